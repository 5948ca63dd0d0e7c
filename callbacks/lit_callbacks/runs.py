"""Reads a run from its TensorBoard event files: curves, levels and verdicts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lit_callbacks.monitors import Level

if TYPE_CHECKING:
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

LEVEL_KEY = "monitor/level"
VERDICT_TAG = "monitor/verdict/text_summary"  # TensorBoard's writers add the suffix to text

_HEAD = re.compile(r"\*\*(\w+)\*\* at \S+")
_LEVELS = {level.word: level for level in Level}


class Point(NamedTuple):
    """One logged value.

    Attributes:
        time: Wall-clock time in seconds.
        step: Place on the x axis.
        value: The value; may be NaN or infinite.
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
            resumed from a checkpoint or rolled back.
    """

    points: list[Point]
    undone: list[list[Point]]


class LoggedVerdict(NamedTuple):
    """A verdict that the detector wrote to the log.

    Attributes:
        time: Wall-clock time in seconds.
        step: Place on the x axis.
        level: `None` if the text does not begin with a level.
        sentence: The reasons.
        actions: What was done about it.
    """

    time: float
    step: int
    level: Level | None
    sentence: str
    actions: tuple[str, ...]


class Span(NamedTuple):
    """A level, from its first step to the step at which it ended."""

    start: int
    end: int
    level: Level


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: Name of the run.
        folder: Folder that it was read from.
        curves: Metrics by key.
        verdicts: Verdicts in order of time.
        spans: Levels over the run; empty if no detector ran.
    """

    name: str
    folder: str
    curves: Mapping[str, Curve]
    verdicts: Sequence[LoggedVerdict]
    spans: Sequence[Span]

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


def read_run(name: str, folder: str | Path) -> Run:
    """Read a run.

    Args:
        name: Name of the run.
        folder: Folder with TensorBoard event files, or one with a single such folder below it.

    Raises:
        ModuleNotFoundError: If tensorboard is not installed.
        ValueError: If there is no run in the folder or there are several, it has no scalars, or a
            level is not 0, 1 or 2.
    """
    log = _load_event_files(folder)
    curves = {key: _build_curve(_read_points(log, key)) for key in sorted(log.Tags()["scalars"])}
    if not curves:
        raise ValueError(f"runs: expected a run with scalars, got {folder} without any")
    texts = log.Tensors(VERDICT_TAG) if VERDICT_TAG in log.Tags()["tensors"] else []
    verdicts = [
        parse_verdict(
            text.wall_time, text.step, text.tensor_proto.string_val[0].decode("utf-8", "replace")
        )
        for text in sorted(texts, key=lambda text: text.wall_time)
    ]
    levels = _read_points(log, LEVEL_KEY) if LEVEL_KEY in curves else []
    return Run(name, str(folder), curves, verdicts, _build_spans(folder, levels, verdicts))


def name_runs(runs: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Folder of each run by its name: the folder's own name, or its path where two are alike.

    Args:
        runs: Folders, or folders by name.

    Raises:
        ValueError: If there is none, a folder is given twice, or `runs` is a single string.
    """
    if isinstance(runs, str):
        raise ValueError(f"runs: expected a list of folders, got the string {runs!r}")
    if not runs:
        raise ValueError("runs: expected at least one run, got none")
    if isinstance(runs, Mapping):
        return {str(name): str(folder) for name, folder in runs.items()}
    folders = [str(run) for run in runs]
    if len(set(folders)) < len(folders):
        raise ValueError(f"runs: expected each folder once, got {', '.join(folders)}")
    tails = [Path(folder).resolve().name for folder in folders]
    return {
        tail if tails.count(tail) == 1 else folder: folder
        for tail, folder in zip(tails, folders, strict=True)
    }


def parse_verdict(time: float, step: int, text: str) -> LoggedVerdict:
    """Parse a text of `monitor/verdict`.

    Its form is `**level** at x`, the sentence, and lines of `- action`. A long sentence is
    followed by `> ` and all of it, which is taken instead.

    Args:
        time: Wall-clock time in seconds.
        step: Place on the x axis.
        text: The text. A first line of another form belongs to the sentence.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    head = _HEAD.fullmatch(lines[0]) if lines else None
    level = _LEVELS.get(head[1]) if head else None
    rest = lines if level is None else lines[1:]
    actions = tuple(line.removeprefix("- ") for line in rest if line.startswith("- "))
    words = [line for line in rest if not line.startswith("- ")]
    whole = [line.removeprefix("> ") for line in words if line.startswith("> ")]
    sentence = " ".join(whole or words)
    return LoggedVerdict(time, step, level, sentence, actions)


def _load_event_files(folder: str | Path) -> EventAccumulator:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "TensorBoard's event files are read with tensorboard: pip install lit-callbacks[report]"
        ) from error
    root = Path(folder)
    folders = {path.parent for path in root.rglob("events.out.tfevents.*")}
    if root in folders:
        folders = {root}
    if len(folders) != 1:
        found = ", ".join(sorted(map(str, folders))) or "no event file"
        raise ValueError(
            f"run: expected a folder with the TensorBoard event files of one run, got {folder} "
            f"with {found}"
        )
    # 0 keeps all values; by default the accumulator samples long series.
    log = EventAccumulator(str(folders.pop()), size_guidance={"scalars": 0, "tensors": 0})
    log.Reload()
    return log


def _read_points(log: EventAccumulator, key: str) -> list[Point]:
    """All values in order of time: files are read in order of name, which may be another one."""
    points = [Point(event.wall_time, event.step, event.value) for event in log.Scalars(key)]
    return sorted(points, key=lambda point: point.time)


def _build_curve(points: Iterable[Point]) -> Curve:
    curve = Curve([], [])
    for point in points:
        undone: list[Point] = []
        # A step that is not above the last one means that the run went back to it.
        while curve.points and curve.points[-1].step >= point.step:
            undone.append(curve.points.pop())
        # A step that was only logged again is replaced, without an undone piece.
        if undone and undone[0].step > point.step:
            # The last common value belongs to the piece too, so that it is drawn from there.
            curve.undone.append([*curve.points[-1:], *reversed(undone)])
        curve.points.append(point)
    return curve


def _build_spans(
    folder: str | Path, levels: Sequence[Point], verdicts: Sequence[LoggedVerdict]
) -> list[Span]:
    unknown = [point.value for point in levels if point.value not in list(Level)]
    if unknown:
        raise ValueError(f"{LEVEL_KEY}: expected 0, 1 or 2, got {unknown[0]} in {folder}")
    # A verdict may be newer than the last level, as loggers may skip steps.
    told = [Point(v.time, v.step, v.level) for v in verdicts if v.level is not None]
    known = _build_curve(sorted([*levels, *told], key=lambda point: point.time)).points
    spans: list[Span] = []
    for value, group in groupby(known, key=lambda point: point.value):
        steps = [point.step for point in group]
        if spans:
            spans[-1] = Span(spans[-1].start, steps[0], spans[-1].level)
        spans.append(Span(steps[0], steps[-1], Level(int(value))))
    return spans
