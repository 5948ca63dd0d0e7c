"""Addresses of services: the type of every option that takes a URL.

Configurations, checkpoints, model cards and logs contain an address as it is written. So it may not
contain a secret, only the name of the environment variable that holds it.
"""

import os
import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote

from lit_rlhf.errors import UserError
from lit_rlhf.terminal import hide_passwords

_VARIABLE = re.compile(r"\$[A-Za-z_]\w*")
_SECRET_NAME = re.compile("auth|cred|key|passw|secret|sig|token", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"(?=.*[A-Za-z])(?=.*\d)\S{20,}")
"""Recognizes a secret in a URL's query: by the parameter's name, or by its length."""
_SECRET_PART = re.compile(
    r"(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z\d]{16,}"
    r"|[\dA-Fa-f]{8}(-[\dA-Fa-f]{4}){3}-[\dA-Fa-f]{12}"
)
"""Recognizes a secret in a URL's path: letters mixed with digits, or a UUID."""


class MissingVariableError(UserError):
    """An environment variable that an address names and that is not set."""


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
        secrets: What may not be shown: the values of the environment variables in it, and user and
            password as HTTP Basic sends them.
    """

    url: str
    credentials: Credentials | None
    secrets: Sequence[str]


@dataclass(frozen=True)
class ServiceUrl:
    """The address of a service, http or https, checked to contain no secret.

    In place of a secret it has the name of an environment variable, which is read for each request:
    the password (`https://user:$VARIABLE@host`), the whole value of a parameter of the query
    (`https://host?token=$VARIABLE`), or a part of the path (`https://host/$VARIABLE/score`).

    Args:
        text: The address.
        option: Name of the option that has it, for messages.

    Raises:
        ValueError: If it is no such address, or contains what looks like a secret. The message does
            not show it.
    """

    text: str
    option: str = "url"

    def __post_init__(self) -> None:
        import httpx2

        try:
            url = httpx2.URL(self.text)
        except httpx2.InvalidURL:
            url = httpx2.URL()  # refused below: the message of the error may quote a password
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(
                f"{self.option}: expected http://host... or https://host..., got {self.shown!r}"
            )
        if url.userinfo and not _VARIABLE.fullmatch(url.password):
            raise ValueError(
                f"{self.option}: expected the name of an environment variable in place of the "
                f"password, as in https://user:$VARIABLE@host, got {self.shown!r}"
            )
        if url.fragment:
            raise ValueError(
                f"{self.option}: expected no fragment, which is never sent, got {self.shown!r}"
            )
        if url.path != (path := _redact_path(url.path)):
            raise ValueError(
                f"{self.option}: expected the name of an environment variable in place of what "
                f"looks like a token, as in https://host/$VARIABLE/score, got {path!r}"
            )
        for name, value in url.params.multi_items():
            secret = _SECRET_NAME.search(name) or _SECRET_VALUE.fullmatch(value)
            if value and secret and not _VARIABLE.fullmatch(value):
                raise ValueError(
                    f"{self.option}: expected the name of an environment variable as value of "
                    f"{name!r}, as in https://host?{name}=$VARIABLE, got {self.shown!r}"
                )

    @property
    def shown(self) -> str:
        """The address for messages and reports, see `redact_url`."""
        return redact_url(self.text)

    def expand(self, path: str = "") -> Target:
        """Put the values of environment variables into the address.

        Args:
            path: What follows the address's own path, such as `/v1/models`.

        Raises:
            MissingVariableError: If a variable is not set.
        """
        import httpx2

        secrets: list[str] = []

        def read(reference: str) -> str:
            variable = reference.removeprefix("$")
            if variable not in os.environ:
                raise MissingVariableError(
                    f"{self.shown}: expected a password or token in the environment variable "
                    f"{variable}, which is not set"
                )
            secrets.append(os.environ[variable])
            return os.environ[variable]

        def expand(text: str) -> str:
            return quote(read(text), safe="") if _VARIABLE.fullmatch(text) else text

        url = httpx2.URL(self.text)
        own_path = url.raw_path.decode().partition("?")[0]
        whole_path = own_path.rstrip("/") + path if path else own_path
        target = "/".join(map(expand, whole_path.split("/")))
        if url.query:
            parts = [part.partition("=") for part in url.query.decode().split("&")]
            target += "?" + "&".join(name + sign + expand(value) for name, sign, value in parts)
        credentials = None
        if url.userinfo:
            credentials = Credentials(user=url.username, password=read(url.password))
            secrets.append(b64encode(":".join(credentials).encode()).decode())
        expanded = url.copy_with(userinfo=b"", raw_path=target.encode())
        return Target(url=str(expanded), credentials=credentials, secrets=secrets)


def has_password(text: str) -> bool:
    """Whether a text has a URL, of whatever kind, with a user or a password itself in it."""
    return hide_passwords(text) != text


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
        if not _VARIABLE.fullmatch(part)
        and (_SECRET_PART.search(part) or (part and _SECRET_NAME.fullmatch(previous)))
        else part
        for previous, part in zip(["", "", *parts], parts, strict=False)
    )
