"""RewardBench's questions: the best of two and of four, against scores of single responses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_rlhf.data import DialogueEncoder, Message, RecordError
from lit_rlhf.forward import sequence_scores
from lit_rlhf.models import load_scalar_model, load_tokenizer
from lit_rlhf.tools.commands.reward import COMMANDS
from lit_rlhf.tools.evaluation.reward_bench import (
    BenchQuestions,
    print_accuracy,
    read_questions,
    summarize,
)
from tests.support.evaluation_folders import write_lines, write_policy, write_reward

TEXTS = ["well, hello", "no", "iron and zinc", "tea", "so it is", "boil water first"]
QUESTIONS: list[dict[str, Any]] = [
    *(
        {"subset": "pair", "prompt": f"{n}?", "chosen": TEXTS[n], "rejected": TEXTS[n - 1]}
        for n in range(6)
    ),
    *(
        {
            "subset": "four",
            "prompt": f"{n}!",
            "chosen": [TEXTS[n]],
            "rejected": [TEXTS[n - k] for k in (1, 2, 3)],
        }
        for n in range(6)
    ),
    {"subset": "two right", "prompt": "hi", "chosen": TEXTS[:2], "rejected": TEXTS[2:4]},
    {"subset": "pair", "prompt": "hi", "chosen": "a", "rejected": "b " * 200},
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward_bench")
    write_policy(folder / "sft", seed=0)
    write_reward(folder / "reward", str(folder / "sft"))
    write_lines(folder / "questions.jsonl", QUESTIONS)
    return folder


def score(root: Path, prompt: str, response: str) -> float:
    encoder = DialogueEncoder(load_tokenizer(root / "reward"), "hh", 64)
    turns = [Message("user", prompt), Message("assistant", response)]
    ids = encoder.encode_dialogue(turns).input_ids[None]
    with torch.no_grad():
        return float(sequence_scores(load_scalar_model(root / "reward").eval(), ids, ids >= 0))


def test_the_best_response_has_to_score_highest(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right: dict[str, list[bool]] = {}
    for question in QUESTIONS[:-1]:
        sides = (question[side] for side in ("chosen", "rejected"))
        texts = ([side] if isinstance(side, str) else side for side in sides)
        scores = [[score(root, question["prompt"], text) for text in side] for side in texts]
        right.setdefault(question["subset"], []).append(min(scores[0]) > max(scores[1]))
    expected = {
        subset: sum(model_report) / len(model_report) for subset, model_report in right.items()
    }
    assert 0 < expected["pair"] < 1
    assert 0 < expected["four"] < 1
    words = ["--models", str(root / "reward"), "--questions", str(root / "questions.jsonl")]
    words += ["--output", str(root / "report.json"), "--max_length", "64"]
    COMMANDS["bench"].run(words, "bench")
    (model_report,) = json.loads((root / "report.json").read_text("utf-8"))["models"].values()
    rows = model_report["subsets"]
    assert {subset: rows[subset]["accuracy"] for subset in expected} == pytest.approx(expected)
    mean = sum(expected.values()) / 3
    assert model_report["mean"] == pytest.approx(mean)
    assert [rows["pair"][key] for key in ("questions", "left_out")] == [6, 1]
    printed = capsys.readouterr().out
    assert f"mean over subsets: {mean:.1%}" in printed
    assert re.search(r"\bpair\W+6\W+1\W", printed)


def test_all_pairs_of_a_question_count() -> None:
    bench = BenchQuestions(
        pairs=[{"question": number} for number in (0, 0, 1, 1, 2)], subsets=["a", "a", "b"]
    )
    wins = dict(enumerate([True, True, True, False, True]))
    summary = summarize(bench, wins)
    assert (summary["subsets"]["a"]["accuracy"], summary["mean"]) == (0.5, 0.75)
    del wins[1], wins[4]  # the pairs were too long, and so the questions
    summary = summarize(bench, wins)
    assert (summary["subsets"]["a"]["accuracy"], summary["mean"]) == (0.0, 0.0)
    assert summary["subsets"]["b"] == {"questions": 0, "left_out": 1}
    print_accuracy("model", summary)
    assert summarize(bench, {})["mean"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chosen": []}, "field 'chosen': not a text or a list of texts"),
        ({"rejected": ["a", 3]}, "field 'rejected': not a text or a list of texts"),
        ({"rejected": ["a", " "]}, "field 'rejected': not a text or a list of texts"),
        ({"rejected": ["a", TEXTS[0]]}, "field 'rejected': a text that is chosen, too"),
        ({"subset": None}, "field 'subset'"),
        ({"prompt": 3}, "field 'prompt'"),
    ],
)
def test_a_bad_question_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_lines(tmp_path / "q.jsonl", [QUESTIONS[0], QUESTIONS[6] | change])
    with pytest.raises(RecordError, match=rf"q\.jsonl:2: {message}"):
        read_questions(str(tmp_path / "q.jsonl"))
