"""Ask a judge which of two answers is better.

The conversation and the answers come from the models under test, so nothing in them may reach the
judge as an instruction:

- They are one JSON object on one line of a user message, between instructions.
- Markers around that line contain a hash of the data, which no text can contain of itself.
- Characters that end a line, are invisible, or start a control token of a chat template
  (`<|im_end|>`, `[INST]`) are escaped, so that a server that searches for such tokens finds none.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

from lit_rlhf.choices import Criterion as Criterion
from lit_rlhf.data import Message
from lit_rlhf.files import RepeatedKeyError, parse_json
from lit_rlhf.rewards.judge.endpoint import (
    PROMPTS,
    ChatMessage,
    JudgeEndpoint,
    MalformedReplyError,
    escape_json,
)

Verdict = Literal["A", "B", "tie"]

_TEXTS = PROMPTS["compare"]
_SCHEMA: dict[str, Any] = _TEXTS["schema"]
_MAX_REPEATED = 2000  # characters of an unreadable reply that are sent back to the judge
_THOUGHTS = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)
_FENCE = re.compile(r"\A```(?:json)?\s*\n(.*)\n\s*```\Z", re.DOTALL)


class Question(NamedTuple):
    """Two answers to one conversation, in the order in which the judge sees them.

    Attributes:
        criterion: What the answers are compared by.
        conversation: The turns before the answers, oldest first.
        answer_a: The first answer.
        answer_b: The second answer.
    """

    criterion: Criterion
    conversation: Sequence[Message]
    answer_a: str
    answer_b: str

    @property
    def swapped(self) -> "Question":
        """The same question with the answers in the other order."""
        return self._replace(answer_a=self.answer_b, answer_b=self.answer_a)

    @property
    def longest(self) -> int:
        """Characters of its longest text."""
        texts = [turn.content for turn in self.conversation]
        return max(map(len, [*texts, self.answer_a, self.answer_b]))


class JudgeReply(NamedTuple):
    """The better answer, or a tie, with the judge's reason.

    Attributes:
        verdict: The better answer; `None` if no reply could be read.
        reason: The judge's reason, or what was wrong with its last reply.
        malformed: Replies that could not be read, in order.
    """

    verdict: Verdict | None
    reason: str
    malformed: Sequence[str] = ()


def compare_answers(
    endpoint: JudgeEndpoint, question: Question, *, max_characters: int, attempts: int
) -> JudgeReply:
    """Ask which of two answers is better, until the reply can be read.

    Args:
        endpoint: The judge.
        question: The answers.
        max_characters: Longest text that the judge is shown; the rest is left out.
        attempts: How often the judge is asked at most.

    Raises:
        NoCompletionError: If the server does not answer as an endpoint does.
        RemoteError: If a request failed for good.
    """
    answer = endpoint.ask(
        question_messages(question, max_characters),
        parse=parse_reply,
        ask_again=_ask_again,
        attempts=attempts,
        schema=_SCHEMA,
    )
    if answer.value is None:
        return JudgeReply(verdict=None, reason=answer.problem, malformed=answer.malformed)
    return answer.value._replace(malformed=answer.malformed)


def question_messages(question: Question, max_characters: int) -> list[ChatMessage]:
    """Build the messages that ask a question.

    Texts longer than `max_characters` are cut off, and the judge reads how much is missing.
    """
    data = escape_json(
        {
            "conversation": [
                {"role": turn.role, "content": _cut_text(turn.content, max_characters)}
                for turn in question.conversation
            ],
            "answer_a": _cut_text(question.answer_a, max_characters),
            "answer_b": _cut_text(question.answer_b, max_characters),
        }
    )
    fields = {
        "mark": hashlib.sha256(data.encode()).hexdigest()[:32],
        "criterion": _TEXTS["criteria"][question.criterion],
        "format": _TEXTS["format"],
    }
    return [
        {"role": "system", "content": _TEXTS["system"].format(**fields)},
        {"role": "user", "content": _TEXTS["user"].format(data=data, **fields)},
    ]


def wording() -> str:
    """Return the text that all questions share, to tell answers to other wordings apart."""
    names = ("system", "user", "again", "format", "criteria")
    return json.dumps([*(_TEXTS[name] for name in names), _SCHEMA])


def parse_reply(text: str) -> JudgeReply:
    """Parse a reply strictly; nothing is guessed.

    Thoughts in `<think>` before the JSON object and a code fence around it are skipped.

    Raises:
        MalformedReplyError: If it does not have the requested form.
    """
    answer = _THOUGHTS.sub("", text).strip()
    if not answer:
        raise MalformedReplyError("it is empty")
    fenced = _FENCE.match(answer)
    try:
        fields = parse_json(fenced[1] if fenced else answer)
    except RepeatedKeyError as error:  # a verdict must not be a matter of luck
        raise MalformedReplyError("it names a field twice") from error
    except ValueError as error:
        raise MalformedReplyError("it is not only one JSON object") from error
    if not isinstance(fields, dict) or set(fields) != {"verdict", "reason"}:
        raise MalformedReplyError('it is not an object with exactly "reason" and "verdict"')
    verdict = fields["verdict"]
    if verdict not in get_args(Verdict):
        raise MalformedReplyError('its "verdict" is not "A", "B" or "tie"')
    reason = fields["reason"]
    if not isinstance(reason, str):
        raise MalformedReplyError('its "reason" is not a string')
    return JudgeReply(verdict=verdict, reason=reason)


def _ask_again(reply: str, problem: str) -> list[ChatMessage]:
    """Show the judge its last reply, and say what is wrong with it."""
    return [
        {"role": "assistant", "content": reply[:_MAX_REPEATED] or "(no text)"},
        {
            "role": "user",
            "content": _TEXTS["again"].format(problem=problem, format=_TEXTS["format"]),
        },
    ]


def _cut_text(text: str, max_characters: int) -> str:
    """Cut a text that is too long, and append how many characters are missing."""
    missing = len(text) - max_characters
    return text if missing <= 0 else f"{text[:max_characters]} [{missing} characters left out]"
