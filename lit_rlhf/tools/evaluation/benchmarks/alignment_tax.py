"""The alignment tax: scores of several models on benchmarks, and their change from the first."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lit_rlhf.checks import check_count
from lit_rlhf.models import ModelOptions
from lit_rlhf.terminal import print_line
from lit_rlhf.tools.evaluation.benchmarks.choices import read_questions
from lit_rlhf.tools.evaluation.benchmarks.harness import (
    TaskResult,
    find_tasks,
    load_harness_model,
    mean_stderr,
    run_choice_tasks,
    run_harness_tasks,
)
from lit_rlhf.tools.evaluation.loading import CPU, short_names
from lit_rlhf.tools.evaluation.output import make_table, print_table


@dataclass(frozen=True)
class BenchmarkScore:
    """One model's score on a benchmark, and the difference from the first model's.

    Attributes:
        value: The score.
        stderr: Its standard error; `None` if the benchmark has none.
        difference: The score minus the first model's; `None` for the first model.
        difference_stderr: Standard error of the difference: question by question for a score that
            is a mean over questions, otherwise as for two independent scores.
    """

    value: float
    stderr: float | None
    difference: float | None = None
    difference_stderr: float | None = None


@dataclass(frozen=True)
class BenchmarkRow:
    """Scores of all models on one benchmark by one metric.

    Attributes:
        benchmark: Name of the benchmark.
        part: A sub-task or subject; "" for the whole.
        metric: Name of the metric.
        questions: Number of questions.
        higher_is_better: Whether a higher score is better; `None` if the benchmark does not say.
        cut: Largest number of questions whose beginning did not fit into a model.
        scores: Scores by model.
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
    """Scores of models on benchmarks.

    Attributes:
        models: Folders or hub ids by name, the baseline first.
        rows: Each benchmark followed by its parts.
        shots: Number of examples before each question; `None` for each benchmark's own number.
    """

    models: dict[str, str]
    rows: list[BenchmarkRow]
    shots: int | None


def run_benchmarks(
    models: Sequence[str],
    *,
    tasks: Sequence[str] = (),
    choices: Sequence[str] = (),
    model_options: ModelOptions = ModelOptions(),
    device: torch.device = CPU,
    batch_size: int = 8,
    shots: int | None = None,
    max_questions: int | None = None,
) -> BenchmarkReport:
    """Run benchmarks on several models and compare them with the first.

    The models read the texts as the benchmarks write them, without a chat template.

    Args:
        models: Folders or hub ids, the baseline first.
        tasks: Tasks, groups or tags of lm-evaluation-harness.
        choices: Files of multiple-choice questions, see `read_questions`.
        model_options: How the models are loaded.
        device: Where they compute.
        batch_size: Texts per forward.
        shots: Examples before each question. `None`: each benchmark's own number, none for choices.
        max_questions: Number of questions of each task, from the first; `None` for all.
    """
    if not tasks and not choices:
        raise ValueError("benchmarks, choices: expected at least one of them, got none")
    if shots is not None:
        check_count("shots", shots, minimum=0)
    if max_questions is not None:
        check_count("max_questions", max_questions)
    check_count("benchmark_batch_size", batch_size)
    files = dict(zip(short_names(choices, "choices"), choices, strict=True)) if choices else {}
    questions = {name: read_questions(path) for name, path in files.items()}
    for name, of_file in questions.items():
        if shots is not None and shots >= len(of_file):
            raise ValueError(
                f"shots: expected less than the {len(of_file)} questions of {name}, got {shots}"
            )
    names = short_names(models, "policies")
    manager = find_tasks(tasks) if tasks else None
    results: dict[str, dict[str, list[TaskResult]]] = {}
    for name, path in zip(names, models, strict=True):
        model = load_harness_model(path, model_options, device, batch_size)
        results[name] = {}
        if manager is not None:
            results[name] |= run_harness_tasks(
                model, tasks, manager=manager, shots=shots, limit=max_questions
            )
        if questions:
            results[name] |= run_choice_tasks(model, questions, shots=shots, limit=max_questions)
        del model  # frees its memory before the next one is loaded
    return BenchmarkReport(
        models=dict(zip(names, models, strict=True)),
        rows=compare_results(results),
        shots=shots,
    )


def compare_results(
    results: Mapping[str, Mapping[str, Sequence[TaskResult]]],
) -> list[BenchmarkRow]:
    """Compare the results of all models, by model and benchmark, with the first model's."""
    baseline = next(iter(results))
    rows = []
    for benchmark, parts in results[baseline].items():
        for place, first in enumerate(parts):
            by_model = {name: of_model[benchmark][place] for name, of_model in results.items()}
            rows += [
                BenchmarkRow(
                    benchmark=benchmark,
                    part=first.part,
                    metric=metric,
                    questions=first.questions,
                    higher_is_better=first.higher_is_better.get(metric.partition(",")[0]),
                    cut=max(task_result.cut for task_result in by_model.values()),
                    scores={
                        name: _score(task_result, None if name == baseline else first, metric)
                        for name, task_result in by_model.items()
                    },
                )
                for metric in first.values
            ]
    return rows


def _score(task_result: TaskResult, baseline: TaskResult | None, metric: str) -> BenchmarkScore:
    score = task_result.values[metric]
    if baseline is None:
        return BenchmarkScore(value=score.value, stderr=score.stderr)
    baseline_score = baseline.values[metric]
    policy_scores = task_result.by_question.get(metric)
    baseline_scores = baseline.by_question.get(metric)
    if policy_scores is not None and baseline_scores is not None:
        error = mean_stderr([a - b for a, b in zip(policy_scores, baseline_scores, strict=True)])
    elif score.stderr is not None and baseline_score.stderr is not None:
        error = math.hypot(score.stderr, baseline_score.stderr)
    else:
        error = None
    return BenchmarkScore(
        value=score.value,
        stderr=score.stderr,
        difference=score.value - baseline_score.value,
        difference_stderr=error,
    )


def print_benchmarks(report: BenchmarkReport) -> None:
    """Print the table on standard output, and how many questions did not fit into a model."""
    names = list(report.models)
    caption = f"Below each score: its difference from {names[0]}." if len(names) > 1 else None
    shots = "" if report.shots is None else f", {report.shots} examples before each"
    title = f"benchmarks{shots}; score ± standard error"
    table = make_table(title, ["", "questions", *names], caption=caption)
    for row in report.rows:
        name = f"  {row.part}" if row.part else row.benchmark
        lower = ", lower is better" if row.higher_is_better is False else ""
        cells = (_format_score(row.scores[model]) for model in names)
        table.add_row(f"{name} ({row.metric}{lower})", str(row.questions), *cells)
    print_table(table)
    for name, cut in {row.benchmark: row.cut for row in report.rows if not row.part}.items():
        if cut:
            print_line(f"{name}: the beginning of {cut} questions did not fit into a model.")


def _format_score(score: BenchmarkScore) -> str:
    cell = _format_with_error(f"{score.value:.3f}", score.stderr)
    if score.difference is None:
        return cell
    return f"{cell}\n{_format_with_error(f'{score.difference:+.3f}', score.difference_stderr)}"


def _format_with_error(value: str, stderr: float | None) -> str:
    return value if stderr is None else f"{value} ± {stderr:.3f}"
