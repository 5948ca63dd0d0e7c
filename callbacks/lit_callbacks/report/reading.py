"""Reads the runs of a page: the log of any trainer, the responses beside it, and its phases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from lit_callbacks.formats import read_samples
from lit_callbacks.gain import Gain, explain_gain
from lit_callbacks.logs import logged_steps
from lit_callbacks.names import find_names
from lit_callbacks.runs import (
    SAMPLES_FILE,
    LoggedVerdict,
    Point,
    Run,
    build_spans,
    find_regular_files,
    read_run,
)
from lit_callbacks.watch import Watch

Sample = Mapping[str, Any]
EXTREMES = 5
"""Number of best and of worst responses that are shown."""


def read_any_run(name: str, folder: str) -> Run:
    """Read a run. One without a detector gets the verdicts of the default monitors.

    Args:
        name: Name of the run.
        folder: A log, see `read_run`.
    """
    run = read_run(name, folder)
    if run.spans:
        return run
    watch = Watch(names=find_names(run.curves))
    levels: list[Point] = []
    verdicts: list[LoggedVerdict] = []
    for step, scalars in logged_steps(run).items():
        if watch.reads(scalars):
            verdict = watch.step(scalars)
            if watch.is_news:
                verdicts.append(
                    LoggedVerdict(
                        time=step,
                        step=step,
                        level=verdict.level,
                        sentence=verdict.sentence,
                        actions=(),
                    )
                )
            levels.append(Point(time=step, step=step, value=verdict.level))
    spans = build_spans(folder, levels, [])
    return replace(run, spans=spans, verdicts=verdicts, judged_afterwards=bool(spans))


def read_responses(run: Run) -> dict[str, Any] | None:
    """Read what the page shows of a run's file of `SampleTimeline`; `None` if it has none.

    `total` is the number of responses, and `by_prompt` has them by prompt and step. `moments` are
    verdicts with the steps before, at and after them, or no verdicts with steps of the whole run.
    `ranked` are the best- and the worst-scored responses by title, and `gain` says what the rise of
    the score is made of, or why that is not known.
    """
    log = Path(run.folder)
    if log.is_file():
        files = find_regular_files(log.parent, SAMPLES_FILE)
    else:
        files = find_regular_files(log, f"**/{SAMPLES_FILE}")
    samples: list[Sample] = [sample for file in files[:1] for sample in read_samples(file)]
    if not samples:
        return None
    steps = sorted({sample["step"] for sample in samples})
    by_prompt: dict[str, dict[int, Sample]] = {}
    for sample in samples:
        by_prompt.setdefault(sample["prompt"], {})[sample["step"]] = sample
    around = [(_around(verdict.step, steps), verdict) for verdict in run.verdicts]
    moments = [
        ([verdict for _, verdict in group], shown_steps)
        for shown_steps, group in groupby(around, key=itemgetter(0))
    ]
    overview_steps = sorted({steps[0], steps[len(steps) // 2], steps[-1]})
    scored = {
        (s["prompt"], s["response"]): s for s in samples if math.isfinite(s.get("score", math.nan))
    }
    ordered = sorted(scored.values(), key=lambda sample: -sample["score"])
    best = ordered[: min(EXTREMES, len(ordered) // 2)]
    worst = ordered[::-1][: len(best)]
    try:
        gain: Gain | str = explain_gain([s for s in samples if "score" in s])
    except ValueError as error:
        gain = str(error)
    ranked = {"Best-scored": best, "Worst-scored": worst} if best else {}
    return {
        "total": len(samples),
        "by_prompt": by_prompt,
        "moments": moments or [([], overview_steps)],
        "ranked": ranked,
        "gain": gain,
    }


def _around(step: int, sampled: list[int]) -> list[int]:
    """The last sampled step before a step, the first from it on, and the next one."""
    later = [s for s in sampled if s >= step][:2]
    return [*[s for s in sampled if s < step][-1:], *later]


class SaidVerdict(NamedTuple):
    """The sentence of a verdict, in parts.

    Attributes:
        meaning: What the signs mean together, for example `the policy is exploiting its reward`;
            the whole sentence if it has no meaning but is a single sign.
        reasons: The signs, the gravest first.
    """

    meaning: str
    reasons: tuple[str, ...] = ()


def split_verdict(sentence: str) -> SaidVerdict:
    """Split the sentence of a verdict: its meaning is behind the last colon, its signs before.

    Examples:
        >>> split_verdict("KL 41 nats, length 40: the policy exploits")
        SaidVerdict(meaning='the policy exploits', reasons=('KL 41 nats', 'length 40'))
    """
    signs, _, meaning = sentence.rpartition(": ")
    if not signs or ", " in meaning:  # no conclusion: signs alone, or "not enough for ...: signs"
        signs = sentence
        meaning = ""
    reasons = tuple(signs.split(", "))
    if meaning:
        return SaidVerdict(meaning, reasons)
    return SaidVerdict(sentence) if len(reasons) == 1 else SaidVerdict("several signs", reasons)


class PhaseMeans(NamedTuple):
    """Time and memory of a phase of a step.

    Attributes:
        seconds: Mean time.
        peak: Peak memory in GiB; `None` if it was not logged.
    """

    seconds: float
    peak: float | None


def read_phases(run: Run) -> dict[str, PhaseMeans]:
    """Read time and memory of each phase of a step, by the phase's name."""
    phases = {}
    for key, curve in run.curves.items():
        prefix, _, name = key.partition("/")
        seconds = [p.value for p in curve.points if math.isfinite(p.value)]
        if prefix == "time" and seconds:
            memory = run.curves.get(f"memory/{name}")
            peak = max((p.value for p in memory.points), default=None) if memory else None
            phases[name] = PhaseMeans(fmean(seconds), peak)
    return phases
