"""The client of every service: reward servers, judges and servers that sample.

It speaks JSON over HTTP. A server may be down, slow, wrong or hostile: an exchange ends by its
deadline, an answer has a largest size, a redirect is not followed, and no secret is shown.
"""

import json
import logging
import re
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from time import monotonic, sleep
from typing import Any, NamedTuple
from urllib.parse import quote, quote_plus

import httpx2

from lit_callbacks.files import parse_json
from lit_rlhf.checks import check_count, check_not_negative, check_positive
from lit_rlhf.errors import UserError
from lit_rlhf.terminal import MAX_SHOWN, shorten
from lit_rlhf.time_limit import call_with_timeout
from lit_rlhf.urls import MissingVariableError, ServiceUrl, Target

MAX_BODY = 2**24  # bytes of an answer, hundreds of thousands of scores
_MAX_READ = 2**16  # bytes of an answer of which a message may show the beginning
LONGEST_PAUSE = 60.0  # seconds that a server may ask to wait before the next attempt
_TIMEOUT = 408
_TOO_MANY_REQUESTS = 429
_HEADERS = {
    "Content-Type": "application/json",
    "Accept": "application/json",
    "Accept-Encoding": "identity",  # the limit on size holds for what arrives
}

# it logs each request with its URL, which has the values of environment variables in it
logging.getLogger("httpx2").setLevel(logging.WARNING)


class RemoteError(UserError):
    """A service that does not answer as it should; the message begins with its address.

    Attributes:
        problem: What is wrong, without the address.
        status: HTTP status of the answer; `None` without one.
        timed_out: Whether there was no answer in time.
        body: Body of the answer.

    Args:
        address: The address without secrets.
        problem: What is wrong.
        status: HTTP status of the answer.
        timed_out: Whether there was no answer in time.
        body: Body of the answer.
    """

    def __init__(
        self,
        address: str,
        problem: str,
        *,
        status: int | None = None,
        timed_out: bool = False,
        body: bytes = b"",
    ) -> None:
        super().__init__(f"{address}: {problem}")
        self.problem = problem
        self.status = status
        self.timed_out = timed_out
        self.body = body


class _TransientError(Exception):
    """A failure of one attempt that another attempt may not have."""

    def __init__(
        self, message: str, answer: "Answer | None" = None, timed_out: bool = False
    ) -> None:
        super().__init__(message)
        self.answer = answer
        self.timed_out = timed_out


class Answer(NamedTuple):
    """A service's answer.

    Attributes:
        status: HTTP status.
        body: Body of the response.
        pause: Seconds that the service asks to wait before another attempt; `None` for no wish.
        secrets: What was sent and may not be shown if the service repeats it, in any spelling.
    """

    status: int
    body: bytes
    pause: float | None = None
    secrets: Sequence[str] = ()

    @property
    def shown(self) -> str:
        """The beginning of the body for a message."""
        body = self.body[:_MAX_READ]
        for secret in self.secrets:
            in_json = json.dumps(secret)[1:-1]
            in_url = (quote(secret, safe=""), quote_plus(secret))
            for spelling in (secret, *in_url, in_json, in_json.replace("/", r"\/")):
                pattern = re.escape(spelling.encode())
                body = re.sub(pattern, b"***", body, flags=re.IGNORECASE)  # %2f is %2F
        # a character has 4 bytes at most
        text = body[: 4 * MAX_SHOWN].decode("utf-8", errors="replace")
        return f"the body {shorten(text)}" if text else "no body"

    def parse(self) -> Any:  # noqa: ANN401  # whatever the service has sent
        """Parse the body as JSON; `None` if it is none, or gives a key twice."""
        try:
            return parse_json(self.body)
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"status {self.status} and {self.shown}"


class RemoteClient(AbstractContextManager["RemoteClient"]):
    """A client of one service; a context manager, which closes its connections.

    An attempt is repeated if the connection fails, no answer comes in time, or the status is 408,
    429 or 5xx. Threads may share a client.

    Args:
        url: Address of the service.
        timeout: Seconds that an attempt may take, from connecting to the end of the answer.
        retries: Further attempts after the first.
        backoff: Seconds before the second attempt; doubled before each further one. A service may
            ask for another pause.
        key: Key that is sent with each request, as `Authorization: Bearer`; empty for none.
        max_connections: Number of connections at a time; `None` for no limit.
    """

    def __init__(
        self,
        url: ServiceUrl,
        *,
        timeout: float,
        retries: int = 0,
        backoff: float = 1.0,
        key: str = "",
        max_connections: int | None = None,
    ) -> None:
        check_positive("timeout", timeout)
        check_count("retries", retries, minimum=0)
        check_not_negative("backoff", backoff)
        if not (key.isascii() and key.isprintable()):  # the error of the client would show it
            raise ValueError("key: expected printable ASCII characters, got others")
        self.url = url
        self.timeout = timeout
        self.retries = retries
        self.backoff = backoff
        self._key = key
        headers = _HEADERS | ({"Authorization": f"Bearer {key}"} if key else {})
        limits = httpx2.Limits(max_connections=max_connections)
        try:
            self._client = httpx2.Client(timeout=timeout, limits=limits, headers=headers)
        except Exception as error:  # its kinds have no common class, and it may quote a password
            raise UserError(
                f"{url.shown}: expected a proxy's URL, http://host:port, in HTTP_PROXY, "
                "HTTPS_PROXY and ALL_PROXY of the environment, and certificates that can be read "
                f"in SSL_CERT_FILE, got others ({type(error).__name__})"
            ) from None

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def get(self, path: str = "") -> Answer:
        """Ask by GET.

        Args:
            path: What follows the path of the address.

        Raises:
            RemoteError: If there is no answer with status 2xx.
        """
        return self._ask("GET", path, b"")

    def post(self, path: str = "", body: object = None) -> Answer:
        """Ask by POST.

        Args:
            path: What follows the path of the address.
            body: Is sent as JSON; `None`: nothing is sent.

        Raises:
            RemoteError: If there is no answer with status 2xx.
        """
        return self._ask("POST", path, b"" if body is None else json.dumps(body).encode())

    def fail(self, expected: str, answer: Answer) -> RemoteError:
        """Build the error for an answer of another form.

        Args:
            expected: The form, for the message.
            answer: The answer.
        """
        return RemoteError(
            self.url.shown,
            f"expected {expected}, got {answer}",
            status=answer.status,
            body=answer.body,
        )

    def _ask(self, method: str, path: str, content: bytes) -> Answer:
        """Send a request, with several attempts where that may help."""
        address = self.url.shown
        try:
            target = self.url.expand(path)
        except MissingVariableError as error:
            raise RemoteError(address, str(error).removeprefix(f"{address}: ")) from error
        for attempt in range(self.retries + 1):
            try:
                return self._attempt(method, target, content)
            except _TransientError as error:
                answer = error.answer
                if attempt == self.retries:
                    option = " (retries)" if self.retries else ""
                    raise RemoteError(
                        address,
                        f"{error} in the last of {attempt + 1} attempts{option}",
                        status=None if answer is None else answer.status,
                        timed_out=error.timed_out,
                        body=b"" if answer is None else answer.body,
                    ) from error
                pause = self.backoff * 2**attempt
                if answer is not None and answer.pause is not None:
                    pause = answer.pause
                warnings.warn(
                    f"{address}: {error} in attempt {attempt + 1} of {self.retries + 1}; the next "
                    f"one is in {pause:g} seconds",
                    stacklevel=2,
                )
                sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self, method: str, target: Target, content: bytes) -> Answer:
        """Send a request once, in a thread that a slow server cannot hold up.

        The time limit of httpx starts anew with every byte that arrives, and resolving a name has
        none.
        """
        too_late = f"no answer within {self.timeout:g} seconds (timeout)"
        receive = partial(self._receive, method, target, content)
        exchange = call_with_timeout(receive, self.timeout)
        if not exchange.done():
            raise _TransientError(too_late, timed_out=True)
        try:
            answer = exchange.result()
        except httpx2.TimeoutException as error:
            raise _TransientError(too_late, timed_out=True) from error
        # a UnicodeError: a name of a host that cannot be looked up
        except (httpx2.TransportError, UnicodeError) as error:
            raise _TransientError(f"the connection failed ({error})") from error
        status = answer.status
        if status in (_TIMEOUT, _TOO_MANY_REQUESTS) or status >= 500:
            raise _TransientError(str(answer), answer)
        if not 200 <= status < 300:
            hint = ", a redirect, which is not followed" if 300 <= status < 400 else ""
            raise RemoteError(
                self.url.shown,
                f"expected status 200, got status {status}{hint} and {answer.shown}",
                status=status,
                body=answer.body,
            )
        return answer

    def _receive(self, method: str, target: Target, content: bytes) -> Answer:
        """Send a request and read the answer as far as the limits allow."""
        deadline = monotonic() + self.timeout
        request = self._client.build_request(method, target.url, content=content)
        response = self._client.send(request, auth=target.credentials, stream=True)
        status = response.status_code
        body = bytearray()
        try:
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding.lower() != "identity":  # a small body could become a very large one
                raise RemoteError(
                    self.url.shown,
                    f"expected an answer that is not compressed, got {encoding:.20} with status "
                    f"{status}",
                    status=status,
                )
            for part in response.iter_raw():
                body += part
                if len(body) > MAX_BODY:
                    raise RemoteError(
                        self.url.shown,
                        f"expected an answer of at most {MAX_BODY} bytes, got a response of more "
                        f"than {MAX_BODY} bytes with status {status}",
                        status=status,
                    )
                if monotonic() > deadline:
                    raise httpx2.ReadTimeout("the time is up", request=request)
        finally:
            response.close()
        pause = _parse_pause(response.headers.get("Retry-After", ""))
        secrets = [secret for secret in (*target.secrets, self._key) if secret]
        return Answer(status=status, body=bytes(body), pause=pause, secrets=secrets)


def _parse_pause(text: str) -> float | None:
    """Seconds of a `Retry-After`, as far as they are a reasonable pause."""
    try:
        pause = float(text)
    except ValueError:
        return None
    return pause if 0 <= pause <= LONGEST_PAUSE else None
