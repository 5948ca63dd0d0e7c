"""Reads a run from its log: curves, levels and verdicts.

The log is TensorBoard's event files, or a file that `lit_callbacks.formats` reads: a table such as
Lightning's `CSVLogger` writes, an export of a tracker, lines of JSON, a Trainer's
`trainer_state.json`, what a trainer printed, or an offline file of Weights & Biases.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from lit_callbacks.files import parse_json, split_lines
from lit_callbacks.formats import (
    READERS,
    LogFile,
    content_error,
    is_curve_export,
    parse_number,
    parse_step,
    read_records,
)
from lit_callbacks.monitors import Level

RECORDS_FILE = "log.jsonl"
"""File beside a log with the texts and histograms that its logger does not take."""
LEVEL_KEY = "monitor/level"
VERDICT_KEY = "monitor/verdict"
HELD_OUT_KEY = "held_out"
"""Key of a text that says how good the finished model is on held-out data."""
STEPS = (
    "step",
    "Step",
    "global_step",
    "iteration",
    "train/global_step",
    "training/global_step",
    "current_steps",
    "rollout/step",
    "train/step",
    "_step",
)
"""Names under which logs have their x axis."""
_EVENT_FILES = "events.out.tfevents.*"
_PLACEHOLDER = "hp_metric"
"""Scalar that Lightning's `TensorBoardLogger` writes at step 0 when a run starts: no metric."""
_TABLE = "metrics.csv"
_STATE = "trainer_state.json"
_KINDS = ("*.wandb", _STATE, "*.jsonl", "*.csv", "*.tsv", "*.log", "*.out")
"""Files of a folder that are looked for, one kind after the other."""
SAMPLES_FILE = "samples.jsonl"
"""File beside a log with the responses of a `SampleTimeline`."""

_LATEST = 253_000_000_000.0
"""Seconds from 1970 to a time in the year 9987; Python's calendar ends with 9999."""
_HEAD = re.compile(r"\*\*([\w ]+)\*\* at (?:\w+ )?\S+")
_LEVELS = {level.word: level for level in Level}


class EmptyLogError(ValueError):
    """A log without numbers, to which some may be added yet."""


class Point(NamedTuple):
    """One logged value.

    Attributes:
        time: Wall-clock time in seconds. Only event files have times. Records of other files get
            the time of the file, one microsecond apart.
        step: Its x value.
        value: The value, which may be NaN or infinite.
    """

    time: float
    step: int
    value: float


@dataclass(frozen=True)
class Curve:
    """A metric over a run.

    Attributes:
        points: The values that count, in ascending steps.
        undone: Pieces that were logged before the run went back to an earlier step, because it was
            resumed or rolled back.
        n_replaced: Number of values that later ones of the same steps, or of earlier ones, have
            replaced.
    """

    points: list[Point]
    undone: list[list[Point]]
    n_replaced: int = 0


class UnreadValue(NamedTuple):
    """A value in a log that is no number.

    Attributes:
        place: File, and number of its line or of the entry of an array.
        value: The value.
    """

    place: str
    value: object


class LoggedVerdict(NamedTuple):
    """A verdict that the detector wrote to the log.

    Attributes:
        time: Wall-clock time in seconds, see `Point`.
        step: Its x value.
        level: Level of the run; `None` if the text has none.
        sentence: Reasons in plain words.
        actions: What actions did, in words.
    """

    time: float
    step: int
    level: Level | None
    sentence: str
    actions: tuple[str, ...]


class Span(NamedTuple):
    """Steps with the same level.

    Attributes:
        start: First step of the level.
        end: Step at which it ended.
        level: The level.
    """

    start: int
    end: int
    level: Level


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: Name of the run.
        folder: Path of its log.
        curves: Metrics by key.
        verdicts: Verdicts in the order of writing.
        spans: Levels from one change to the next; empty if nothing has judged the run.
        judged_afterwards: Whether the verdicts come from monitors that read the log, and not from a
            detector in the run.
        held_out: How good the finished model is on held-out data, in a line; empty if the run did
            not say.
        unread: The first value of each key that is there but no number, by key.
    """

    name: str
    folder: str
    curves: Mapping[str, Curve]
    verdicts: Sequence[LoggedVerdict]
    spans: Sequence[Span]
    judged_afterwards: bool = False
    held_out: str = ""
    unread: Mapping[str, UnreadValue] = field(default_factory=dict)

    @property
    def level(self) -> Level | None:
        """Level at the end; `None` if no detector ran."""
        return self.spans[-1].level if self.spans else None

    @property
    def worst(self) -> Level:
        """The highest level of the run, including pieces that were undone."""
        logged = [verdict.level for verdict in self.verdicts if verdict.level is not None]
        return max([Level.HEALTHY, *logged, *(span.level for span in self.spans)])

    @property
    def reason(self) -> LoggedVerdict | None:
        """The verdict that led to the level at the end; `None` if none was written for it."""
        last = self.verdicts[-1] if self.verdicts else None
        return last if last is not None and last.level == self.level else None


def read_run(name: str, log: str | Path) -> Run:
    """Read a run.

    Args:
        name: Name of the run.
        log: Folder with TensorBoard's event files or a `metrics.csv`, or one with a single such
            folder below it; a file of `lit_callbacks.formats`; or a folder with one such file, or
            with exports of several curves of one run.

    Raises:
        ModuleNotFoundError: If the package that reads such a log is not installed.
        ValueError: If there is no readable log or there are several.
        EmptyLogError: If the log has no numbers yet.
    """
    read = _read_log(Path(log))
    _check_times(log, read)
    curves = {key: _build_curve(points) for key, points in sorted(read.scalars.items())}
    if not curves:
        raise EmptyLogError(f"runs: expected a run with scalars, got {log} without any")
    # verdicts of a logger that takes no texts are in the file of records
    beside = _read_texts(read.folder / RECORDS_FILE)
    texts = {key: read.texts.get(key) or beside.get(key, []) for key in (VERDICT_KEY, HELD_OUT_KEY)}
    verdicts = [parse_verdict(t.time, t.step, t.text) for t in texts[VERDICT_KEY]]
    spans = build_spans(log, read.scalars.get(LEVEL_KEY, []), verdicts)
    return Run(
        name=name,
        folder=str(log),
        curves=curves,
        verdicts=verdicts,
        spans=spans,
        held_out=max(texts[HELD_OUT_KEY]).text if texts[HELD_OUT_KEY] else "",
        unread=read.unread,
    )


def name_runs(runs: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Name runs by the names of their folders, with parent folders where two names are alike.

    Args:
        runs: Folders of runs, or folders by name. A folder with several runs below it stands for
            all of them, unless it is given by name.

    Returns:
        Folders by name.
    """
    if isinstance(runs, str):
        raise ValueError(f"runs: expected a list of folders, got the string {runs!r}")
    if not runs:
        raise ValueError("runs: expected at least one run, got none")
    if isinstance(runs, Mapping):
        return {str(name): str(folder) for name, folder in runs.items()}
    folders = [str(log) for run in runs for log in _each_log(run)]
    if len(set(folders)) < len(folders):
        raise ValueError(f"runs: expected each folder once, got {', '.join(folders)}")
    paths = [Path(folder).resolve() for folder in folders]
    return {
        _shortest_tail(path, paths) or folder: folder
        for folder, path in zip(folders, paths, strict=True)
    }


def _shortest_tail(path: Path, paths: Sequence[Path]) -> str:
    """The fewest last parts of a path that only one of the paths ends in; empty if none are."""
    for length in range(1, len(path.parts) + 1):
        tail = path.parts[-length:]
        if sum(other.parts[-length:] == tail for other in paths) == 1:
            return "/".join(tail)
    return ""


def _each_log(folder: str) -> list[str | Path]:
    logs = find_logs(folder)
    return [*logs] if len(logs) > 1 else [folder]


def parse_verdict(time: float, step: int, text: str) -> LoggedVerdict:
    """Parse a text of `monitor/verdict`: `**level** at step x`, the sentence, lines of `- action`.

    If the sentence is shortened, a line of `> ` and the whole sentence follows. A first line of
    another form is taken as part of the sentence.

    Args:
        time: Wall-clock time of the text, seconds.
        step: Its x value.
        text: The text.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    head = _HEAD.fullmatch(lines[0]) if lines else None
    level = _LEVELS.get(head[1]) if head else None
    body = lines if level is None else lines[1:]
    actions = tuple(line.removeprefix("- ") for line in body if line.startswith("- "))
    words = [line for line in body if not line.startswith("- ")]
    quoted = [line.removeprefix("> ") for line in words if line.startswith("> ")]
    return LoggedVerdict(
        time=time,
        step=step,
        level=level,
        sentence=" ".join(quoted or words),
        actions=actions,
    )


class LoggedText(NamedTuple):
    """A text in a log.

    Attributes:
        time: Wall-clock time in seconds, see `Point`.
        step: Its x value.
        text: The text.
    """

    time: float
    step: int
    text: str


class _Log(NamedTuple):
    """The content of a log.

    Attributes:
        folder: Folder that the log lies in.
        scalars: Logged values by key, in the order of writing.
        texts: Verdicts and other texts by key, in the order of writing.
        unread: The first value of each key that is there but no number, by key.
    """

    folder: Path
    scalars: dict[str, list[Point]]
    texts: dict[str, list[LoggedText]]
    unread: Mapping[str, UnreadValue]


class _LogFiles(NamedTuple):
    """The files that a run has logged to.

    Attributes:
        path: The log: a folder with event files, a table or exports of curves, or another file.
        files: What is read: the event files, the table, the exports, or the other file.
    """

    path: Path
    files: Sequence[Path]


def find_logs(folder: str | Path) -> list[Path]:
    """Find the logs of all runs in a folder.

    These are folders with event files, or else with tables: the folder itself, or all below it.
    Where there are none, they are the files of the first kind of `_KINDS` in or below the folder,
    each with a run. A folder whose files are exports of curves is the log of one run.
    """
    return [log.path for log in _find_log_files(Path(folder))]


def _find_log_files(folder: Path) -> list[_LogFiles]:
    """Find the files of all runs in a folder, see `find_logs`."""
    for pattern in (_EVENT_FILES, _TABLE):
        by_folder: dict[Path, list[Path]] = {}
        for file in find_regular_files(folder, f"**/{pattern}"):
            by_folder.setdefault(file.parent, []).append(file)
        if by_folder:
            folders = [folder] if folder in by_folder else sorted(by_folder)
            return [_LogFiles(path, by_folder[path]) for path in folders]
    for place, kind in enumerate(_KINDS):
        files = find_regular_files(folder, f"**/{kind}")
        files = [file for file in files if file.name != SAMPLES_FILE]
        if kind == _STATE:
            files = _find_last_states(files)
        if files and all(map(is_curve_export, files)):
            for other_kind in _KINDS[place + 1 :]:
                files += filter(is_curve_export, find_regular_files(folder, f"**/{other_kind}"))
            return [_LogFiles(folder, files)]
        if files:
            return [_LogFiles(file, [file]) for file in files]
    return []


def find_regular_files(folder: str | Path, pattern: str) -> list[Path]:
    """Find files by a pattern, but no pipes and devices: reading them may never end.

    Args:
        folder: The folder.
        pattern: A pattern of `Path.glob`, for instance `**/*.csv`.
    """
    return sorted(path for path in Path(folder).glob(pattern) if path.is_file())


def _find_last_states(files: Iterable[Path]) -> list[Path]:
    """For each run the state that has all of its steps: its checkpoints' largest one."""
    by_run: dict[Path, list[Path]] = {}
    for file in files:
        is_checkpoint = file.parent.name.startswith("checkpoint-")
        run = file.parent.parent if is_checkpoint else file.parent
        by_run.setdefault(run, []).append(file)
    return [max(states, key=lambda file: file.stat().st_size) for states in by_run.values()]


def _read_log(path: Path) -> _Log:
    """Read the only log at a path."""
    logs = [_LogFiles(path, [path])] if path.is_file() else _find_log_files(path)
    if len(logs) > 1:
        names = ", ".join(str(log.path) for log in logs)
        raise ValueError(f"run: expected the log of one run, got {path} with {names}")
    if not logs or (path.is_file() and path.suffix not in (*READERS, ".wandb")):
        missing = "" if path.exists() else ", which does not exist"
        raise ValueError(
            "log: expected a folder with TensorBoard's event files or a table, or a file "
            f"{', '.join([*READERS, '.wandb'])}, got {path}{missing}"
        )
    (log,) = logs
    if log.files[0].match(_EVENT_FILES):
        return _read_event_files(log)
    return _merge_exports(path, [_read_records(file) for file in log.files])


def _check_times(log: str | Path, read: _Log) -> None:
    """Refuse times that no calendar has."""
    times = [point.time for points in read.scalars.values() for point in points]
    times += [text.time for texts in read.texts.values() for text in texts]
    for time in times:
        if not abs(time) < _LATEST:  # NaN, too
            raise ValueError(f"{log}: expected times before the year 9999, got {time} seconds")


def _merge_exports(path: Path, logs: Sequence[_Log]) -> _Log:
    """Merge what the exports of one run have; a single log stays as it is."""
    scalars: dict[str, list[Point]] = {}
    for log in logs:
        if twice := scalars.keys() & log.scalars.keys():
            raise ValueError(
                f"log: expected the curves of one run, got {path} with {min(twice)} twice"
            )
        scalars |= log.scalars
    return logs[0]._replace(scalars=scalars)


def _read_event_files(events: _LogFiles) -> _Log:
    try:
        from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
            EventAccumulator,
        )
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "TensorBoard's event files are read with tensorboard: pip install tensorboard"
        ) from error
    logs = []
    for file in events.files:
        # 0 keeps all values; by default the accumulator samples long series
        log = EventAccumulator(str(file), size_guidance={"scalars": 0, "tensors": 0})
        log.Reload()
        if log.Tags()["scalars"] or log.Tags()["tensors"]:
            logs.append(_read_event_file(events.path, log))
    scalars: dict[str, list[Point]] = {}
    texts: dict[str, list[LoggedText]] = {}
    for part in _order_event_files(logs):
        for key, points in part.scalars.items():
            scalars.setdefault(key, []).extend(points)
        for key, written in part.texts.items():
            texts.setdefault(key, []).extend(written)
    return _Log(events.path, scalars, texts, unread={})


def _read_event_file(folder: Path, log: Any) -> _Log:  # noqa: ANN401  # tensorboard has no types
    """The content of one file of events, in the order of writing.

    Args:
        folder: Folder of the file.
        log: An `EventAccumulator` that has read the file.
    """
    scalars = {
        key: [
            Point(time=event.wall_time, step=event.step, value=event.value)
            for event in log.Scalars(key)
        ]
        for key in log.Tags()["scalars"]
        if key != _PLACEHOLDER
    }
    texts = {}
    for key in (VERDICT_KEY, HELD_OUT_KEY):
        tag = f"{key}/text_summary"  # TensorBoard's writers add the suffix to text
        events = log.Tensors(tag) if tag in log.Tags()["tensors"] else []
        texts[key] = [
            LoggedText(
                time=event.wall_time,
                step=event.step,
                text=event.tensor_proto.string_val[0].decode("utf-8", "replace"),
            )
            for event in events
            if event.tensor_proto.string_val  # another program may have other values there
        ]
    return _Log(folder, scalars, texts, unread={})


def _order_event_files(logs: Sequence[_Log]) -> list[_Log]:
    """Order the files of a run as they were written, although the clock may have been set back.

    Names of files may have another order than the times of their events, which decide. But a run
    begins with its lowest step: if older files have only later steps, the clock was set back before
    they were written. They are put behind the others, at times after theirs.

    Args:
        logs: The content of each file.
    """
    ordered = sorted(logs, key=_start_time)
    first_steps = [
        min((points[0].step for points in log.scalars.values()), default=math.inf)
        for log in ordered
    ]
    n_misdated = first_steps.index(min(first_steps)) if first_steps else 0
    misdated = ordered[:n_misdated]
    dated = ordered[n_misdated:]
    if not misdated:
        return dated
    delay = max(_end_time(log) for log in dated) - _start_time(misdated[0])
    return [*dated, *(_delay(log, delay) for log in misdated)]


def _start_time(log: _Log) -> float:
    """Time of the first value or text of a log, by the order of writing."""
    times = [points[0].time for points in log.scalars.values() if points]
    times += [texts[0].time for texts in log.texts.values() if texts]
    return min(times, default=math.inf)


def _end_time(log: _Log) -> float:
    """Time of the last value or text of a log, by the order of writing."""
    times = [points[-1].time for points in log.scalars.values() if points]
    times += [texts[-1].time for texts in log.texts.values() if texts]
    return max(times, default=-math.inf)


def _delay(log: _Log, seconds: float) -> _Log:
    """A log whose times are later by some seconds."""
    return log._replace(
        scalars={
            key: [point._replace(time=point.time + seconds) for point in points]
            for key, points in log.scalars.items()
        },
        texts={
            key: [text._replace(time=text.time + seconds) for text in texts]
            for key, texts in log.texts.items()
        },
    )


class _LoggedStep(NamedTuple):
    """A record of a file.

    Attributes:
        step: Its step.
        numbers: Its numbers by key, without the step.
        values: All of its values by key.
    """

    step: int
    numbers: Mapping[str, float]
    values: Mapping[str, Any]


def _find_axis(values: Mapping[str, Any]) -> str | None:
    """Find the name of a record's x axis; `None` if it has none.

    One that is empty is taken only if there is no other: trackers join tables with an axis each.
    """
    axes = [name for name in STEPS if name in values]
    return min(axes, key=lambda name: values[name] in (None, ""), default=None)


def _read_records(file: Path) -> _Log:
    """Read the scalars of a file. There may be several records for a step, as from `CSVLogger`."""
    scalars: dict[str, list[Point]] = {}
    texts: dict[str, list[LoggedText]] = {}
    unread: dict[str, UnreadValue] = {}
    written = file.stat().st_mtime
    logged: list[_LoggedStep] = []
    for count, (place, values) in enumerate(read_records(file)):
        axis = _find_axis(values)
        step = count if axis is None else parse_step(values[axis], file, place)
        numbers = {
            key: number
            for key, value in values.items()
            if key not in ("", axis) and (number := parse_number(value)) is not None
        }
        for key in values.keys() - numbers.keys() - unread.keys() - {axis}:
            if key and values[key] not in (None, ""):  # an empty cell was not logged
                unread[key] = UnreadValue(place=f"{file}:{place}", value=values[key])
        logged.append(_LoggedStep(step=step, numbers=numbers, values=values))
    if len(logged) > 2 and all(a.step > b.step for a, b in pairwise(logged)):
        logged.reverse()  # an export with the newest step first, and no run that went back
    for count, record in enumerate(logged):
        time = written + 1e-6 * count
        for key, number in record.numbers.items():
            point = Point(time=time, step=record.step, value=number)
            scalars.setdefault(key, []).append(point)
        for key in (VERDICT_KEY, HELD_OUT_KEY):
            if value := record.values.get(key):
                text = LoggedText(time=time, step=record.step, text=str(value))
                texts.setdefault(key, []).append(text)
    return _Log(file.parent, scalars, texts, unread)


def _read_texts(path: Path) -> dict[str, list[LoggedText]]:
    """Texts in a file of records by key; none if there is no such file."""
    if not path.is_file():
        return {}
    texts: dict[str, list[LoggedText]] = {}
    for line in split_lines(LogFile.read(path).text):
        record = None
        with suppress(ValueError):  # a run that was killed may leave half a line
            record = parse_json(line.text)
        if not isinstance(record, dict) or record.get("key") not in (VERDICT_KEY, HELD_OUT_KEY):
            continue
        time = parse_number(record.get("time"))
        if time is None or not math.isfinite(time):
            raise content_error(path, line.number, expected="a text with its time", got=record)
        step = parse_step(record.get("step"), path, line.number)
        text = LoggedText(time=time, step=step, text=str(record.get("text", "")))
        texts.setdefault(record["key"], []).append(text)
    return texts


def _build_curve(points: Sequence[Point]) -> Curve:
    remaining: list[Point] = []
    undone_pieces: list[list[Point]] = []
    for point in points:
        undone: list[Point] = []
        # a step that is not above the last one means that the run went back to it
        while remaining and remaining[-1].step >= point.step:
            undone.append(remaining.pop())
        # a step that was only logged again is replaced, without an undone piece
        if undone and undone[0].step > point.step:
            # the last common value belongs to the piece too, so that it is drawn from there
            undone_pieces.append([*remaining[-1:], *reversed(undone)])
        remaining.append(point)
    return Curve(points=remaining, undone=undone_pieces, n_replaced=len(points) - len(remaining))


def build_spans(
    folder: str | Path, levels: Sequence[Point], verdicts: Sequence[LoggedVerdict]
) -> list[Span]:
    """Find the levels of a run from one change to the next.

    Args:
        folder: Path of the log, for the error.
        levels: Logged levels, as numbers.
        verdicts: Logged verdicts.

    Raises:
        ValueError: If a logged level is none of `Level`.
    """
    unknown = [point.value for point in levels if point.value not in list(Level)]
    if unknown:
        raise ValueError(f"{LEVEL_KEY}: expected -1, 0, 1 or 2, got {unknown[0]} in {folder}")
    # loggers may skip steps, so a verdict may be newer than the last level
    judged = [
        Point(time=verdict.time, step=verdict.step, value=verdict.level)
        for verdict in verdicts
        if verdict.level is not None
    ]
    in_order = [*_never_earlier(levels), *_never_earlier(judged)]
    points = _build_curve(sorted(in_order, key=lambda point: point.time)).points
    spans: list[Span] = []
    for value, group in groupby(points, key=lambda point: point.value):
        steps = [point.step for point in group]
        if spans:
            spans.append(spans.pop()._replace(end=steps[0]))
        spans.append(Span(steps[0], steps[-1], Level(int(value))))
    return spans


def _never_earlier(points: Iterable[Point]) -> Iterator[Point]:
    """Points in the order of writing, none at an earlier time than the one before.

    The clock may have gone back between them.
    """
    latest = -math.inf
    for point in points:
        latest = max(latest, point.time)
        yield point._replace(time=latest)
