"""A replayed run gets the same verdicts as the detector gave during the run."""

import math
from pathlib import Path

import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from lit_callbacks import (
    CollapseDetector,
    KLMonitor,
    LengthMonitor,
    Level,
    Monitor,
    NonFiniteMonitor,
    RewardDistributionMonitor,
    replay_run,
    replay_steps,
)
from tests.callbacks.scripted import Scripted, Watch, batches, trainer

STEPS = 30
BAD = [max(0.0, min(5.0, (i - 15) / 2)) for i in range(STEPS)]
"""Healthy for fifteen batches, and collapsed within ten."""
SCRIPT = {
    "toy/kl": [0.1 + 5.0 * bad for bad in BAD],
    "toy/length": [10.0 + i % 3 + 3.0 * bad for i, bad in enumerate(BAD)],
    "toy/loss": [math.nan if i >= 28 else 1.0 for i in range(STEPS)],
}
SCORES = [[k / 20 + 4 * bad * (k >= 18) for k in range(21)] for bad in BAD]


def monitors() -> list[Monitor]:
    kl, length = KLMonitor("toy/kl", high=10.0), LengthMonitor("toy/length", high_ratio=1.6)
    return [kl, length, RewardDistributionMonitor(), NonFiniteMonitor()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Watch]:
    folder, watch = tmp_path_factory.mktemp("run"), Watch()
    detector = CollapseDetector(monitors(), [watch])
    logger = TensorBoardLogger(folder, name="", version="")
    module = Scripted(SCRIPT, {"scores": SCORES})
    trainer(folder, detector, logger=logger).fit(module, batches(STEPS))
    return folder, watch


def test_replay_repeats_the_detector(run: tuple[Path, Watch]) -> None:
    folder, watch = run
    replayed = [(step, v.level, v.sentence) for step, v in replay_run(str(folder), monitors())]
    assert [step for step, _, _ in replayed] == [*range(1, STEPS + 1)]
    assert {level for _, level, _ in replayed} == {0, 1, 2}
    # TensorBoard keeps 32 bits of a number; sentences show three digits
    assert replayed == [(v.step, v.level, v.sentence) for v in watch.verdicts]


def test_other_votes_give_another_verdict(run: tuple[Path, Watch]) -> None:
    folder, _ = run

    def first(votes: int) -> int:
        verdicts = replay_run(str(folder), monitors(), votes)
        return next(step for step, verdict in verdicts if verdict.level is Level.COLLAPSED)

    # by hand: rewards are beyond their threshold from 17 on, KL from 20 on, length from 21 on, and
    # each votes at the second step beyond it; KL is needed in any case
    assert [first(1), first(2), first(3)] == [21, 21, 22]


def test_a_metric_that_was_not_logged_is_named(run: tuple[Path, Watch]) -> None:
    folder, _ = run
    message = r"expected rollout/kl among the logged metrics, got .*toy/kl"
    with pytest.raises(ValueError, match=message):
        replay_run(str(folder), [KLMonitor()])


def test_log_without_any_watched_metric_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected .*rollout/kl.* got loss"):
        replay_steps({1: {"loss": 1.0}})


def test_default_monitors_take_what_a_log_has() -> None:
    step = {"rollout/kl": 1.0, "rollout/response_length": 50.0}
    replayed = replay_steps(dict.fromkeys(range(3), step))
    assert [verdict.level for _, verdict in replayed] == [Level.HEALTHY] * 3
