"""Scores of several models on benchmarks side by side, with differences from the first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class BenchmarkScore:
    """One model's score on a benchmark.

    Attributes:
        value: The score.
        stderr: Its standard error; `None` where the benchmark has none.
        difference: The score minus the first model's; `None` for the first model itself.
        difference_stderr: Its standard error: over the differences question by question where the
            score is a mean over questions, else as of two independent scores; `None` without.
    """

    value: float
    stderr: float | None
    difference: float | None = None
    difference_stderr: float | None = None


@dataclass(frozen=True)
class BenchmarkRow:
    """All models on one benchmark, by one metric.

    Attributes:
        benchmark: Name of the task or group, or of the file.
        part: Sub-task or subject; "" for the whole.
        metric: Name of the metric, with its filter if it has one.
        questions: Number of questions.
        higher_is_better: Which way is better; `None` where the benchmark does not say.
        cut: Questions of which some model did not see the beginning, as they were too long for it.
        scores: Scores by model name.
    """

    benchmark: str
    part: str
    metric: str
    questions: int
    higher_is_better: bool | None
    cut: int
    scores: dict[str, BenchmarkScore]


@dataclass(frozen=True)
class BenchmarkReport:
    """Models on benchmarks.

    Attributes:
        models: Path by name, the baseline first.
        rows: Benchmark by benchmark, each followed by its parts.
        shots: Examples before each question; `None` for the benchmarks' own number.
    """

    models: dict[str, str]
    rows: list[BenchmarkRow]
    shots: int | None

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON takes it."""
        return asdict(self)


class Answers(NamedTuple):
    """One model's results of one task, sub-task, group or subject.

    Attributes:
        part: As in `BenchmarkRow`.
        values: Score and standard error by metric, the latter `None` where there is none.
        by_question: Each question's score by metric, where it is a mean over questions.
        questions: Number of questions.
        higher_is_better: By metric.
        cut: Questions that the model did not see the beginning of.
    """

    part: str
    values: dict[str, tuple[float, float | None]]
    by_question: dict[str, list[float]]
    questions: int
    higher_is_better: dict[str, bool]
    cut: int


def compared_rows(found: Mapping[str, Mapping[str, Sequence[Answers]]]) -> list[BenchmarkRow]:
    """Scores of all models side by side, with differences from the first.

    Args:
        found: By model and benchmark the results, alike in every model; the whole comes first.
    """
    baseline = next(iter(found))
    rows = []
    for benchmark, parts in found[baseline].items():
        for place, first in enumerate(parts):
            per_model = {name: answers[benchmark][place] for name, answers in found.items()}
            rows += [
                BenchmarkRow(
                    benchmark=benchmark,
                    part=first.part,
                    metric=metric,
                    questions=first.questions,
                    higher_is_better=first.higher_is_better.get(metric.partition(",")[0]),
                    cut=max(answers.cut for answers in per_model.values()),
                    scores={
                        name: _score(answers, None if name == baseline else first, metric)
                        for name, answers in per_model.items()
                    },
                )
                for metric in first.values
            ]
    return rows


def mean_stderr(values: Sequence[float]) -> float | None:
    """Standard error of a mean; `None` for a single value."""
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return math.sqrt(squares / (len(values) - 1) / len(values))


def _score(answers: Answers, baseline: Answers | None, metric: str) -> BenchmarkScore:
    value, stderr = answers.values[metric]
    if baseline is None:
        return BenchmarkScore(value, stderr)
    base, base_stderr = baseline.values[metric]
    ours, theirs = answers.by_question.get(metric), baseline.by_question.get(metric)
    if ours is not None and theirs is not None:
        error = mean_stderr([a - b for a, b in zip(ours, theirs, strict=True)])
    elif stderr is not None and base_stderr is not None:
        error = math.hypot(stderr, base_stderr)
    else:
        error = None
    return BenchmarkScore(value, stderr, value - base, error)
