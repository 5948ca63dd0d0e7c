"""Judges logs of any trainer, afterwards or while they are written."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from lit_callbacks.calibration import describe_changes, is_calibrated, thresholds_of
from lit_callbacks.monitors import Level, Monitor, StepMetrics
from lit_callbacks.names import KEYS_BESIDE, OWN_KEYS, find_names
from lit_callbacks.runs import EmptyLogError, Run, find_logs, read_run
from lit_callbacks.signals import Preset
from lit_callbacks.verdict import Verdict
from lit_callbacks.watch import Watch
from lit_callbacks.words import check_seconds, printable_line


class JudgedStep(NamedTuple):
    """A logged step and the verdict on it.

    Attributes:
        step: Its x value in the log.
        verdict: The verdict.
    """

    step: int
    verdict: Verdict


def read_logged_steps(log: str | Path) -> dict[int, dict[str, float]]:
    """Read the scalars of a run by step and key, in ascending steps.

    Args:
        log: A log, see `read_run`.
    """
    return logged_steps(read_run("run", log))


def read_log(log: str | Path) -> list[dict[str, float]]:
    """Read the metrics of a run as a table, for instance for `pandas.DataFrame`.

    Args:
        log: A log, see `read_run`.

    Returns:
        A row for each step, in ascending steps: `step`, and the metrics that were logged there.
    """
    return [{"step": step, **scalars} for step, scalars in read_logged_steps(log).items()]


def logged_steps(run: Run) -> dict[int, dict[str, float]]:
    """The scalars of a run by step and key, in ascending steps."""
    by_step: dict[int, dict[str, float]] = {}
    for key, curve in run.curves.items():
        for point in curve.points:
            by_step.setdefault(point.step, {})[key] = point.value
    return dict(sorted(by_step.items()))


def replay_steps(
    steps: Mapping[int, Mapping[str, float]],
    monitors: Sequence[Monitor] | None = None,
    votes: int | None = None,
) -> list[JudgedStep]:
    """Judge logged steps as `CollapseDetector` judges them during the run.

    Steps without any watched metric are skipped. A monitor of a tensor needs the metrics that a
    detector logged about it.

    Args:
        steps: Scalars of the run by step and key, in ascending steps.
        monitors: The monitors; by default one per signal, without those whose metrics are not in
            the log.
        votes: Number of different signals that make a collapse, at least 1; see `Watch`.

    Returns:
        The steps that were judged, in order.

    Raises:
        ValueError: If a metric of a given monitor is in no step.
    """
    watch = Watch(monitors, votes)
    replayed: list[JudgedStep] = []
    for step, scalars in steps.items():
        non_finite = tuple(key for key, value in scalars.items() if not math.isfinite(value))
        metrics = StepMetrics(scalars, {}, non_finite)
        if any(m.keys and not m.optional and m.can_read(metrics) for m in watch.monitors):
            watch.observe(metrics)
            replayed.append(JudgedStep(step, watch.judge()))
    unread = {m.key for m in watch.monitors if m.keys and not m.optional and not m.steps}
    if unread and (monitors is not None or not replayed):
        logged = {key for scalars in steps.values() for key in scalars}
        raise ValueError(
            f"monitors: expected {', '.join(sorted(unread))} among the logged metrics, got "
            f"{', '.join(sorted(logged)) or 'none'}"
        )
    return replayed


def replay_run(
    log: str, monitors: Sequence[Monitor] | None = None, votes: int | None = None
) -> list[JudgedStep]:
    """Judge a log as `CollapseDetector` judges a run, see `replay_steps`.

    Args:
        log: A log, see `read_run`.
        monitors: The monitors; by default one per signal.
        votes: Number of different signals that make a collapse, at least 1; see `Watch`.

    Returns:
        The steps that were judged, in order.
    """
    return replay_steps(read_logged_steps(log), monitors, votes)


def _split_folders(logs: Sequence[str]) -> list[str]:
    """Put the logs below a folder in place of a folder that has several."""
    split: list[str] = []
    for log in logs:
        below = find_logs(log) if Path(log).is_dir() else []
        split += map(str, below) if len(below) > 1 else [log]
    return list(dict.fromkeys(split))


def _rename_metrics(
    steps: Iterable[Mapping[str, float]], names: Mapping[str, str]
) -> list[dict[str, float]]:
    """The steps of a log, with the watched metrics under the monitors' keys, too.

    Args:
        steps: Metrics by their names in the log, step by step.
        names: Names of metrics by the monitors' keys.
    """
    return [
        dict(step) | {key: step[name] for key, name in names.items() if name in step}
        for step in steps
    ]


def _find_all_names(
    steps: Iterable[Mapping[str, float]], names: Mapping[str, str] | None
) -> dict[str, str]:
    """Names of a log's metrics by the monitors' keys: recognized ones, and others.

    Args:
        steps: Metrics by their names in the log, step by step.
        names: Names of metrics by the monitors' keys, which go before recognized ones.
    """
    return find_names(key for step in steps for key in step) | dict(names or {})


def _calibrated_signals(watch: Watch, runs: Iterable[Sequence[Mapping[str, float]]]) -> set[str]:
    """The signals of some runs whose thresholds can be calibrated."""
    steps = [StepMetrics(step, {}) for run in runs for step in run]
    monitors = [monitor for monitor in watch.monitors if is_calibrated(monitor)]
    return {monitor.vote for monitor in monitors if any(map(monitor.can_read, steps))}


def _check_names(names: Mapping[str, str]) -> None:
    """Refuse names of metrics for keys that no monitor reads."""
    watched_keys = (*OWN_KEYS, *KEYS_BESIDE)
    for key in names:
        if key not in watched_keys:
            raise ValueError(f"--map: expected keys among {', '.join(watched_keys)}, got {key}")


def _check_names_are_logged(names: Mapping[str, str], logged: AbstractSet[str]) -> None:
    """Refuse names of metrics that no log has."""
    for key, name in names.items():
        if name not in logged:
            raise ValueError(
                f"--map: expected the name of a logged metric for {key}, got {name!r}; logged are "
                f"{', '.join(sorted(logged)) or 'no numbers'}"
            )


def _check_healthy(runs: Sequence[str], healthy: Sequence[str]) -> None:
    """Refuse a log as healthy that is also judged: nothing in it could be flagged any more."""
    judged = {Path(log).resolve() for log in runs}
    for log in healthy:
        if Path(log).resolve() in judged:
            raise ValueError(f"--healthy: expected other logs than the judged ones, got {log}")


def _describe_unread(run: Run, names: Iterable[str]) -> list[str]:
    """The watched metrics of which some value in a log is no number.

    Args:
        run: The log.
        names: Names of the watched metrics in it.
    """
    return [
        f"{name} is no number, but {run.unread[name].value!r:.80}, at {run.unread[name].place}"
        for name in names
        if name in run.unread
    ]


def _describe_replaced(run: Run, names: Iterable[str]) -> list[str]:
    """How many values of a log later ones of the same steps have replaced, if any.

    Args:
        run: The log.
        names: Names of the watched metrics in it.
    """
    replaced = {name: run.curves[name].n_replaced for name in names if name in run.curves}
    if not any(replaced.values()):
        return []
    name, count = max(replaced.items(), key=itemgetter(1))
    total = count + len(run.curves[name].points)
    return [
        f"{count} of {total} values of {name} do not count, because later ones have their steps: "
        "the run was resumed or rolled back, or the log has several runs"
    ]


def _describe_ended(run: Run, watch: Watch) -> list[str]:
    """The watched metrics that a log has at first and no longer at its end.

    The verdict at the end does not rest on them.

    Args:
        run: The log.
        watch: The watch that has judged it.
    """
    judged = {step: metrics for step, metrics in logged_steps(run).items() if watch.reads(metrics)}
    metrics = [StepMetrics(step, {}) for step in _rename_metrics(judged.values(), watch.names)]
    ended: dict[int, list[str]] = {}
    for monitor in watch.monitors:
        places = [n for n, step in enumerate(metrics) if monitor.keys and monitor.can_read(step)]
        if not places:
            continue
        gaps = [later - earlier for earlier, later in pairwise(places)]
        n_without = len(metrics) - 1 - places[-1]
        if n_without > max([2 * monitor.patience - 1, *gaps]):
            ended.setdefault(places[-1], []).append(monitor.name)
    return [
        f"{', '.join(dict.fromkeys(names))}: last logged at step {list(judged)[last]}, "
        f"{len(metrics) - 1 - last} steps ago"
        for last, names in ended.items()
    ]


def _describe_gaps(run: Run, watch: Watch) -> list[str]:
    """What of the watched metrics of a log its verdict does not rest on.

    Args:
        run: The log.
        watch: The watch that has judged it.
    """
    recognized = find_names([*run.curves, *run.unread]) | watch.names
    names = sorted({*recognized.values(), *OWN_KEYS})
    return [
        *_describe_unread(run, names),
        *_describe_replaced(run, names),
        *_describe_ended(run, watch),
    ]


@dataclass
class _WatchedLog:
    """A log and the watch that judges it, step by step as the log grows.

    Attributes:
        log: The log, see `read_run`.
        new_watch: Makes a watch.
        watch: Judges the steps.
        run: The log as it was last read; `None` while it is empty.
        steps_read: Number of its steps that the watch has seen, or that hold nothing watched.
        highest: The highest level so far.
    """

    log: str
    new_watch: Callable[[], Watch]
    watch: Watch = field(init=False)
    run: Run | None = None
    steps_read: int = 0
    highest: Level = Level.HEALTHY

    def __post_init__(self) -> None:
        self.watch = self.new_watch()

    def read_steps(self, names: Mapping[str, str] | None) -> dict[int, dict[str, float]]:
        """Read the metrics of all steps by step and key; start anew if the log was begun anew.

        Args:
            names: Names of metrics by the monitors' keys, besides those that are recognized.
        """
        steps: dict[int, dict[str, float]] = {}
        try:
            self.run = read_run("run", self.log)
        except EmptyLogError:
            pass
        else:
            steps = logged_steps(self.run)
        curves = {} if self.run is None else self.run.curves
        went_back = any(curve.n_replaced for curve in curves.values())
        if len(steps) < self.steps_read and not went_back:
            print(printable_line(f"{self.log}: the log was begun anew, and so are its baselines"))
            self.watch = self.new_watch()
            self.steps_read = 0
        self.watch.names = _find_all_names(steps.values(), names)
        return steps

    def judge(self, steps: Mapping[int, Mapping[str, float]], *, until: int | None) -> None:
        """Judge the steps that are new, and print notes and changes of the verdict.

        Args:
            steps: Metrics of all steps, see `read_steps`.
            until: Index of the first step to leave for later, as in a slice; `None`: none.
        """
        for step, scalars in list(steps.items())[self.steps_read : until]:
            self.steps_read += 1
            if not self.watch.reads(scalars):
                continue
            verdict = self.watch.step(scalars)
            self.highest = max(self.highest, verdict.level)
            texts = [*self.watch.notes]
            if self.watch.is_news:
                texts.append(f"{verdict.level.word}: {verdict.sentence}")
            for text in texts:
                print(printable_line(f"{self.log} step {step}: {text}"), flush=True)

    def print_summary(self) -> None:
        """Print what the verdict does not rest on, and the last verdict."""
        verdict = self.watch.verdict
        worst = "" if self.highest <= verdict.level else f", {self.highest.word} before"
        judgement = f"{verdict.level.word} after {verdict.step} steps{worst}"
        gaps = [] if self.run is None else _describe_gaps(self.run, self.watch)
        for text in (*gaps, f"{judgement}: {verdict.sentence}"):
            print(printable_line(f"{self.log}: {text}"))


def _calibrate_and_print(
    watch: Watch, healthy_runs: Mapping[str, Sequence[Mapping[str, float]]]
) -> dict[str, dict[str, float]]:
    """Loosen thresholds by healthy runs, and print what changed.

    Args:
        watch: A watch with the options of the run.
        healthy_runs: Metrics by key of each step, by the run's log.

    Returns:
        The changed thresholds, as `Watch` takes them.
    """
    try:
        changes = watch.calibrate(list(healthy_runs.values()))
    except ValueError as error:
        raise ValueError(f"--healthy {', '.join(healthy_runs)}: {error}") from error
    for line in describe_changes(changes, len(healthy_runs)):
        print(printable_line(line))
    return thresholds_of(changes)


def _check_shared_signals(
    watched: _WatchedLog,
    steps: Mapping[int, Mapping[str, float]],
    healthy_runs: Iterable[Sequence[Mapping[str, float]]],
) -> None:
    """Refuse healthy runs that have no signal in common with the log that they calibrate.

    Args:
        watched: The log.
        steps: Metrics of its steps.
        healthy_runs: Metrics by key of each step, run by run.
    """
    watch = watched.watch
    in_log = _calibrated_signals(watch, [_rename_metrics(steps.values(), watch.names)])
    in_healthy = _calibrated_signals(watch, healthy_runs)
    if not in_log & in_healthy:
        raise ValueError(
            f"--healthy: expected runs with a signal that {watched.log} has, too (it has "
            f"{', '.join(sorted(in_log)) or 'none'}), got {', '.join(sorted(in_healthy))}"
        )


def watch_logs(
    logs: Sequence[str],
    names: Mapping[str, str] | None = None,
    votes: int = 2,
    responses: int = 0,
    follow: float = 0.0,
    *,
    preset: str = Preset.CHAT,
    healthy: Sequence[str] = (),
) -> dict[str, Level]:
    """Judge logs and print every change of a verdict's level, and each graver kind of trouble.

    Args:
        logs: Logs, see `read_run`, and folders of the logs of several runs. Of such a folder, runs
            that log none of the watched metrics are left out.
        names: Names of metrics by the monitors' keys, besides those that are recognized.
        votes: Number of different signals that make a collapse, at least 1; see `Watch`.
        responses: Number of responses of a step; 0 reads it from the log.
        follow: Seconds between two looks for new steps, until Ctrl-C; 0 reads the logs once. The
            newest step is judged when the next one is there.
        preset: Task that the thresholds are meant for; see `Watch`.
        healthy: Logs of runs that a person calls healthy, by which thresholds are loosened; see
            `Watch.calibrate`.

    Returns:
        The highest level of each log.
    """
    check_seconds("follow", follow)
    _check_names(names or {})
    runs = _split_folders(logs)
    healthy = _split_folders(healthy)
    _check_healthy(runs, healthy)
    healthy_runs: dict[str, list[dict[str, float]]] = {}
    for log in healthy:
        healthy_steps = read_logged_steps(log).values()
        healthy_runs[log] = _rename_metrics(healthy_steps, _find_all_names(healthy_steps, names))
    thresholds: dict[str, dict[str, float]] = {}
    if healthy_runs:
        template = Watch(votes=votes, responses=responses, preset=preset)
        thresholds = _calibrate_and_print(template, healthy_runs)
    new_watch = partial(
        Watch, votes=votes, responses=responses, preset=preset, thresholds=thresholds
    )
    watched_logs = [_WatchedLog(log, new_watch) for log in runs]
    logged_names: set[str] = set()
    while True:
        for watched in list(watched_logs):
            steps = watched.read_steps(names)
            logged_names |= set() if watched.run is None else watched.run.curves.keys()
            if healthy_runs and steps and not watched.steps_read:
                _check_shared_signals(watched, steps, healthy_runs.values())
            # a trainer may still be writing the newest step
            watched.judge(steps, until=-1 if follow else None)
            if follow or watched.watch.verdict.step:
                continue
            if watched.log in logs:
                logged = sorted({key for scalars in steps.values() for key in scalars})
                keys = dict.fromkeys(key for m in watched.watch.monitors for key in m.keys)
                raise ValueError(
                    f"{watched.log}: expected one of {', '.join(keys)} or the names of a known "
                    "trainer "
                    f"(--map '{{KEY: NAME}}' gives others), got {', '.join(logged) or 'no numbers'}"
                )
            print(printable_line(f"{watched.log}: left out, it logs nothing that is watched"))
            watched_logs.remove(watched)
        if not follow:
            _check_names_are_logged(names or {}, logged_names)
            break
        if getattr(sys.stdout, "is_dropped", False):  # its reader has gone, as `head` does
            break
        try:
            time.sleep(follow)
        except KeyboardInterrupt:
            break
    for watched in watched_logs:
        watched.print_summary()
    return {watched.log: watched.highest for watched in watched_logs}
