"""Judges logs of any trainer, afterwards or while they are written."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
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
from lit_callbacks.words import printable_line


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
    if not follow >= 0:
        raise ValueError(f"follow: expected at least 0 seconds, got {follow}")
    _check_names(names or {})
    runs = _split_folders(logs)
    healthy = _split_folders(healthy)
    _check_healthy(runs, healthy)
    thresholds: dict[str, dict[str, float]] = {}
    calm: dict[str, list[dict[str, float]]] = {}
    if healthy:
        for log in healthy:
            healthy_steps = read_logged_steps(log).values()
            calm[log] = _rename_metrics(healthy_steps, _find_all_names(healthy_steps, names))
        template = Watch(votes=votes, responses=responses, preset=preset)
        try:
            changes = template.calibrate(list(calm.values()))
        except ValueError as error:
            raise ValueError(f"--healthy {', '.join(calm)}: {error}") from error
        for line in describe_changes(changes, len(calm)):
            print(printable_line(line))
        thresholds = thresholds_of(changes)
    new_watch = partial(
        Watch, votes=votes, responses=responses, preset=preset, thresholds=thresholds
    )
    watches = {log: new_watch() for log in runs}
    judged = dict.fromkeys(runs, 0)  # number of steps
    highest = dict.fromkeys(runs, Level.HEALTHY)
    read: dict[str, Run] = {}
    while True:
        for log, watch in list(watches.items()):
            try:
                read[log] = read_run("run", log)
            except EmptyLogError:
                steps: dict[int, dict[str, float]] = {}
            else:
                steps = logged_steps(read[log])
            went_back = log in read and any(c.n_replaced for c in read[log].curves.values())
            if len(steps) < judged[log] and not went_back:
                print(printable_line(f"{log}: the log was begun anew, and so are its baselines"))
                watches[log] = watch = new_watch()
                judged[log] = 0
            watch.names = _find_all_names(steps.values(), names)
            if healthy and steps and not judged[log]:
                shared = _calibrated_signals(watch, [_rename_metrics(steps.values(), watch.names)])
                if not shared & (known := _calibrated_signals(watch, calm.values())):
                    raise ValueError(
                        f"--healthy: expected runs with a signal that {log} has, too (it has "
                        f"{', '.join(sorted(shared)) or 'none'}), got {', '.join(sorted(known))}"
                    )
            for step, scalars in list(steps.items())[judged[log] : -1 if follow else None]:
                judged[log] += 1
                if not watch.reads(scalars):
                    continue
                verdict = watch.step(scalars)
                highest[log] = max(highest[log], verdict.level)
                for note in watch.notes:
                    print(printable_line(f"{log} step {step}: {note}"), flush=True)
                if watch.is_news:
                    text = f"{verdict.level.word}: {verdict.sentence}"
                    print(printable_line(f"{log} step {step}: {text}"), flush=True)
            if not follow and not watch.verdict.step and log not in logs:
                print(printable_line(f"{log}: left out, it logs nothing that is watched"))
                del watches[log], highest[log]
            elif not follow and not watch.verdict.step:
                logged = sorted({key for scalars in steps.values() for key in scalars})
                watched_keys = dict.fromkeys(key for m in watch.monitors for key in m.keys)
                raise ValueError(
                    f"{log}: expected one of {', '.join(watched_keys)} or the names of a known "
                    "trainer "
                    f"(--map '{{KEY: NAME}}' gives others), got {', '.join(logged) or 'no numbers'}"
                )
        if not follow:
            _check_names_are_logged(
                names or {}, {key for run in read.values() for key in run.curves}
            )
            break
        try:
            time.sleep(follow)
        except KeyboardInterrupt:
            break
    for log, watch in watches.items():
        verdict = watch.verdict
        worst = "" if highest[log] <= verdict.level else f", {highest[log].word} before"
        judgement = f"{verdict.level.word} after {verdict.step} steps{worst}"
        for text in _describe_gaps(read[log], watch) if log in read else ():
            print(printable_line(f"{log}: {text}"))
        print(printable_line(f"{log}: {judgement}: {verdict.sentence}"))
    return highest
