"""Rows of data files: the dialogue that each format is read into, and checked field access."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lit_rlhf.data.records import Message

Row = Mapping[str, Any]
"""One row of a data file: its fields by name."""

_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}


class FieldError(ValueError):
    """A field of a row that cannot be used; the reader adds the file and the line.

    Attributes:
        field: Name of the field.
        reason: What is wrong, in words that do not vary from row to row.
        detail: The particulars.
    """

    def __init__(self, field: str, reason: str, detail: str = "") -> None:
        """Make the error.

        Args:
            field: Name of the field.
            reason: What is wrong.
            detail: The particulars.
        """
        self.field = field
        self.reason = reason
        self.detail = detail
        super().__init__(f"field {field!r}: {reason}")


@dataclass(frozen=True)
class Response:
    """An unchecked response and the field that it came from."""

    value: Any
    field: str


@dataclass(frozen=True)
class Dialogue:
    """One dialogue of a row, not yet checked.

    Attributes:
        prompt: The turns before the response.
        field: The field that the prompt came from.
        chosen: The response, or the preferred one.
        rejected: The other response.
        rejected_prompt: The turns before the rejected response where the row repeats them.
        margin: By how much the chosen response is better.
    """

    prompt: tuple[Message, ...]
    field: str
    chosen: Response | None = None
    rejected: Response | None = None
    rejected_prompt: tuple[Message, ...] | None = None
    margin: Any = 0.0


def string_field(row: Row, field: str) -> str:
    """Read a field that must be a string with something in it.

    Args:
        row: The row.
        field: Name of the field.

    Returns:
        The string.

    Raises:
        FieldError: If the field is missing, empty or not a string.
    """
    if row.get(field) is None:
        raise FieldError(field, "missing")
    value = row[field]
    if not isinstance(value, str):
        raise FieldError(field, "not a string", type(value).__name__)
    if not value.strip():
        raise FieldError(field, "empty")
    return value


def first_field(row: Row, fields: tuple[str, ...]) -> str:
    """Find out which of several names a row uses for a field.

    Args:
        row: The row.
        fields: The names.

    Returns:
        The first that the row has, else the first of all.
    """
    return next((field for field in fields if row.get(field) is not None), fields[0])


def message_list(value: Any, field: str) -> tuple[Message, ...]:  # noqa: ANN401 - as in the file
    """Read a list of turns.

    Args:
        value: What the field holds.
        field: Name of the field.

    Returns:
        The turns.

    Raises:
        FieldError: If it is not a list of at least one turn.
    """
    if not isinstance(value, list):
        raise FieldError(field, "not a list of turns", type(value).__name__)
    if not value:
        raise FieldError(field, "empty")
    return tuple(turn_message(turn, field) for turn in value)


def turn_message(turn: Any, field: str) -> Message:  # noqa: ANN401 - as in the file
    """Read a turn, ``{role, content}`` or ``{from, value}``.

    Args:
        turn: What the field holds.
        field: Name of the field.

    Returns:
        The turn, with the role's usual name.

    Raises:
        FieldError: If it is not a turn with a known role and a string.
    """
    if not isinstance(turn, Mapping):
        raise FieldError(field, "a turn is not an object", type(turn).__name__)
    role_key, content_key = ("from", "value") if "from" in turn else ("role", "content")
    role, content = turn.get(role_key), turn.get(content_key)
    if not isinstance(role, str) or role.lower() not in _ROLES:
        raise FieldError(f"{field}.{role_key}", "unknown role", repr(role))
    if not isinstance(content, str):
        reason = "missing" if content is None else "not a string"
        raise FieldError(f"{field}.{content_key}", reason)
    return Message(_ROLES[role.lower()], content)
