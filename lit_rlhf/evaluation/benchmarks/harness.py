"""lm-evaluation-harness."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from lit_rlhf.evaluation.benchmarks.choices import ChoiceQuestion, choice_task
from lit_rlhf.evaluation.loading import load_policy
from lit_rlhf.models import ModelOptions, load_tokenizer

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager


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


def mean_stderr(values: Sequence[float]) -> float | None:
    """Standard error of a mean; `None` for a single value."""
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return math.sqrt(squares / (len(values) - 1) / len(values))


NO_HARNESS = (
    "benchmarks, choices: expected lm-evaluation-harness to be installed; "
    "pip install 'lit-rlhf[benchmarks]'"
)


def find_tasks(tasks: Sequence[str]) -> TaskManager:
    """The harness's tasks.

    Raises:
        ValueError: If it has no task, group or tag of such a name; with the closest ones.
        ModuleNotFoundError: Without lm-evaluation-harness.
    """
    with _harness():
        from lm_eval.tasks import TaskManager
    manager = TaskManager()
    for task in tasks:
        if task not in manager.all_tasks:
            close = get_close_matches(task, manager.all_tasks, n=5, cutoff=0.5)
            raise ValueError(
                f"benchmarks: expected a task or group of lm-evaluation-harness, got {task!r}; "
                f"close to it: {', '.join(close) or 'none'}"
            )
    return manager


def run_harness_tasks(
    reader: HFLM,
    tasks: Sequence[str],
    manager: TaskManager,
    shots: int | None,
    limit: int | None,
) -> dict[str, list[Answers]]:
    """Each task or group, followed by its sub-tasks; the tasks of a tag stand for it."""
    results = _results(reader, list(tasks), manager, shots, limit)
    members: Mapping[str, Sequence[str]] = results["group_subtasks"]
    inner = {child for children in members.values() for child in children}

    def below(name: str) -> Iterator[str]:
        for child in members.get(name, ()):
            yield child
            yield from below(child)

    found = {}
    for name in results["results"]:
        if name not in inner:
            parts = [_answers(reader, results, part, part) for part in below(name)]
            found[name] = [_answers(reader, results, name, ""), *parts]
    return found


def _answers(reader: HFLM, results: Mapping[str, Any], name: str, part: str) -> Answers:
    """Of a task, or of a group with all questions below it."""
    members: Mapping[str, Sequence[str]] = results["group_subtasks"]

    def leaves(task: str) -> Iterator[str]:
        if task not in members:
            yield task
        for child in members.get(task, ()):
            yield from leaves(child)

    samples = [sample for leaf in leaves(name) for sample in results["samples"][leaf]]
    measured = results["results"][name]
    values = {
        key: (float(value), _number(measured.get(key.replace(",", "_stderr,", 1))))
        for key, value in measured.items()
        if "," in key and "_stderr," not in key and _number(value) is not None
    }
    by_question = {}
    for key, (value, _) in values.items():
        metric, _, filtered = key.partition(",")
        scores = [_number(s.get(metric)) for s in samples if s["filter"] == filtered]
        known = [score for score in scores if score is not None]
        # only then is the score the mean over questions, and can be compared one by one
        if len(known) == len(scores) > 0 and math.isclose(
            math.fsum(known) / len(known), value, rel_tol=1e-9, abs_tol=1e-9
        ):
            by_question[key] = known
    asked = {(sample["doc_hash"], sample["prompt_hash"]): sample for sample in samples}
    plain = {key.removesuffix(",none"): pair for key, pair in values.items()}
    return Answers(
        part=part,
        values=plain,
        by_question={key.removesuffix(",none"): scores for key, scores in by_question.items()},
        questions=sum(results["n-samples"][leaf]["effective"] for leaf in leaves(name)),
        higher_is_better=results["higher_is_better"].get(name, {}),
        cut=sum(_is_cut(reader, sample) for sample in asked.values()),
    )


def run_choice_tasks(
    reader: HFLM,
    questions: Mapping[str, Sequence[ChoiceQuestion]],
    shots: int | None,
    limit: int | None,
) -> dict[str, list[Answers]]:
    """Each file, followed by its subjects if it has several."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=False)
    found = {}
    for name, read in questions.items():
        results = _results(reader, [choice_task(name, read)], manager, shots, limit)
        whole = _answers(reader, results, name, "")
        by_subject: dict[str, list[dict[str, Any]]] = {}
        for sample in results["samples"][name]:
            by_subject.setdefault(sample["doc"]["subject"], []).append(sample)
        parts = [_subject(reader, about, samples) for about, samples in by_subject.items()]
        found[name] = [whole, *(parts if len(parts) > 1 else ())]
    return found


def _subject(reader: HFLM, subject: str, samples: Sequence[Mapping[str, Any]]) -> Answers:
    right = [float(sample["acc"]) for sample in samples]
    return Answers(
        part=subject or "no subject",
        values={"acc": (math.fsum(right) / len(right), mean_stderr(right))},
        by_question={"acc": right},
        questions=len(right),
        higher_is_better={"acc": True},
        cut=sum(_is_cut(reader, sample) for sample in samples),
    )


def _results(
    reader: HFLM,
    tasks: Sequence[str | dict[str, Any]],
    manager: TaskManager,
    shots: int | None,
    limit: int | None,
) -> dict[str, Any]:
    import lm_eval

    with _harness():
        try:
            results = lm_eval.simple_evaluate(
                model=reader,
                tasks=list(tasks),
                task_manager=manager,
                num_fewshot=shots,
                limit=limit,
                bootstrap_iters=1000,  # for the errors of metrics that are no means
            )
        except OSError as error:  # of the hub: no network, no such data set
            raise ValueError(
                f"benchmarks: could not get the data, which are downloaded from the hub once: "
                f"{error}. A file of questions (--choices) needs no download"
            ) from error
    assert results is not None  # it is on the other ranks of several processes
    return dict(results)


def _is_cut(reader: HFLM, sample: Mapping[str, Any]) -> bool:
    """Whether the longest text of a question is longer than what the model reads."""
    texts = [
        "".join(arguments)
        for arguments in sample["arguments"]
        if all(isinstance(argument, str) for argument in arguments)  # not one that is generated
    ]
    longest = max(texts, key=len, default="")
    return bool(len(reader.tok_encode(longest)) > reader.max_length + 1)


def load_harness_model(
    path: str, options: ModelOptions, device: torch.device, batch_size: int
) -> HFLM:
    """A model as the harness takes it, loaded as everywhere here: from safetensors only."""
    if batch_size < 1:
        raise ValueError(f"benchmark_batch_size: expected an integer >= 1, got {batch_size}")
    with _harness():
        from lm_eval.models.huggingface import HFLM

        model: nn.Module = load_policy(path, options, device)
        tokenizer = load_tokenizer(path, options.trust_remote_code)
        return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)


@contextmanager
def _harness() -> Iterator[None]:
    """Its notes on being called from Python are none for a user; its errors are.

    Raises:
        ModuleNotFoundError: If it is not installed; says how to.
    """
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] == "lm_eval":
            raise ModuleNotFoundError(NO_HARNESS, name=error.name) from error
        raise
    finally:
        logger.setLevel(before)


def _number(value: object) -> float | None:
    """A finite number, or else `None`."""
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    return None
