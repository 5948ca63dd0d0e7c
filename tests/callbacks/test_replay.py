"""A replayed run gets the same verdicts as the detector gave during the run."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lit_callbacks import (
    CollapseDetector,
    KLMonitor,
    LengthMonitor,
    Level,
    LoggedStep,
    Monitor,
    NonFiniteMonitor,
    RewardDistributionMonitor,
    replay_run,
    replay_steps,
)

STEPS = 30


class Scripted(LightningModule):
    """Logs a run that is healthy for fifteen batches and collapses within ten."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        bad = max(0.0, min(5.0, (batch_idx - 15) / 2))
        scores = torch.linspace(0, 1, 21)
        scores[-3:] += 4 * bad
        self.log("toy/kl", 0.1 + 5.0 * bad)
        self.log("toy/length", 10.0 + batch_idx % 3 + 3.0 * bad)
        self.log("toy/loss", float("nan") if batch_idx >= 28 else 1.0)
        self.log("step", float(batch_idx))
        return {"scores": scores}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def monitors() -> list[Monitor]:
    return [
        KLMonitor("toy/kl", high=10.0),
        LengthMonitor("toy/length", high_ratio=1.6),
        RewardDistributionMonitor(),
        NonFiniteMonitor(),
    ]


class Watched(CollapseDetector):
    """Keeps every verdict."""

    def __init__(self) -> None:
        super().__init__(monitors(), actions=[])
        self.seen: list[tuple[int, Level, str]] = []

    def on_train_batch_end(self, *args: object, **kwargs: object) -> None:
        super().on_train_batch_end(*args, **kwargs)  # type: ignore[arg-type]
        self.seen.append((len(self.seen), self.verdict.level, self.verdict.sentence))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Watched]:
    folder, detector = tmp_path_factory.mktemp("run"), Watched()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=TensorBoardLogger(folder, name="", version=""),
        log_every_n_steps=1,
        callbacks=[detector],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Scripted(), DataLoader(torch.zeros(STEPS, 1)))  # type: ignore[arg-type]
    return folder, detector


def test_replay_repeats_the_detector(run: tuple[Path, Watched]) -> None:
    folder, detector = run
    replayed = [(step, v.level, v.sentence) for step, v in replay_run(str(folder), monitors())]
    assert len(replayed) == STEPS
    assert {level for _, level, _ in replayed} == {0, 1, 2}
    # TensorBoard keeps 32 bits of a number; sentences show three digits
    assert replayed == detector.seen


def test_other_votes_give_another_verdict(run: tuple[Path, Watched]) -> None:
    folder, _ = run

    def first(votes: int) -> int:
        verdicts = replay_run(str(folder), monitors(), votes)
        return next(step for step, verdict in verdicts if verdict.level is Level.COLLAPSED)

    # by hand: rewards are beyond their threshold from 16 on, KL from 19 on, length from 20 on, and
    # each votes at the second step beyond it; KL is needed in any case
    assert [first(1), first(2), first(3)] == [20, 20, 21]


def test_a_metric_that_was_not_logged_is_named(run: tuple[Path, Watched]) -> None:
    folder, _ = run
    with pytest.raises(
        ValueError, match=r"expected rollout/kl among the logged metrics, got .*toy/kl"
    ):
        replay_run(str(folder), [KLMonitor()])


def test_log_without_any_watched_metric_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected .*rollout/kl.* got loss"):
        replay_steps([LoggedStep(1, {"loss": 1.0})])


def test_default_monitors_take_what_a_log_has() -> None:
    step = {"rollout/kl": 1.0, "rollout/response_length": 50.0}
    replayed = replay_steps([LoggedStep(i, step) for i in range(3)])
    assert [verdict.level for _, verdict in replayed] == [Level.HEALTHY] * 3
