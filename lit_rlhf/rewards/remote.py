"""Rewards from a service: JSON over HTTP, with a time limit and repeated attempts."""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, sleep
from typing import Any, NamedTuple

import httpx2
import torch

from lit_rlhf.checks import check_count, check_fields, check_not_negative, check_positive
from lit_rlhf.rewards.functions import MAX_SHOWN, RewardError, shorten
from lit_rlhf.time_limit import call_with_timeout

TOO_MANY_REQUESTS = 429
MAX_BODY = 2**24  # bytes, hundreds of thousands of scores
LARGEST_SCORE = torch.finfo(torch.float32).max


class ServiceResponse(NamedTuple):
    """Status and body of a service's response to a request."""

    status: int
    body: bytes


class TransientError(Exception):
    """A failure of one attempt that another attempt may not have."""


@dataclass(frozen=True)
class RemoteScorer:
    """Scores from a service that gets `{"prompts": [...], "responses": [...]}` by POST.

    With `fields`, the request also has `"fields": {name: [...]}`. The service answers
    `{"scores": [...]}`, a finite number for each response. An attempt is repeated if the connection
    fails, no answer comes in time, or the status is 429 or 5xx. Redirects are not followed.

    Args:
        url: URL of the service, http or https. It may begin with `user:$VARIABLE@`, which sends the
            password in that environment variable (HTTP Basic). A password itself is refused, as
            configurations, checkpoints and model cards hold the URL.
        batch_size: Most responses per request.
        timeout: Seconds that an attempt may take, from connecting to the end of the answer.
        retries: Further attempts after the first.
        backoff: Seconds before the second attempt; doubled before each further one.
        fields: Fields of the prompts' records that the service gets.

    Raises:
        ValueError: If the URL is not http or https or has a password in it, or a number is out of
            range.
    """

    url: str
    batch_size: int = 64
    timeout: float = 30.0
    retries: int = 4
    backoff: float = 1.0
    fields: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Check the arguments."""
        try:
            url = httpx2.URL(self.url)
        except httpx2.InvalidURL:
            url = httpx2.URL()  # refused below: the message of the error may quote a password
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(
                f"url: expected http://host... or https://host..., got {redact_url(self.url)!r}"
            )
        if url.userinfo and not re.fullmatch(r"\$[A-Za-z_]\w*", url.password):
            raise ValueError(
                "url: expected the name of an environment variable in place of the password, as in "
                f"https://user:$VARIABLE@host, got {redact_url(self.url)!r}"
            )
        check_count("batch_size", self.batch_size)
        check_count("retries", self.retries, minimum=0)
        check_fields(check_positive, self, "timeout")
        check_fields(check_not_negative, self, "backoff")

    @property
    def record_fields(self) -> Sequence[str]:
        """The fields of the records that the call needs."""
        return self.fields

    def __call__(
        self, prompts: Sequence[str], responses: Sequence[str], **fields: Sequence[Any]
    ) -> list[float]:
        """Score `responses` to `prompts`, whose records have `fields`.

        Raises:
            RewardError: If the last attempt fails, or the answer is not as expected; with the URL,
                the status and the beginning of the answer.
        """
        scores: list[float] = []
        for start in range(0, len(responses), self.batch_size):
            rows = slice(start, start + self.batch_size)
            request: dict[str, Any] = {
                "prompts": list(prompts[rows]),
                "responses": list(responses[rows]),
            }
            if fields:
                request["fields"] = {name: list(column[rows]) for name, column in fields.items()}
            scores += self._score_batch(request)
        return scores

    def _score_batch(self, request: Mapping[str, Any]) -> list[float]:
        """Score the responses of one request, with several attempts where that may help."""
        responses = request["responses"]
        content = f"{len(responses)} responses, the first: {shorten(responses[0])}"
        url = redact_url(self.url)
        body = json.dumps(request).encode()
        for attempt in range(self.retries + 1):
            try:
                return self._parse_scores(self._send(body), len(responses), content)
            except TransientError as error:
                if attempt == self.retries:
                    raise RewardError(
                        f"{url}: {error} in the last of {attempt + 1} attempts (retries); "
                        f"asked about {content}"
                    ) from error
                pause = self.backoff * 2**attempt
                warnings.warn(
                    f"{url}: {error} in attempt {attempt + 1} of {self.retries + 1}; the next "
                    f"one is in {pause:g} seconds",
                    stacklevel=2,
                )
                sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def _send(self, body: bytes) -> ServiceResponse:
        """Make one attempt.

        Raises:
            RewardError: For a status that another attempt will not change, or an answer that is too
                long.
            TransientError: If another attempt may succeed.
        """
        # The time limit of a socket starts anew with every byte that arrives, and resolving a name
        # has none. A thread that is given up ends at its next byte.
        post = partial(_post, self.url, self._password(), body, self.timeout)
        sent = call_with_timeout(post, self.timeout)
        too_slow = f"no answer within {self.timeout:g} seconds (timeout)"
        if not sent.done():
            raise TransientError(too_slow)
        try:
            status, answer = sent.result()
        except (TimeoutError, httpx2.TimeoutException) as error:
            raise TransientError(too_slow) from error
        except httpx2.TransportError as error:
            raise TransientError(f"the connection failed ({error})") from error
        if len(answer) > MAX_BODY:
            raise RewardError(
                f"{redact_url(self.url)}: expected an answer of at most {MAX_BODY} bytes, got a "
                f"longer one with status {status}"
            )
        if status == TOO_MANY_REQUESTS or status >= 500:
            raise TransientError(f"status {status} and {_quote_body(answer)}")
        if not 200 <= status < 300:
            hint = ", a redirect, which is not followed" if 300 <= status < 400 else ""
            raise RewardError(
                f"{redact_url(self.url)}: expected status 200, got status {status}{hint} and "
                f"{_quote_body(answer)}"
            )
        return ServiceResponse(status, answer)

    def _password(self) -> str:
        """The password in the environment variable that the URL names; empty for none.

        Raises:
            RewardError: If the environment does not have it.
        """
        variable = httpx2.URL(self.url).password.removeprefix("$")
        if variable and variable not in os.environ:
            raise RewardError(
                f"{redact_url(self.url)}: expected the password in the environment variable "
                f"{variable}, which is not set"
            )
        return os.environ.get(variable, "")

    def _parse_scores(self, answer: ServiceResponse, count: int, content: str) -> list[float]:
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
        # compared and not passed to `isfinite`, which fails for an integer of 400 digits
        elif not all(abs(score) < math.inf for score in scores):
            problem = "not all are finite in"
        elif not all(abs(score) <= LARGEST_SCORE for score in scores):
            problem = "not all are in the range of float32 in"
        if problem:
            raise RewardError(
                f'{redact_url(self.url)}: expected {{"scores": [...]}} with {count} finite '
                f"numbers, one for each response, {problem} status {answer.status} and "
                f"{_quote_body(answer.body)}; asked about {content}"
            )
        return [float(score) for score in scores]


def redact_url(url: str) -> str:
    """Replace user and password in a URL by `***`, for messages and reports."""
    # up to the last @: a password may contain a / or another @
    return re.sub(r"^(\w+://)?.*@", r"\1***@", url, flags=re.DOTALL)


def _post(url: str, password: str, body: bytes, timeout: float) -> ServiceResponse:
    deadline = monotonic() + timeout
    target = httpx2.URL(url)
    with httpx2.stream(
        "POST",
        target.copy_with(userinfo=b""),
        content=body,
        headers={
            "Content-Type": "application/json",
            "Accept": "application/json",
            "Accept-Encoding": "identity",  # the limit on size holds for what arrives
        },
        auth=(target.username, password) if target.userinfo else None,
        timeout=timeout,
        follow_redirects=False,
    ) as answer:
        return ServiceResponse(answer.status_code, _read_body(answer.iter_raw(), deadline))


def _read_body(parts: Iterable[bytes], deadline: float) -> bytes:
    """Read no further than the part that exceeds `MAX_BODY`.

    Raises:
        TimeoutError: If `deadline` has passed.
    """
    body = bytearray()
    for part in parts:
        body += part
        if len(body) > MAX_BODY:
            break
        if monotonic() > deadline:
            raise TimeoutError
    return bytes(body)


def _is_number(value: object) -> bool:
    """Whether a JSON value is a number; to Python, true and false are integers too."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _quote_body(body: bytes) -> str:
    text = body[: 4 * MAX_SHOWN].decode("utf-8", errors="replace")  # up to 4 bytes per character
    return f"the body {shorten(text)}" if text else "no body"
