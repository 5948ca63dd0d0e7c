from __future__ import annotations

import pytest

from lit_rlhf.evaluation.judge.messages import MalformedReplyError, parse_reply


@pytest.mark.parametrize(
    "text",
    [
        '{"reason": "shorter", "verdict": "B"}',
        ' {"verdict":"B","reason":"shorter"}\n',
        '```json\n{"reason": "shorter", "verdict": "B"}\n```',
        '```\n{"reason": "shorter", "verdict": "B"}\n```',
        '<think>{"verdict": "A"}? No.</think>\n{"reason": "shorter", "verdict": "B"}',
    ],
)
def test_a_reply_is_read(text: str) -> None:
    assert parse_reply(text) == ("B", "shorter")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not one JSON object alone"),
        ("A", "not one JSON object alone"),
        ('The verdict: {"reason": "x", "verdict": "A"}', "not one JSON object alone"),
        ('{"reason": "x", "verdict": "A"} {"reason": "x", "verdict": "B"}', "not one JSON"),
        ('{"reason": "x", "verdict": "A"', "not one JSON object alone"),
        ("[" * 100_000, "JSON"),
        ('"A"', "not an object"),
        ('{"verdict": "A"}', "not an object with"),
        ('{"reason": "x", "verdict": "A", "confidence": 1}', "not an object with"),
        ('{"reason": "x", "verdict": "a"}', 'none of "A"'),
        ('{"reason": "x", "verdict": ["A"]}', 'none of "A"'),
        ('{"reason": "x", "verdict": null}', 'none of "A"'),
        ('{"reason": 1, "verdict": "A"}', "not a string"),
        ('{"reason": "x", "verdict": "A", "verdict": "B"}', "a field twice"),
    ],
)
def test_any_other_reply_is_malformed(text: str, problem: str) -> None:
    with pytest.raises(MalformedReplyError, match=problem):
        parse_reply(text)
