"""`lit_rlhf quickstart`: all stages on the built-in world, and a comparison of the models."""

import json
import os
import shlex
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from lit_callbacks.files import read_json, write_text
from lit_rlhf.checks import check_count
from lit_rlhf.cli.configs import CONFIGS, config_name
from lit_rlhf.command import Command
from lit_rlhf.files import delete
from lit_rlhf.terminal import print_line
from lit_rlhf.tools.lab import WorldName, forget_settings

DEFAULT_DIR = "runs/quickstart"
_LINE = 79  # characters
GOLD = "lit_rlhf.tools.lab.gold"
_STAGES = ("sft", "reward", "ppo_vanilla", "ppo_max")
_WRITTEN = ("sft", "world", "configs", "logs", *_STAGES[1:], "evaluation.json", "report.html")
"""What a quickstart writes into its folder."""

COLLAPSE_STDS: Final = 0.5
"""A run collapses if its gold reward ends this many of SFT's standard deviations below SFT's."""
IMPROVEMENT: Final = 0.3
"""A policy improves if its gold reward ends this much above SFT's."""


class Progress(Enum):
    """Progress of an earlier call with a step."""

    NEW = "not begun"
    INTERRUPTED = "begun"
    FINISHED = "a later step has begun"


class Steps:
    """The steps of a quickstart that have begun, in a file; with other settings it begins anew."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.settings = settings
        self.begun: list[str] = []
        self.differing: list[str] = []
        if path.exists():
            begun = read_json(path, dict)
            try:
                self.differing = [n for n in settings if begun["settings"].get(n) != settings[n]]
                self.begun = [] if self.differing else [str(step) for step in begun["steps"]]
            except (KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{path}: expected the steps of an interrupted quickstart, got another file; "
                    "take another folder (--output_dir FOLDER)"
                ) from error

    def begin(self, step: str) -> Progress:
        """Record that a step begins.

        Args:
            step: Name of the step.

        Returns:
            How far an earlier call came with it.
        """
        if step in self.begun:
            return Progress.INTERRUPTED if step == self.begun[-1] else Progress.FINISHED
        self.begun.append(step)
        record = {"settings": self.settings, "steps": self.begun}
        write_text(self.path, json.dumps(record, indent=1))
        return Progress.NEW


@dataclass
class Quickstart:
    """The steps of the quickstart, each a command of `lit_rlhf` that is printed before it runs.

    Attributes:
        root: Folder for all files.
        seed: Seed of the world, the weights, the order of the data and the rollouts.
        world: Name of the world, which says how labellers err.
        language: Language of the world.
        configs: Folder with the configurations of the stages.
        pairs: Number of preferences that the reward model learns from.
        overwrite: Replace an earlier quickstart.
        steps: Which steps have begun, so that an interrupted quickstart continues; `None` begins
            each step anew.
    """

    root: Path
    seed: int = 0
    world: WorldName = "biased"
    language: str = "en"
    configs: Path = CONFIGS / "quickstart"
    pairs: int = 13000
    overwrite: bool = False
    steps: Steps | None = None

    def __post_init__(self) -> None:
        if not (self.configs / "sft.yaml").is_file():
            raise FileNotFoundError(f"configs: expected a folder with sft.yaml, got {self.configs}")

    def prepare(self) -> None:
        """Write the world, train the SFT model, label preferences and train the reward model."""
        self.write_world()
        self.fit_sft("sft.yaml")
        self.label_preferences()
        self.fit_reward("reward.yaml")

    def write_world(self) -> None:
        """Write the world with its prompts and demonstrations, and the untrained base model."""
        if self.begin("world") is Progress.FINISHED:
            return
        if self.overwrite:  # a world with other settings is refused
            forget_settings(self.root / "world")
        run(
            *("lab", "world", "--output_dir", f"{self.root}/world", "--seed", str(self.seed)),
            *("--world", self.world, "--language", self.language, "--n_heldout_prompts", "512"),
        )

    def fit_sft(self, *configs: str | Path) -> None:
        """Train the SFT model, from configurations given by name or path."""
        self.fit(configs, seeded=["--data.seed"])

    def label_preferences(self) -> None:
        """Sample pairs of the SFT model's responses, and label them."""
        world = f"{self.root}/world"
        if self.begin("preferences") is Progress.FINISHED:
            return
        run(
            *("lab", "preferences", "--policy", f"{self.root}/sft", "--world", world),
            *("--output", f"{world}/preferences.jsonl", "--pairs", str(self.pairs)),
            *("--seed", str(self.seed)),
        )

    def fit_reward(self, *configs: str | Path) -> None:
        """Train the reward model, from configurations given by name or path."""
        self.fit(configs, seeded=["--data.seed", "--model.head_seed"])

    def fit_ppo(self, configs: Sequence[str | Path], *options: str) -> None:
        """Train with PPO, from configurations given by name or path, and further options."""
        self.fit(configs, *options, seeded=["--data.seed", "--model.seed"])

    def fit(self, configs: Sequence[str | Path], *options: str, seeded: Sequence[str]) -> None:
        """Train a stage.

        Args:
            configs: Names or paths of its configurations; the last one wins.
            *options: Further arguments of `lit_rlhf fit`.
            seeded: Flags that get the seed.
        """
        progress = self.begin(Path(configs[-1]).stem)
        if progress is Progress.FINISHED:
            return
        files = [
            _relocate(config if isinstance(config, Path) else self.configs / config, root=self.root)
            for config in configs
        ]
        run(
            "fit",
            *(part for file in files for part in ("--config", config_name(file))),
            *("--seed_everything", str(self.seed)),
            *(part for flag in seeded for part in (flag, str(self.seed))),
            *(("--ckpt_path", "last") if progress is Progress.INTERRUPTED else ()),
            *(("--overwrite",) if self.overwrite and progress is Progress.NEW else ()),
            *options,
        )

    def begin(self, step: str) -> Progress:
        """Record that a step begins, if steps are recorded.

        Args:
            step: Name of the step.

        Returns:
            How far an earlier call came with it.
        """
        return Progress.NEW if self.steps is None else self.steps.begin(step)

    def evaluate(self, *policies: str) -> None:
        """Compare policies on the held-out prompts.

        Args:
            *policies: Names of their folders.
        """
        root = self.root
        run(
            *("evaluate", "--policies", *(f"{root}/{policy}" for policy in policies)),
            *("--prompts", f"{root}/world/prompts_heldout.jsonl"),
            *(
                "--rewards",
                f"{{{GOLD}:gold_reward: 1.0, {root}/reward: 1.0, {GOLD}:well_formed: 1.0}}",
            ),
            *("--output", f"{root}/evaluation.json"),
            *("--max_new_tokens", "48", "--seed", str(self.seed)),
            # the policies' own distributions, whose KL is reported
            *("--temperature", "1", "--top_p", "1", "--repetition_penalty", "1"),
        )


class Outcome(NamedTuple):
    """The numbers of a finished quickstart that tell what happened in it.

    All but the deviation are means over the held-out prompts.

    Attributes:
        sft_gold: Gold reward of the SFT policy.
        sft_std: Standard deviation of its gold reward over the prompts.
        vanilla_gold: Gold reward of vanilla PPO.
        max_gold: Gold reward of PPO-max.
        vanilla_score: Score of vanilla PPO under the reward model.
        max_score: Score of PPO-max under the reward model.
        sft_well_formed: Share of well-formed responses of the SFT policy, 0 to 1.
        vanilla_well_formed: Share of well-formed responses of vanilla PPO.
        max_well_formed: Share of well-formed responses of PPO-max.
    """

    sft_gold: float
    sft_std: float
    vanilla_gold: float
    max_gold: float
    vanilla_score: float
    max_score: float
    sft_well_formed: float
    vanilla_well_formed: float
    max_well_formed: float

    @property
    def collapsed(self) -> bool:
        """Whether vanilla PPO ended at least `COLLAPSE_STDS` below SFT in gold."""
        return self.vanilla_gold <= self.sft_gold - COLLAPSE_STDS * self.sft_std

    @property
    def exploited(self) -> bool:
        """Whether vanilla PPO collapsed with a higher score than PPO-max: the expected outcome."""
        return self.collapsed and self.vanilla_score > self.max_score

    @property
    def improved(self) -> bool:
        """Whether PPO-max ended at least `IMPROVEMENT` above SFT in gold: the expected outcome."""
        return self.max_gold >= self.sft_gold + IMPROVEMENT

    def sentence(self) -> str:
        """One sentence that says what happened, whether it was expected or not."""
        golds = f"from {self.sft_gold:.2f} (SFT) to {self.vanilla_gold:.2f}"
        scores = f"{self.vanilla_score:.2f} against {self.max_score:.2f} of PPO-max"
        if self.exploited:
            vanilla = (
                f"vanilla PPO exploited the reward model: its score is high ({scores}), but its "
                f"gold reward fell {golds}, and {self.vanilla_well_formed:.0%} of its responses "
                f"are well-formed (SFT {self.sft_well_formed:.0%})"
            )
        elif self.collapsed:
            vanilla = (
                f"vanilla PPO's gold reward fell {golds}, but, unexpectedly, its score under the "
                f"reward model did not end above PPO-max's ({scores})"
            )
        elif self.vanilla_gold < self.sft_gold:
            vanilla = (
                f"vanilla PPO's gold reward fell {golds}, which is less than expected "
                f"({COLLAPSE_STDS * self.sft_std:.2f})"
            )
        else:
            vanilla = f"vanilla PPO, unexpectedly, did not collapse: its gold reward went {golds}"
        change = f"ended at {self.max_gold:.2f}, {self.max_gold - self.sft_gold:+.2f} to SFT"
        if self.improved:
            ppo_max = f"PPO-max improved the policy: its gold reward {change}"
        elif self.max_gold > self.sft_gold:
            ppo_max = (
                f"PPO-max improved the policy by less than expected ({IMPROVEMENT}): its gold "
                f"reward {change}"
            )
        else:
            ppo_max = f"PPO-max, unexpectedly, did not improve the policy: its gold reward {change}"
        return f"In this run, {vanilla}; {ppo_max}."


def read_outcome(evaluation: Mapping[str, Any]) -> Outcome:
    """Read the outcome of a quickstart.

    Args:
        evaluation: Report of `lit_rlhf evaluate` on `sft`, `ppo_vanilla` and `ppo_max`.
    """
    policies = evaluation["policies"]
    sft = policies["sft"]["rewards"]
    vanilla = policies["ppo_vanilla"]["rewards"]
    ppo_max = policies["ppo_max"]["rewards"]
    return Outcome(
        sft_gold=sft["gold_reward"]["mean"],
        sft_std=sft["gold_reward"]["std"],
        vanilla_gold=vanilla["gold_reward"]["mean"],
        max_gold=ppo_max["gold_reward"]["mean"],
        vanilla_score=vanilla["reward"]["mean"],
        max_score=ppo_max["reward"]["mean"],
        sft_well_formed=sft["well_formed"]["mean"],
        vanilla_well_formed=vanilla["well_formed"]["mean"],
        max_well_formed=ppo_max["well_formed"]["mean"],
    )


def run(*arguments: str) -> None:
    """Print a command of `lit_rlhf` and run it."""
    from lit_rlhf.cli.main import main as command

    print()
    print_line(f"$ {shlex.join(['lit_rlhf', *arguments])}", flush=True)
    command(arguments)


def quickstart(
    output_dir: str = DEFAULT_DIR,
    *,
    seed: int = 0,
    world: WorldName = "biased",
    language: Literal["en", "zh", "both"] = "en",
    configs: str = str(CONFIGS / "quickstart"),
    pairs: int = 13000,
    overwrite: bool = False,
) -> None:
    """Train SFT, reward model, vanilla PPO and PPO-max on the built-in world, and compare them.

    Each step is a command that you can run by hand; it is printed before it runs. After an
    interruption, the same command continues with the step that was interrupted.

    Args:
        output_dir: Folder for all files.
        seed: Seed of the world, the weights, the order of the data and the rollouts.
        world: Name of the world, which says how labellers err.
        language: Language of the world.
        configs: Folder with the configurations of the stages.
        pairs: Number of preferences that the reward model learns from.
        overwrite: Replace an earlier quickstart in the folder.
    """
    start = time.perf_counter()
    check_count("pairs", pairs)
    root = Path(output_dir)
    stages = Quickstart(
        root,
        seed=seed,
        world=world,
        language=language,
        configs=Path(configs),
        pairs=pairs,
        overwrite=overwrite,
    )
    stages.steps = _read_steps(stages)
    stages.prepare()
    stages.fit_ppo(["ppo_max.yaml", "ppo_vanilla.yaml"])
    stages.fit_ppo(["ppo_max.yaml"])
    stages.begin("comparison")
    _draw_runs(root)
    stages.evaluate("sft", "ppo_vanilla", "ppo_max")
    stages.steps.path.unlink()  # finished: the same command does not replace it
    _tell_end(root, minutes=(time.perf_counter() - start) / 60)


def _read_steps(stages: Quickstart) -> Steps:
    """Read how far an earlier call came; refuse to replace a quickstart that is finished."""
    root = stages.root
    settings = {n: value for n, value in vars(stages).items() if n not in ("root", "steps")}
    files = sorted(stages.configs.glob("*.yaml"))
    settings["configs"] = [file.read_text("utf-8") for file in files]
    steps = Steps(root / "quickstart.json", settings)
    there = next((name for name in _WRITTEN if os.path.lexists(root / name)), None)
    if (there or steps.differing) and not steps.begun and not stages.overwrite:
        if steps.differing:
            holds = f"an earlier quickstart with other {', '.join(steps.differing)}"
        else:
            holds = "an earlier quickstart" if there == "sft" else f"{there}, perhaps another run's"
        raise SystemExit(
            f"lit_rlhf quickstart: {root} holds {holds}. Take another folder (--output_dir "
            "FOLDER), or replace it (--overwrite)"
        )
    if not steps.begun:  # a step that is interrupted at once must not resume the earlier run
        for stage in _STAGES:
            delete(root / "logs" / stage / "checkpoints")
    return steps


def _draw_runs(root: Path) -> None:
    """Draw the runs of PPO side by side, as a figure and as a page."""
    from lit_rlhf.tools.evaluation import run_figure, save_figure

    logs = {"vanilla": f"{root}/logs/ppo_vanilla", "PPO-max": f"{root}/logs/ppo_max"}
    save_figure(run_figure(logs), f"{root}/collapse.png")
    named = (f"{name}={folder}" for name, folder in logs.items())
    run("report", *named, "--output", f"{root}/report.html")


def _tell_end(root: Path, minutes: float) -> None:
    """Print where everything is, and what happened."""
    evaluation = read_json(root / "evaluation.json", dict)
    print(f"\nDone in {minutes:.1f} minutes.")
    print_line(f"Verdicts and curves: {root}/report.html, {root}/collapse.png")
    print_line(f"All metrics: tensorboard --logdir {root}/logs")
    print_line(f"Models in {root}: sft, reward, ppo_vanilla, ppo_max")
    print(f"\n{textwrap.fill(read_outcome(evaluation).sentence(), _LINE)}")


def _relocate(config: Path, *, root: Path) -> Path:
    """Copy a configuration with its paths under `root`, unless they are there already."""
    if root == Path(DEFAULT_DIR):
        return config
    copy = root / "configs" / config.name
    return write_text(copy, config.read_text("utf-8").replace(DEFAULT_DIR, str(root)))


_OUTPUT = ("output_dir",)
COMMAND = Command(quickstart, writes=_OUTPUT, folders=_OUTPUT)
