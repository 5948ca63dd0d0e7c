"""What a run left in its TensorBoard event files: curves, levels and verdicts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lit_callbacks.levels import Level

if TYPE_CHECKING:
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

LEVEL_KEY = "monitor/level"
VERDICT_TAG = "monitor/verdict/text_summary"  # the suffix is what TensorBoard's writers add to text

_HEAD = re.compile(r"\*\*(\w+)\*\* at \S+")
_LEVELS = {level.word: level for level in Level}


class Reading(NamedTuple):
    """One number that was logged.

    Attributes:
        time: wall-clock time in seconds.
        step: place on the x axis.
        value: the number; may be nan or infinite.
    """

    time: float
    step: int
    value: float


@dataclass(frozen=True)
class Curve:
    """A metric over a run.

    Attributes:
        readings: the course that counts, in ascending steps.
        undone: pieces that were logged before the run went back to an earlier step, because it was
            resumed from a checkpoint or rolled back.
    """

    readings: list[Reading]
    undone: list[list[Reading]]


class Mark(NamedTuple):
    """A verdict that the detector wrote down.

    Attributes:
        time: wall-clock time in seconds.
        step: place on the x axis.
        level: None where the text does not begin with one.
        sentence: why.
        actions: what was done about it.
    """

    time: float
    step: int
    level: Level | None
    sentence: str
    actions: tuple[str, ...]


class Span(NamedTuple):
    """A level and the steps from its first one to the one where it ended."""

    start: int
    end: int
    level: Level


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: what it is called on the page.
        folder: where it was read from.
        curves: metrics by key.
        marks: verdicts in order of time.
        spans: levels over the run; empty where no detector ran.
    """

    name: str
    folder: str
    curves: Mapping[str, Curve]
    marks: Sequence[Mark]
    spans: Sequence[Span]

    @property
    def level(self) -> Level | None:
        """Level at the end; None where no detector ran."""
        return self.spans[-1].level if self.spans else None

    @property
    def worst(self) -> Level:
        """The highest level there was, also before the run went back to an earlier step."""
        told = [mark.level for mark in self.marks if mark.level is not None]
        return max([Level.HEALTHY, *told, *(span.level for span in self.spans)])

    @property
    def reason(self) -> Mark | None:
        """The verdict that led to the level at the end; None where none was written for it."""
        last = self.marks[-1] if self.marks else None
        return last if last is not None and last.level == self.level else None


def read_run(name: str, folder: str) -> Run:
    """Read a run.

    Args:
        name: what it is called on the page.
        folder: folder with TensorBoard event files, or one with a single such folder below it.

    Raises:
        ModuleNotFoundError: without tensorboard.
        ValueError: if there is no run in the folder or there are several, it has no scalars, or a
            level other than 0, 1 and 2.
    """
    log = event_log(folder)
    curves = {key: _curve(_readings(log, key)) for key in sorted(log.Tags()["scalars"])}
    if not curves:
        raise ValueError(f"runs: expected a run with scalars, got {folder} without any")
    texts = log.Tensors(VERDICT_TAG) if VERDICT_TAG in log.Tags()["tensors"] else []
    marks = [
        parse_verdict(
            text.wall_time, text.step, text.tensor_proto.string_val[0].decode("utf-8", "replace")
        )
        for text in sorted(texts, key=lambda text: text.wall_time)
    ]
    levels = _readings(log, LEVEL_KEY) if LEVEL_KEY in curves else []
    return Run(name, folder, curves, marks, _spans(folder, levels, marks))


def named_runs(runs: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Folder of each run by the name it gets: the folder's own, or the path where two are alike.

    Args:
        runs: folders, or folders by name.

    Raises:
        ValueError: if there is none, a folder comes twice, or it is a single string.
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


def parse_verdict(time: float, step: int, text: str) -> Mark:
    """Take a text of ``monitor/verdict`` apart: ``**level** at x``, sentence, ``- action`` lines.

    Args:
        time: wall-clock time in seconds.
        step: place on the x axis.
        text: the text. Where its first line is another one, that line belongs to the sentence.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    head = _HEAD.fullmatch(lines[0]) if lines else None
    level = _LEVELS.get(head[1]) if head else None
    rest = lines if level is None else lines[1:]
    actions = tuple(line.removeprefix("- ") for line in rest if line.startswith("- "))
    sentence = " ".join(line for line in rest if not line.startswith("- "))
    return Mark(time, step, level, sentence, actions)


def event_log(folder: str | Path) -> EventAccumulator:
    """Open the TensorBoard logs of one run, with all that they hold.

    Args:
        folder: folder with TensorBoard event files, or one with a single such folder below it.

    Raises:
        ModuleNotFoundError: without tensorboard.
        ValueError: if there is no run in the folder, or there are several.
    """
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
    # 0: all of them
    log = EventAccumulator(str(folders.pop()), size_guidance={"scalars": 0, "tensors": 0})
    log.Reload()
    return log


def _readings(log: EventAccumulator, key: str) -> list[Reading]:
    """All readings in order of time, in whatever order the files were read."""
    readings = [Reading(event.wall_time, event.step, event.value) for event in log.Scalars(key)]
    return sorted(readings, key=lambda reading: reading.time)


def _curve(readings: Iterable[Reading]) -> Curve:
    curve = Curve([], [])
    for reading in readings:
        undone: list[Reading] = []
        while curve.readings and curve.readings[-1].step >= reading.step:
            undone.append(curve.readings.pop())
        if undone and undone[0].step > reading.step:
            # the last common reading too, so that the piece is drawn from where it left
            curve.undone.append([*curve.readings[-1:], *reversed(undone)])
        curve.readings.append(reading)
    return curve


def _spans(folder: str, levels: Sequence[Reading], marks: Sequence[Mark]) -> list[Span]:
    strange = [reading.value for reading in levels if reading.value not in list(Level)]
    if strange:
        raise ValueError(f"{LEVEL_KEY}: expected 0, 1 or 2, got {strange[0]} in {folder}")
    # A verdict may be newer than the last level that the logger took.
    told = [Reading(mark.time, mark.step, mark.level) for mark in marks if mark.level is not None]
    known = _curve(sorted([*levels, *told], key=lambda reading: reading.time)).readings
    spans: list[Span] = []
    for value, group in groupby(known, key=lambda reading: reading.value):
        steps = [reading.step for reading in group]
        if spans:
            spans[-1] = Span(spans[-1].start, steps[0], spans[-1].level)
        spans.append(Span(steps[0], steps[-1], Level(int(value))))
    return spans
