"""What the judge replied: read strictly, never guessed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Verdict = Literal["A", "B", "tie"]

_THOUGHTS = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)
_FENCE = re.compile(r"\A```(?:json)?\s*\n(.*)\n\s*```\Z", re.DOTALL)


@dataclass(frozen=True)
class Answer:
    """The judge's answer to one question.

    Attributes:
        verdict: Which of the two answers is better, `None` if no reply could be read.
        reason: Why, in the judge's words, or what was wrong with the last reply.
        requests: Requests that were made for it.
        prompt_tokens: Tokens sent in all of them.
        completion_tokens: Tokens that came back.
        malformed: The replies that could not be read.
    """

    verdict: Verdict | None
    reason: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    malformed: list[str] = field(default_factory=list)


class MalformedReplyError(ValueError):
    """A reply that does not have the form that was asked for; the message says in what."""


def parsed_reply(text: str) -> tuple[Verdict, str]:
    """Verdict and reason of a reply.

    Thoughts in `<think>` before the answer and a code fence around it are left aside.

    Raises:
        MalformedReplyError: If the rest is not one JSON object with a verdict and a reason alone.
    """
    answer = _THOUGHTS.sub("", text).strip()
    fenced = _FENCE.match(answer)
    try:
        fields = json.loads(fenced[1] if fenced else answer, object_pairs_hook=_each_once)
    except json.JSONDecodeError as error:
        raise MalformedReplyError("it is not one JSON object alone") from error
    except RecursionError as error:
        raise MalformedReplyError("its JSON is nested too deeply") from error
    if not isinstance(fields, dict) or set(fields) != {"verdict", "reason"}:
        raise MalformedReplyError('it is not an object with "reason" and "verdict" alone')
    verdict, reason = fields["verdict"], fields["reason"]
    if verdict not in get_args(Verdict):
        raise MalformedReplyError('its "verdict" is none of "A", "B" and "tie"')
    if not isinstance(reason, str):
        raise MalformedReplyError('its "reason" is not a string')
    return verdict, reason


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise MalformedReplyError("it names a field twice")
    return dict(pairs)
