"""A language model that grades responses, as a reward."""

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from lit_rlhf.checks import check_count, check_fields, check_not_negative, check_positive
from lit_rlhf.rank_zero import rank_zero_info
from lit_rlhf.remote import RemoteError
from lit_rlhf.rewards.functions import RewardError
from lit_rlhf.rewards.judge.endpoint import (
    PROMPTS,
    ChatMessage,
    JudgeEndpoint,
    MalformedReplyError,
    NoCompletionError,
    escape_json,
)
from lit_rlhf.terminal import shorten
from lit_rlhf.urls import ServiceUrl

KEPT_GRADES = 2**16
ATTEMPTS = 3  # at a reply that can be read
_GRADE = re.compile(r"10|\d")
_TEXTS = PROMPTS["grade"]
_MAX_ERROR = 1000  # characters of a message about an error


class GradedPair(NamedTuple):
    """A prompt and a response to it.

    Attributes:
        prompt: The rendered prompt.
        response: The decoded response.
    """

    prompt: str
    response: str


@dataclass
class TokenCount:
    """Tokens that a judge took on this rank.

    Attributes:
        used: Tokens so far.
        next_report: Number of tokens at which they are reported next.
    """

    used: int = 0
    next_report: int = 1


@dataclass(frozen=True)
class JudgeRule:
    """A grade from 0 to 10 by a language model at an OpenAI-compatible endpoint.

    The endpoint is sent all prompts and responses, one of each per request. A pair is graded once
    for as long as its grade is kept. The tokens that this took are reported each time they have
    doubled.

    Args:
        model: Name of the judge as the endpoint knows it.
        base_url: Address of the endpoint, which usually ends in /v1; `None` for OpenAI's.
        criterion: What makes a response good, in a sentence for the judge.
        api_key_variable: Environment variable that holds the key; your own server may need none.
        temperature: Sampling temperature of the judge; `None` leaves it to the endpoint.
        max_tokens: Longest reply of the judge, in tokens, with what it thinks before its grade.
        concurrency: Number of requests at a time.
        timeout: Seconds that a request may take, up to the end of the response.
        retries: How often a request that fails is repeated, with growing pauses.
    """

    model: str
    base_url: str | None = None
    criterion: str = "The response is helpful, honest and harmless."
    api_key_variable: str = "OPENAI_API_KEY"
    temperature: float | None = 0.0
    max_tokens: int = 16
    concurrency: int = 8
    timeout: float = 60.0
    retries: int = 4
    grades: dict[GradedPair, float] = field(default_factory=dict, init=False, repr=False)
    tokens: TokenCount = field(default_factory=TokenCount, init=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(check_count, self, "max_tokens", "concurrency")
        check_count("retries", self.retries, minimum=0)
        check_fields(check_positive, self, "timeout")
        check_fields(check_not_negative, self, "temperature")
        if self.base_url is not None:
            ServiceUrl(self.base_url, "base_url")

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        """Grade `responses` to `prompts`."""
        if len(self.grades) > KEPT_GRADES:
            self.grades.clear()
        pairs = [
            GradedPair(prompt=prompt, response=response)
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        new = [pair for pair in dict.fromkeys(pairs) if pair not in self.grades]
        endpoint = self._open_endpoint()
        try:
            with ThreadPoolExecutor(self.concurrency) as pool:
                grades = pool.map(lambda pair: self._grade(endpoint, pair), new)
                self.grades.update(zip(new, grades, strict=True))
        finally:
            endpoint.close()
        self._count_tokens(endpoint.tokens)
        return [self.grades[pair] for pair in pairs]

    def _open_endpoint(self) -> JudgeEndpoint:
        key = os.environ.get(self.api_key_variable)
        if not key and self.base_url is None:
            raise RewardError(
                f"api_key_variable: expected OpenAI's key in the environment variable "
                f"{self.api_key_variable}, which is not set; or base_url of your own server"
            )
        return JudgeEndpoint(
            model=self.model,
            base_url=self.base_url,
            key=key,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            timeout=self.timeout,
            retries=self.retries,
            concurrency=self.concurrency,
        )

    def _grade(self, endpoint: JudgeEndpoint, pair: GradedPair) -> float:
        """Ask for the grade of a response until the reply is one."""
        messages = [
            {"role": "system", "content": _TEXTS["system"].format(criterion=self.criterion)},
            {
                "role": "user",
                "content": escape_json({"conversation": pair.prompt, "response": pair.response}),
            },
        ]
        judge = f"the judge {self.model} at {endpoint.address}"
        try:
            answer = endpoint.ask(
                messages, parse=parse_grade, ask_again=_ask_again, attempts=ATTEMPTS
            )
        except NoCompletionError as error:
            raise RewardError(f"{judge}: base_url: {error}"[:_MAX_ERROR]) from error
        except RemoteError as error:
            raise RewardError(f"{judge}: {error.problem}"[:_MAX_ERROR]) from error
        if answer.value is None:
            raise RewardError(
                f"{judge}: expected a whole number from 0 to 10 in one of {ATTEMPTS} replies of at "
                f"most {self.max_tokens} tokens (max_tokens), got {shorten(answer.malformed[-1])} "
                f"at last for the response {shorten(pair.response)}"
            )
        return answer.value

    def _count_tokens(self, tokens: int) -> None:
        """Add tokens, and report them if they have doubled since the last report."""
        self.tokens.used += tokens
        if self.tokens.used >= self.tokens.next_report:
            rank_zero_info(f"judge {self.model}: {self.tokens.used:,} tokens so far on this rank")
            self.tokens.next_report = 2 * self.tokens.used


def parse_grade(text: str) -> float:
    """Read a reply that is a whole number from 0 to 10 alone, after what the judge has thought.

    Raises:
        MalformedReplyError: If it is anything else.
    """
    match = _GRADE.fullmatch(text.rpartition("</think>")[2].strip())
    if match is None:
        raise MalformedReplyError("it is not a whole number from 0 to 10")
    return float(match[0])


def _ask_again(reply: str, problem: str) -> list[ChatMessage]:
    """Remind the judge of the form: the same question alone would get the same reply."""
    return [{"role": "user", "content": _TEXTS["again"]}]
