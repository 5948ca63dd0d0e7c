"""`lit_rlhf quickstart`: all stages on the built-in world, and what came out."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jsonargparse import auto_cli

DEFAULT_DIR = "runs/quickstart"


def quickstart(
    output_dir: str = DEFAULT_DIR,
    seed: int = 0,
    language: Literal["en", "zh", "both"] = "en",
    configs: str = "configs/quickstart",
    pairs: int = 13000,
) -> None:
    """Train SFT, reward model, vanilla PPO and PPO-max on the built-in world, and compare them.

    Each step is a command that you can run by hand; it is printed before it runs.

    Args:
        output_dir: Folder for everything that is made.
        seed: Of the world, the weights, the data order and the rollouts.
        language: Of the world.
        configs: Folder with the stages' configurations.
        pairs: Preferences that the reward model learns from.
    """
    from lit_rlhf.cli.main import main as command

    folder = Path(configs)
    if not (folder / "sft.yaml").is_file():
        raise FileNotFoundError(
            f"configs: expected a folder with sft.yaml, got {folder}; run from the project's root"
        )
    root, start = Path(output_dir), time.perf_counter()

    def run(*arguments: str) -> None:
        print(f"\n$ {shlex.join(['lit_rlhf', *arguments])}", flush=True)
        command(arguments)

    def fit(*names: str, seeded: Sequence[str] = ("--data.init_args.seed",)) -> None:
        files = [relocated(folder / name, root) for name in names]
        run(
            "fit",
            *(part for file in files for part in ("--config", str(file))),
            *("--seed_everything", str(seed)),
            *(part for flag in seeded for part in (flag, str(seed))),
        )

    world = f"{root}/world"
    run(
        *("lab", "world", "--output_dir", world, "--seed", str(seed), "--language", language),
        *("--n_heldout_prompts", "512"),
    )
    fit("sft.yaml")
    run(
        *("lab", "preferences", "--policy", f"{root}/sft", "--world", world),
        *("--output", f"{world}/preferences.jsonl", "--pairs", str(pairs), "--seed", str(seed)),
    )
    fit("reward.yaml", seeded=("--data.init_args.seed", "--model.init_args.head_seed"))
    ppo = ("--data.init_args.seed", "--model.init_args.seed")
    fit("ppo_max.yaml", "ppo_vanilla.yaml", seeded=ppo)
    fit("ppo_max.yaml", seeded=ppo)
    run(
        *("plot", "--runs", f"vanilla={root}/logs/ppo_vanilla", f"PPO-max={root}/logs/ppo_max"),
        *("--output", f"{root}/collapse.png"),
    )
    run(
        *("evaluate", "--policies", f"{root}/sft", f"{root}/ppo_vanilla", f"{root}/ppo_max"),
        *("--prompts", f"{world}/prompts_heldout.jsonl"),
        *("--rewards", f"{{lit_rlhf.lab.gold:gold_reward: 1.0, {root}/reward: 1.0}}"),
        *("--output", f"{root}/evaluation.json", "--max_new_tokens", "48", "--seed", str(seed)),
    )
    print(
        f"\nDone in {(time.perf_counter() - start) / 60:.1f} minutes. Curves: {root}/collapse.png,"
    )
    print(f"or tensorboard --logdir {root}/logs. Models: {root}/sft, reward, ppo_vanilla, ppo_max.")


def relocated(config: Path, root: Path) -> Path:
    """A copy of `config` with its paths under `root`; `config` itself where nothing moves."""
    if root == Path(DEFAULT_DIR):
        return config
    copy = root / "configs" / config.name
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(config.read_text("utf-8").replace(DEFAULT_DIR, str(root)), "utf-8")
    return copy


def main(argv: Sequence[str]) -> None:
    """Entry point of `lit_rlhf quickstart`."""
    auto_cli(quickstart, args=list(argv), prog="lit_rlhf quickstart")
