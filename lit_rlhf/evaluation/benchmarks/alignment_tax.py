"""Benchmarks before and after alignment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich import box
from rich.table import Table

from lit_rlhf.evaluation.benchmarks.choices import read_questions
from lit_rlhf.evaluation.benchmarks.harness import (
    Answers,
    find_tasks,
    load_harness_model,
    mean_stderr,
    run_choice_tasks,
    run_harness_tasks,
)
from lit_rlhf.evaluation.loading import short_names
from lit_rlhf.evaluation.output import print_table
from lit_rlhf.models import ModelOptions


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


def run_benchmarks(
    models: Sequence[str],
    tasks: Sequence[str] = (),
    choices: Sequence[str] = (),
    options: ModelOptions | None = None,
    device: torch.device | None = None,
    batch_size: int = 8,
    shots: int | None = None,
    max_questions: int | None = None,
) -> BenchmarkReport:
    """Run benchmarks on several models; the first is what the others are compared with.

    Texts are given to the models as the benchmarks write them, without a chat template.

    Args:
        models: Folders or hub ids of causal language models.
        tasks: Names of tasks, groups or tags of lm-evaluation-harness, whose data it downloads.
        choices: Files of multiple-choice questions (see `read_questions`); nothing is downloaded.
        options: How models are loaded; `None` takes the defaults.
        device: Where to run; `None` is the CPU.
        batch_size: Texts per forward.
        shots: Examples before each question; `None` takes what each benchmark is defined with. For
            a file they are drawn from its other questions.
        max_questions: Use only this many of the first questions of each task; `None` takes all.

    Raises:
        RecordError: If a file cannot be read; names the line and the field.
        ValueError: If there is no such task, a model is named twice or has no causal language model
            in it, or an argument is out of range.
        ModuleNotFoundError: Without lm-evaluation-harness.
    """
    if not tasks and not choices:
        raise ValueError("benchmarks, choices: expected one of them, got none")
    for name, value, least in (("shots", shots, 0), ("max_questions", max_questions, 1)):
        if value is not None and value < least:
            raise ValueError(f"{name}: expected an integer >= {least}, got {value}")
    files = dict(zip(short_names(choices, "choices"), choices, strict=True)) if choices else {}
    questions = {name: read_questions(path) for name, path in files.items()}
    for name, read in questions.items():
        if shots is not None and shots >= len(read):
            raise ValueError(
                f"shots: expected less than the {len(read)} questions of {name}, got {shots}"
            )
    names = short_names(models, "policies")
    manager = find_tasks(tasks) if tasks else None
    options, device = options or ModelOptions(), device or torch.device("cpu")
    found: dict[str, dict[str, list[Answers]]] = {}
    for name, path in zip(names, models, strict=True):
        reader = load_harness_model(path, options, device, batch_size)
        found[name] = {}
        if manager is not None:
            found[name] |= run_harness_tasks(reader, tasks, manager, shots, max_questions)
        if questions:
            found[name] |= run_choice_tasks(reader, questions, shots, max_questions)
        del reader  # before the next one is loaded
    return BenchmarkReport(dict(zip(names, models, strict=True)), compare_results(found), shots)


def compare_results(found: Mapping[str, Mapping[str, Sequence[Answers]]]) -> list[BenchmarkRow]:
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


MOST_PARTS = 12  # of one benchmark in the table; MMLU has 61


def benchmark_table(report: BenchmarkReport) -> Table:
    """A row for each benchmark and metric, a column for each model."""
    names = list(report.models)
    rows = shown_rows(report)
    caption = f"Below each score: its difference from {names[0]}." if len(names) > 1 else ""
    if len(rows) < len(report.rows):
        caption += f" {len(report.rows) - len(rows)} more rows, of parts, are in the report."
    shots = "" if report.shots is None else f", {report.shots} examples before each"
    table = Table(
        box=box.HORIZONTALS,
        padding=(0, 1),
        title=f"benchmarks{shots}; score ± standard error",
        caption=caption.strip() or None,
    )
    table.add_column("", overflow="fold")
    table.add_column("questions", justify="right")
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(_label(row), str(row.questions), *(_cell(row.scores[n]) for n in names))
    return table


def shown_rows(report: BenchmarkReport) -> list[BenchmarkRow]:
    """All rows but the parts of benchmarks with many and a score over all of them."""
    parts: dict[str, set[str]] = {}
    for row in report.rows:
        parts.setdefault(row.benchmark, set()).add(row.part)
    return [
        row
        for row in report.rows
        if not row.part
        or "" not in parts[row.benchmark]
        or len(parts[row.benchmark]) <= MOST_PARTS + 1
    ]


def print_benchmarks(report: BenchmarkReport) -> None:
    """Print the table on standard output, and say which questions were not read as a whole."""
    print_table(benchmark_table(report))
    for name, cut in {row.benchmark: row.cut for row in report.rows if not row.part}.items():
        if cut:
            print(f"{name}: the beginning of {cut} questions did not fit into a model.")


def _label(row: BenchmarkRow) -> str:
    name = f"  {row.part}" if row.part else row.benchmark
    lower = ", lower is better" if row.higher_is_better is False else ""
    return f"{name} ({row.metric}{lower})"


def _cell(score: BenchmarkScore) -> str:
    cell = _with_error(f"{score.value:.3f}", score.stderr)
    if score.difference is None:
        return cell
    return f"{cell}\n{_with_error(f'{score.difference:+.3f}', score.difference_stderr)}"


def _with_error(value: str, stderr: float | None) -> str:
    return value if stderr is None else f"{value} ± {stderr:.3f}"
