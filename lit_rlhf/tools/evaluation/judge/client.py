"""Ask the judge which of two answers is better, at an OpenAI-compatible endpoint.

The conversation and the answers come from the models under test, so nothing in them may reach the
judge as an instruction:

- They are one JSON object on one line of a user message, between instructions.
- Markers around that line contain a hash of the data, which no text can contain of itself.
- Characters that end a line, are invisible, or start a control token of a chat template
  (`<|im_end|>`, `[INST]`) are escaped, so that a server that searches for such tokens finds none.
"""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

import yaml

from lit_rlhf.checks import check_count, check_not_negative, check_positive
from lit_rlhf.data import Message
from lit_rlhf.rewards import escape_json, open_endpoint, redact_url

Criterion = Literal["helpful", "harmless"]
Verdict = Literal["A", "B", "tie"]
ChatMessage = dict[str, str]
"""A message to the endpoint, with `role` and `content`."""

_TEXTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("prompts.yaml").read_text("utf-8"))

SCHEMA: dict[str, Any] = _TEXTS["schema"]
"""JSON schema of the judge's reply."""

_MAX_REPEATED = 2000  # characters of an unreadable reply that are sent back to the judge

_THOUGHTS = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)
_FENCE = re.compile(r"\A```(?:json)?\s*\n(.*)\n\s*```\Z", re.DOTALL)


class Question(NamedTuple):
    """Two answers to one conversation, in the order in which the judge sees them."""

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

    If no reply could be read, the verdict is `None` and the reason says what was wrong with the
    last one; `malformed` are the earlier ones.
    """

    verdict: Verdict | None
    reason: str
    malformed: Sequence[str] = ()


class MalformedReplyError(ValueError):
    """A reply that does not have the requested form; the message says what is wrong."""


def question_messages(question: Question, max_characters: int) -> list[ChatMessage]:
    """Build the messages that ask a question.

    Of a longer text than `max_characters` the rest is left out, and the judge is told how much.
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


def retry_messages(messages: Sequence[ChatMessage], reply: str, problem: str) -> list[ChatMessage]:
    """Build the messages that ask again after a reply that could not be parsed for a `problem`."""
    again = _TEXTS["again"].format(problem=problem, format=_TEXTS["format"])
    return [
        *messages,
        {"role": "assistant", "content": reply[:_MAX_REPEATED] or "(no text)"},
        {"role": "user", "content": again},
    ]


def wording() -> str:
    """Return the text that all questions share, to tell answers to other wordings apart."""
    names = ("system", "user", "again", "format", "criteria")
    return json.dumps([*(_TEXTS[name] for name in names), SCHEMA])


def _cut_text(text: str, max_characters: int) -> str:
    """Cut a text that is too long, and append how many characters are missing."""
    missing = len(text) - max_characters
    return text if missing <= 0 else f"{text[:max_characters]} [{missing} characters left out]"


def parse_reply(text: str) -> JudgeReply:
    """Parse a reply strictly; nothing is guessed.

    Thoughts in `<think>` before the JSON object and a code fence around it are skipped.
    """
    answer = _THOUGHTS.sub("", text).strip()
    if not answer:
        raise MalformedReplyError("it is empty")
    fenced = _FENCE.match(answer)
    try:
        fields = json.loads(fenced[1] if fenced else answer, object_pairs_hook=_refuse_duplicates)
    except json.JSONDecodeError as error:
        raise MalformedReplyError("it is not only one JSON object") from error
    except RecursionError as error:
        raise MalformedReplyError("its JSON is nested too deeply") from error
    if not isinstance(fields, dict) or set(fields) != {"verdict", "reason"}:
        raise MalformedReplyError('it is not an object with exactly "reason" and "verdict"')
    verdict, reason = fields["verdict"], fields["reason"]
    if verdict not in get_args(Verdict):
        raise MalformedReplyError('its "verdict" is not "A", "B" or "tie"')
    if not isinstance(reason, str):
        raise MalformedReplyError('its "reason" is not a string')
    return JudgeReply(verdict, reason)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # json keeps the last of two equal keys, and a verdict must not be a matter of luck
    if len(dict(pairs)) < len(pairs):
        raise MalformedReplyError("it names a field twice")
    return dict(pairs)


@dataclass(frozen=True)
class JudgeOptions:
    """A language model as judge, behind an OpenAI-compatible endpoint that is sent all texts.

    Attributes:
        model: Name of the judge as the endpoint knows it. Default: no judge.
        base_url: Address of the endpoint. It usually ends in /v1, for example
            http://localhost:8000/v1. Default: OpenAI's.
        api_key_variable: Environment variable that holds the key. Your own server often needs
            none.
        criteria: What answers are compared by. Each criterion is a separate request.
        folder: Folder for answers and verdicts. A run continues with the answers that are there.
        temperature: Sampling temperature of the judge; null leaves it to the endpoint.
        max_tokens: Longest reply of the judge, in tokens.
        max_characters: Longest text that the judge is shown, in characters. Longer texts are cut
            off and counted.
        concurrency: Number of requests at a time.
        timeout: Seconds that a request may take, up to the end of the response.
        max_retries: How often a failed request is repeated, with growing pauses.
        max_attempts: How often the judge is asked for a reply that can be read. After that the
            verdict is invalid.
    """

    model: str | None = None
    base_url: str | None = None
    api_key_variable: str = "OPENAI_API_KEY"
    criteria: list[Criterion] = field(default_factory=lambda: ["helpful", "harmless"])
    folder: str = "runs/judge"
    temperature: float | None = 0.0
    max_tokens: int = 1024
    max_characters: int = 20_000
    concurrency: int = 8
    timeout: float = 120.0
    max_retries: int = 6
    max_attempts: int = 3

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_characters", "concurrency", "max_attempts"):
            check_count(f"judge.{name}", getattr(self, name))
        check_count("judge.max_retries", self.max_retries, minimum=0)
        check_positive("judge.timeout", self.timeout)
        if self.temperature is not None:
            check_not_negative("judge.temperature", self.temperature)
        known, given = get_args(Criterion), self.criteria
        if set(given) - set(known) or len(set(given)) < len(given):
            raise ValueError(f"judge.criteria: expected some of {known}, each once, got {given}")


class JudgeError(OSError):
    """The judge cannot be asked; the message says why and what to do."""


class JudgeClient:
    """A judge behind an OpenAI-compatible endpoint, see `open_endpoint`. Threads may share it."""

    def __init__(self, options: JudgeOptions) -> None:
        if find_spec("openai") is None:
            raise JudgeError("a judge needs the openai package: pip install openai")
        self.options = options
        key = os.environ.get(options.api_key_variable)
        if not key and options.base_url is None:
            raise ValueError(
                "judge.api_key_variable: expected the key of OpenAI's endpoint in the environment "
                f"variable {options.api_key_variable}, which is not set. Set it, or give the "
                "address of your own server as judge.base_url"
            )
        limits = (options.timeout, options.max_retries, options.concurrency)
        self._client = open_endpoint(options.base_url, key, *limits)
        self._with_schema = True

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def ask(self, messages: Sequence[ChatMessage]) -> JudgeReply:
        """Ask a question until the reply can be read, at most `max_attempts` times."""
        sent = list(messages)
        malformed: list[str] = []
        problem = ""
        for _ in range(self.options.max_attempts):
            choice = self._complete(sent)
            # the openai client does not check what the endpoint has sent
            message = getattr(choice, "message", None)
            text = str(getattr(message, "content", None) or getattr(message, "refusal", None) or "")
            try:
                return parse_reply(text)._replace(malformed=malformed)
            except MalformedReplyError as error:
                problem = str(error)
                if getattr(choice, "finish_reason", None) == "length":
                    problem = f"it was cut off after {self.options.max_tokens} tokens"
                malformed.append(text)
                # only the last bad reply is sent back: a judge copies what it reads
                sent = retry_messages(messages, text, problem)
        return JudgeReply(None, problem, malformed)

    def _complete(self, messages: Sequence[ChatMessage]) -> object:
        """Send one request, which the `openai` client repeats after a temporary failure."""
        import openai

        optional: dict[str, Any] = {}
        if self.options.temperature is not None:
            optional["temperature"] = self.options.temperature
        with_schema = self._with_schema
        if with_schema:
            schema = {"name": "verdict", "strict": True, "schema": SCHEMA}
            optional["response_format"] = {"type": "json_schema", "json_schema": schema}
        try:
            completion: object = self._client.chat.completions.create(
                model=str(self.options.model),
                messages=cast(Any, list(messages)),
                max_completion_tokens=self.options.max_tokens,
                **optional,
            )
        except openai.BadRequestError as error:
            if not with_schema or "response_format" not in str(error):
                raise JudgeError(_describe(error, self.options)) from error
            # The server does not know response_format. The prompt asks for the same form, and
            # replies are checked in any case.
            self._with_schema = False
            return self._complete(messages)
        except openai.OpenAIError as error:
            raise JudgeError(_describe(error, self.options)) from error
        except (ValueError, RecursionError) as error:
            completion = error  # the body is not JSON, or is nested too deeply
        choices = getattr(completion, "choices", None)
        if not isinstance(choices, list) or not choices:
            raise JudgeError(
                f"judge.base_url: {redact_url(str(self._client.base_url))} does not reply as an "
                "OpenAI-compatible endpoint does; the address usually ends in /v1. It sent "
                f"{str(completion) or 'nothing'!r:.200}"
            )
        return choices[0]


def _describe(error: Exception, options: JudgeOptions) -> str:
    """Say what happened and what helps."""
    import openai

    where = redact_url(options.base_url) if options.base_url else "OpenAI's endpoint"
    repeated = f"after {options.max_retries} retries (judge.max_retries)"
    texts: dict[tuple[type[Exception], ...], str] = {
        (openai.AuthenticationError, openai.PermissionDeniedError): "does not accept the key. Set "
        f"the environment variable {options.api_key_variable} to a valid one, or name another "
        "variable with judge.api_key_variable",
        (
            openai.NotFoundError,
        ): f"knows no model {options.model!r}, or the address is wrong. Check "
        "judge.model and judge.base_url, which usually ends in /v1",
        (openai.RateLimitError,): f"still limits the rate {repeated}. Lower judge.concurrency, "
        "wait, or check your quota",
        (openai.APITimeoutError,): f"did not reply within {options.timeout:g} seconds {repeated}. "
        "Raise judge.timeout or lower judge.concurrency",
        (openai.APIConnectionError,): f"cannot be reached {repeated} ({error.__cause__}). Check "
        "that the server runs and that judge.base_url is its address",
        (openai.InternalServerError,): f"fails {repeated}; its log tells why",
        (Exception,): "refuses the request. If it does not support a setting, change "
        "judge.temperature (null sends none) or judge.max_tokens; if the texts are too long for "
        "it, lower judge.max_characters",
    }
    text = next(text for kinds, text in texts.items() if isinstance(error, kinds))
    if isinstance(error, openai.APIStatusError) and error.response.is_redirect:
        text = "redirects to another address, which is not followed, as the texts would go there; "
        text += "give that address as judge.base_url"
    return f"the judge at {where} {text}. It said {type(error).__name__}: {error}"[:1000]
