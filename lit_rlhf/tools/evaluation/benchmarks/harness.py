"""Run tasks of lm-evaluation-harness on one model. Only this file knows the harness."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import variance
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from lit_rlhf.forward import set_longest_sequence
from lit_rlhf.models import ModelOptions, load_tokenizer
from lit_rlhf.suggestions import did_you_mean
from lit_rlhf.tools.evaluation.benchmarks.choices import choice_task
from lit_rlhf.tools.evaluation.loading import load_policy

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

_NO_HARNESS = (
    "benchmarks, choices: expected lm-evaluation-harness to be installed; pip install lm-eval"
)


class MetricValue(NamedTuple):
    """A score by one metric.

    Attributes:
        value: The score.
        stderr: Its standard error; `None` if the task has none.
    """

    value: float
    stderr: float | None


class TaskResult(NamedTuple):
    """One model's result on a task, sub-task, group or subject.

    Attributes:
        part: The sub-task or subject; "" for the whole.
        values: Scores by metric.
        by_question: Scores of each question, by metric, where the score is their mean.
        questions: Number of questions.
        higher_is_better: Whether a higher score is better, by metric.
        cut: Number of questions whose beginning did not fit into the model.
    """

    part: str
    values: dict[str, MetricValue]
    by_question: dict[str, list[float]]
    questions: int
    higher_is_better: dict[str, bool]
    cut: int


def find_tasks(tasks: Sequence[str]) -> TaskManager:
    """Load the harness's index of tasks and check that it has these tasks, groups or tags."""
    with _quiet_harness():
        from lm_eval.tasks import TaskManager
    manager = TaskManager()
    for task in tasks:
        if task not in manager.all_tasks:
            raise ValueError(
                f"benchmarks: expected a task or group of lm-evaluation-harness, got {task!r}"
                f"{did_you_mean(task, manager.all_tasks)}"
            )
    return manager


def load_harness_model(
    path: str, model_options: ModelOptions, device: torch.device, batch_size: int
) -> HFLM:
    """Load a model for the harness, with the project's own loader: from safetensors only.

    Args:
        path: Folder or hub id.
        model_options: How the model is loaded.
        device: Where it computes.
        batch_size: Texts per forward.
    """
    with _quiet_harness():
        from lm_eval.models.huggingface import HFLM

        tokenizer = load_tokenizer(path, model_options.trust_remote_code)
        model: nn.Module = load_policy(path, model_options, device, tokenizer)
        harness_model = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        # questions are as long as the harness lets them be
        set_longest_sequence(model, harness_model.max_length + 1)
        return harness_model


def run_harness_tasks(
    model: HFLM,
    tasks: Sequence[str],
    *,
    manager: TaskManager,
    shots: int | None,
    limit: int | None,
) -> dict[str, list[TaskResult]]:
    """Run tasks, groups or tags. A tag is replaced by its tasks.

    Args:
        model: The model.
        tasks: Names of tasks, groups or tags.
        manager: The harness's index of tasks.
        shots: Examples before each question; `None` for each task's own number.
        limit: Number of questions of each task, from the first; `None` for all.

    Returns:
        Results by task, each followed by the results of its sub-tasks.
    """
    results = _run(model, list(tasks), manager=manager, shots=shots, limit=limit)
    members: Mapping[str, Sequence[str]] = results["group_subtasks"]
    nested = {child for children in members.values() for child in children}
    return {
        name: [
            _read_result(model, results, task, part="" if task == name else task)
            for task in _walk(members, name)
        ]
        for name in results["results"]
        if name not in nested
    }


def run_choice_tasks(
    model: HFLM,
    questions: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    shots: int | None,
    limit: int | None,
) -> dict[str, list[TaskResult]]:
    """Ask multiple-choice questions from files.

    Args:
        model: The model.
        questions: Questions of `read_questions` by the name of their file.
        shots: Examples before each question; `None` for none.
        limit: Number of questions of each file, from the first; `None` for all.

    Returns:
        Results by file, each followed by the results of its subjects if there are several.
    """
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=False)
    results_by_file = {}
    for name, of_file in questions.items():
        results = _run(
            model, [choice_task(name, of_file)], manager=manager, shots=shots, limit=limit
        )
        by_subject: dict[str, list[dict[str, Any]]] = {}
        for sample in results["samples"][name]:
            by_subject.setdefault(sample["doc"]["subject"], []).append(sample)
        parts = [
            _subject_result(model, subject, samples) for subject, samples in by_subject.items()
        ]
        all_subjects = _read_result(model, results, name, part="")
        results_by_file[name] = [all_subjects, *(parts if len(parts) > 1 else ())]
    return results_by_file


def mean_stderr(values: Sequence[float]) -> float | None:
    """Compute the standard error of a mean; `None` for a single value.

    Args:
        values: The values that the mean is taken over, at least one.
    """
    return math.sqrt(variance(values) / len(values)) if len(values) > 1 else None


def _run(
    model: HFLM,
    tasks: Sequence[str | dict[str, Any]],
    *,
    manager: TaskManager,
    shots: int | None,
    limit: int | None,
) -> dict[str, Any]:
    import lm_eval

    with _quiet_harness():
        try:
            results = lm_eval.simple_evaluate(
                model=model,
                tasks=list(tasks),
                task_manager=manager,
                num_fewshot=shots,
                limit=limit,
                # for the standard errors of metrics that are not means, such as BLEU
                bootstrap_iters=1000,
            )
        except OSError as error:  # from the hub: no network, or no such data set
            raise ValueError(
                f"benchmarks: could not download the data from the hub: {error}. A file of "
                "questions (--choices) needs no download"
            ) from error
    assert results is not None  # it is None on all but the first of several processes
    return dict(results)


def _walk(members: Mapping[str, Sequence[str]], name: str) -> Iterator[str]:
    """A task or group, and all below it."""
    yield name
    for child in members.get(name, ()):
        yield from _walk(members, child)


def _read_result(model: HFLM, results: Mapping[str, Any], name: str, part: str) -> TaskResult:
    """Read the result of a task, or of a group with the questions of all tasks in it."""
    members: Mapping[str, Sequence[str]] = results["group_subtasks"]
    leaves = [task for task in _walk(members, name) if task not in members]
    samples = [sample for leaf in leaves for sample in results["samples"][leaf]]
    measured = results["results"][name]
    # a metric's key is `metric,filter`, its standard error's is `metric_stderr,filter`
    values = {
        key: MetricValue(
            value=float(value),
            stderr=_to_number(measured.get(key.replace(",", "_stderr,", 1))),
        )
        for key, value in measured.items()
        if "," in key and "_stderr," not in key and _to_number(value) is not None
    }
    by_question = {}
    for key, score in values.items():
        metric, _, filtered = key.partition(",")
        scores = [_to_number(s.get(metric)) for s in samples if s["filter"] == filtered]
        numbers = [number for number in scores if number is not None]
        # Only a score that is the plain mean over all questions can be compared question by
        # question. A group may weigh its tasks equally, and perplexity is not a mean.
        if len(numbers) == len(scores) > 0 and math.isclose(
            math.fsum(numbers) / len(numbers), score.value, rel_tol=1e-9, abs_tol=1e-9
        ):
            by_question[key] = numbers
    # a question has one sample for each filter
    unique = {(sample["doc_hash"], sample["prompt_hash"]): sample for sample in samples}
    return TaskResult(
        part=part,
        values={key.removesuffix(",none"): score for key, score in values.items()},
        by_question={key.removesuffix(",none"): scores for key, scores in by_question.items()},
        questions=sum(results["n-samples"][leaf]["effective"] for leaf in leaves),
        higher_is_better=results["higher_is_better"].get(name, {}),
        cut=sum(_is_cut(model, sample) for sample in unique.values()),
    )


def _subject_result(model: HFLM, subject: str, samples: Sequence[Mapping[str, Any]]) -> TaskResult:
    correct = [float(sample["acc"]) for sample in samples]
    return TaskResult(
        part=subject or "no subject",
        values={
            "acc": MetricValue(value=math.fsum(correct) / len(correct), stderr=mean_stderr(correct))
        },
        by_question={"acc": correct},
        questions=len(correct),
        higher_is_better={"acc": True},
        cut=sum(_is_cut(model, sample) for sample in samples),
    )


def _is_cut(model: HFLM, sample: Mapping[str, Any]) -> bool:
    """Whether the longest text of a question is longer than the model's context."""
    texts = [
        "".join(arguments)
        for arguments in sample["arguments"]
        if all(isinstance(argument, str) for argument in arguments)  # not for generation tasks
    ]
    longest = max(texts, key=len, default="")
    # the last token is only a target
    return bool(len(model.tok_encode(longest)) > model.max_length + 1)


@contextmanager
def _quiet_harness() -> Iterator[None]:
    """Silence the harness's warnings about being called from Python; its errors stay."""
    logger = logging.getLogger("lm_eval")
    original_level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] == "lm_eval":
            raise ModuleNotFoundError(_NO_HARNESS, name=error.name) from error
        raise
    finally:
        logger.setLevel(original_level)


def _to_number(value: object) -> float | None:
    """Convert a finite number; `None` for anything else."""
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    return None
