"""Tasks of lm-evaluation-harness, with made-up questions in place of the hub's."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
import pytest

from lit_rlhf.tools.evaluation.benchmarks import print_benchmarks, run_benchmarks
from lit_rlhf.tools.evaluation.benchmarks.harness import find_tasks
from tests.support.evaluation_folders import Folders


@pytest.fixture
def few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index of three folders: an index of all 14,000 tasks takes half a minute."""
    folder = Path(lm_eval.tasks.__file__).parent
    few = [folder / name for name in ("mmlu", "ceval", "cmmlu")]
    manager = partial(lm_eval.tasks.TaskManager, include_path=few, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", manager)


def no_hub(path: str, name: str | None = None, **_: Any) -> Mapping[str, datasets.Dataset]:
    """What the hub has as `cais/mmlu`, made up: two questions, with an answer by subject."""
    assert path == "cais/mmlu"
    rest = {"choices": list("wxyz"), "answer": len(str(name)) % 4}
    rows = [{"question": f"{name} {n}?", **rest} for n in range(2)]
    return {"test": datasets.Dataset.from_list(rows), "dev": datasets.Dataset.from_list(rows)}


def test_a_mistyped_benchmark_is_named_with_those_close_to_it(few_tasks: None) -> None:
    with pytest.raises(ValueError, match=r"got 'ceval-vaild'; did you mean ceval-valid"):
        find_tasks(["mmlu", "ceval-vaild"])


def test_a_group_is_a_row_over_all_questions_with_its_parts_below(
    folders: Folders, few_tasks: None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(datasets, "load_dataset", no_hub)
    report = run_benchmarks([folders.sft, folders.ppo], tasks=["mmlu_social_sciences"], shots=1)
    whole, *parts = report.rows
    assert (whole.benchmark, whole.part, whole.questions) == ("mmlu_social_sciences", "", 24)
    assert {row.part.startswith("mmlu_") for row in parts} == {True}
    assert len(parts) == 12
    for name in ("sft", "ppo"):
        mean = sum(row.scores[name].value * row.questions for row in parts) / 24
        assert whole.scores[name].value == pytest.approx(mean)
    steps = [row.scores["ppo"].value - row.scores["sft"].value for row in parts]
    assert whole.scores["ppo"].difference == pytest.approx(sum(steps) / 12)
    assert whole.scores["ppo"].difference_stderr is not None
    print_benchmarks(report)
    printed = capsys.readouterr().out
    assert "mmlu_social_sciences (acc)" in printed
    scores = whole.scores["ppo"]
    assert f"{scores.difference:+.3f} ± {scores.difference_stderr:.3f}" in printed


def test_tasks_are_limited_to_the_first_questions_with_the_shots_before_each(
    folders: Folders, few_tasks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "load_dataset", no_hub)
    report = run_benchmarks([folders.sft], tasks=["mmlu_anatomy"], shots=2, max_questions=1)
    assert report.shots == 2
    assert [row.questions for row in report.rows] == [1]


def test_offline_benchmark_is_refused_with_what_needs_no_download(
    folders: Folders, few_tasks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'cais/mmlu' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(ValueError, match=r"cais/mmlu.*\(--choices\) needs no download"):
        run_benchmarks([folders.sft], tasks=["mmlu_anatomy"])
