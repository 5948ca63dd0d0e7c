from pathlib import Path
from typing import Any

import pytest

from lit_rlhf.data import Message, RecordError
from lit_rlhf.tools.evaluation import read_responses
from tests.support.evaluation_folders import write_lines


def said(*pairs: tuple[Any, str], **fields: str) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "response": response, **fields} for prompt, response in pairs]


def test_a_file_is_a_policy_called_like_it(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}]
    sft = write_lines(tmp_path / "sft.jsonl", said(("hi", "hello"), ("bye", "")))
    ppo = write_lines(tmp_path / "ppo.en.jsonl", said((turns, "Hello!"), ("bye", "see you")))
    responses = read_responses([sft, ppo])
    assert responses.prompts == [(Message("user", "hi"),), (Message("user", "bye"),)]
    assert responses.by_policy == {"sft": ["hello", ""], "ppo": ["Hello!", "see you"]}


def test_one_file_may_hold_several_policies(tmp_path: Path) -> None:
    rendered = "\n\nHuman: hi\n\nAssistant:"  # a prompt may be a rendered dialogue
    records = said((rendered, "a"), policy="sft") + said((rendered, "b"), policy="ppo")
    responses = read_responses([write_lines(tmp_path / "responses.jsonl", records)])
    assert responses.prompts == [(Message("user", "hi"),)]
    assert responses.by_policy == {"sft": ["a"], "ppo": ["b"]}


def test_models_of_one_file_are_policies(tmp_path: Path) -> None:
    records = said(("hi", "a"), model="runs/sft") + said(("hi", "b"), model="runs/ppo")
    both = read_responses([write_lines(tmp_path / "both.jsonl", records)])
    assert both.by_policy == {"runs/sft": ["a"], "runs/ppo": ["b"]}
    files = [write_lines(tmp_path / f"{n}.jsonl", [record]) for n, record in enumerate(records)]
    assert read_responses(files).by_policy == {"0": ["a"], "1": ["b"]}


def test_the_limit_holds_for_each_policy(tmp_path: Path) -> None:
    records = said(("hi", "a"), ("bye", "b"))
    files = [write_lines(tmp_path / f"{name}.jsonl", records) for name in ("sft", "ppo")]
    assert read_responses(files, limit=1).by_policy == {"sft": ["a"], "ppo": ["a"]}


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (said(("hi", "a"), ("why", "b")), r"ppo.jsonl:2: expected the prompt of .*sft.jsonl:2"),
        (said(("hi", "a")), r"policy 'ppo': expected 2 responses, as many as 'sft' has, got 1"),
        (said(("hi", "a"), policy="sft"), r"'sft' in .*sft.jsonl:1 and .*ppo.jsonl:1; rename"),
    ],
)
def test_prompts_must_agree(tmp_path: Path, second: list[dict[str, Any]], message: str) -> None:
    first = write_lines(tmp_path / "sft.jsonl", said(("hi", "a"), ("bye", "b")))
    with pytest.raises(ValueError, match=message):
        read_responses([first, write_lines(tmp_path / "ppo.jsonl", second)])


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "hi"}, r"a.jsonl:1: field 'response': missing"),
        ({"prompt": "hi", "response": 3}, r"a.jsonl:1: field 'response': not a string"),
        ({"response": "hi"}, r"a.jsonl:1: field 'prompt': missing"),
        ({"prompt": "hi", "response": "", "policy": 1}, r"field 'policy': not a name"),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        read_responses([write_lines(tmp_path / "a.jsonl", [record])])


def test_one_policy_cannot_be_compared(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "sft.jsonl", said(("hi", "a")))
    with pytest.raises(ValueError, match=r"two or more, the baseline first, got sft in"):
        read_responses([file])
    with pytest.raises(ValueError, match="max_prompts: expected an integer >= 1, got 0"):
        read_responses([file, file], limit=0)
