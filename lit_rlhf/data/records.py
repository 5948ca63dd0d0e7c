"""What a data file holds once read: typed records, and the error that a bad one raises."""

from dataclasses import dataclass, field
from typing import Literal

RecordKind = Literal["demonstration", "preference", "prompt", "text", "ptx"]
"""Kinds of records to read; ``ptx`` is plain text or demonstrations, whichever a file holds."""


@dataclass(frozen=True)
class Message:
    """One turn of a dialogue.

    Attributes:
        role: ``"system"``, ``"user"`` or ``"assistant"``.
        content: What was said, without any marker of the template.
    """

    role: str
    content: str


@dataclass(frozen=True)
class DemonstrationRecord:
    """A dialogue whose last turn, the assistant's, is to be imitated.

    Attributes:
        messages: An optional system turn, then human and assistant turns in alternation.
        source: Name of the source it came from.
        location: ``file:line`` (or ``dataset:row``) it was read from, for messages.
    """

    messages: tuple[Message, ...]
    source: str
    location: str = field(default="", compare=False)


@dataclass(frozen=True)
class PreferenceRecord:
    """Two responses to one prompt, of which the first was preferred.

    Attributes:
        prompt: The dialogue up to and with the last human turn.
        chosen: The preferred response.
        rejected: The other one.
        source: Name of the source it came from.
        margin: By how much the chosen one is better, in the units of the reward; 0 if unknown.
        location: ``file:line`` (or ``dataset:row``) it was read from, for messages.
    """

    prompt: tuple[Message, ...]
    chosen: str
    rejected: str
    source: str
    margin: float = 0.0
    location: str = field(default="", compare=False)


@dataclass(frozen=True)
class PromptRecord:
    """A dialogue that waits for the assistant's answer.

    Attributes:
        prompt: The dialogue up to and with the last human turn.
        source: Name of the source it came from.
        location: ``file:line`` (or ``dataset:row``) it was read from, for messages.
    """

    prompt: tuple[Message, ...]
    source: str
    location: str = field(default="", compare=False)


@dataclass(frozen=True)
class TextRecord:
    """Plain text for language modelling (the ptx term of Eq. 17).

    Attributes:
        text: One document.
        source: Name of the source it came from.
        location: ``file:line`` (or ``dataset:row``) it was read from, for messages.
    """

    text: str
    source: str
    location: str = field(default="", compare=False)


Record = DemonstrationRecord | PreferenceRecord | PromptRecord | TextRecord


class RecordError(ValueError):
    """A record that cannot be used.

    Attributes:
        file: Path of the file, or the hub id of the dataset.
        line: Line of the file, or row of the dataset, counted from 1; 0 for the file as a whole.
        field: The field at fault, "" where the record as a whole is.
        reason: What is wrong, in words that do not vary from record to record.
    """

    def __init__(
        self, file: str, line: int, reason: str, field: str = "", detail: str = ""
    ) -> None:
        """Make the error.

        Args:
            file: Path of the file, or the hub id of the dataset.
            line: Line or row counted from 1; 0 for the file as a whole.
            reason: What is wrong; bad records are counted by it.
            field: The field at fault.
            detail: What makes this case differ from others with the same reason.
        """
        self.file = file
        self.line = line
        self.field = field
        self.reason = reason
        self.detail = detail
        where = file if line == 0 else f"{file}:{line}"
        if field:
            where += f": field '{field}'"
        super().__init__(f"{where}: {reason}" + (f" ({detail})" if detail else ""))
