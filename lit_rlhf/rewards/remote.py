"""Rewards from a service: JSON over HTTP, with a time limit and repeated attempts."""

import json
import math
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, sleep
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx2
import torch

from lit_rlhf.checks import check_count, check_fields, check_not_negative, check_positive
from lit_rlhf.rewards.functions import MAX_SHOWN, RewardError, shorten
from lit_rlhf.time_limit import call_with_timeout

TOO_MANY_REQUESTS = 429
MAX_BODY = 2**24  # bytes of a response, hundreds of thousands of scores
TRANSFER_HEADERS = ("content-encoding", "content-length", "transfer-encoding")
LARGEST_SCORE = torch.finfo(torch.float32).max

VARIABLE = re.compile(r"\$[A-Za-z_]\w*")
SECRET_NAME = re.compile("auth|cred|key|passw|secret|sig|token", re.IGNORECASE)
SECRET_VALUE = re.compile(r"(?=.*[A-Za-z])(?=.*\d)\S{20,}")
"""Recognizes a secret in a URL's query: by the parameter's name, or by its length."""
SECRET_PART = re.compile(
    r"(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z\d]{16,}"
    r"|[\dA-Fa-f]{8}(-[\dA-Fa-f]{4}){3}-[\dA-Fa-f]{12}"
)
"""Recognizes a secret in a URL's path: letters mixed with digits, or a UUID."""


class ServiceAnswer(NamedTuple):
    """The service's answer to one attempt.

    Attributes:
        status: HTTP status.
        body: Body of the response.
    """

    status: int
    body: bytes


class Credentials(NamedTuple):
    """User and password of HTTP Basic.

    Attributes:
        user: Name of the user.
        password: The password itself.
    """

    user: str
    password: str


class Target(NamedTuple):
    """Destination of a request.

    Attributes:
        url: The URL with its secrets, but without user and password.
        credentials: User and password; `None` without them.
    """

    url: httpx2.URL
    credentials: Credentials | None


class TransientError(Exception):
    """A failure of one attempt that another attempt may not have."""


class TooLongError(httpx2.ReadError):
    """A response of more than `MAX_BODY` bytes."""


class LimitedClient(httpx2.Client):
    """An HTTP client that limits the seconds and size of a whole response and follows no redirect.

    The time limit of httpx starts anew with every byte that arrives, resolving a name has none, and
    a redirect would send the texts elsewhere.

    Args:
        timeout: Seconds up to the end of a response.
        max_connections: Number of connections at a time; `None` for no limit.
        options: Further arguments of `httpx2.Client`.
    """

    def __init__(self, timeout: float, max_connections: int | None = None, **options: Any) -> None:
        limits = httpx2.Limits(max_connections=max_connections)
        super().__init__(timeout=timeout, limits=limits, **options)
        self._seconds = timeout

    def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request and read its response, in a thread that a slow server cannot hold up."""
        receive = partial(self._receive, request, options | {"stream": True})
        response = call_with_timeout(receive, self._seconds)
        if not response.done():
            raise httpx2.ReadTimeout("the time is up", request=request)
        return response.result()

    def _receive(self, request: httpx2.Request, options: dict[str, Any]) -> httpx2.Response:
        deadline = monotonic() + self._seconds
        response = super().send(request, **options)
        body = bytearray()
        try:
            for part in response.iter_bytes():
                body += part
                if len(body) > MAX_BODY:
                    status = response.status_code
                    message = f"a response of more than {MAX_BODY} bytes with status {status}"
                    raise TooLongError(message, request=request)
                if monotonic() > deadline:
                    raise httpx2.ReadTimeout("the time is up", request=request)
        finally:
            response.close()
        headers = {k: v for k, v in response.headers.items() if k.lower() not in TRANSFER_HEADERS}
        return httpx2.Response(
            response.status_code, headers=headers, content=bytes(body), request=request
        )


@dataclass(frozen=True)
class RemoteScorer:
    """Scores from a service that gets `{"prompts": [...], "responses": [...]}` by POST.

    With `fields`, the request also has `"fields": {name: [...]}`. The service answers
    `{"scores": [...]}`, a finite number for each response, or null to abstain. An attempt is
    repeated if the connection fails, no answer comes in time, or the status is 429 or 5xx.
    Redirects are not followed.

    Args:
        url: URL of the service, http or https. It may begin with `user:$VARIABLE@`, which sends the
            password in that environment variable (HTTP Basic); parameters of its query may be
            `name=$VARIABLE`, and parts of its path `$VARIABLE`. A password or token itself is
            refused, because configurations, checkpoints and model cards contain the URL.
        batch_size: Most responses per request.
        timeout: Seconds that an attempt may take, from connecting to the end of the answer.
        retries: Further attempts after the first.
        backoff: Seconds before the second attempt; doubled before each further one.
        fields: Fields of the prompts' records that the service gets.
    """

    url: str
    batch_size: int = 64
    timeout: float = 30.0
    retries: int = 4
    backoff: float = 1.0
    fields: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        try:
            url = httpx2.URL(self.url)
        except httpx2.InvalidURL:
            url = httpx2.URL()  # refused below: the message of the error may quote a password
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(
                f"url: expected http://host... or https://host..., got {redact_url(self.url)!r}"
            )
        if url.userinfo and not VARIABLE.fullmatch(url.password):
            raise ValueError(
                "url: expected the name of an environment variable in place of the password, as in "
                f"https://user:$VARIABLE@host, got {redact_url(self.url)!r}"
            )
        if url.fragment:
            raise ValueError(
                f"url: expected no fragment, which is never sent, got {redact_url(self.url)!r}"
            )
        if url.path != (shown := _redact_path(url.path)):
            raise ValueError(
                "url: expected the name of an environment variable in place of what looks like a "
                f"token, as in https://host/$VARIABLE/score, got {shown!r}"
            )
        for name, value in url.params.multi_items():
            secret = SECRET_NAME.search(name) or SECRET_VALUE.fullmatch(value)
            if value and secret and not VARIABLE.fullmatch(value):
                raise ValueError(
                    f"url: expected the name of an environment variable as value of {name!r}, as "
                    f"in https://host?{name}=$VARIABLE, got {redact_url(self.url)!r}"
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
    ) -> list[float | None]:
        """Score `responses` to `prompts`, whose records have `fields`."""
        scores: list[float | None] = []
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

    def _score_batch(self, request: Mapping[str, Any]) -> list[float | None]:
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

    def _send(self, body: bytes) -> ServiceAnswer:
        """Make one attempt."""
        target = self._expand_url()
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            "Accept-Encoding": "identity",  # the limit on size holds for what arrives
        }
        try:
            with LimitedClient(self.timeout, auth=target.credentials) as client:
                response = client.post(target.url, content=body, headers=headers)
        except httpx2.TimeoutException as error:
            raise TransientError(f"no answer within {self.timeout:g} seconds (timeout)") from error
        except TooLongError as error:
            raise RewardError(
                f"{redact_url(self.url)}: expected an answer of at most {MAX_BODY} bytes, got "
                f"{error}"
            ) from error
        except httpx2.TransportError as error:
            raise TransientError(f"the connection failed ({error})") from error
        status = response.status_code
        if status == TOO_MANY_REQUESTS or status >= 500:
            raise TransientError(f"status {status} and {_quote_body(response.content)}")
        if not 200 <= status < 300:
            hint = ", a redirect, which is not followed" if 300 <= status < 400 else ""
            raise RewardError(
                f"{redact_url(self.url)}: expected status 200, got status {status}{hint} and "
                f"{_quote_body(response.content)}"
            )
        return ServiceAnswer(status=status, body=response.content)

    def _expand_url(self) -> Target:
        """Put the values of environment variables into the URL."""

        def read(reference: str) -> str:
            variable = reference.removeprefix("$")
            if variable not in os.environ:
                raise RewardError(
                    f"{redact_url(self.url)}: expected a password or token in the environment "
                    f"variable {variable}, which is not set"
                )
            return os.environ[variable]

        def expand(text: str) -> str:
            return quote(read(text), safe="") if VARIABLE.fullmatch(text) else text

        url = httpx2.URL(self.url)
        path = "/".join(map(expand, url.raw_path.decode().partition("?")[0].split("/")))
        parts = [part.partition("=") for part in url.query.decode().split("&")]
        query = "&".join(name + sign + expand(value) for name, sign, value in parts)
        sent = f"{path}?{query}" if url.query else path
        credentials = None
        if url.userinfo:
            credentials = Credentials(user=url.username, password=read(url.password))
        return Target(
            url=url.copy_with(userinfo=b"", raw_path=sent.encode()), credentials=credentials
        )

    def _parse_scores(self, answer: ServiceAnswer, count: int, content: str) -> list[float | None]:
        """Take `count` finite scores or nulls from an answer to a request about `content`."""
        try:
            scores: Any = json.loads(answer.body)["scores"]
        except (ValueError, LookupError, TypeError, RecursionError):
            scores = None
        problem = ""
        # by type: true and false are integers to `isinstance`
        types = {int, float, type(None)}
        if not isinstance(scores, list) or not {type(score) for score in scores} <= types:
            problem = "got"
        elif len(scores) != count:
            problem = f"got {len(scores)} scores with"
        # compared and not passed to `isfinite`, which fails for an integer of 400 digits
        elif not all(abs(score) < math.inf for score in scores if score is not None):
            problem = "not all are finite in"
        elif not all(abs(score) <= LARGEST_SCORE for score in scores if score is not None):
            problem = "not all are in the range of float32 in"
        if problem:
            raise RewardError(
                f'{redact_url(self.url)}: expected {{"scores": [...]}} with {count} finite '
                f"numbers, one for each response, {problem} status {answer.status} and "
                f"{_quote_body(answer.body)}; asked about {content}"
            )
        return [None if score is None else float(score) for score in scores]


def redact_url(url: str) -> str:
    """Replace what is or may be secret in a URL by `***`, for messages and reports.

    These are user, password, fragment, the values of the query, and parts of the path that look
    like a secret. Names of environment variables stay.
    """
    # up to the last @: a password may contain a / or another @
    url = re.sub(r"^(\w+://)?.*@", r"\1***@", url, flags=re.DOTALL)
    url = re.sub("#.*", "#***", url, flags=re.DOTALL)
    address, query, values = url.partition("?")
    scheme, slashes, address = address.rpartition("://")
    host, slash, path = address.partition("/")
    values = re.sub(r"(^|&)([^=&#]*=)(?!\$\w+(?:[&#]|$))[^&#]+", r"\1\2***", values)
    return scheme + slashes + host + slash + _redact_path(path) + query + values


def _redact_path(path: str) -> str:
    parts = re.split("([/;=])", path)
    return "".join(
        "***"
        if not VARIABLE.fullmatch(part)
        and (SECRET_PART.search(part) or (part and SECRET_NAME.fullmatch(before)))
        else part
        for before, part in zip(["", "", *parts], parts, strict=False)
    )


def _quote_body(body: bytes) -> str:
    text = body[: 4 * MAX_SHOWN].decode("utf-8", errors="replace")  # up to 4 bytes per character
    return f"the body {shorten(text)}" if text else "no body"
