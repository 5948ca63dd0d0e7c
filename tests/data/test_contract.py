"""The text contract of a model folder."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers import PreTrainedTokenizerFast as Tokenizer

from lit_rlhf.data.contract import TextContract
from lit_rlhf.data.encoding import DialogueEncoder
from tests.support.tiny_tokenizers import tiny_tokenizer


def contract(tokenizer: PreTrainedTokenizerBase, template: str = "hh") -> TextContract:
    return DialogueEncoder(tokenizer, template, 64).contract


def test_contract_survives_the_disk(tokenizer: Tokenizer, tmp_path: Path) -> None:
    written = contract(tokenizer)
    assert TextContract.find(tmp_path / "model") is None
    assert written.save(tmp_path / "model").name == "text_contract.json"
    assert TextContract.load(tmp_path / "model") == TextContract.find(tmp_path / "model") == written
    with pytest.raises(FileNotFoundError):
        TextContract.load(tmp_path)
    (tmp_path / "text_contract.json").write_text(json.dumps({"eos_token": "</s>"}))
    with pytest.raises(ValueError, match="expected the fields"):
        TextContract.load(tmp_path)


@pytest.mark.parametrize("content", [b"\xe9", b"[" * 100_000, b"9" * 5000, b"{"])
def test_unreadable_contract_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "text_contract.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"text_contract.json: expected (text in UTF-8|JSON)"):
        TextContract.load(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("chat_template", 5, "expected chat_template of the type str, got 5"),
        ("max_length", "8", "expected max_length of the type int, got '8'"),
        ("bos_token", [], "expected bos_token of the type str | None, got []"),
        ("template_date", 5, "expected template_date of the type str | None, got 5"),
        ("template_date", "today", "template_date: Invalid isoformat string: 'today'"),
    ],
)
def test_contract_with_another_kind_of_value_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, field: str, value: object, problem: str
) -> None:
    content = dataclasses.asdict(contract(tokenizer)) | {field: value}
    (tmp_path / "text_contract.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=re.escape(f"/text_contract.json: {problem}")):
        TextContract.load(tmp_path)


def test_contract_of_an_older_version_has_no_date_and_fits_any(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    built = contract(tokenizer)
    content = dataclasses.asdict(built)
    del content["template_date"]
    (tmp_path / "text_contract.json").write_text(json.dumps(content))
    old = TextContract.load(tmp_path)
    assert old == built
    dated = dataclasses.replace(built, template_date="2024-07-26")
    assert old.mismatch(dated) is None
    other = dataclasses.replace(built, template_date="2025-01-01")
    assert other.mismatch(dated) == "template_date is '2025-01-01' here and '2024-07-26' there"


def test_contract_says_how_text_is_read() -> None:
    built = contract(tiny_tokenizer(bos="<s>"))
    assert (built.eos_token, built.bos_token, built.add_bos) == ("</s>", "<s>", True)
    assert (built.truncation_side, built.max_length) == ("left", 64)
    assert "Human" in built.chat_template


def test_saved_tokenizer_keeps_it(any_tokenizer: Tokenizer, tmp_path: Path) -> None:
    before = contract(any_tokenizer)
    any_tokenizer.save_pretrained(tmp_path)
    assert contract(AutoTokenizer.from_pretrained(tmp_path), "tokenizer") == before


def test_pad_token_and_length_do_not_matter_and_the_vocabulary_does() -> None:
    tokenizer = tiny_tokenizer()
    first = contract(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    assert first.mismatch(dataclasses.replace(contract(tokenizer), max_length=7)) is None
    other = contract(tiny_tokenizer(extra=["<|Human|>"]))  # with another vocabulary
    assert first.tokenizer_hash != other.tokenizer_hash


def test_changed_template_is_shown_with_both_renderings() -> None:
    message = contract(tiny_tokenizer(), "hh").mismatch(contract(tiny_tokenizer(), "paper-en"))
    assert "Human: first question\\n\\nAssistant: first answer" in message
    assert "Human:first question</s>Assistant:first answer</s>" in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("eos_token", "<eos>"),
        ("eos_token_id", 99),
        ("bos_token", "<s>"),
        ("add_bos", True),
        ("truncation_side", "right"),
        ("vocab_size", 3),
        ("tokenizer_hash", "0"),
    ],
)
def test_every_other_difference_is_named(tokenizer: Tokenizer, field: str, value: object) -> None:
    first = contract(tokenizer)
    second = dataclasses.replace(first, **{field: value})  # type: ignore[arg-type]
    message = first.mismatch(second)
    assert field in message
    if field != "tokenizer_hash":  # whose values say nothing
        assert message == f"{field} is {getattr(first, field)!r} here and {value!r} there"
