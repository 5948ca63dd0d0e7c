"""Rows and records: what a data file holds, before and after it is parsed.

A reader yields rows, the fields of one line with its location. `lit_rlhf.data.formats` parses a row
into typed records. Whatever is wrong on the way is a `RecordError` that names the location.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

RecordKind = Literal["demonstration", "preference", "prompt", "text", "ptx"]
"""The kinds of records. `ptx` is plain text or demonstrations, whichever a file holds."""

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}
_TOOL_ROLES = {"tool", "function", "function_call", "ipython", "observation"}


class Location(NamedTuple):
    """The place of a row, which error messages show as `file:line`.

    Attributes:
        file: Path of the file, or hub id of the dataset.
        line: The line, the dataset's row or the JSON array's element, from 1; 0 is the whole file.
    """

    file: str
    line: int = 0

    def __str__(self) -> str:
        """The location as error messages show it."""
        return f"{self.file}:{self.line}" if self.line else self.file


NOWHERE = Location("")
"""The location of a record that was not read from a file."""


class RecordError(ValueError):
    """A row or record that cannot be used.

    Attributes:
        location: Where it was read from.
        reason: What is wrong, in words that do not depend on the row; bad records are counted by
            their reason.
        field: The field that is wrong, `""` if the record as a whole is.
        detail: What is particular to this row, for instance the value.
    """

    def __init__(
        self, location: Location, reason: str, *, field: str = "", detail: str = ""
    ) -> None:
        self.location = location
        self.reason = reason
        self.field = field
        self.detail = detail
        where = f"{location}: field '{field}'" if field else f"{location}"
        super().__init__(f"{where}: {reason}" + (f" ({detail})" if detail else ""))

    def __reduce__(self) -> tuple[Any, ...]:  # a worker process may raise it
        make = partial(type(self), field=self.field, detail=self.detail)
        return make, (self.location, self.reason)

    @property
    def file(self) -> str:
        """Path of the file, or hub id of the dataset."""
        return self.location.file

    @property
    def line(self) -> int:
        """Line or row, counted from 1; 0 for the file as a whole."""
        return self.location.line


@dataclass(frozen=True)
class Message:
    """One turn of a dialogue.

    Attributes:
        role: `"system"`, `"user"` or `"assistant"`.
        content: The text.
    """

    role: str
    content: str


def turns_as_dicts(turns: Sequence[Message]) -> list[dict[str, str]]:
    """The turns of a dialogue as data files and chat templates have them."""
    return [{"role": turn.role, "content": turn.content} for turn in turns]


@dataclass(frozen=True)
class Row:
    """One row of a data file or dataset, not yet checked.

    Attributes:
        fields: The values by name.
        location: Where it was read from.
        source: Name of its data source.
    """

    fields: Mapping[str, Any]
    location: Location
    source: str = ""

    def get(self, field: str) -> Any:  # noqa: ANN401 - whatever the file holds
        """The value of a field, None if the row does not have it."""
        return self.fields.get(field)

    def error(self, reason: str, *, field: str = "", detail: str = "") -> RecordError:
        """Make an error about this row, to be raised by the caller.

        Args:
            reason: What is wrong, in words that do not depend on the row.
            field: The field that is wrong, `""` if the row as a whole is.
            detail: What is particular to this row, for instance the value.
        """
        return RecordError(self.location, reason, field=field, detail=detail)

    def find_field(self, *names: str) -> str:
        """The first of several names of a field that the row has, or the first of all."""
        return next((name for name in names if self.get(name) is not None), names[0])

    def read_string(self, field: str) -> str:
        """Read a field that has to be a string with more than whitespace, or raise its error."""
        value = self.get(field)
        if value is None:
            raise self.error("missing", field=field)
        if not isinstance(value, str):
            raise self.error("not a string", field=field, detail=type(value).__name__)
        if not value.strip():
            raise self.error("empty", field=field)
        return value

    def check_text(self, field: str, text: str) -> None:
        """Refuse the text of a field with half of a surrogate pair, which JSON can escape."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            detail = f"{text[error.start]!r} at character {error.start + 1}"
            raise self.error("half of a surrogate pair", field=field, detail=detail) from error

    def read_turns(self, field: str) -> tuple[Message, ...]:
        """Read a field that must be a list of at least one turn, or raise its error.

        A system turn without text says nothing and is left out, like an empty field `system`.
        """
        value = self.get(field)
        if not isinstance(value, list):
            raise self.error("not a list of turns", field=field, detail=type(value).__name__)
        if not value:
            raise self.error("empty", field=field)
        turns = tuple(self.read_turn(turn, field) for turn in value)
        if turns[0].role == "system" and not turns[0].content.strip():
            turns = turns[1:]
        if not turns:
            raise self.error("empty", field=field)
        return turns

    def read_turn(self, turn: Any, field: str) -> Message:  # noqa: ANN401 - whatever the file holds
        """Read a turn, `{role, content}`, `{role, text}` or `{from, value}`, or raise its error."""
        if not isinstance(turn, Mapping):
            raise self.error("a turn is not an object", field=field, detail=type(turn).__name__)
        role_key = "from" if "from" in turn else "role"
        content_key = "value" if "from" in turn else "content"
        if content_key not in turn and "text" in turn:
            content_key = "text"
        role = turn.get(role_key)
        content = turn.get(content_key)
        if turn.get("tool_calls") or (isinstance(role, str) and role.lower() in _TOOL_ROLES):
            named = "tool_calls" if turn.get("tool_calls") else role_key
            raise self.error(
                "calls of tools are not supported", field=f"{field}.{named}", detail=repr(role)
            )
        if not isinstance(role, str) or role.lower() not in _ROLES:
            raise self.error("unknown role", field=f"{field}.{role_key}", detail=repr(role))
        if isinstance(content, list):
            content = self._join_parts(content, f"{field}.{content_key}")
        if not isinstance(content, str):
            if content is not None:
                raise self.error(
                    "not a string", field=f"{field}.{content_key}", detail=type(content).__name__
                )
            if _ROLES[role.lower()] == "user":
                raise self.error("missing", field=f"{field}.{content_key}")
            # a prompt needs no answer, and where one is needed the empty turn is refused
            content = ""
        return Message(_ROLES[role.lower()], content)

    def _join_parts(self, parts: Sequence[Any], field: str) -> str:
        """The text of a turn that is a list of parts, `{"type": "text", "text": ...}`."""
        texts = []
        for part in parts:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise self.error(
                    "a part is not a text", field=field, detail=f"a part of type {kind!r}"
                )
            texts.append(part["text"])
        return "".join(texts)


@dataclass(frozen=True)
class DemonstrationRecord:
    """A dialogue whose last turn, the assistant's, is to be imitated.

    Attributes:
        messages: The turns, which alternate after a system turn if there is one.
        source: Name of the data source.
        location: Where it was read from.
        has_untrained_turns: Whether the row says of an earlier answer that it is not trained on.
        is_label: Whether it was made from a person's label of responses that policies sampled.
        fields: All fields of its row by name, where `load_records` was asked to keep them.
    """

    messages: tuple[Message, ...]
    source: str
    location: Location = field(default=NOWHERE, compare=False)
    has_untrained_turns: bool = False
    is_label: bool = field(default=False, compare=False)
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class PreferenceRecord:
    """Two responses to one prompt.

    Attributes:
        prompt: The turns before the responses; the last is the human's.
        chosen: The preferred response.
        rejected: The other response.
        source: Name of the data source.
        margin: By how much the chosen response is better, in units of the reward; 0 if unknown.
        location: Where it was read from.
        is_label: Whether it is a person's label of responses that policies sampled.
    """

    prompt: tuple[Message, ...]
    chosen: str
    rejected: str
    source: str
    margin: float = 0.0
    location: Location = field(default=NOWHERE, compare=False)
    is_label: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class PromptRecord:
    """A dialogue that waits for the assistant's response.

    Attributes:
        prompt: The turns; the last is the human's.
        source: Name of the data source.
        location: Where it was read from.
        fields: All fields of its row by name, such as the answer that a reward compares with.
    """

    prompt: tuple[Message, ...]
    source: str
    location: Location = field(default=NOWHERE, compare=False)
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class TextRecord:
    """A document for language modelling, the ptx term of Eq. 17.

    Attributes:
        text: The document.
        source: Name of the data source.
        location: Where it was read from.
    """

    text: str
    source: str
    location: Location = field(default=NOWHERE, compare=False)


Record = DemonstrationRecord | PreferenceRecord | PromptRecord | TextRecord
AnyRecord = TypeVar("AnyRecord", bound=Record)
