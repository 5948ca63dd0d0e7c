"""Scores from a service: a JSON request over HTTP, with a time limit and repeated attempts."""

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
from typing import Any
from urllib.parse import urlsplit

from lit_rlhf.rewards.functions import MAX_SHOWN, RewardError, shorten

TOO_MANY_REQUESTS = 429


class TransientError(Exception):
    """An attempt that failed for a reason that may pass."""


@dataclass(frozen=True)
class RemoteScorer:
    """Scores of a service, which gets `{"prompts": [...], "responses": [...]}` by POST.

    It answers `{"scores": [...]}`, a finite number for each response. An attempt that gets no
    connection, no answer in time, or status 429 or 5xx is repeated.

    Args:
        url: Of the service, http or https.
        batch_size: Responses per request.
        timeout: Seconds to wait for the service, in each attempt.
        retries: Further attempts after the first.
        backoff: Seconds before the second attempt; twice as long before each next one.

    Raises:
        ValueError: For a URL of another kind, or a number out of range.
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
        """Scores of `responses` to `prompts`.

        Raises:
            RewardError: If the service cannot be asked, or answers something else; with the URL,
                the status and the beginning of its answer.
        """
        scores: list[float] = []
        for start in range(0, len(responses), self.batch_size):
            rows = slice(start, start + self.batch_size)
            scores += self.batch_scores(list(prompts[rows]), list(responses[rows]))
        return scores

    def batch_scores(self, prompts: list[str], responses: list[str]) -> list[float]:
        """Scores of one request, attempted several times where that may help.

        Raises:
            RewardError: If no attempt succeeds, or the answer is not one score for each response.
        """
        asked = f"{len(responses)} responses, the first: {shorten(responses[0])}"
        body = json.dumps({"prompts": prompts, "responses": responses}).encode()
        for attempt in range(self.retries + 1):
            try:
                answer = self.answer(body)
            except TransientError as error:
                if attempt == self.retries:
                    raise RewardError(
                        f"{self.url}: {error} in the last of {attempt + 1} attempts (retries); "
                        f"asked about {asked}"
                    ) from error
                pause = self.backoff * 2**attempt
                warnings.warn(
                    f"{self.url}: {error} in attempt {attempt + 1} of {self.retries + 1}; the next "
                    f"one is in {pause:g} seconds",
                    stacklevel=2,
                )
                sleep(pause)
            else:
                return self.checked_scores(answer, len(responses), asked)
        raise AssertionError("the last attempt returns or raises")

    def answer(self, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer to one request.

        Raises:
            RewardError: For a status that another attempt will not change.
            TransientError: If another attempt may succeed.
        """
        request = urllib.request.Request(
            self.url, body, {"Content-Type": "application/json", "Accept": "application/json"}
        )
        try:
            status, answer = exchanged(request, self.timeout)
        except TimeoutError as error:
            raise TransientError(f"no answer within {self.timeout:g} seconds (timeout)") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                reason = f"not within {self.timeout:g} seconds (timeout)"
            raise TransientError(f"no connection, or not to the end: {reason!s}") from error
        if status == TOO_MANY_REQUESTS or status >= 500:
            raise TransientError(f"status {status} and {beginning(answer)}")
        if not 200 <= status < 300:
            raise RewardError(
                f"{self.url}: expected status 200, got status {status} and {beginning(answer)}"
            )
        return status, answer

    def checked_scores(self, answer: tuple[int, bytes], count: int, asked: str) -> list[float]:
        """The scores in an answer.

        Raises:
            RewardError: If it is not `{"scores": [...]}` with `count` finite numbers.
        """
        status, body = answer
        try:
            scores: Any = json.loads(body)["scores"]
        except (ValueError, LookupError, TypeError, RecursionError):
            scores = None
        problem = ""
        if not isinstance(scores, list) or not all(map(is_number, scores)):
            problem = "got"
        elif len(scores) != count:
            problem = f"got {len(scores)} scores with"
        elif not all(map(math.isfinite, scores)):
            problem = "not all are finite in"
        if problem:
            raise RewardError(
                f'{self.url}: expected {{"scores": [...]}} with {count} finite numbers, one for '
                f"each response, {problem} status {status} and {beginning(body)}; asked about "
                f"{asked}"
            )
        return [float(score) for score in scores]


def exchanged(request: urllib.request.Request, timeout: float) -> tuple[int, bytes]:
    """Status and body of the answer, whatever the status."""
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def is_number(value: object) -> bool:
    """Whether a value of a JSON document is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def beginning(body: bytes) -> str:
    """The beginning of an answer's body, quoted."""
    text = body[: 4 * MAX_SHOWN].decode("utf-8", errors="replace")
    return f"the body {shorten(text)}" if text else "no body"
