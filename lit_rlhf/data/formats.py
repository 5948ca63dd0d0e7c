"""The record formats that data files come in, and how each becomes a dialogue.

A parser turns one row into a :class:`Dialogue`: a prompt, and where the row has them a chosen and a
rejected response. What a record of a given kind needs of these is checked in one place,
:func:`parsed_records`; so a preference file serves as demonstrations (its chosen responses) and as
prompts, and a demonstration file as prompts.
"""

import math
from typing import Any, Literal

from lit_rlhf.data.parsers import ANSWER_FIELDS, OUTPUT_FIELDS, PARSERS
from lit_rlhf.data.records import (
    DemonstrationRecord,
    Message,
    PreferenceRecord,
    PromptRecord,
    Record,
    RecordKind,
    TextRecord,
)
from lit_rlhf.data.rows import Dialogue, FieldError, Response, Row, string_field

Format = Literal[
    "auto",
    "hh",
    "messages",
    "pairs",
    "conversations",
    "instruction",
    "question",
    "multiple_choice",
    "instances",
    "prompt",
    "text",
]

FORMATS: dict[str, str] = {
    "hh": "chosen and rejected: full dialogues with '\\n\\nHuman:' and '\\n\\nAssistant:'",
    "messages": "messages: a list of {role, content}",
    "pairs": "prompt, chosen, rejected: strings or lists of {role, content}",
    "conversations": "conversations: a list of {from, value}; chosen, rejected for preferences",
    "instruction": "instruction, input (or context), output (or response)",
    "question": "question (or prompt), answer (or std_answer, completion, response)",
    "multiple_choice": "question, options (or A, B, C, ...), answer: a letter or an index",
    "instances": "instruction, instances: a list of {input, output}",
    "prompt": "prompt or question (a string or turns), or instruction with input",
    "text": "text, or any .txt file",
}
"""The known formats and the fields that each reads."""


def detected_format(row: Row) -> str:
    """Tell a file's format from the fields of its first record.

    Args:
        row: The record.

    Returns:
        A key of :data:`FORMATS`.

    Raises:
        FieldError: If no format has these fields; the message lists those there are.
    """
    keys = {key for key, value in row.items() if value is not None}
    if "conversations" in keys:
        return "conversations"
    if "messages" in keys:
        return "messages"
    if {"chosen", "rejected"} <= keys:
        plain = isinstance(row["chosen"], str) and "prompt" not in keys
        return "hh" if plain else "pairs"
    if {"instruction", "instances"} <= keys:
        return "instances"
    if "instruction" in keys:
        return "instruction" if keys & set(OUTPUT_FIELDS) else "prompt"
    if "question" in keys and ("options" in keys or {"A", "B"} <= keys):
        return "multiple_choice"
    if keys & {"question", "prompt"}:
        return "question" if keys & set(ANSWER_FIELDS) else "prompt"
    if "text" in keys:
        return "text"
    known = "".join(f"\n  {name}: {what}" for name, what in FORMATS.items())
    raise FieldError(
        "", "no known format has these fields", f"{sorted(keys)}; known formats:{known}"
    )


def parsed_records(
    row: Row, format: str, kind: RecordKind, source: str, location: str
) -> list[Record]:
    """Turn one row into records.

    The kind ``ptx`` takes plain text from the format ``text`` and demonstrations from the others.

    Args:
        row: The row.
        format: A key of :data:`FORMATS`.
        kind: The kind of record wanted.
        source: Name of the source, kept in the records.
        location: File and line, kept in the records.

    Returns:
        The records: one, or for the format ``instances`` one per instance.

    Raises:
        FieldError: If the row does not give such a record.
    """
    if kind == "ptx":
        kind = "text" if format == "text" else "demonstration"
    if kind == "text":
        return [TextRecord(string_field(row, "text"), source, location)]
    if format == "text":
        raise FieldError("text", f"plain text has no {kind} in it")
    if kind != "preference":  # then nothing that is wrong with the rejected response matters
        row = {field: value for field, value in row.items() if field != "rejected"}
    dialogues = PARSERS[format](row)
    return [_record(dialogue, kind, source, location) for dialogue in dialogues]


def _record(dialogue: Dialogue, kind: RecordKind, source: str, location: str) -> Record:
    prompt = _checked_prompt(dialogue.prompt, dialogue.field, dialogue.chosen is not None)
    if kind == "prompt":
        return PromptRecord(prompt, source, location)
    missing = "chosen" if kind == "preference" else dialogue.field
    chosen = _checked_response(dialogue.chosen, missing)
    if kind == "demonstration":
        return DemonstrationRecord((*prompt, Message("assistant", chosen)), source, location)
    rejected = _checked_response(dialogue.rejected, "rejected")
    if dialogue.rejected_prompt is not None and dialogue.rejected_prompt != dialogue.prompt:
        raise FieldError("rejected", "chosen and rejected have different prompts")
    if chosen.strip() == rejected.strip():
        raise FieldError("rejected", "chosen and rejected are equal")
    return PreferenceRecord(
        prompt, chosen, rejected, source, _checked_margin(dialogue.margin), location
    )


def _checked_prompt(prompt: tuple[Message, ...], field: str, answered: bool) -> tuple[Message, ...]:
    turns = prompt[1:] if prompt and prompt[0].role == "system" else prompt
    for message in prompt:
        if not message.content.strip():
            raise FieldError(field, f"empty {_named(message.role)} turn")
    for turn, message in enumerate(turns):
        if message.role == "system":
            raise FieldError(field, "a system turn after the first turn")
        before = turns[turn - 1].role if turn else "assistant"
        if message.role == before:
            if turn == 0:
                raise FieldError(field, "the dialogue starts with an assistant turn")
            raise FieldError(field, f"two {_named(before)} turns in a row")
    if not turns:
        raise FieldError(field, "no human turn")
    if turns[-1].role == "assistant":
        raise FieldError(
            field,
            "two assistant turns in a row"
            if answered
            else "the prompt ends with an assistant turn",
        )
    return prompt


def _checked_response(response: Response | None, wanted: str) -> str:
    if response is None:
        raise FieldError(wanted, "missing, or no assistant turn at the end")
    if not isinstance(response.value, str):
        raise FieldError(response.field, "not a string", type(response.value).__name__)
    if not response.value.strip():
        raise FieldError(response.field, "empty assistant turn")
    return response.value


def _checked_margin(margin: Any) -> float:  # noqa: ANN401 - whatever the file holds
    good = isinstance(margin, int | float) and not isinstance(margin, bool)
    if not good or not math.isfinite(margin) or margin < 0:
        raise FieldError("margin", "not a number of at least 0", repr(margin))
    return float(margin)


def _named(role: str) -> str:
    return "human" if role == "user" else role
