"""One question to the judge's endpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast, get_args

from lit_rlhf.evaluation.judge.messages import (
    SCHEMA,
    ChatMessage,
    Criterion,
    MalformedReplyError,
    Verdict,
    parse_reply,
    retry_messages,
)

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion, ChatCompletionMessageParam


@dataclass(frozen=True)
class JudgeOptions:
    """A language model behind an OpenAI-compatible endpoint as a judge. Sends it all texts.

    Attributes:
        model: Name of the judge as the endpoint knows it. Default: no judge is asked.
        base_url: Of the endpoint, usually ending in /v1, for instance http://localhost:8000/v1.
            Default: OpenAI's.
        api_key_variable: Environment variable with the key. Servers of your own often need none.
        criteria: What answers are compared by, each in a request of its own.
        labels: File of preferences (chosen and rejected) by criterion, to measure the judge's
            agreement with them, for instance {helpful: pairs.jsonl}.
        max_labels: Use only this many of the first preferences of a file.
        folder: Where answers and verdicts are kept; a run continues with the answers there.
        temperature: Of the judge's sampling; null leaves it to the endpoint.
        max_tokens: Longest answer of the judge in tokens.
        max_characters: Longest text shown to the judge; what is behind is cut off and counted.
        concurrency: Requests under way at a time.
        timeout: Seconds that a request may take.
        max_retries: How often a failed request is repeated, after longer and longer waits.
        max_attempts: How often the judge is asked until its answer can be read; after that the
            verdict is invalid.
        input_price: Of a million tokens sent, for the cost. Default: unknown.
        output_price: Of a million tokens answered.
    """

    model: str | None = None
    base_url: str | None = None
    api_key_variable: str = "OPENAI_API_KEY"
    criteria: list[Criterion] = field(default_factory=lambda: ["helpful", "harmless"])
    labels: Mapping[Criterion, str] = field(default_factory=dict)
    max_labels: int = 200
    folder: str = "runs/judge"
    temperature: float | None = 0.0
    max_tokens: int = 1024
    max_characters: int = 20_000
    concurrency: int = 8
    timeout: float = 120.0
    max_retries: int = 6
    max_attempts: int = 3
    input_price: float | None = None
    output_price: float | None = None

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            ValueError: If one is out of range.
        """
        for name, lowest in {
            "max_labels": 1,
            "max_tokens": 1,
            "max_characters": 1,
            "concurrency": 1,
            "max_retries": 0,
            "max_attempts": 1,
        }.items():
            if getattr(self, name) < lowest:
                raise ValueError(
                    f"judge.{name}: expected an integer >= {lowest}, got {getattr(self, name)}"
                )
        known = get_args(Criterion)
        for name in ("criteria", "labels"):
            given = list(getattr(self, name))
            if set(given) - set(known) or len(set(given)) < len(given):
                raise ValueError(f"judge.{name}: expected some of {known}, each once, got {given}")
        if not self.timeout > 0:
            raise ValueError(f"judge.timeout: expected seconds > 0, got {self.timeout}")
        for name in ("temperature", "input_price", "output_price"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"judge.{name}: expected a number >= 0, got {value}")
        if (self.input_price is None) != (self.output_price is None):
            raise ValueError("judge.input_price, judge.output_price: expected both or none of them")


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


_NO_KEY = "none"  # what servers without keys are sent


class JudgeError(OSError):
    """The judge could not be asked; the message says why and what to do."""


class Reply(NamedTuple):
    """What the endpoint sent back.

    Attributes:
        text: The judge's words; empty if there are none.
        cut_off: Whether they ended at the token limit.
        prompt_tokens: Tokens sent, 0 if the endpoint does not count.
        completion_tokens: Tokens that came back.
    """

    text: str
    cut_off: bool
    prompt_tokens: int
    completion_tokens: int


class JudgeClient:
    """A judge behind an OpenAI-compatible endpoint. Threads may share it.

    The `openai` client repeats requests that failed for a passing reason (no connection, time-out,
    status 408, 409, 429, 5xx), after waits that double, or as long as the server asks for.

    Args:
        options: The judge and how it is asked; with a model.

    Raises:
        JudgeError: If the `openai` package is missing.
        ValueError: If there is no key for OpenAI's endpoint.
    """

    def __init__(self, options: JudgeOptions) -> None:
        try:
            import openai
        except ImportError as error:
            raise JudgeError(
                "a judge needs the openai package: pip install 'lit-rlhf[judge]'"
            ) from error
        self.options = options
        key = os.environ.get(options.api_key_variable)
        if not key and options.base_url is None:
            raise ValueError(
                f"judge.api_key_variable: expected the key of OpenAI's endpoint in the environment "
                f"variable {options.api_key_variable}, which is not set. Set it, or name your own "
                "server with judge.base_url"
            )
        self._client = openai.OpenAI(
            api_key=key or _NO_KEY,
            base_url=options.base_url,
            timeout=options.timeout,
            max_retries=options.max_retries,
        )
        self._with_schema = True

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def answer(self, messages: Sequence[ChatMessage]) -> Answer:
        """Ask until a reply can be read, at most `max_attempts` times.

        Args:
            messages: The question; see `judge_messages`.

        Raises:
            JudgeError: If the endpoint does not reply.
        """
        asked = list(messages)
        malformed: list[str] = []
        sent = received = 0
        problem = ""
        for attempt in range(1, self.options.max_attempts + 1):
            reply = self.reply(asked)
            sent, received = sent + reply.prompt_tokens, received + reply.completion_tokens
            try:
                verdict, reason = parse_reply(reply.text)
            except MalformedReplyError as error:
                problem = str(error)
                if reply.cut_off:
                    problem = f"it was cut off after {self.options.max_tokens} tokens"
                malformed.append(reply.text)
                asked = retry_messages(messages, reply.text, problem)
            else:
                return Answer(verdict, reason, attempt, sent, received, malformed)
        return Answer(None, problem, self.options.max_attempts, sent, received, malformed)

    def reply(self, messages: Sequence[ChatMessage]) -> Reply:
        """Send one request, repeated by the client if it fails for a passing reason.

        Raises:
            JudgeError: If no reply came, or none of a chat model.
        """
        import openai

        try:
            completion = self._completion(messages)
        except openai.BadRequestError as error:
            if not self._with_schema or "response_format" not in str(error):
                raise JudgeError(_advice(error, self.options)) from error
            self._with_schema = False  # from now on; the prompt asks for the same format
            return self.reply(messages)
        except (openai.OpenAIError, ValueError) as error:  # ValueError: a body that is not JSON
            raise JudgeError(_advice(error, self.options)) from error
        if not getattr(completion, "choices", None):
            raise JudgeError(
                f"judge.base_url: {self._client.base_url} does not reply as an OpenAI-compatible "
                f"endpoint does; the address usually ends in /v1. It sent {str(completion)!r:.200}"
            )
        choice, usage = completion.choices[0], completion.usage
        return Reply(
            choice.message.content or choice.message.refusal or "",
            choice.finish_reason == "length",
            usage.prompt_tokens if usage else 0,
            usage.completion_tokens if usage else 0,
        )

    def _completion(self, messages: Sequence[ChatMessage]) -> ChatCompletion:
        optional: dict[str, Any] = {}
        if self.options.temperature is not None:
            optional["temperature"] = self.options.temperature
        if self._with_schema:
            schema = {"name": "verdict", "strict": True, "schema": SCHEMA}
            optional["response_format"] = {"type": "json_schema", "json_schema": schema}
        completion: ChatCompletion = self._client.chat.completions.create(
            model=str(self.options.model),
            messages=cast("list[ChatCompletionMessageParam]", list(messages)),
            max_completion_tokens=self.options.max_tokens,
            **optional,
        )
        return completion


def _advice(error: Exception, options: JudgeOptions) -> str:
    """What happened and what helps."""
    import openai

    where = options.base_url or "OpenAI's endpoint"
    said = f"{type(error).__name__}: {error}"[:500]
    repeated = f"after {options.max_retries} retries (judge.max_retries)"
    if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
        return (
            f"the judge at {where} does not accept the key. Set the environment variable "
            f"{options.api_key_variable} to a valid one, or name another with "
            f"judge.api_key_variable. It said {said}"
        )
    if isinstance(error, openai.NotFoundError):
        return (
            f"the judge at {where} knows no model {options.model!r}, or the address is wrong. "
            f"Check judge.model and judge.base_url, which usually ends in /v1. It said {said}"
        )
    if isinstance(error, openai.RateLimitError):
        return (
            f"the judge at {where} still limits the rate {repeated}. Lower judge.concurrency, "
            f"wait, or check your quota. It said {said}"
        )
    if isinstance(error, openai.APITimeoutError):
        return (
            f"the judge at {where} did not reply within {options.timeout:g} seconds {repeated}. "
            "Raise judge.timeout or lower judge.concurrency"
        )
    if isinstance(error, openai.APIConnectionError):
        return (
            f"the judge at {where} cannot be reached {repeated}. Check that the server runs and "
            f"that judge.base_url is its address. {said} ({error.__cause__})"
        )
    if isinstance(error, openai.InternalServerError):
        return f"the judge at {where} fails {repeated}; its log tells why. It said {said}"
    return (
        f"the judge at {where} refuses the request. Where it does not take a setting, change "
        "judge.temperature (null sends none) or judge.max_tokens; where the texts are too long for "
        f"it, lower judge.max_characters. It said {said}"
    )
