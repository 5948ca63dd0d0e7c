"""The benchmark of the alignment tax: its rule, its data and its page."""

import gzip
import json
from pathlib import Path

import pytest

from experiments.alignment_tax import study as alignment_tax
from experiments.alignment_tax.study import format_page, judge, split_text, write_questions
from experiments.results_file import read_runs
from lit_rlhf.tools.evaluation.benchmarks.choices import read_questions


@pytest.mark.parametrize(
    ("effects", "sign", "expected"),
    [
        ([-0.02, -0.021, -0.022], -1, "yes"),
        ([0.02, 0.021, 0.022], -1, "no"),
        ([0.02, 0.021, 0.022], 1, "yes"),
        ([-0.01, 0.01, 0.02], 1, "undecided"),
    ],
)
def test_judge_asks_for_one_sided_intervals(effects: list[float], sign: int, expected: str) -> None:
    assert judge(effects, sign) == expected


def test_questions_are_of_the_test_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alignment_tax, "QUESTIONS", 2)
    row = {"subject": "law", "question": "?", **dict(zip("ABCD", "wxyz", strict=True))}
    message = (("dev", "A"), ("test", "B"), ("test", "D"))
    rows = [{**row, "split": split, "answer": answer} for split, answer in message]
    with gzip.open(tmp_path / "mmlu.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    write_questions(tmp_path / "mmlu.jsonl.gz", tmp_path / "asked.jsonl")
    asked = read_questions(str(tmp_path / "asked.jsonl"))
    assert sorted(question["answer"] for question in asked) == [1, 3]
    assert asked[0]["text"] == "?\nA. w\nB. x\nC. y\nD. z\nAnswer:"


def test_text_is_measured_on_lines_that_no_arm_trains_on(tmp_path: Path) -> None:
    lines = [f"{number} " + "word " * 60 for number in range(20)]
    (tmp_path / "text.txt").write_text("\n".join(["too short", *lines]))
    split_text(tmp_path / "text.txt", tmp_path / "train.jsonl", tmp_path / "unseen.jsonl")
    training, unseen = (
        {json.loads(line)["text"] for line in (tmp_path / name).read_text().splitlines()}
        for name in ("train.jsonl", "unseen.jsonl")
    )
    assert (len(training), len(unseen), training & unseen) == (18, 2, set())


def test_page_compares_the_arms_within_a_seed() -> None:
    accuracy = {"ppo_vanilla": 0.20, "ppo_vanilla_ptx": 0.24}

    def measured(arm: str, seed: int) -> dict[str, float]:
        perplexity = 7.0 if arm == "sft" else 7.0 + seed / 10
        return {"accuracy": accuracy.get(arm, 0.25) + seed / 100, "perplexity": perplexity}

    arms = ("sft", *alignment_tax.ARMS)
    seeds = (1, 2, 3)
    results = {f"seed_{s}": {arm: measured(arm, s) for arm in arms} for s in seeds}
    page = format_page({seed: {"measure": {"result": of}} for seed, of in results.items()})
    assert "vanilla PPO against SFT | PPO costs | -5.0 [-5.0, -5.0] | yes" in page
    assert "vanilla PPO-ptx against vanilla PPO | ptx mitigates | +4.0 [+4.0, +4.0] | yes" in page
    assert "PPO-max against SFT | PPO costs | +0.0 [+0.0, +0.0] | undecided" in page


def test_page_has_the_policies_of_the_world() -> None:
    page = format_page(read_runs(alignment_tax.RESULTS))
    assert "| SFT | 24.0 | 25.2 | 25.2 |" in page  # the built-in world's
