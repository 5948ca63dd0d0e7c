"""Tiny PPO runs for the doctor, and what it finds."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from lit_rlhf.modules import PPOModule
from lit_rlhf.ppo import PPO
from lit_rlhf.rollout import Experience, RolloutBatch, TokenStatistics
from lit_rlhf.tools.doctor import QUIET, Finding, Report, examine
from lit_rlhf.tools.doctor.case import Case
from lit_rlhf.tools.doctor.plan import RunPlan
from tests.support.stages import ppo_options, prompts, trainer, with_algorithm

CHECKS = {
    *("start", "vocabulary", "text contract", "memory", "iteration", "reference"),
    *("ratio", "padding", "sampling", "EOS", "clipping", "known pairs", "reward probe", "time"),
}


def module_of(root: Path, kind: type[PPO] = PPO, **options: Any) -> PPOModule:
    """A module on the folder's models, whose responses mostly end."""
    return with_algorithm(kind)(**ppo_options(root, sampling={"max_new_tokens": 24}, **options))


def case_of(root: Path, folder: Path, plan: RunPlan | None = None, **options: Any) -> Case:
    module, run = module_of(root, **options), trainer(folder)
    module.trainer = run
    return Case(module, prompts(root), run, plan or RunPlan())


def findings(
    root: Path, folder: Path, module: Any = None, plan: Any = None, data: Any = None, **trainer: Any
) -> Report:
    """What the doctor finds in a tiny run; `trainer` and `data` are settings over the usual."""
    settings = {"accelerator": "cpu", "max_epochs": 3, "default_root_dir": folder, **trainer}
    with warnings.catch_warnings():
        # reference and reward model are frozen in evaluation mode, which Lightning warns about
        warnings.filterwarnings("ignore", ".*in eval mode at the start of training")
        data_module, run = prompts(root, **(data or {})), Trainer(**(QUIET | settings))
        return examine(module or module_of(root), data_module, run, plan)


def not_ok(report: Report) -> dict[str, str]:
    """Status of the checks that are not ok, after asserting that no check is missing.

    What is said of the rewards is left out: the random reward models of these runs like some
    cheats, and the data of most have no pairs.
    """
    assert set(report.findings) == CHECKS
    of_rewards = ("known pairs", "reward probe")
    others = {name: f for name, f in report.findings.items() if name not in of_rewards}
    return {name: str(f.status) for name, f in others.items() if f.status != "ok"}


def only_finding(report: Report, check: str, status: str) -> Finding:
    """The finding of the one check that is not ok."""
    assert not_ok(report) == {check: status}
    return report.findings[check]


def with_experience(change: Callable[[Experience], dict[str, Tensor]]) -> type[PPO]:
    """An algorithm whose experience has other fields than it should."""

    class Changed(PPO):
        def experience(
            self, rollouts: RolloutBatch, rewards: Tensor, estimates: TokenStatistics
        ) -> Experience:
            made = super().experience(rollouts, rewards, estimates)
            return replace(made, **change(made))

    return Changed
