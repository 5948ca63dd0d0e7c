"""All checks of a run, inside a `Trainer.fit` of one batch that saves nothing."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor

from lit_rlhf.data import PromptBatch, RecordDataModule, TokenBatch
from lit_rlhf.modules import PhaseTimer, PPOModule
from lit_rlhf.ppo import UPDATE_MEMORY, NetworkName, iteration_draws
from lit_rlhf.rollout import Experience, iterate_minibatches
from lit_rlhf.tools.doctor.case import NETWORKS, Case, NetworkStep
from lit_rlhf.tools.doctor.checks.clipping import check_clipping
from lit_rlhf.tools.doctor.checks.distributions import (
    check_padding,
    check_ratio,
    check_reference,
    check_sampling,
)
from lit_rlhf.tools.doctor.checks.eos import check_eos
from lit_rlhf.tools.doctor.checks.memory import check_memory, free_memory
from lit_rlhf.tools.doctor.checks.pairs import check_known_pairs
from lit_rlhf.tools.doctor.checks.rewards import check_reward
from lit_rlhf.tools.doctor.checks.text import check_text_contract, check_vocabulary
from lit_rlhf.tools.doctor.checks.time import check_time
from lit_rlhf.tools.doctor.plan import RunPlan
from lit_rlhf.tools.doctor.report import Display, Finding, Report, Status, failure, failure_of, ok

_NO_BATCH = failure(
    "The training data give no batch.",
    "Lower data.batch_size, or add prompts to data.train_sources.",
)
_NOT_REACHED = Finding(Status.NOT_CHECKED, "Not reached.")


class FirstMoment(NamedTuple):
    """Adam's running mean of the gradient of one parameter.

    Attributes:
        mean: The running mean.
        beta: Its rate of decay, beta_1.
    """

    mean: Tensor
    beta: float


class Check(NamedTuple):
    """A check of a run.

    Attributes:
        name: Its name in the report.
        about: What is checked, in a line.
        run: The check itself.
        needs: Field of `Case` without which it cannot run, because an earlier check failed; empty
            for none.
    """

    name: str
    about: str
    run: Callable[[Case], Finding]
    needs: str = ""

    def find(self, case: Case) -> Finding:
        """Run the check. An exception inside it is a failure."""
        if self.needs and not hasattr(case, self.needs):
            return Finding(
                Status.NOT_CHECKED, f"There are no {self.needs}: see the failures above."
            )
        try:
            return self.run(case)
        except Exception as error:  # any kind, from the user's models, data and functions
            return failure_of(error)


def run_iteration(case: Case) -> Finding:
    """Run one iteration by the module's own phases, and fill the case's fields."""
    module = case.module
    batch = case.batch
    # the draws of the run's first iteration, as in PPOModule.training_step
    draws = iteration_draws(seed=module.seed, iteration=0, rank=module.global_rank)
    collected = module.ppo.collect(batch, draws.rollout_seed, module.timer)
    rollouts = collected.rollouts
    scores = collected.scores.total
    estimates = collected.estimates
    case.rollouts = rollouts
    case.scores = scores
    case.estimates = estimates
    if rollouts.statistics is not None:
        case.rescored = module.ppo.estimate(rollouts._replace(statistics=None))
    values = {"rewards": scores, **{k: v for k, v in estimates._asdict().items() if v is not None}}
    if names := [name for name, value in values.items() if not bool(value.isfinite().all())]:
        return failure(
            f"Not finite in {len(scores)} rollouts: {', '.join(names)}.",
            "Look at the model or reward function that they come from; float32 "
            "(model.network.dtype) helps where numbers overflow.",
        )
    case.experience = module.ppo.learn_from(collected).experience
    if not bool(case.experience.loss_mask.any()):
        return failure(
            f"Nothing to learn from: all {len(scores)} responses were cut off, and "
            "model.advantages.truncation is mask.",
            "Raise model.sampling.max_new_tokens, or use truncation: terminal with a "
            "model.reward_shaping.missing_eos_penalty.",
        )
    updates = _run_two_updates(case, draws.generator)
    steps = [step for update in updates for step in update.values()]
    if names := sorted({k for step in steps for k, v in step.metrics.items() if v != v}):
        return failure(
            f"An update was skipped because a number was not finite: {', '.join(names)}.",
            "Lower learning_rate of model.policy_optimizer or model.critic_optimizer, or set "
            "model.network.dtype: float32.",
        )
    case.updates = updates
    return ok(
        f"{len(scores)} responses of {float(rollouts.lengths.float().mean()):.1f} tokens on "
        f"average, score {float(scores.mean()):.2f} (standard deviation "
        f"{float(scores.std(correction=0)):.2f}), and two updates."
    )


def _run_two_updates(
    case: Case, generator: torch.Generator
) -> list[dict[NetworkName, NetworkStep]]:
    """Update both networks twice on the first minibatch that has a token to learn from.

    The first update allocates the state of the optimizers. Where it did not clip a network's
    gradient, the second clips it to half of the norm that it had.
    """
    module = case.module
    experience = case.experience
    batch = case.batch
    size = module.minibatches.minibatch_size
    minibatches = iterate_minibatches(len(experience), size=size, generator=generator)
    has_tokens = experience.loss_mask.any(1).cpu()
    index = next(rows for rows in minibatches if bool(has_tokens[rows].any())).to(module.device)
    minibatch = experience.select(index)
    ptx = None if batch.ptx is None else batch.ptx.select(index)
    update = partial(_update, module, minibatch, ptx)
    clips: dict[NetworkName, float | None] = {
        "policy": module.policy_optimizer.grad_clip,
        "critic": module.critic_optimizer.grad_clip,
    }
    first = update(clips, PhaseTimer(module))
    for name, step in first.items():
        if step.clip is not None and not step.norm > step.clip:
            clips[name] = step.norm / 2 or step.clip
    return [first, update(clips, module.timer)]


def _update(
    module: PPOModule,
    minibatch: Experience,
    ptx: TokenBatch | None,
    clips: dict[NetworkName, float | None],
    timer: PhaseTimer,
) -> dict[NetworkName, NetworkStep]:
    """Update both networks once, each from first moments of 0 (see `_first_moments`)."""
    optimizers = {
        name: network.optimizer
        for name in NETWORKS
        if (network := module.trained_networks().get(name)) is not None
    }
    for optimizer in optimizers.values():
        for moment in _first_moments(optimizer):
            moment.mean.zero_()
    stepper = module.make_stepper(EXAMINATION, clips)
    metrics_of: dict[NetworkName, dict[str, Tensor]] = {}
    with timer("update", minibatch.rollouts.sequence_shape, UPDATE_MEMORY):
        if module.ppo.separate_critic:
            metrics_of["critic"] = module.ppo.train_critic(minibatch, stepper)
        metrics_of["policy"] = module.ppo.train_policy(minibatch, ptx, stepper)
    steps: dict[NetworkName, NetworkStep] = {}
    for name, optimizer in optimizers.items():
        metrics = {key: float(value) for key, value in metrics_of[name].items()}
        steps[name] = NetworkStep(
            metrics=metrics,
            clip=clips[name],
            norm=metrics[f"ppo/{name}_grad_norm"],
            applied_norm=_applied_gradient_norm(optimizer),
        )
    return steps


# Adam's first moment is a running mean of the gradients that its steps have really used, under
# every strategy. An engine has the moments of its partitions, which are whole in one process. Set
# to 0 before a step, the moment is (1 - beta_1) times the gradient of that step afterwards.


def _applied_gradient_norm(optimizer: LightningOptimizer) -> float | None:
    """L2 norm of the gradient of a step from moments of 0; `None` without Adam."""
    norms = [
        torch.linalg.vector_norm(moment.mean, dtype=torch.float32).cpu() / (1 - moment.beta)
        for moment in _first_moments(optimizer)
    ]
    return float(torch.stack(norms).norm()) if norms else None


def _first_moments(optimizer: LightningOptimizer) -> list[FirstMoment]:
    """List Adam's running means of the gradient; none for other optimizers."""
    return [
        FirstMoment(mean=optimizer.state[parameter]["exp_avg"], beta=group["betas"][0])
        for group in optimizer.param_groups
        for parameter in group["params"]
        # `get`: indexing would make an empty entry, which optimizers take for an initialized one
        if "exp_avg" in optimizer.state.get(parameter, {})
    ]


EXAMINATION = "the examination"  # what messages about an update call it
START = "start"
START_ABOUT = "models and data load, the strategy starts"
CHECKS_BEFORE = (
    Check("vocabulary", "vocabularies and special tokens of all models agree", check_vocabulary),
    Check("text contract", "reward models read text as the policy writes it", check_text_contract),
    Check("memory", "an estimate fits into the device's memory", check_memory),
)
"""Checks before the networks are on the device."""
CHECKS_DURING = (
    Check("iteration", "one PPO iteration runs, and its numbers are finite", run_iteration),
    Check(
        "reference",
        "KL(policy, reference) = 0 before the first update",
        check_reference,
        "estimates",
    ),
    Check("ratio", "the ratio is 1 before the first update", check_ratio, "updates"),
    Check("padding", "padding changes no log-prob, value or score", check_padding, "scores"),
    Check(
        "sampling",
        "responses come from the distribution they are scored with",
        check_sampling,
        "estimates",
    ),
    Check("EOS", "responses end with EOS, and EOS is trained", check_eos, "estimates"),
    Check("clipping", "gradients are clipped under the run's strategy", check_clipping, "updates"),
    Check("known pairs", "reward models prefer what people preferred", check_known_pairs, "scores"),
    Check(
        "reward probe", "ways to cheat do not score higher than responses", check_reward, "scores"
    ),
    Check("time", "throughput and time to finish", check_time, "updates"),
)
"""Checks on one iteration."""
ALL_CHECKS = (*CHECKS_BEFORE, *CHECKS_DURING)


class Examination(LightningModule):
    """Trains nothing: runs the checks on the networks of another module, as a fit of one batch.

    It has that module's networks and optimizers, so that the Trainer puts them on the device and
    sets them up for the strategy as in the run. The findings go into `report`.
    """

    def __init__(self, case: Case, report: Report, display: Display | None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.case = case
        self.report = report
        self.display = display
        # The module is not a child itself: engines wrap direct children.
        for name, network in case.module.named_children():
            self.add_module(name, network)

    def setup(self, stage: str) -> None:
        """Run the checks that need no device, then the module's own setup."""
        networks = self.case.networks()
        weights = sum(p.numel() for network in networks.values() for p in network.parameters())
        started = ok(
            f"Policy {self.case.module.model_path!r}: {len(networks)} networks with {weights:,} "
            f"weights in total, on {self.case.trainer.strategy.root_device}."
        )
        self.add(START, started)
        self.case.free_memory = free_memory(self.case.trainer.strategy.root_device)
        for check in CHECKS_BEFORE:
            self.run_check(check)
        try:
            self.case.module.setup(stage)
        except ValueError:
            # The module refuses a text contract that does not match. That is a finding already,
            # and the other checks can run.
            if self.report.findings["text contract"].status is not Status.FAILURE:
                raise

    def configure_optimizers(self) -> Any:  # noqa: ANN401  # one of Lightning's many forms
        """Optimizers and schedules of the module."""
        return self.case.module.configure_optimizers()

    def on_fit_start(self) -> None:
        """Check the weights as the module does."""
        self.case.module.to(self.device)  # the buffers that are not in a network
        self.case.module.on_fit_start()

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Run the checks on one batch, and end the fit."""
        self.case.batch = self.case.module.ppo.repeat_prompts(batch)
        for check in CHECKS_DURING:
            self.run_check(check)
        self.case.trainer.should_stop = True

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Do nothing. Lightning warns of a datamodule with validation data without this."""

    def run_check(self, check: Check) -> None:
        """Run a check, and add and show its finding."""
        with self.display.show_progress(check.about) if self.display else nullcontext():
            finding = check.find(self.case)
        self.add(check.name, finding)

    def add(self, name: str, finding: Finding) -> None:
        """Add a finding to the report and show it."""
        self.report.findings[name] = finding
        if self.display is not None:
            self.display.show_finding(name, finding)


def examine(
    module: PPOModule,
    data: LightningDataModule,
    trainer: Trainer,
    plan: RunPlan | None = None,
    display: Display | None = None,
) -> Report:
    """Check a PPO run before it starts. Module and Trainer cannot be used for anything else after.

    Args:
        module: The module of the run.
        data: The data of the run.
        trainer: A Trainer with the run's strategy, precision and length, in one process, without
            callbacks and checkpoints (see `lit_rlhf.tools.doctor.QUIET`).
        plan: What the run asks of the machine. `None`: what `trainer` has.
        display: Where findings are shown as they come; `None` for nowhere.
    """
    plan = plan or RunPlan()
    report = Report(substitution=plan.substitution)
    case = Case(module, data, trainer, plan)
    module.trainer = trainer
    examination = Examination(case, report, display)
    try:
        if isinstance(data, RecordDataModule):
            # Before the fit, in which it would refuse networks that do not embed every token: that
            # is a finding of the doctor's own, and the other checks can run.
            data.tokenizer = data.tokenizer or module.tokenizer
            data.setup("fit")
        with warnings.catch_warnings():
            if plan.engines:
                # bfloat16 weights have float32 masters in the run, though not under the strategy
                # that replaces its own on a machine without a GPU
                warnings.filterwarnings("ignore", ".* rounded back to what they were in bfloat16")
            trainer.fit(examination, datamodule=data)
    except Exception as error:  # any kind, from the user's models, data and strategy
        examination.add(START, failure_of(error))
    else:
        if not hasattr(case, "batch"):
            examination.add(START, _NO_BATCH)
    for check in ALL_CHECKS:
        if check.name not in report.findings:
            examination.add(check.name, _NOT_REACHED)
    return report


def report_start_failure(error: Exception, plan: RunPlan, display: Display) -> Report:
    """Report a run whose module, data or Trainer could not be built.

    Args:
        error: Why not.
        plan: What the run asks of the machine.
        display: Where the findings are shown.
    """
    findings = {START: failure_of(error)}
    findings |= {check.name: _NOT_REACHED for check in ALL_CHECKS}
    for name, finding in findings.items():
        display.show_finding(name, finding)
    return Report(findings, plan.substitution)
