"""Rewards from a service: JSON over HTTP, with a time limit and repeated attempts."""

from __future__ import annotations

import http.client
import json
import math
import urllib.error
import urllib.request
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from time import sleep
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from lit_rlhf.rewards.functions import MAX_SHOWN, RewardError, shorten

TOO_MANY_REQUESTS = 429


class Answer(NamedTuple):
    """An answer of the service.

    Attributes:
        status: HTTP status.
        body: Its body, undecoded.
    """

    status: int
    body: bytes


class TransientError(Exception):
    """A failure of one attempt that another attempt may not have."""


@dataclass(frozen=True)
class RemoteScorer:
    """Scores from a service that gets `{"prompts": [...], "responses": [...]}` by POST.

    The service answers `{"scores": [...]}`, a finite number for each response. An attempt is
    repeated if the connection fails, no answer comes in time, or the status is 429 or 5xx.

    Args:
        url: URL of the service, http or https.
        batch_size: Most responses per request.
        timeout: Seconds that an attempt may take.
        retries: Further attempts after the first.
        backoff: Seconds before the second attempt; doubled before each further one.

    Raises:
        ValueError: If the URL is not http or https, or a number is out of range.
    """

    url: str
    batch_size: int = 64
    timeout: float = 30.0
    retries: int = 4
    backoff: float = 1.0

    def __post_init__(self) -> None:
        """Check the arguments."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url: expected http://host... or https://host..., got {self.url!r}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size: expected an integer >= 1, got {self.batch_size}")
        if not self.timeout > 0:
            raise ValueError(f"timeout: expected a value > 0, got {self.timeout}")
        if self.retries < 0 or not self.backoff >= 0:
            raise ValueError(
                f"retries, backoff: expected values >= 0, got {self.retries} and {self.backoff}"
            )

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        """Score `responses` to `prompts`.

        Raises:
            RewardError: If the last attempt fails, or the answer is not as expected; with the URL,
                the status and the beginning of the answer.
        """
        scores: list[float] = []
        for start in range(0, len(responses), self.batch_size):
            rows = slice(start, start + self.batch_size)
            scores += self._score_batch(list(prompts[rows]), list(responses[rows]))
        return scores

    def _score_batch(self, prompts: list[str], responses: list[str]) -> list[float]:
        """Score the responses of one request, with several attempts where that may help."""
        content = f"{len(responses)} responses, the first: {shorten(responses[0])}"
        body = json.dumps({"prompts": prompts, "responses": responses}).encode()
        for attempt in range(self.retries + 1):
            try:
                answer = self._send(body)
            except TransientError as error:
                if attempt == self.retries:
                    raise RewardError(
                        f"{self.url}: {error} in the last of {attempt + 1} attempts (retries); "
                        f"asked about {content}"
                    ) from error
                pause = self.backoff * 2**attempt
                warnings.warn(
                    f"{self.url}: {error} in attempt {attempt + 1} of {self.retries + 1}; the next "
                    f"one is in {pause:g} seconds",
                    stacklevel=2,
                )
                sleep(pause)
            else:
                return self._parse_scores(answer, len(responses), content)
        raise AssertionError("the last attempt returns or raises")

    def _send(self, body: bytes) -> Answer:
        """Make one attempt.

        Raises:
            RewardError: For a status that another attempt will not change.
            TransientError: If another attempt may succeed.
        """
        request = urllib.request.Request(
            self.url, body, {"Content-Type": "application/json", "Accept": "application/json"}
        )
        try:
            answer = _post(request, self.timeout)
        except TimeoutError as error:
            raise TransientError(f"no answer within {self.timeout:g} seconds (timeout)") from error
        except (OSError, http.client.HTTPException) as error:
            # a timeout while connecting arrives here, inside of a URLError
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                reason = f"not within {self.timeout:g} seconds (timeout)"
            raise TransientError(f"the connection failed ({reason!s})") from error
        if answer.status == TOO_MANY_REQUESTS or answer.status >= 500:
            raise TransientError(f"status {answer.status} and {_quote_body(answer.body)}")
        if not 200 <= answer.status < 300:
            raise RewardError(
                f"{self.url}: expected status 200, got status {answer.status} and "
                f"{_quote_body(answer.body)}"
            )
        return answer

    def _parse_scores(self, answer: Answer, count: int, content: str) -> list[float]:
        """Take `count` finite scores from an answer.

        Raises:
            RewardError: If the answer has another form.
        """
        try:
            scores: Any = json.loads(answer.body)["scores"]
        except (ValueError, LookupError, TypeError, RecursionError):
            scores = None
        problem = ""
        if not isinstance(scores, list) or not all(map(_is_number, scores)):
            problem = "got"
        elif len(scores) != count:
            problem = f"got {len(scores)} scores with"
        elif not all(map(math.isfinite, scores)):
            problem = "not all are finite in"
        if problem:
            raise RewardError(
                f'{self.url}: expected {{"scores": [...]}} with {count} finite numbers, one for '
                f"each response, {problem} status {answer.status} and {_quote_body(answer.body)}; "
                f"asked about {content}"
            )
        return [float(score) for score in scores]


def _post(request: urllib.request.Request, timeout: float) -> Answer:
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return Answer(answer.status, answer.read())
    except urllib.error.HTTPError as error:
        # raised for a status outside 2xx, whose body says what went wrong
        with error:
            return Answer(error.code, error.read())


def _is_number(value: object) -> bool:
    """Whether a JSON value is a number; to Python, true and false are integers too."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _quote_body(body: bytes) -> str:
    text = body[: 4 * MAX_SHOWN].decode("utf-8", errors="replace")  # up to 4 bytes per character
    return f"the body {shorten(text)}" if text else "no body"
