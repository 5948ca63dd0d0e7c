"""All checks of a run, inside a throw-away fit of one batch under the run's own strategy."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from lightning.pytorch import LightningDataModule, Trainer

from lit_rlhf.data import PromptBatch
from lit_rlhf.doctor.agreement import text_contract, vocabularies
from lit_rlhf.doctor.case import Case, Check, checked, raised
from lit_rlhf.doctor.clipping import clipping
from lit_rlhf.doctor.distributions import kl_to_reference, padding, ratio, sampling
from lit_rlhf.doctor.duration import duration
from lit_rlhf.doctor.ending import eos
from lit_rlhf.doctor.findings import Finding, Report, Status, failure, ok
from lit_rlhf.doctor.iteration import one_iteration
from lit_rlhf.doctor.memory import free_memory, memory
from lit_rlhf.doctor.plan import RunPlan
from lit_rlhf.doctor.printing import Display
from lit_rlhf.modules import PPOModule

START = "start"
NO_BATCH = (
    "The training data give no batch.",
    "Lower data.batch_size, or give more prompts in data.train_sources.",
)
START_ABOUT = "models and data load, the strategy starts"
BEFORE = (
    Check("vocabulary", "vocabulary sizes and special tokens of all models agree", vocabularies),
    Check("text contract", "reward models read text as the policy writes it", text_contract),
    Check("memory", "an estimate against what the device has", memory),
)
"""Checks before anything runs on the device."""
DURING = (
    Check("iteration", "one PPO iteration runs, and its numbers are finite", one_iteration),
    Check(
        "reference",
        "KL(policy, reference) = 0 before the first step",
        kl_to_reference,
        ("rollouts", "estimates"),
    ),
    Check("ratio", "the ratio is 1 before the first step", ratio, ("updates",)),
    Check("padding", "padding changes no log-prob, value or score", padding, ("scores",)),
    Check(
        "sampling",
        "responses come from the distribution they are scored with",
        sampling,
        ("estimates",),
    ),
    Check("EOS", "responses end by EOS, and learn to", eos, ("estimates",)),
    Check("clipping", "gradients are clipped under the run's strategy", clipping, ("updates",)),
    Check("time", "throughput and time to finish", duration, ("updates",)),
)
"""Checks on one iteration."""


class Examination:
    """The hooks of a fit that is nothing but checks.

    Args:
        case: The run.
        report: Takes the findings.
        display: Shows them as they come; `None`: nothing is shown.
    """

    def __init__(self, case: Case, report: Report, display: Display | None) -> None:
        self.case = case
        self.report = report
        self.display = display
        self.own_setup = case.module.setup

    def attach(self) -> None:
        """Put the checks in the place of the module's own hooks, which would train and save."""
        module: Any = self.case.module
        module.setup = self.setup
        module.training_step = self.training_step
        module.on_train_end = self.on_train_end

    def setup(self, stage: str) -> None:
        """Check what can be told before the networks are on the device."""
        self.add(START, self.loaded())
        self.case.free_memory = free_memory(self.case.trainer.strategy.root_device)
        for check in BEFORE:
            self.perform(check)
        try:
            self.own_setup(stage)
        except ValueError:
            # that the contracts differ is told already, and the other checks can go on
            if self.report.findings["text contract"].status is not Status.FAILURE:
                raise

    def loaded(self) -> Finding:
        """What there is to examine."""
        networks = self.case.networks()
        weights = sum(p.numel() for network in networks.values() for p in network.parameters())
        return ok(
            f"Policy {self.case.module.model_path!r}: {len(networks)} networks of {weights:,} "
            f"weights together, on {self.case.trainer.strategy.root_device}."
        )

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Run the checks on one batch and end the fit."""
        self.case.batch = batch
        self.case.ppo_epochs = self.case.module.minibatches.ppo_epochs
        for check in DURING:
            self.perform(check)
        self.case.trainer.should_stop = True

    def on_train_end(self) -> None:
        """Nothing is saved."""

    def perform(self, check: Check) -> None:
        """Run one check and tell what it found."""
        with self.display.doing(check.about) if self.display else nullcontext():
            finding = checked(check, self.case)
        self.add(check.name, finding)

    def add(self, name: str, finding: Finding) -> None:
        """Keep a finding and show it."""
        self.report.findings[name] = finding
        if self.display is not None:
            self.display.show(name, finding)


def examine(
    module: PPOModule,
    data: LightningDataModule,
    trainer: Trainer,
    plan: RunPlan | None = None,
    display: Display | None = None,
) -> Report:
    """Check a PPO run before it starts. The module and the Trainer are used up by it.

    Args:
        module: As it would be trained.
        data: Its datamodule.
        trainer: With the run's strategy, precision and length, one process, no callbacks and no
            checkpoints (see `lit_rlhf.doctor.plan.QUIET`).
        plan: What the run asks of the machine; `None`: what `trainer` has.
        display: Shows findings as they come; `None`: nothing is shown.
    """
    plan = plan or RunPlan()
    report = Report(stand_in=plan.stand_in)
    case = Case(module, data, trainer, plan)
    examination = Examination(case, report, display)
    examination.attach()
    try:
        trainer.fit(module, datamodule=data)
    except Exception as error:  # of the user's models, data or strategy: any kind
        examination.add(START, raised(error))
    else:
        if case.batch is None:
            examination.add(START, failure(*NO_BATCH))
    for check in (*BEFORE, *DURING):
        if check.name not in report.findings:
            examination.add(check.name, not_reached())
    return report


def not_reached() -> Finding:
    """The finding of a check that the run did not come to."""
    return Finding(Status.NOT_CHECKED, "Not reached.")
