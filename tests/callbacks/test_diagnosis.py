"""The page on diagnosis: its examples print what the page says."""

import contextlib
import io
from itertools import pairwise
from typing import Any

import pytest

from tests.support.docs_blocks import ROOT, blocks

BLOCKS = blocks(ROOT / "docs" / "diagnosis.md")
SHOWN = [
    (code, output)
    for code, output in pairwise(BLOCKS)
    if code.language == "python" and not output.language
]


def test_page_shows_a_verdict_of_each_kind() -> None:
    text = "".join(output.text for _, output in SHOWN)
    for level in ("suspicious", "collapsed", "data changed", "healthy"):
        assert f"{level}: " in text
    for meaning in ("exploiting its reward", "not the policy's", "lost its variety"):
        assert meaning in text


@pytest.mark.parametrize(("code", "output"), SHOWN)
def test_example_prints_what_the_page_shows(code: Any, output: Any) -> None:
    namespace: dict[str, Any] = {}
    definitions = next(block for block in BLOCKS if block.language == "python")
    exec(definitions.text, namespace)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code.text, namespace)
    assert printed.getvalue() == output.text
