"""CollapseDetector on scripted metrics under a real Trainer: its verdicts and what it logs."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from lit_callbacks import (
    Action,
    CollapseDetector,
    CollapseEarlyStopping,
    Level,
    Monitor,
    NonFiniteMonitor,
    RewardDistributionMonitor,
)
from tests.callbacks.scripted import Script, Scripted, Watch, above, batches, trainer

NAN = math.nan
COLLAPSE = {
    "drift": [1.0, 1.0, 2.0, 12.0, 13.0, 14.0, 15.0, 1.0, 1.0],
    "size": [5.0, 5.0, 5.0, 5.0, 5.0, 50.0, 50.0, 5.0, 5.0],
}
# `drift` is above 10 for the second time in a row at step 5, `size` above 40 at step 7
LEVELS = [0, 0, 0, 0, 1, 1, 2, 0, 0]


def two_monitors() -> list[Monitor]:
    return [above(10.0, "drift", baseline_steps=2), above(40.0, "size", baseline_steps=2)]


def watched(
    folder: Path,
    script: Script,
    monitors: list[Monitor],
    module: dict[str, Any] | None = None,
    when: Any = "train_batch",
    epochs: int = 1,
    **arguments: Any,
) -> list[int]:
    """The level of every step."""
    watch = Watch()
    detector = CollapseDetector(monitors, [watch], when=when)
    length = max(map(len, script.values())) // epochs
    run = trainer(folder, detector, max_epochs=epochs, **arguments)
    run.fit(Scripted(script, **(module or {})), batches(length))
    return watch.levels


def mock_logger(folder: Path) -> Mock:
    logger = Mock()
    logger.save_dir = str(folder)
    return logger


# --- verdicts, and all that is logged


@pytest.mark.parametrize("manual", [False, True])
def test_a_collapse_is_logged_step_by_step(tmp_path: Path, manual: bool) -> None:
    logger = mock_logger(tmp_path)
    levels = watched(tmp_path, COLLAPSE, two_monitors(), {"manual": manual}, logger=logger)
    assert levels == LEVELS
    expected = []
    for step, level in enumerate(LEVELS, 1):
        metrics = {key: series[step - 1] for key, series in COLLAPSE.items()}
        expected += [
            call({"monitor/level": float(level)}, step=step),
            call(metrics=metrics, step=step),
        ]
    assert logger.log_metrics.mock_calls == expected


def test_a_healthy_run_stays_at_level_zero_and_writes_no_text(tmp_path: Path) -> None:
    script = {"drift": [1.0 + 0.1 * math.sin(i) for i in range(30)]}
    monitor = Monitor("drift", high_ratio=1.5, low_ratio=0.5)
    logger = TensorBoardLogger(tmp_path, name="", version="")
    assert watched(tmp_path, script, [monitor], logger=logger) == [0] * 30
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.value for event in events.Scalars("monitor/level")] == [0.0] * 30
    assert "monitor/verdict/text_summary" not in events.Tags()["tensors"]


@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_is_no_collapse(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    script = {"drift": [draw.gauss(10.0, 3.0) for _ in range(60)]}
    script["drift"][30] = 1000.0  # one wild value
    monitor = Monitor("drift", high_ratio=1.6, low_ratio=0.4)
    assert max(watched(tmp_path, script, [monitor])) < Level.COLLAPSED


def test_the_verdict_is_written_where_the_level_changes(tmp_path: Path) -> None:
    watch = Watch()
    detector = CollapseDetector(two_monitors(), [watch])
    logger = TensorBoardLogger(tmp_path, name="", version="")
    trainer(tmp_path, detector, logger=logger).fit(Scripted(COLLAPSE), batches(9))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    written = [
        (event.step, event.tensor_proto.string_val[0].decode())
        for event in events.Tensors("monitor/verdict/text_summary")
    ]
    sentences = [verdict.sentence for verdict in watch.verdicts]
    assert written == [
        (5, f"**suspicious** at 5\n\n{sentences[4]}"),
        (7, f"**collapsed** at 7\n\n{sentences[6]}"),
        (8, f"**healthy** at 8\n\n{sentences[7]}"),
    ]
    assert "drift" in sentences[4]
    assert "size" not in sentences[4]
    assert "drift" in sentences[6]
    assert "size" in sentences[6]


def test_nan_in_any_metric_is_a_collapse_at_once(tmp_path: Path) -> None:
    script = {"other": [1.0, NAN, 1.0, NAN, math.inf, 1.0]}
    # two in a row: steps 4 and 5
    assert watched(tmp_path, script, [NonFiniteMonitor(patience=2)]) == [0, 0, 0, 0, 2, 0]


def test_a_watched_metric_that_is_nan_counts_as_beyond_its_line(tmp_path: Path) -> None:
    monitor = above(10.0)
    assert watched(tmp_path, {"kl": [1.0, NAN, NAN, 1.0]}, [monitor]) == [0, 0, 2, 0]
    assert monitor.normal == [1.0, 1.0]


# --- what is done about it


class Told(Action):
    """Writes down when it is told of a step, and when it acts."""

    def __init__(self, name: str, events: list[str]) -> None:
        super().__init__(cooldown=1)
        self.name, self.events = name, events

    def on_step(self, *_: object) -> None:
        self.events.append(f"{self.name} sees")

    def act(self, *_: object) -> str:
        self.events.append(f"{self.name} acts")
        return ""


class Clearing(Told):
    clears_monitors = True


def test_all_actions_see_a_step_before_one_acts(tmp_path: Path) -> None:
    events: list[str] = []
    actions: list[Action] = [Told("first", events), Told("second", events)]
    detector = CollapseDetector([above(10.0)], actions)
    trainer(tmp_path, detector).fit(Scripted({"kl": [20.0, 20.0]}), batches(2))
    seen = ["first sees", "second sees"]
    assert events == [*seen, *seen, "first acts", "second acts"]


def test_readings_are_void_after_an_action_that_restores_an_earlier_state(tmp_path: Path) -> None:
    events: list[str] = []
    monitor, other = above(10.0), above(10.0, "drift")
    detector = CollapseDetector([monitor, other], [Clearing("it", events)], votes=1)
    script = {"kl": [1.0, 20.0, 20.0, 20.0], "drift": [1.0, 2.0, 3.0, 4.0]}
    trainer(tmp_path, detector).fit(Scripted(script), batches(4))
    # two readings beyond the threshold make a collapse, and the fourth is the first after it
    assert events.count("it acts") == 1
    assert (monitor.history, monitor.level) == ([20.0], Level.HEALTHY)
    assert (other.history, other.normal) == ([4.0], [1.0, 2.0, 3.0, 4.0])


# --- what is read


def test_a_missing_key_ends_the_run_at_the_first_step(tmp_path: Path) -> None:
    module = Scripted({"drift": [1.0, 1.0]}, {"scores": [[1.0, 2.0]] * 2})
    run = trainer(tmp_path, CollapseDetector([above(1.0, "drfit"), above(1.0, "drift")]))
    expected = (
        "expected drfit among the logged metrics or the tensors that the training step returns, "
        "got drift, loss, scores, step"
    )
    with pytest.raises(ValueError, match=expected):
        run.fit(module, batches(2))
    assert module.batches == 1


def test_keys_of_an_earlier_fit_are_not_those_of_this_one(tmp_path: Path) -> None:
    detector = CollapseDetector([above(10.0, "drift")])
    trainer(tmp_path, detector).fit(Scripted({"drift": [1.0]}), batches(1))
    with pytest.raises(ValueError, match="expected drift among the logged metrics"):
        trainer(tmp_path, detector).fit(Scripted({"kl": [1.0]}), batches(1))


def test_records_without_an_optional_key_are_passed_over(tmp_path: Path) -> None:
    monitor = above(10.0, optional=True)
    script = {"drift": [1.0] * 5, "kl": [None, 11.0, None, 12.0, None]}
    assert watched(tmp_path, script, [monitor, above(10.0, "drift")]) == [0, 0, 0, 1, 1]
    assert monitor.history == [11.0, 12.0]


def test_an_old_value_is_no_new_reading(tmp_path: Path) -> None:
    """Fails if Lightning ever stops copying what is logged: the reader tells by the copy."""
    monitor = above(10.0)
    script = {"kl": [1.0, None, None, 20.0, None, None, 20.0, 20.0]}
    assert watched(tmp_path, script, [monitor]) == [0, 0, 0, 0, 0, 0, 2, 2]
    assert monitor.history == [1.0, 20.0, 20.0, 20.0]


def test_one_nan_is_counted_once(tmp_path: Path) -> None:
    script = {"other": [1.0, NAN, None, None, None]}
    assert watched(tmp_path, script, [NonFiniteMonitor(patience=2)]) == [0] * 5


def test_a_tensor_of_the_steps_outputs_is_read_by_its_mean(tmp_path: Path) -> None:
    scores = [[1.0, 1.0], [2.0, 0.0], [20.0, 4.0], [21.0, 5.0]]
    monitor = above(10.0, "scores")
    script = {"drift": [1.0] * 4}
    assert watched(tmp_path, script, [monitor], {"outputs": {"scores": scores}}) == [0, 0, 0, 2]
    assert monitor.history == [1.0, 1.0, 12.0, 13.0]


def test_a_distribution_is_logged_with_its_shape_and_a_histogram(tmp_path: Path) -> None:
    mock, board = mock_logger(tmp_path), TensorBoardLogger(tmp_path, name="", version="")
    watched(
        tmp_path,
        {"drift": [1.0]},
        [RewardDistributionMonitor()],
        {"outputs": {"scores": [[0.0, 1.0, 2.0, 3.0, 4.0]]}},
        logger=[mock, board],
    )
    shape = mock.log_metrics.mock_calls[0].args[0]
    assert shape["monitor/scores_mean"] == 2.0
    assert shape["monitor/scores_std"] == pytest.approx(math.sqrt(2))
    assert shape["monitor/scores_kurtosis"] == pytest.approx(34 / 5 / 4 - 3)
    assert shape["monitor/scores_q95"] == pytest.approx(3.8)
    assert shape["monitor/scores_tail"] == pytest.approx(1.0)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (histogram,) = events.Histograms("monitor/scores")
    assert (histogram.step, histogram.histogram_value.num) == (1, 5)


# --- when a step is made


def test_every_batch_is_a_step_under_gradient_accumulation(tmp_path: Path) -> None:
    script = {"kl": [1.0, 1.0, 1.0, 20.0, 20.0, 20.0]}
    levels = watched(tmp_path, script, [above(10.0)], accumulate_grad_batches=3)
    assert levels == [0, 0, 0, 0, 2, 2]


def test_an_epoch_is_a_step_with_the_means_of_its_metrics(tmp_path: Path) -> None:
    monitor = above(10.0)
    script = {"kl": [1.0, 3.0, 1.0, 1.0, 12.0, 14.0, 20.0, 30.0]}
    levels = watched(tmp_path, script, [monitor], {"on_epoch": True}, "train_epoch", epochs=4)
    assert monitor.history == [2.0, 1.0, 13.0, 25.0]
    assert levels == [0, 0, 0, 2]


class Validated(Scripted):
    """Logs `val/kl`, a number for each validation that is not a sanity check."""

    def __init__(self, script: Script, values: list[float]) -> None:
        super().__init__(script)
        self.values = values

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/kl", 99.0 if self.trainer.sanity_checking else self.values[0])

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.values = self.values[1:]

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test/kl", 99.0)


def test_a_validation_is_a_step_but_a_sanity_check_is_none(tmp_path: Path) -> None:
    monitor, watch = above(10.0, "val/kl"), Watch()
    module = Validated({"kl": [1.0] * 8}, [1.0, 1.0, 20.0, 30.0])
    run = trainer(
        tmp_path,
        CollapseDetector([monitor], [watch], when="validation"),
        max_epochs=2,
        val_check_interval=2,
        num_sanity_val_steps=1,
    )
    run.fit(module, batches(4), batches(1))
    assert monitor.history == [1.0, 1.0, 20.0, 30.0]
    assert watch.levels == [0, 0, 0, 2]


@pytest.mark.parametrize("when", ["train_batch", "train_epoch", "validation"])
def test_nothing_happens_outside_of_fit(tmp_path: Path, when: Any) -> None:
    logger = mock_logger(tmp_path)
    detector = CollapseDetector([above(1.0)], when=when)
    run = trainer(tmp_path, detector, logger=logger)
    module = Validated({}, [1.0])
    run.validate(module, batches(1), verbose=False)
    run.test(module, batches(1), verbose=False)
    assert detector.verdict.step == 0
    keys = {key for made in logger.log_metrics.mock_calls for key in made.kwargs["metrics"]}
    assert keys == {"val/kl", "test/kl", "epoch"}


# --- CollapseEarlyStopping


@pytest.mark.parametrize("manual", [False, True])
def test_early_stopping_stops_after_the_batch_and_says_why(tmp_path: Path, manual: bool) -> None:
    module = Scripted(COLLAPSE, manual=manual)
    stopping = CollapseEarlyStopping(two_monitors())
    run = trainer(tmp_path, stopping)
    with pytest.warns(UserWarning, match=r"^step 7, collapsed: .*drift .*size "):
        run.fit(module, batches(9))
    assert module.batches == run.global_step == 7
    assert stopping.verdict.level is Level.COLLAPSED


def test_early_stopping_lets_a_healthy_run_end(tmp_path: Path) -> None:
    module = Scripted({"kl": [1.0] * 5})
    trainer(tmp_path, CollapseEarlyStopping([above(10.0)])).fit(module, batches(5))
    assert module.batches == 5


# --- arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"votes": 0}, "votes: expected at least 1, got 0"),
        ({"when": "batch"}, "when: expected train_batch, train_epoch or validation, got 'batch'"),
        ({"monitors": []}, "monitors: expected at least one"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CollapseDetector(**arguments)


def test_multi_element_outputs_of_any_type_are_read(tmp_path: Path) -> None:
    class Halves(Scripted):
        def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
            step = super().training_step(batch, batch_idx)
            return step | {"scores": torch.tensor([[1.0, 2.0], [3.0, 6.0]], dtype=torch.bfloat16)}

    monitor = above(10.0, "scores")
    trainer(tmp_path, CollapseDetector([monitor])).fit(Halves({}), batches(1))
    assert monitor.history == [3.0]
