"""CollapseDetector on scripted metrics under a real Trainer: its verdicts and what it logs."""

import csv
import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call, patch

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor

from lit_callbacks import (
    Action,
    AdjustLearningRate,
    CollapseDetector,
    CollapseEarlyStopping,
    EntropyMonitor,
    KLMonitor,
    LengthMonitor,
    Level,
    Monitor,
    NonFiniteMonitor,
    PerplexityMonitor,
    RewardDistributionMonitor,
    RollBack,
    StopTraining,
    Verdict,
    find_collapse,
    read_run,
)
from lit_callbacks.rollback import SavedWeights
from tests.support.report_pages import read_events, read_texts
from tests.support.scripted import (
    RecordActs,
    Script,
    Scripted,
    Watch,
    above,
    batches,
    fit_batches,
    trainer,
)

NAN = math.nan
COLLAPSE = {
    "drift": [1.0, 1.0, 2.0, 12.0, 13.0, 14.0, 15.0, 1.0, 1.0, 1.0, 1.0],
    "size": [5.0, 5.0, 5.0, 5.0, 5.0, 50.0, 50.0, 5.0, 5.0, 5.0, 5.0],
}
# `drift` is above 10 for the second time in a row at step 5, `size` above 40 at step 7, and the
# third quiet step leaves the level
LEVELS = [0, 0, 0, 0, 1, 1, 2, 2, 2, 0, 0]


def two_monitors() -> list[Monitor]:
    return [above(10.0, "drift", baseline_steps=2), above(40.0, "size", baseline_steps=2)]


def watched(
    folder: Path, script: Script, monitors: list[Monitor], module: Any = None, **arguments: Any
) -> list[int]:
    """The level of every step."""
    watch = Watch()
    run = trainer(folder, CollapseDetector(monitors, [watch], votes=2), **arguments)
    run.fit(Scripted(script, **(module or {})), batches(max(map(len, script.values()))))
    return watch.levels


@pytest.mark.parametrize("manual", [False, True])
def test_a_collapse_is_logged_step_by_step(tmp_path: Path, manual: bool) -> None:
    logger = Mock(save_dir=str(tmp_path))
    levels = watched(tmp_path, COLLAPSE, two_monitors(), {"manual": manual}, logger=logger)
    assert levels == LEVELS
    logged = [
        logged_call
        for logged_call in logger.log_metrics.mock_calls
        if "metrics" in logged_call.kwargs
    ]
    keys, rows = [*COLLAPSE, "monitor/level"], zip(*COLLAPSE.values(), LEVELS, strict=True)
    metrics = [dict(zip(keys, row, strict=True)) for row in rows]
    assert logged == [
        call(metrics=step_metrics, step=step) for step, step_metrics in enumerate(metrics, 1)
    ]


def test_nan_in_any_metric_is_a_collapse_at_once(tmp_path: Path) -> None:
    script = {"other": [1.0, NAN, 1.0, NAN, math.inf, 1.0, 1.0, 1.0]}
    # two in a row: steps 4 and 5
    assert watched(tmp_path, script, [NonFiniteMonitor(patience=2)]) == [0, 0, 0, 2, 2, 2, 2, 0]


def test_all_actions_see_a_step_before_one_acts(tmp_path: Path, monkeypatch: Any) -> None:
    seen_calls, actions = Mock(), [RecordActs(cooldown=1), RecordActs(cooldown=1)]
    for action, calls in zip(actions, (seen_calls.first, seen_calls.second), strict=True):
        calls.acts.return_value = ""
        monkeypatch.setattr(action, "on_step", calls.sees)
        monkeypatch.setattr(action, "act", calls.acts)
    detector = CollapseDetector([above(10.0)], [*actions])
    trainer(tmp_path, detector).fit(Scripted({"kl": [20.0, 20.0]}), batches(2))
    seen = ["first.sees", "second.sees"]
    assert [name for name, *_ in seen_calls.mock_calls] == [
        *seen,
        *seen,
        "first.acts",
        "second.acts",
    ]


def test_readings_are_void_after_an_action_that_restores_an_earlier_state(tmp_path: Path) -> None:
    monitor, other, action = above(10.0), above(10.0, "drift"), RecordActs(cooldown=1)
    action.clears_monitors = True
    detector = CollapseDetector([monitor, other], [action], votes=1)
    script = {"kl": [1.0, 20.0, 20.0, 20.0], "drift": [1.0, 2.0, 3.0, 4.0]}
    trainer(tmp_path, detector).fit(Scripted(script), batches(4))
    # two readings beyond the threshold make a collapse, and the fourth is the first after it
    assert action.acts == [3]
    assert (monitor.history, monitor.level) == ([20.0], Level.HEALTHY)
    assert (other.history, other.normal) == ([4.0], [1.0, 2.0, 3.0, 4.0])


LONG = {
    key: [3.0 + i / 100 for i in range(8)] + [40.0] * 3
    for key in ("rollout/kl", "rollout/response_length", "rollout/perplexity", "rollout/entropy")
}


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the detectors said in the terminal."""
    return [r.getMessage() for r in caplog.records if r.name == "lightning.pytorch.lit_callbacks"]


@pytest.fixture(autouse=True)
def _log_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning.pytorch")


def test_levels_and_actions_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitors = [KLMonitor(), LengthMonitor(), PerplexityMonitor(), EntropyMonitor(high_ratio=3.0)]
    board, table = TensorBoardLogger(tmp_path, name="", version=""), CSVLogger(tmp_path, "csv")
    detector = CollapseDetector(monitors, [RecordActs(cooldown=10)])
    with patch.object(RecordActs, "act", return_value="raised " + "one and another " * 20):
        trainer(tmp_path, detector, logger=[board, table]).fit(Scripted(LONG), batches(11))
    ranges, verdict, action = lines(caplog)
    assert ranges.startswith("thresholds: KL at most 30 nats, length 1.82 to 6.07 tokens, ")
    assert ranges.endswith("; two of these 3 signals make a collapse (votes: 2)")
    assert verdict == (
        "collapsed at step 10: KL 40 nats is 13.2x its baseline and rising and 2 more: the policy "
        "is exploiting its reward"
    )
    assert action.startswith("at step 10: raised one and another")
    assert len(action.split()) == 25
    severities = [r.levelname for r in caplog.records if "at step 10" in r.getMessage()]
    assert severities == ["WARNING"] * 2
    ((step, text),) = read_texts(tmp_path)
    head, short, whole, done = text.split("\n\n")
    assert (step, head) == (10, "**collapsed** at step 10")
    assert f"collapsed at step 10: {short}" == verdict
    assert "entropy 40 nats is 13.2x its baseline and rising: the policy is" in whole
    assert done.startswith("- raised one and another")
    with (Path(table.log_dir) / "metrics.csv").open(encoding="utf-8", newline="") as file:
        words = [row["monitor/verdict"] for row in csv.DictReader(file)]
    assert [text.splitlines()[0] for text in words if text] == ["**collapsed** at step 10"]
    # as the report reads it
    (read,) = read_run("run", tmp_path).verdicts
    assert (read.level, read.sentence) == (Level.COLLAPSED, whole.removeprefix("> "))


def test_levels_are_logged_as_often_as_metrics_and_at_their_step(tmp_path: Path) -> None:
    """A module without a `step` of its own: Lightning counts batches from 0."""
    logger = TensorBoardLogger(tmp_path, name="", version="")
    monitors: list[Monitor] = [*two_monitors(), RewardDistributionMonitor()]
    module = {"logs_step": False, "outputs": {"scores": [[1.0, 2.0]] * 11}}
    watched(tmp_path, COLLAPSE, monitors, module, logger=logger, log_every_n_steps=3)
    events = read_events(tmp_path)
    for key in ("drift", "monitor/level", "monitor/scores_mean"):
        assert [event.step for event in events.Scalars(key)] == [2, 5, 8], key
    assert [event.step for event in events.Histograms("monitor/scores")] == [2, 5, 8]
    assert [event.value for event in events.Scalars("monitor/level")] == [0.0, 1.0, 2.0]
    # words come when the level changes
    assert [step for step, _ in read_texts(tmp_path)] == [4, 6, 9]


def test_two_detectors_have_own_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="")
    watched = ([above(10.0, "drift")], [above(40.0, "size"), NonFiniteMonitor()])
    detectors = [CollapseDetector(monitors) for monitors in watched]
    trainer(tmp_path, *detectors, logger=logger).fit(Scripted(COLLAPSE), batches(11))
    events = read_events(tmp_path)
    levels = {
        "monitor": [0, 0, 0, 0, 2, 2, 2, 2, 2, 0, 0],
        "monitor/2": [0, 0, 0, 0, 0, 0, 2, 2, 2, 0, 0],
    }
    for prefix, steps in (("monitor", [5, 10]), ("monitor/2", [7, 10])):
        assert [event.value for event in events.Scalars(f"{prefix}/level")] == levels[prefix]
        assert [step for step, _ in read_texts(tmp_path, f"{prefix}/verdict")] == steps
    messages = lines(caplog)
    heads = ["thresholds", "monitor/2", "collapsed at step 5", "monitor/2"]
    heads += ["healthy at step 10", "monitor/2"]
    assert [line.partition(": ")[0] for line in messages] == heads
    levels_of_second = [line.split()[1] for line in messages if "monitor/2" in line]
    assert levels_of_second == ["thresholds:", "collapsed", "healthy"]


@pytest.mark.parametrize(("steps", "signals"), [(8, ""), (7, "drift"), (3, "any signal")])
def test_silent_monitors_are_named(tmp_path: Path, caplog: Any, steps: int, signals: str) -> None:
    monitors = [Monitor("drift", high_ratio=1.5), above(40.0, "size", warmup=3)]
    monitors.append(above(1.0, "absent", optional=True))
    script = {"drift": [1.0] * steps, "size": [1.0] * steps}
    logger = TensorBoardLogger(tmp_path, name="", version="")
    watched(tmp_path, script, monitors, logger=logger)
    silent = f"{steps} steps were too few for a baseline to judge {signals}"
    ranges = (
        "thresholds: drift at most 1.5, size at most 40; two of these 2 signals make a collapse "
        "(votes: 2)"
    )
    assert lines(caplog) == [silent if signals else ranges]
    assert read_texts(tmp_path, "monitor/note")


def test_a_missing_key_ends_the_run_at_the_first_step(tmp_path: Path) -> None:
    module = Scripted({"drift": [1.0, 1.0]}, {"scores": [[1.0, 2.0]] * 2})
    run = trainer(tmp_path, CollapseDetector([above(1.0, "drfit"), above(1.0, "drift")]))
    expected = (
        "expected drfit among the logged metrics or the tensors that the training step returns, "
        "got drift, loss, scores, step; one that is logged with on_epoch=True is there with when: "
        "train_epoch"
    )
    with pytest.raises(ValueError, match=expected):
        run.fit(module, batches(2))
    assert module.batches == 1


def test_a_missing_key_of_validation_is_read_in_validation(tmp_path: Path) -> None:
    run = trainer(tmp_path, CollapseDetector([above(1.0, "val/acc")]))
    with pytest.raises(ValueError, match=r"val/acc .*logged in validation is there with when: val"):
        run.fit(Scripted({"drift": [1.0]}), batches(1))


def test_a_monitor_of_an_own_metric_stops_the_run_alone(tmp_path: Path, caplog: Any) -> None:
    module = Scripted(COLLAPSE)
    monitors: list[Monitor] = [*two_monitors(), NonFiniteMonitor()]
    run = trainer(tmp_path, CollapseDetector(monitors, [StopTraining()]))
    run.fit(module, batches(9))
    assert run.global_step == 5  # `drift` is beyond 10 for the second time
    ranges, verdict, action = lines(caplog)
    assert ranges.endswith("size at most 40; each of them makes a collapse alone")
    assert verdict.startswith("collapsed at step 5: drift 13 is ")
    assert action == "at step 5: stopped training"
    caplog.clear()
    one = CollapseDetector([above(10.0, "drift"), NonFiniteMonitor()])
    trainer(tmp_path, one).fit(Scripted(COLLAPSE), batches(9))
    assert lines(caplog)[0].endswith("drift at most 10; it makes a collapse alone")


def test_the_end_says_what_one_vote_would_have_done(tmp_path: Path, caplog: Any) -> None:
    script = {"drift": COLLAPSE["drift"], "size": [5.0] * 11}
    assert watched(tmp_path, script, two_monitors()) == [0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0]
    *_, last = lines(caplog)
    assert last.startswith("votes: 1 would have called it collapsed at step 5: drift 13 is ")
    assert not last.endswith("...")
    watched(tmp_path, script, two_monitors(), {"logs_step": False})  # the first batch is step 0
    assert "votes: 1 would have called it collapsed at step 4: drift" in lines(caplog)[-1]


def test_a_run_that_was_stopped_does_not_speak_of_too_few_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monitors: list[Monitor] = [above(10.0, "drift"), Monitor("size", high_ratio=3.0)]
    detector = CollapseDetector(monitors, [StopTraining()])
    trainer(tmp_path, detector).fit(Scripted(COLLAPSE), batches(9))
    assert not any("too few" in line for line in lines(caplog))


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


def test_a_distribution_is_logged_with_its_shape_and_a_histogram(tmp_path: Path) -> None:
    mock, board = Mock(save_dir=str(tmp_path)), TensorBoardLogger(tmp_path, name="", version="")
    module = {"outputs": {"scores": [[0.0, 1.0, 2.0, 3.0, 4.0]]}}
    monitors: list[Monitor] = [RewardDistributionMonitor()]
    watched(tmp_path, {"drift": [1.0]}, monitors, module, logger=[mock, board])
    shape = mock.log_metrics.mock_calls[0].kwargs["metrics"]
    assert shape["monitor/scores_mean"] == 2.0
    assert shape["monitor/scores_std"] == pytest.approx(math.sqrt(2))
    assert shape["monitor/scores_q95"] == pytest.approx(3.8)
    (histogram,) = read_events(tmp_path).Histograms("monitor/scores")
    assert (histogram.step, histogram.histogram_value.num) == (1, 5)


def test_every_batch_is_a_step_under_gradient_accumulation(tmp_path: Path) -> None:
    script = {"kl": [1.0, 1.0, 1.0, 20.0, 20.0, 20.0]}
    levels = watched(tmp_path, script, [above(10.0)], accumulate_grad_batches=3)
    assert levels == [0, 0, 0, 0, 2, 2]


def test_an_epoch_is_a_step_with_the_means_of_its_metrics(tmp_path: Path) -> None:
    monitor, watch = above(10.0), Watch()
    module = Scripted({"kl": [1.0, 3.0, 1.0, 1.0, 12.0, 14.0, 20.0, 30.0]}, on_epoch=True)
    detector = CollapseDetector([monitor], [watch], when="train_epoch")
    trainer(tmp_path, detector, max_epochs=4).fit(module, batches(2))
    assert monitor.history == [2.0, 1.0, 13.0, 25.0]
    assert watch.levels == [0, 0, 0, 2]


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
    monitor, watch, logger = above(10.0, "val/kl"), Watch(), Mock(save_dir=str(tmp_path))
    module = Validated({"kl": [1.0] * 8}, [1.0, 1.0, 20.0, 30.0])
    detector = CollapseDetector([monitor], [watch], when="validation")
    options = {"max_epochs": 2, "val_check_interval": 2, "num_sanity_val_steps": 1}
    trainer(tmp_path, detector, logger=logger, **options).fit(module, batches(4), batches(1))
    assert monitor.history == [1.0, 1.0, 20.0, 30.0]
    assert watch.levels == [0, 0, 0, 2]
    calls = [
        logged_call for logged_call in logger.log_metrics.mock_calls if logged_call.args
    ]  # not Lightning's own
    levels = [
        (logged_call.kwargs["step"], logged_call.args[0]["monitor/level"]) for logged_call in calls
    ]
    assert levels == [(2, 0), (4, 0), (6, 0), (8, 2)]


@pytest.mark.parametrize("when", ["train_batch", "train_epoch", "validation"])
def test_nothing_happens_outside_of_fit(tmp_path: Path, when: Any) -> None:
    logger, module = Mock(save_dir=str(tmp_path)), Validated({}, [1.0])
    detector = CollapseDetector([above(1.0)], when=when)
    run = trainer(tmp_path, detector, logger=logger)
    run.validate(module, batches(1), verbose=False)
    run.test(module, batches(1), verbose=False)
    assert detector.verdict.step == 0
    keys = {
        key
        for logged_call in logger.log_metrics.mock_calls
        for key in logged_call.kwargs["metrics"]
    }
    assert keys == {"val/kl", "test/kl", "epoch"}


@pytest.mark.parametrize("manual", [False, True])
def test_early_stopping_ends_the_run_at_a_collapse(
    tmp_path: Path, manual: bool, caplog: pytest.LogCaptureFixture
) -> None:
    module = Scripted(COLLAPSE, manual=manual)
    stopping = CollapseEarlyStopping(two_monitors(), votes=2)
    run = trainer(tmp_path, stopping)
    run.fit(module, batches(9))
    assert module.batches == run.global_step == 7
    assert stopping.verdict.level is Level.COLLAPSED
    assert lines(caplog)[-1] == "at step 7: stopped training"


def test_run_that_ends_for_another_reason_is_not_stopped_by_the_detector(tmp_path: Path) -> None:
    class Ending(Scripted):
        def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
            self.trainer.should_stop = batch_idx == 6
            return super().training_step(batch, batch_idx)

    stopping = CollapseEarlyStopping(two_monitors(), votes=2)
    run = trainer(tmp_path, stopping)
    run.fit(Ending(COLLAPSE), batches(9))
    assert (stopping.verdict.level, run.global_step) == (Level.COLLAPSED, 7)
    assert find_collapse(run) is None


def test_newest_healthy_weights_of_all_actions_are_found(tmp_path: Path) -> None:
    actions = [StopTraining(folder=str(tmp_path)), RollBack(folder=str(tmp_path))]
    detector = CollapseDetector(two_monitors(), [*actions])
    detector.stopped_by = detector.verdict
    for action, step in zip(actions, (9, 4), strict=True):
        action.saved = [SavedWeights(1, "step=1.ckpt"), SavedWeights(step, f"step={step}.ckpt")]
    collapse = find_collapse(trainer(tmp_path, detector))
    assert collapse is not None
    assert collapse.verdict is detector.verdict
    assert collapse.healthy_step == 9
    assert collapse.checkpoint == tmp_path / "step=9.ckpt"


# --- across a resume, from checkpoints that a Trainer wrote

# a baseline of 3 steps, then beyond the threshold from step 6 on, with a patience of 3
LATE = {"kl": [1.0, 2.0, 1.5, 1.5, 2.0, 12.0, 13.0, 14.0, 15.0, 1.0]}


def patient_monitors() -> list[Monitor]:
    options = {"patience": 3, "baseline_steps": 3, "horizon": 5, "trend_steps": 4}
    return [above(10.0, high_ratio=2.0, **options), NonFiniteMonitor()]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Verdict]]:
    """The folder of a run with its checkpoints, and its verdicts."""
    folder, watch = tmp_path_factory.mktemp("uninterrupted"), Watch()
    fit_batches(
        folder, Scripted(LATE), len(LATE["kl"]), CollapseDetector(patient_monitors(), [watch])
    )
    return folder, watch.verdicts


@pytest.mark.parametrize("done", range(1, len(LATE["kl"])))
def test_verdicts_of_a_resumed_run_are_those_of_a_whole_run(
    uninterrupted: tuple[Path, list[Verdict]], done: int
) -> None:
    folder, verdicts = uninterrupted
    assert [v.step for v in verdicts if v.level is Level.COLLAPSED] == [8, 9, 10]
    watch = Watch()
    detector = CollapseDetector(patient_monitors(), [watch])
    fit_batches(folder, Scripted(LATE), len(LATE["kl"]), detector, done=done)
    assert watch.verdicts == verdicts[done:]


def test_the_last_verdict_is_in_a_checkpoint(uninterrupted: tuple[Path, list[Verdict]]) -> None:
    folder, verdicts = uninterrupted
    detector = CollapseDetector(patient_monitors(), [Watch()])
    saved = torch.load(folder / "8.ckpt", weights_only=True)["callbacks"]
    detector.load_state_dict(saved[detector.state_key])
    assert detector.verdict == verdicts[7]


def test_early_stopping_ends_a_resumed_run_at_the_same_batch(tmp_path: Path) -> None:
    for done in (None, 6):
        module, stopping = Scripted(LATE), CollapseEarlyStopping(patient_monitors())
        run = fit_batches(tmp_path, module, len(LATE["kl"]), stopping, done=done)
        assert (run.global_step, module.batches) == (8, 8 - (done or 0))


def test_detectors_of_one_run_keep_a_state_each(tmp_path: Path) -> None:
    script = {"kl": [1.0, 20.0, 20.0, 20.0], "size": [1.0, 1.0, 20.0, 20.0]}

    def detectors() -> list[CollapseDetector]:
        return [CollapseDetector([above(10.0, key)], []) for key in ("kl", "size")]

    fit_batches(tmp_path, Scripted(script), 4, *detectors())
    state = torch.load(tmp_path / "3.ckpt", weights_only=True)["callbacks"]
    levels = {key: value["level"] for key, value in state.items() if "CollapseDetector" in key}
    assert levels == {f"CollapseDetector(train_batch: {k})": n for k, n in (("kl", 2), ("size", 0))}
    resumed = detectors()
    fit_batches(tmp_path, Scripted(script), 4, *resumed, done=3)
    assert [detector.verdict.level for detector in resumed] == [2, 2]


def test_state_keys_differ_by_what_is_watched_and_when() -> None:
    detectors = [
        CollapseDetector([above(1.0)]),
        CollapseDetector([above(1.0, "size")]),
        CollapseDetector([above(1.0)], when="validation"),
        CollapseDetector([NonFiniteMonitor()]),
        CollapseEarlyStopping([above(1.0)]),
    ]
    assert len({detector.state_key for detector in detectors}) == 5
    assert CollapseDetector([above(2.0)]).state_key == detectors[0].state_key


def test_other_actions_start_anew_while_the_monitors_go_on(tmp_path: Path) -> None:
    """So that a run that collapsed can be resumed with an action against it."""
    script = {"kl": [1.0, 1.0, 20.0, 20.0, 20.0]}
    fit_batches(
        tmp_path, Scripted(script), 5, CollapseDetector([above(10.0)], [AdjustLearningRate()])
    )
    actions: list[Action] = [AdjustLearningRate(level="collapsed"), StopTraining()]
    detector = CollapseDetector([above(10.0)], actions)
    message = "checkpoint has the actions AdjustLearningRate, the run has .*, StopTraining"
    with pytest.warns(UserWarning, match=message):
        run = fit_batches(tmp_path, Scripted(script), 5, detector, done=3)
    assert run.global_step == 4
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05)
