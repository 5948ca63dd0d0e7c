"""The configurations on a tiny world: with other paths and small sizes, otherwise unchanged.

A root holds what `runs/quickstart` holds after a quickstart: `world/` with its base model, and then
`sft/`, `reward/`, `ppo_max/`, `ppo_vanilla/` and `logs/`, each trained for a step or two.
"""

import json
import os
import random
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from lit_rlhf.cli.main import main
from lit_rlhf.data import CHAT_TEMPLATES
from lit_rlhf.tools.lab import ResponsePair, World, label_pair, render_prompt, write_world

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
QUICKSTART = CONFIGS / "quickstart"
RUNS = "runs/quickstart"  # where the quickstart's configurations have everything

TWO_STEPS: dict[str, Any] = {"max_epochs": 1, "log_every_n_steps": 1}
TWO_STEPS |= {"limit_train_batches": 2, "limit_val_batches": 1}
SMALL: dict[str, dict[str, Any]] = {
    "sft": {"trainer": TWO_STEPS, "data": {"init_args": {"batch_size": 4}}},
    "reward": {"trainer": TWO_STEPS, "data": {"init_args": {"batch_size": 4}}},
    # two iterations: the first trains only the critic where a run has such a phase
    "ppo": {
        "trainer": {**TWO_STEPS, "val_check_interval": 2},
        "model": {
            "init_args": {
                "minibatches": {"minibatch_size": 4},
                "sampling": {"max_new_tokens": 4},
                "critic_pretraining": {"iterations": 1},
                # else the policy's one step would be of size 0
                "policy_optimizer": {"warmup_ratio": 0.0},
                "critic_optimizer": {"warmup_ratio": 0.0},
            }
        },
        "data": {"init_args": {"batch_size": 4, "samples_per_epoch": 8}},
    },
}
"""By stage, an overlay that makes a run small. Overlays behind it win over it."""


def write_moved_config(config: Path, folder: Path, moves: Mapping[str, Path]) -> Path:
    """A copy of `config` in `folder`, in which paths have moved; the longest path wins."""
    text = config.read_text("utf-8")
    for before in sorted(moves, key=len, reverse=True):
        text = text.replace(before, str(moves[before]))
    copy = folder / f"{config.parent.name}_{config.name}"
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(text, "utf-8")
    return copy


def overlay(folder: Path, name: str, content: Mapping[str, Any]) -> Path:
    """An overlay file; JSON is YAML too."""
    path = folder / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), "utf-8")
    return path


def run(*arguments: str) -> None:
    """A `lit_rlhf` command in this process."""
    with (
        # LightningCLI looks at the test runner's own arguments otherwise
        patch.object(sys, "argv", ["lit_rlhf"]),
        # Lightning 2.6.6 makes classes in a way that jsonargparse 4.53 deprecates
        patch.dict(os.environ, {"JSONARGPARSE_DEPRECATION_WARNINGS": "off"}),
        warnings.catch_warnings(),
    ):
        # reference and reward model are frozen in evaluation mode, which Lightning warns about
        warnings.filterwarnings("ignore", ".*in eval mode at the start of training")
        main(arguments)


def fit(configs: Sequence[Path], *flags: str) -> None:
    """`lit_rlhf fit` with these configurations, the last one winning."""
    run("fit", *(part for config in configs for part in ("--config", str(config))), *flags)


def fit_stage(stage: str, configs: Sequence[Path], folder: Path, moves: Mapping[str, Path]) -> None:
    """Fit a stage with small sizes, by an overlay after the first configuration."""
    first, *others = (write_moved_config(config, folder / "configs", moves) for config in configs)
    fit([first, overlay(folder / "configs", f"small_{stage}", SMALL[stage]), *others])


def logged(run: Path) -> dict[str, list[float]]:
    """Values of each metric that a run has logged, in order."""
    events = EventAccumulator(str(run))
    events.Reload()
    keys = [key for key in events.Tags()["scalars"] if "/" in key]
    return {key: [event.value for event in events.Scalars(key)] for key in keys}


def write_tiny_world(folder: Path, world: World) -> Path:
    """Write a world of a few records, and return its folder."""
    return write_world(
        folder,
        world,
        seed=0,
        chat_template=CHAT_TEMPLATES["hh"],
        n_demonstrations=48,
        n_train_prompts=48,
        n_heldout_prompts=8,
        n_texts=16,
    )


@cache
def world_root(base: Path) -> Path:
    """A root with the world, the SFT model and the reward model; read only."""
    root = base / "tiny_quickstart"
    world = World()
    folder = write_tiny_world(root / "world", world)
    write_preferences(folder / "preferences.jsonl", world, 24)
    for stage in ("sft", "reward"):
        fit_stage(stage, [QUICKSTART / f"{stage}.yaml"], root, {RUNS: root})
    return root


@cache
def full_root(base: Path) -> Path:
    """The same root with both PPO policies; read only."""
    root = world_root(base)
    ppo_max, vanilla = QUICKSTART / "ppo_max.yaml", QUICKSTART / "ppo_vanilla.yaml"
    fit_stage("ppo", [ppo_max], root, {RUNS: root})
    fit_stage("ppo", [ppo_max, vanilla], root, {RUNS: root})
    return root


def write_preferences(path: Path, world: World, pairs: int) -> None:
    """Write labelled pairs of two demonstrators' answers; the quickstart samples from SFT."""
    rng = random.Random(0)
    records: list[dict[str, str]] = []
    for prompt in world.sample_prompts(4 * pairs, seed=1):
        first, second = (world.sample_demonstration(prompt, rng) for _ in range(2))
        pair = ResponsePair(first, second)
        if pair.is_usable and len(records) < pairs:
            records.append(label_pair(render_prompt(prompt), pair, world, rng))
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
