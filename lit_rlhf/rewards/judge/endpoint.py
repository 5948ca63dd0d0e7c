"""Ask a language model at an OpenAI-compatible endpoint, until its reply can be read."""

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

import yaml

from lit_rlhf.remote import Answer, RemoteClient, RemoteError
from lit_rlhf.urls import ServiceUrl

OPENAI = "https://api.openai.com/v1"
"""Address of OpenAI's endpoint, which an endpoint has that is given none."""

BAD_REQUEST = 400

ChatMessage = dict[str, str]
"""A message to the endpoint, with `role` and `content`."""

PROMPTS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("prompts.yaml").read_text("utf-8")
)
"""What a judge is told, by what it does."""

_CONTROL_TAG = re.compile(r"\[(?=/?[A-Z_]+\])")
_ESCAPED_CATEGORIES = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}  # control, invisible, line ends

Value = TypeVar("Value")


class NoCompletionError(ValueError):
    """The server answered, but not as an OpenAI-compatible endpoint does."""


class MalformedReplyError(ValueError):
    """A reply that does not have the requested form; the message says what is wrong."""


class Completion(NamedTuple):
    """A reply of the model.

    Attributes:
        text: Its text, or its refusal; empty for none.
        is_cut_off: Whether it ended at the longest reply.
    """

    text: str
    is_cut_off: bool


@dataclass(frozen=True)
class ReadReply(Generic[Value]):
    """A reply that was read, after others that could not be read.

    Attributes:
        value: What was read; `None` if no reply could be read.
        malformed: Texts of the replies that could not be read, in order.
        problem: What was wrong with the last of them; empty without any.
    """

    value: Value | None
    malformed: list[str] = field(default_factory=list)
    problem: str = ""


class JudgeEndpoint:
    """A model behind an OpenAI-compatible endpoint.

    Requests that fail for a temporary reason are repeated, see `RemoteClient`. Threads may share an
    endpoint.

    Args:
        model: Name of the model as the endpoint knows it.
        base_url: Address of the endpoint, which usually ends in /v1; `None` for OpenAI's.
        key: Key of the endpoint; `None` for a server that needs none.
        temperature: Sampling temperature; `None` leaves it to the endpoint.
        max_tokens: Longest reply, in tokens.
        timeout: Seconds that a request may take, up to the end of the response.
        retries: How often a request that fails is repeated.
        concurrency: Number of requests at a time.
    """

    def __init__(
        self,
        *,
        model: str,
        base_url: str | None,
        key: str | None,
        temperature: float | None,
        max_tokens: int,
        timeout: float,
        retries: int,
        concurrency: int,
    ) -> None:
        self.model = model
        self.temperature = temperature
        self.max_tokens = max_tokens
        self.tokens = 0
        """Tokens of all requests and replies so far, as the endpoint counts them."""
        self._client = RemoteClient(
            ServiceUrl(base_url or OPENAI, "base_url"),
            timeout=timeout,
            retries=retries,
            backoff=0.5,
            key=(key or "").strip(),
            max_connections=concurrency,
        )
        self.address = self._client.url.shown if base_url else "OpenAI's endpoint"
        self._lock = Lock()
        self._knows_schemas = True

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def ask(
        self,
        messages: Sequence[ChatMessage],
        *,
        parse: Callable[[str], Value],
        ask_again: Callable[[str, str], Sequence[ChatMessage]],
        attempts: int,
        schema: Mapping[str, Any] | None = None,
    ) -> ReadReply[Value]:
        """Ask a question until the reply can be read.

        Args:
            messages: Messages of the question.
            parse: Reads the text of a reply; raises `MalformedReplyError` if it cannot.
            ask_again: Messages that follow the question after a reply that could not be read,
                from its text and what was wrong with it. Earlier replies are not sent: a model
                copies what it reads.
            attempts: How often the model is asked at most.
            schema: JSON schema of the reply, as far as the server knows how to use it.

        Raises:
            NoCompletionError: If the server does not answer as an endpoint does.
            RemoteError: If a request failed for good.
        """
        request = list(messages)
        malformed: list[str] = []
        problem = ""
        for _ in range(attempts):
            completion = self._complete(request, schema)
            try:
                return ReadReply(value=parse(completion.text), malformed=malformed)
            except MalformedReplyError as error:
                problem = str(error)
                if completion.is_cut_off:
                    problem = f"it was cut off after {self.max_tokens} tokens"
                malformed.append(completion.text)
                request = [*messages, *ask_again(completion.text, problem)]
        return ReadReply(value=None, malformed=malformed, problem=problem)

    def _complete(
        self, messages: Sequence[ChatMessage], schema: Mapping[str, Any] | None
    ) -> Completion:
        """Send one request, which is repeated after a temporary failure."""
        request: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "max_completion_tokens": self.max_tokens,
        }
        if self.temperature is not None:
            request["temperature"] = self.temperature
        with_schema = schema is not None and self._knows_schemas
        if with_schema:
            json_schema = {"name": "verdict", "strict": True, "schema": schema}
            request["response_format"] = {"type": "json_schema", "json_schema": json_schema}
        try:
            answer = self._client.post("/chat/completions", request)
        except RemoteError as error:
            if not (with_schema and error.status == BAD_REQUEST):
                raise
            if b"response_format" not in error.body:
                raise
            # The server does not know response_format. The prompt asks for the same form, and
            # replies are checked in any case.
            self._knows_schemas = False
            return self._complete(messages, schema)
        return self._read_completion(answer)

    def _read_completion(self, answer: Answer) -> Completion:
        """Read what the endpoint has sent."""
        completion = answer.parse()
        choices = _field(completion, "choices")
        if not isinstance(choices, list) or not choices:
            raise NoCompletionError(
                f"{self._client.url.shown} does not reply as an OpenAI-compatible endpoint does; "
                f"the address usually ends in /v1. It sent {answer}"
            )
        tokens = _field(_field(completion, "usage"), "total_tokens")
        if isinstance(tokens, int):
            with self._lock:
                self.tokens += tokens
        message = _field(choices[0], "message")
        return Completion(
            text=str(_field(message, "content") or _field(message, "refusal") or ""),
            is_cut_off=_field(choices[0], "finish_reason") == "length",
        )


def _field(value: Any, name: str) -> Any:  # noqa: ANN401  # any JSON value
    """A field of an object; `None` of anything else."""
    return value.get(name) if isinstance(value, dict) else None


def escape_json(value: Any) -> str:  # noqa: ANN401  # any JSON value
    """Format a value as one line of JSON that can be read as nothing but text.

    Control characters, line ends, invisible characters, halves of surrogate pairs, `<` and the
    bracket of tags such as `[INST]` are escaped. Parsing the JSON gives back the same value.
    """
    text = json.dumps(value, ensure_ascii=False)
    text = "".join(
        json.dumps(character)[1:-1]
        if unicodedata.category(character) in _ESCAPED_CATEGORIES
        else character
        for character in text
    )
    return _CONTROL_TAG.sub(r"\\u005b", text.replace("<", r"\u003c"))
