"""Benchmarks before and after alignment, in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lit_rlhf.evaluation.benchmarks.comparison import Answers, BenchmarkReport, compared_rows
from lit_rlhf.evaluation.benchmarks.harness import (
    harness_answers,
    known_tasks,
    loaded_reader,
    local_answers,
)
from lit_rlhf.evaluation.benchmarks.local_choices import local_questions
from lit_rlhf.evaluation.compare import short_names
from lit_rlhf.models import ModelOptions


def benchmark_scores(
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
        choices: Files of multiple-choice questions (see `local_questions`); nothing is downloaded.
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
    questions = {name: local_questions(path) for name, path in files.items()}
    for name, read in questions.items():
        if shots is not None and shots >= len(read):
            raise ValueError(
                f"shots: expected less than the {len(read)} questions of {name}, got {shots}"
            )
    names = short_names(models, "policies")
    manager = known_tasks(tasks) if tasks else None
    options, device = options or ModelOptions(), device or torch.device("cpu")
    found: dict[str, dict[str, list[Answers]]] = {}
    for name, path in zip(names, models, strict=True):
        reader = loaded_reader(path, options, device, batch_size)
        found[name] = {}
        if manager is not None:
            found[name] |= harness_answers(reader, tasks, manager, shots, max_questions)
        if questions:
            found[name] |= local_answers(reader, questions, shots, max_questions)
        del reader  # before the next one is loaded
    return BenchmarkReport(dict(zip(names, models, strict=True)), compared_rows(found), shots)
