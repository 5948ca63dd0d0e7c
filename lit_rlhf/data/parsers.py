"""One parser per record format: a row becomes the dialogues it holds, not yet checked."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from lit_rlhf.data.records import Message
from lit_rlhf.data.rows import (
    Dialogue,
    FieldError,
    Response,
    Row,
    first_field,
    message_list,
    string_field,
    turn_message,
)

ANSWER_FIELDS = ("answer", "std_answer", "completion", "response")
OUTPUT_FIELDS = ("output", "response")
_INPUT_FIELDS = ("input", "context")


_MARKER = re.compile(r"\n\n(Human|Assistant):")


def split_dialogue(text: str) -> tuple[Message, ...] | None:
    r"""Split a dialogue string into turns, without outer whitespace.

    A marker counts wherever it stands behind an empty line, so a turn that quotes a whole dialogue
    is split too; such records then show two turns of one speaker in a row, which the reader
    reports. Markers within a line are text.

    Args:
        text: A dialogue that starts with ``\n\nHuman:`` (the empty line before it may be missing).

    Returns:
        The turns, or None if the text starts with something else.
    """
    parts = _MARKER.split("\n\n" + text.lstrip())
    if parts[0].strip() or parts[1:2] != ["Human"]:
        return None
    roles = {"Human": "user", "Assistant": "assistant"}
    return tuple(
        Message(roles[speaker], content.strip())
        for speaker, content in zip(parts[1::2], parts[2::2], strict=True)
    )


def _split(turns: tuple[Message, ...], field: str) -> Dialogue:
    """A dialogue whose last turn, if it is the assistant's, is the response."""
    if turns[-1].role == "assistant":
        return Dialogue(turns[:-1], field, Response(turns[-1].content, field))
    return Dialogue(turns, field)


def _margin(row: Row) -> Any:  # noqa: ANN401 - whatever the file holds
    return 0.0 if row.get("margin") is None else row["margin"]


def _hh(row: Row) -> list[Dialogue]:
    halves = []
    for field in ("chosen", "rejected") if row.get("rejected") is not None else ("chosen",):
        turns = split_dialogue(string_field(row, field))
        if turns is None:
            raise FieldError(field, "the dialogue does not start with '\\n\\nHuman:'")
        halves.append(_split(turns, field))
    chosen, rejected = halves[0], halves[-1] if len(halves) == 2 else None
    if rejected is None:
        return [chosen]
    return [
        Dialogue(
            chosen.prompt,
            "chosen",
            chosen.chosen,
            rejected.chosen,
            rejected.prompt,
            _margin(row),
        )
    ]


def _chat(row: Row) -> list[Dialogue]:
    return [_split(message_list(row.get("messages"), "messages"), "messages")]


def _asked(row: Row, field: str) -> tuple[Message, ...]:
    """The prompt in a field: turns, a string, or a string in HH-RLHF's dialogue format."""
    if isinstance(row.get(field), list):
        return message_list(row[field], field)
    text = string_field(row, field)
    turns = split_dialogue(text) if text.startswith("\n\nHuman:") else None
    if turns is None:
        return (Message("user", text),)
    opened = turns[-1].role == "assistant" and not turns[-1].content
    return turns[:-1] if opened else turns


def _pairs(row: Row) -> list[Dialogue]:
    stem = () if row.get("prompt") is None else _asked(row, "prompt")
    prompts, responses = [], []
    for field in ("chosen", "rejected"):
        value = row.get(field)
        if isinstance(value, list):
            turns = message_list(value, field)
            # Either the response alone, or the dialogue with the prompt repeated.
            whole = turns if turns[: len(stem)] == stem else stem + turns
            half = _split(whole, field)
            prompts.append(half.prompt)
            responses.append(half.chosen)
        else:
            prompts.append(stem)
            responses.append(None if value is None else Response(value, field))
    if not prompts[0]:
        raise FieldError("prompt", "missing")
    return [Dialogue(prompts[0], "prompt", responses[0], responses[1], prompts[1], _margin(row))]


def _conversations(row: Row) -> list[Dialogue]:
    turns = message_list(row.get("conversations"), "conversations")
    system = row.get("system")
    if isinstance(system, str) and system.strip():
        turns = (Message("system", system), *turns)
    if row.get("chosen") is None and row.get("rejected") is None:
        return [_split(turns, "conversations")]
    responses = []
    for field in ("chosen", "rejected"):
        value = row.get(field)
        if isinstance(value, Mapping):
            turn = turn_message(value, field)
            if turn.role != "assistant":
                raise FieldError(field, "not an assistant turn")
            value = turn.content
        responses.append(None if value is None else Response(value, field))
    return [Dialogue(turns, "conversations", responses[0], responses[1], margin=_margin(row))]


def _instructed(instruction: str, extra: Any, field: str) -> tuple[Message, ...]:  # noqa: ANN401
    if extra is not None and not isinstance(extra, str):
        raise FieldError(field, "not a string", type(extra).__name__)
    text = f"{instruction}\n\n{extra}" if extra and extra.strip() else instruction
    return (Message("user", text),)


def _instruction(row: Row) -> list[Dialogue]:
    field, extra = first_field(row, OUTPUT_FIELDS), first_field(row, _INPUT_FIELDS)
    prompt = _instructed(string_field(row, "instruction"), row.get(extra), extra)
    value = row.get(field)
    return [Dialogue(prompt, "instruction", None if value is None else Response(value, field))]


def _question(row: Row) -> list[Dialogue]:
    asked, answered = first_field(row, ("question", "prompt")), first_field(row, ANSWER_FIELDS)
    value = row.get(answered)
    return [
        Dialogue(_asked(row, asked), asked, None if value is None else Response(value, answered))
    ]


def _multiple_choice(row: Row) -> list[Dialogue]:
    letters = "ABCDEFGHIJ"
    options = row.get("options")
    if options is None:
        options = [row[letter] for letter in letters if row.get(letter) is not None]
    if not isinstance(options, list) or not 2 <= len(options) <= len(letters):
        raise FieldError("options", f"not a list of 2 to {len(letters)} options")
    lines = [f"{letter}. {option}" for letter, option in zip(letters, options, strict=False)]
    prompt = (Message("user", "\n".join([string_field(row, "question"), *lines])),)
    answer = row.get("answer")
    if answer is None:
        return [Dialogue(prompt, "question")]
    if isinstance(answer, str):
        answer = letters.find(answer.strip()) if len(answer.strip()) == 1 else -1
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(options):
        raise FieldError("answer", "not the letter or the index of an option", repr(row["answer"]))
    return [Dialogue(prompt, "question", Response(lines[answer], "answer"))]


def _instances(row: Row) -> list[Dialogue]:
    instruction = string_field(row, "instruction")
    instances = row.get("instances")
    if not isinstance(instances, list) or not instances:
        raise FieldError("instances", "not a list of at least one instance")
    dialogues = []
    for instance in instances:
        if not isinstance(instance, Mapping):
            raise FieldError("instances", "an instance is not an object")
        prompt = _instructed(instruction, instance.get("input"), "instances.input")
        value = instance.get("output")
        response = None if value is None else Response(value, "instances.output")
        dialogues.append(Dialogue(prompt, "instruction", response))
    return dialogues


def _prompt(row: Row) -> list[Dialogue]:
    field = first_field(row, ("prompt", "question", "instruction"))
    if field != "instruction":
        return [Dialogue(_asked(row, field), field)]
    extra = first_field(row, _INPUT_FIELDS)
    return [Dialogue(_instructed(string_field(row, field), row.get(extra), extra), field)]


PARSERS: dict[str, Callable[[Row], list[Dialogue]]] = {
    "hh": _hh,
    "messages": _chat,
    "pairs": _pairs,
    "conversations": _conversations,
    "instruction": _instruction,
    "question": _question,
    "multiple_choice": _multiple_choice,
    "instances": _instances,
    "prompt": _prompt,
}
"""Parsers by format; each gives at least one dialogue, or raises FieldError."""
