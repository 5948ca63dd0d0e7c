"""Judges logs of any trainer, afterwards or while they are written.

Reads TensorBoard's event files, tables (CSV), lines of JSON, a Trainer's `trainer_state.json`, and
the offline files of Weights & Biases, if wandb is installed.
"""

from __future__ import annotations

import csv
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from lit_callbacks.monitors import Level, Monitor, StepMetrics
from lit_callbacks.names import find_names
from lit_callbacks.runs import Run, read_run
from lit_callbacks.verdict import Verdict
from lit_callbacks.watch import Watch

STEPS = ("step", "global_step", "iteration", "train/global_step", "training/global_step", "_step")
"""Names under which logs have their x axis."""


class LoggedStep(NamedTuple):
    """The metrics that a run logged at one place of the x axis, by key."""

    step: int
    scalars: dict[str, float]


class ReplayedStep(NamedTuple):
    """The verdict that a detector would have given at one place of the x axis."""

    step: int
    verdict: Verdict


def read_logged_steps(folder: str) -> list[LoggedStep]:
    """Read the scalars of a run, step by step; errors are those of `read_run`."""
    return logged_steps(read_run("run", folder))


def logged_steps(run: Run) -> list[LoggedStep]:
    """The scalars of a run, step by step."""
    by_step: dict[int, dict[str, float]] = {}
    for key, curve in run.curves.items():
        for point in curve.points:
            by_step.setdefault(point.step, {})[key] = point.value
    return [LoggedStep(step, by_step[step]) for step in sorted(by_step)]


def read_steps(path: str) -> list[LoggedStep]:
    """Read the numbers of a log, step by step.

    It is a file `.csv`, `.jsonl`, `.json` (with a `log_history`, as `trainer_state.json`) or
    `.wandb`, or a folder with TensorBoard's event files or one such file.
    """
    file = Path(path)
    if file.is_dir():
        kinds = ("*.wandb", "trainer_state.json", "*.jsonl", "*.csv")
        has_events = any(file.rglob("events.out.tfevents.*"))
        found = [] if has_events else [f for kind in kinds for f in sorted(file.rglob(kind))]
        if not found:
            return read_logged_steps(path)
        file = found[0]
    readers = {".csv": _read_csv, ".jsonl": _read_jsonl, ".json": _read_json, ".wandb": _read_wandb}
    if file.suffix not in readers or not file.is_file():
        raise ValueError(
            f"log: expected a folder of a run, or a file {', '.join(readers)}, got {path}"
        )
    steps: dict[int, dict[str, float]] = {}
    for place, record in enumerate(readers[file.suffix](file)):
        numbers = {key: n for key, v in record.items() if (n := _number(v)) is not None}
        step = next((numbers[name] for name in STEPS if name in numbers), float(place))
        steps.setdefault(int(step), {}).update(numbers)
    return [LoggedStep(step, steps[step]) for step in sorted(steps)]


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _read_csv(file: Path) -> Iterator[Mapping[str, Any]]:
    with file.open(encoding="utf-8", newline="") as lines:
        yield from csv.DictReader(line for line in lines if line.endswith("\n"))


def _read_jsonl(file: Path) -> Iterator[Mapping[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):  # still being written
                return
            try:
                record = json.loads(line)
                yield {**record, **record.get("metrics", {})}
            except (ValueError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{file}:{number}: expected a JSON object of metrics, got {line[:80]!r}"
                ) from error


def _read_json(file: Path) -> Iterator[Mapping[str, Any]]:
    content = json.loads(file.read_text("utf-8"))
    if not isinstance(content, dict) or "log_history" not in content:
        raise ValueError(f"log: expected an object with log_history, as trainer_state.json, {file}")
    yield from content["log_history"]


def _read_wandb(file: Path) -> Iterator[Mapping[str, Any]]:
    try:
        messages = import_module("wandb.proto.wandb_internal_pb2")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{file} is read with wandb: pip install wandb") from error
    for data in _read_blocks(file.read_bytes()):
        record = messages.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}


def _read_blocks(data: bytes, header: int = 7, size: int = 32768) -> Iterator[bytes]:
    """Records of a file in the format of LevelDB's logs, behind the header of wandb.

    A block has parts of records, each behind its checksum (4 bytes), length (2) and kind (1): a
    whole one, or the first, a middle or the last part of one.
    """
    place, record = header, b""
    while place + 7 <= len(data):
        if size - place % size < 7:  # the rest of a block is too short for a part
            place += size - place % size
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        part = data[place + 7 : place + 7 + length]
        if kind == 0 or len(part) < length:  # still being written
            return
        record = part if kind in (1, 2) else record + part
        if kind in (1, 4):
            yield record
        place += 7 + length


def replay_steps(
    steps: Sequence[LoggedStep], monitors: Sequence[Monitor] | None = None, votes: int = 2
) -> list[ReplayedStep]:
    """Judge logged steps as `CollapseDetector` judges them during the run.

    Args:
        steps: The steps in order. Those without any watched metric are skipped.
        monitors: New monitors, which are fed; by default one per signal, of which those whose
            metric was not logged are left out. A monitor of a tensor needs the metrics that a
            detector logged about it.
        votes: Number of different signals that must be beyond their thresholds for a collapse.

    Raises:
        ValueError: If a metric that is not optional is in no step, and `monitors` are given, or if
            none is in any.
    """
    watch = Watch(monitors, votes)
    replayed = []
    for step, scalars in steps:
        non_finite = tuple(key for key, value in scalars.items() if not math.isfinite(value))
        metrics = StepMetrics(scalars, {}, non_finite)
        if any(m.keys and not m.optional and m.can_read(metrics) for m in watch.monitors):
            watch.observe(metrics)
            replayed.append(ReplayedStep(step, watch.judge()))
    unread = {m.key for m in watch.monitors if m.keys and not m.optional and not m.steps}
    if unread and (monitors is not None or not replayed):
        logged = {key for step in steps for key in step.scalars}
        raise ValueError(
            f"monitors: expected {', '.join(sorted(unread))} among the logged metrics, got "
            f"{', '.join(sorted(logged)) or 'none'}"
        )
    return replayed


def replay_run(
    folder: str, monitors: Sequence[Monitor] | None = None, votes: int = 2
) -> list[ReplayedStep]:
    """Judge the run in `folder`, as `read_logged_steps` and `replay_steps` do."""
    return replay_steps(read_logged_steps(folder), monitors, votes)


def watch_logs(
    logs: Sequence[str],
    names: Mapping[str, str] | None = None,
    votes: int = 2,
    responses: int = 0,
    follow: float = 0.0,
) -> dict[str, Level]:
    """Judge logs and print every change of a verdict.

    Args:
        logs: See `read_steps`.
        names: Names of metrics by the monitors' keys, besides those that are recognized.
        votes: Number of different signals that make a collapse.
        responses: Number of responses of a step, if the log does not have it.
        follow: Seconds between two looks for new steps, until Ctrl-C; 0 reads the logs once. The
            newest step is judged when the next one is there.

    Returns:
        The highest level of each log.

    Raises:
        ValueError: If a log cannot be read or has none of the watched metrics.
    """
    watches = {log: Watch(votes=votes, responses=responses) for log in logs}
    judged, highest = dict.fromkeys(logs, 0), dict.fromkeys(logs, Level.HEALTHY)
    while True:
        for log, watch in watches.items():
            steps = read_steps(log)
            watch.names = find_names(k for s in steps for k in s.scalars) | dict(names or {})
            for step, scalars in steps[judged[log] : -1 if follow else None]:
                judged[log] += 1
                if not watch.reads(scalars):
                    continue
                before = watch.verdict.level
                level, sentence, _ = watch.step(scalars)
                highest[log] = max(highest[log], level)
                for note in watch.notes:
                    print(f"{log} step {step}: {note}", flush=True)
                if level is not before:
                    print(f"{log} step {step}: {level.word}: {sentence}", flush=True)
            if not follow and not watch.verdict.step:
                logged = sorted({key for step in steps for key in step.scalars})
                wanted = dict.fromkeys(key for m in watch.monitors for key in m.keys)
                raise ValueError(
                    f"{log}: expected one of {', '.join(wanted)} or the names of a known trainer "
                    f"(--map KEY=NAME gives others), got {', '.join(logged) or 'no numbers'}"
                )
        if not follow:
            break
        try:
            time.sleep(follow)
        except KeyboardInterrupt:
            break
    for log, watch in watches.items():
        level, sentence, count = watch.verdict
        worst = "" if highest[log] <= level else f", {highest[log].word} before"
        print(f"{log}: {level.word} after {count} steps{worst}: {sentence}")
    return highest
