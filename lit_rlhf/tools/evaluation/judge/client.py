"""Ask the judge one question at an OpenAI-compatible endpoint."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, cast, get_args

from lit_rlhf.checks import check_count, check_not_negative, check_positive
from lit_rlhf.rewards import open_endpoint, redact_url
from lit_rlhf.tools.evaluation.judge.messages import (
    SCHEMA,
    ChatMessage,
    Criterion,
    JudgeReply,
    MalformedReplyError,
    parse_reply,
    retry_messages,
)


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
