"""Tokenizers of the kinds there are, and a writer of data files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.tiny_tokenizers import CHATML, tiny_tokenizer


@pytest.fixture(params=["plain", "pad_is_eos", "with_bos", "chatml"])
def any_tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """Tokenizers of the kinds there are."""
    if request.param == "pad_is_eos":
        return tiny_tokenizer(pad=None)
    if request.param == "with_bos":
        return tiny_tokenizer(bos="<s>")
    if request.param == "chatml":
        return tiny_tokenizer("<|im_end|>", extra=["<|im_start|>"], chat_template=CHATML)
    return tiny_tokenizer()


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer without BOS and without a chat template, whose pad token is its own."""
    return tiny_tokenizer()


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., str]:
    """Write JSON lines (strings go in as they are); gives the path."""

    def write(*rows: Any, name: str = "data.jsonl") -> str:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path = tmp_path / name
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return str(path)

    return write
