"""The actions of a detector on its verdict."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler

from lit_callbacks import (
    Action,
    AdjustCoefficient,
    AdjustLearningRate,
    Level,
    StopTraining,
    Trouble,
    Verdict,
    find_collapse,
)
from tests.support.report_pages import read_texts
from tests.support.scripted import (
    RecordActs,
    Scripted,
    batches,
    fit_batches,
    script_of,
    trainer,
    watching,
)


@dataclass(frozen=True)
class LossOptions:
    """Options of a module in a group."""

    entropy_coef: float = 0.5
    epochs: int = 2


class Coefficients(Scripted):
    """A coefficient of each kind."""

    def __init__(self, levels: list[int], gamma: float = 0.5) -> None:
        super().__init__(script_of(levels))
        self.save_hyperparameters("gamma")
        self.beta = 0.1
        self.objective = LossOptions()
        self.count = 3
        self.name = "five"
        self.switch = True
        self.register_buffer("kl_coef", torch.tensor(0.25))
        self.register_buffer("many", torch.zeros(2))
        self.inner = torch.nn.BatchNorm1d(2)  # its buffers are no attributes of this module


def act(action: Action, module: LightningModule) -> str:
    return action.act(cast("Trainer", None), module, Verdict())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"level": "suspicious", "cooldown": 2}, [2, 4, 7, 9]),
        ({"level": "suspicious", "cooldown": 10}, [2, 7]),  # below its level the cooldown ends
        ({"level": "suspicious", "cooldown": 1}, [2, 3, 4, 5, 7, 8, 9, 10]),
        ({"level": "collapsed", "cooldown": 2}, [8, 10]),
        ({}, [8]),
    ],
)
def test_level_and_cooldown_of_an_action(tmp_path: Path, options: Any, expected: list[int]) -> None:
    levels, action = [0, 1, 1, 1, 1, 0, 1, 2, 2, 2], RecordActs(**options)
    trainer(tmp_path, watching(action)).fit(Scripted(script_of(levels)), batches(10))
    assert action.acts == expected


@pytest.mark.parametrize(
    ("action", "trouble", "acts"),
    [
        (StopTraining(), Trouble.BROKEN, True),
        (StopTraining(), Trouble.EXPLOITING, True),
        (StopTraining(), Trouble.MONOTONOUS, False),
        (StopTraining(), None, True),  # a metric of the user has no kind
        (StopTraining(kinds=["monotonous"]), Trouble.MONOTONOUS, True),
        (StopTraining(kinds=["monotonous"]), Trouble.EXPLOITING, False),
        (RecordActs(), Trouble.MONOTONOUS, True),
    ],
)
def test_action_chooses_by_kinds_of_trouble(
    tmp_path: Path, action: Action, trouble: Trouble | None, acts: bool
) -> None:
    verdict = Verdict(Level.COLLAPSED, "KL 41 nats", 3, trouble)
    assert (action.respond(trainer(tmp_path), Scripted([]), verdict) is not None) is acts


def test_kinds_of_an_action_are_checked() -> None:
    with pytest.raises(ValueError, match=r"kinds: expected some of broken, .* got far"):
        StopTraining(kinds=["far"])


@pytest.mark.parametrize("done", [3, 4, 5])
def test_a_resumed_run_keeps_the_cooldown(tmp_path: Path, done: int) -> None:
    script = script_of([1] * 9)
    fit_batches(tmp_path, Scripted(script), 9, watching(RecordActs(level="suspicious", cooldown=4)))
    action = RecordActs(level="suspicious", cooldown=4)
    fit_batches(tmp_path, Scripted(script), 9, watching(action), done=done)
    assert action.acts == [step for step in (1, 5, 9) if step > done]


def test_what_was_done_is_written_under_the_verdict(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="")
    actions = [RecordActs(cooldown=2), AdjustCoefficient("beta", 2.0, level="collapsed")]
    trainer(tmp_path, watching(*actions), logger=logger).fit(Coefficients([0, 2, 2, 2]), batches(4))
    steps, texts = zip(*read_texts(tmp_path), strict=True)
    assert steps == (2, 4)  # a new level, and an act without one
    first, second = (text.split("\n\n") for text in texts)
    assert first[0] == "**collapsed** at step 2"
    assert first[2:] == ["- counted", "- raised beta from 0.1 to 0.2"]
    assert second[2:] == ["- counted"]


def test_what_ended_a_fit_and_the_weights_before_it_can_be_found(tmp_path: Path) -> None:
    detector = watching(StopTraining(every_n_steps=2))
    run = fit_batches(tmp_path, Scripted(script_of([0, 0, 0, 0, 0, 2])), 6, detector)
    collapse = find_collapse(run)
    assert collapse is not None
    assert collapse.verdict.level is Level.COLLAPSED
    assert collapse.verdict.step == 6
    assert collapse.healthy_step == 3
    saved = torch.load(tmp_path / "healthy/weights_step=3.ckpt", weights_only=True)
    assert collapse.checkpoint == tmp_path / "healthy/weights_step=3.ckpt"
    assert "optimizer_states" not in saved
    healthy = fit_batches(tmp_path / "2", Scripted(script_of([0, 1])), 2, watching(StopTraining()))
    assert find_collapse(healthy) is None
    # a Trainer that keeps no checkpoints
    run = trainer(tmp_path / "3", watching(StopTraining()))
    run.fit(Scripted(script_of([0, 2])), batches(2))
    collapse = find_collapse(run)
    assert collapse is not None
    assert collapse.healthy_step is None
    assert collapse.checkpoint is None
    assert not (tmp_path / "3/healthy").exists()


def test_a_coefficient_is_multiplied_wherever_it_is() -> None:
    module = Coefficients([])
    assert act(AdjustCoefficient("beta", 2.0), module) == "raised beta from 0.1 to 0.2"
    assert act(AdjustCoefficient("kl_coef", 0.5), module) == "lowered kl_coef from 0.25 to 0.125"
    assert act(AdjustCoefficient("gamma", 3.0), module) == "raised gamma from 0.5 to 1.5"
    sentence = act(AdjustCoefficient("objective.entropy_coef", 0.5), module)
    assert sentence == "lowered objective.entropy_coef from 0.5 to 0.25"
    assert module.objective == LossOptions(0.25)
    assert (module.beta, module.hparams["gamma"]) == (0.2, 1.5)
    assert torch.equal(module.kl_coef, torch.tensor(0.125))
    assert module.kl_coef is module.get_buffer("kl_coef")


@pytest.mark.parametrize(
    ("value", "factor", "lower", "upper", "expected"),
    [
        (0.5, 4.0, 0.0, 1.5, 1.5),
        (0.5, 0.1, 0.2, 1.0, 0.2),
        (0.0, 2.0, 0.1, 1.0, 0.1),  # raised through `lower`
        (0.0, 2.0, 0.0, 1.0, 0.0),
        (3.0, 2.0, 0.0, 1.0, 3.0),  # never the other way than `factor` says
        (0.1, 0.5, 0.2, 1.0, 0.1),
    ],
)
def test_a_coefficient_stays_within_bounds(
    value: float, factor: float, lower: float, upper: float, expected: float
) -> None:
    module = Coefficients([])
    module.beta = value
    sentence = act(AdjustCoefficient("beta", factor, lower, upper), module)
    assert module.beta == expected
    assert bool(sentence) is (expected != value)


@pytest.mark.parametrize(("factor", "bound"), [(2.0, 0.7), (0.5, 0.3)])
def test_a_buffer_at_its_bound_is_left_alone_though_it_rounds(factor: float, bound: float) -> None:
    """In float32 0.7 is a little less and 0.3 a little more: neither is a change."""
    module = Coefficients([])
    module.kl_coef = torch.tensor(bound)
    bounds = {"upper": bound} if factor > 1 else {"lower": bound}
    assert act(AdjustCoefficient("kl_coef", factor, **bounds), module) == ""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("kl_ceof", "'kl_ceof'; it has beta, gamma, kl_coef, objective.entropy_coef$"),
        ("objective.entropy", "expected a coefficient of Coefficients, got 'objective.entropy'"),
        ("name", "expected 'name' to be a number, got str"),
        ("switch", "expected 'switch' to be a number, got bool"),
        ("many", "expected 'many' to be a number, got Tensor"),
        ("global_step", "expected a coefficient to set, got property 'global_step'"),
    ],
)
def test_wrong_coefficient_is_refused_at_the_start(tmp_path: Path, name: str, message: str) -> None:
    module = Coefficients([0])
    with pytest.raises(ValueError, match=f"^name: .*{message}"):
        trainer(tmp_path, watching(AdjustCoefficient(name, 2.0))).fit(module, batches(1))
    assert module.batches == 0


def test_a_resumed_run_goes_on_with_what_was_set(tmp_path: Path) -> None:
    class Adaptive(Coefficients):
        def on_train_batch_end(self, *_: Any) -> None:
            self.kl_coef += 1.0  # the module moves it itself, too: the checkpoint has the last word

    straight, module = (Adaptive([0, 1, 1, 1, 0]) for _ in range(2))
    names = ("beta", "gamma", "kl_coef", "objective.entropy_coef")
    for one, done in ((straight, None), (module, 3)):
        actions = [AdjustCoefficient(name, 2.0) for name in names]
        fit_batches(tmp_path, one, 5, watching(*actions), done=done)
        assert (one.beta, one.hparams["gamma"], one.objective.entropy_coef) == (0.2, 1.0, 1.0)
    # the checkpoint of a batch is older than the module's own hook at its end
    assert float(straight.kl_coef) == 2 * 1.25 + 4
    assert float(module.kl_coef) == float(straight.kl_coef) - 1


SCHEDULES: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 10),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [LinearLR(optimizer, 0.1, total_iters=5), CosineAnnealingLR(optimizer, 5)],
        milestones=[5],
    ),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.1, 0.2, 2, cycle_momentum=False),
}


class TwoOptimizers(Scripted):
    """Two optimizers, the first with two groups; the schedules step at each batch."""

    def __init__(self, levels: list[int], schedule: str | None) -> None:
        super().__init__(script_of(levels), manual=True)
        self.schedule = schedule
        self.others = torch.nn.ParameterList([torch.ones(1), torch.ones(1)])
        self.rates: list[list[float]] = []

    def optimizers_of_run(self) -> list[LightningOptimizer]:
        return cast("list[LightningOptimizer]", self.optimizers())

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        for key, series in self.script.items():
            self.log(key, cast("float", series[self.trainer.fit_loop.total_batch_idx]))
        self.rates.append([g["lr"] for o in self.optimizers_of_run() for g in o.param_groups])
        self.manual_backward(self.loss(1) + sum(p.sum() for p in self.others))
        for optimizer in self.optimizers_of_run():
            optimizer.step()
        for schedule in cast("list[LRScheduler]", self.lr_schedulers() or []):
            schedule.step()
        return {}

    def configure_optimizers(self) -> OptimizerLRScheduler:
        groups = [{"params": [self.weight]}, {"params": [self.others[0]], "lr": 0.3}]
        optimizers = [torch.optim.Adam(groups, lr=0.1), torch.optim.Adam([self.others[1]], lr=0.01)]
        if self.schedule is None:
            return optimizers
        return optimizers, [SCHEDULES[self.schedule](optimizer) for optimizer in optimizers]


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
def test_all_learning_rates_that_follow_are_scaled(tmp_path: Path, schedule: str | None) -> None:
    plain = TwoOptimizers([0] * 10, schedule)
    trainer(tmp_path, watching()).fit(plain, batches(10))
    module = TwoOptimizers([0, 0, 1, 0, 0, 1, 1, 1, 1, 1], schedule)
    action = AdjustLearningRate(0.5, times=2, cooldown=2)
    trainer(tmp_path, watching(action)).fit(module, batches(10))
    # acts at steps 3 and 6, at most two times: from the next batch on
    factors = [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25]
    for rates, usual, factor in zip(module.rates, plain.rates, factors, strict=True):
        assert rates == pytest.approx([factor * rate for rate in usual], rel=1e-6)
    if schedule is None:
        return
    assert plain.rates[3] != plain.rates[4]
    # the rates that a schedule starts from stand in the groups too, for whoever reads them later
    for optimizer, usual in zip(module.optimizers_of_run(), plain.optimizers_of_run(), strict=True):
        for group, unscaled in zip(optimizer.param_groups, usual.param_groups, strict=True):
            assert group["initial_lr"] == pytest.approx(0.25 * unscaled["initial_lr"], rel=1e-6)


@pytest.mark.parametrize("done", [2, 3, 5])
def test_a_resumed_run_scales_as_an_uninterrupted_one(tmp_path: Path, done: int) -> None:
    straight, resumed = (TwoOptimizers([0, 0, 1, 1, 1, 1, 1, 1], "sequence") for _ in range(2))
    for module, start in ((straight, None), (resumed, done)):
        action = AdjustLearningRate(0.5, times=2, cooldown=2)
        fit_batches(tmp_path, module, 8, watching(action), done=start)
    for rates, expected in zip(resumed.rates, straight.rates[done:], strict=True):
        assert rates == pytest.approx(expected, rel=1e-12)
