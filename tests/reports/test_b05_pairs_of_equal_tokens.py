"""B5: responses whose texts differ but whose tokens do not are a bad record."""

import json
from pathlib import Path

import pytest
from tokenizers import normalizers

from lit_rlhf.data import (
    DataSource,
    DialogueEncoder,
    EncodingError,
    PreferenceDataModule,
    RecordError,
)
from lit_rlhf.data.records import Message
from tests.support.tiny_tokenizers import tiny_tokenizer

QUESTION = [Message("user", "name a metal")]
REASON = "chosen and rejected are the same tokens"


def lowercase_encoder() -> DialogueEncoder:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()  # type: ignore[attr-defined]
    return DialogueEncoder(tokenizer, "none", max_length=64)


def test_texts_that_a_normalizer_makes_equal_are_refused() -> None:
    encoder = lowercase_encoder()
    with pytest.raises(EncodingError, match=REASON):
        encoder.encode_pair(QUESTION, chosen="Iron", rejected="iron")
    pair = encoder.encode_pair(QUESTION, chosen="Iron", rejected="irons")
    assert pair.chosen.input_ids.tolist() != pair.rejected.input_ids.tolist()


def test_texts_that_a_template_makes_equal_are_refused(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"  # drops reasoning, as Qwen3's does from earlier turns
    template.write_text(
        "{% for m in messages %}{{ m['content'].split('</think>')[-1] }}"
        "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    encoder = DialogueEncoder(tiny_tokenizer(), str(template), max_length=64)
    with pytest.raises(EncodingError, match=REASON):
        encoder.encode_pair(QUESTION, chosen="<think>a</think>iron", rejected="iron")


@pytest.mark.parametrize("on_bad_record", ["error", "skip"])
def test_pair_is_named_with_its_line_or_counted(on_bad_record: str, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    pairs = [("iron", "zinc"), ("Iron", "iron"), ("zinc", "no")]
    rows = [{"prompt": "name a metal", "chosen": c, "rejected": r} for c, r in pairs]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = PreferenceDataModule(
        [DataSource(str(file))],
        tokenizer=lowercase_encoder().tokenizer,
        chat_template="none",
        max_length=64,
        on_bad_record=on_bad_record,
    )
    if on_bad_record == "error":
        with pytest.raises(RecordError, match=f"pairs.jsonl:2: {REASON}"):
            data.setup("fit")
    else:
        data.setup("fit")
        assert dict(data.counts.dropped) == {REASON: 1}
        assert len(data.examples["train"]) == 2
