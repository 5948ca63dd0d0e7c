"""The record formats of data files: one parser per format turns a row into records.

A parser finds the prompt, the response and, in preferences, the rejected response in a row.
`_make_record` checks these parts and builds the kind of record that was asked for. A preference
file therefore serves as demonstrations too (its chosen responses) and as prompts, and a
demonstration file serves as prompts.

The format of a file is detected from the fields of its first row and the kind of record that is
wanted: a file with `messages`, `chosen` and `rejected` holds preferences as well as dialogues.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lit_rlhf.data.records import (
    DemonstrationRecord,
    Location,
    Message,
    PreferenceRecord,
    PromptRecord,
    Record,
    RecordError,
    RecordKind,
    Row,
    TextRecord,
)

FORMATS = (
    "hh",
    "messages",
    "pairs",
    "conversations",
    "instruction",
    "question",
    "multiple_choice",
    "instances",
    "comparison",
    "labels",
    "turns",
    "prompt",
    "text",
)
"""The known formats. docs/data.md describes the fields of each."""

_Turns = tuple[Message, ...]

_ANSWER_FIELDS = ("answer", "std_answer", "completion", "response")
_RESPONSE_FIELDS = ("chosen", *_ANSWER_FIELDS)
_OUTPUT_FIELDS = ("output", "response")
_INPUT_FIELDS = ("input", "context")
_OPTION_LETTERS = "ABCDEFGHIJ"
_UNSUPPORTED_FIELDS = ("tools", "functions", "images", "videos", "audios")
"""Fields that change what a prompt means, in the formats of other projects."""
_FALSE_AS_TEXT = ("false", "0", "0.0")
"""What files without truth values write for a response that was rejected."""
_SCORES = (
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("chosen_rating", "rejected_rating"),
    ("chosen-rating", "rejected-rating"),
)
"""Fields in which datasets rate the two responses of a preference."""
_LARGEST_MARGIN = 3.4e38  # batches hold margins as float32
_TURN_MARKER = re.compile(r"\n\n(Human|Assistant):")
_SPEAKERS = {  # MOSS-RLHF's markers of a turn, which its files may have or lack
    "Human:": "user",
    "<|Human|>": "user",
    "Assistant:": "assistant",
    "<|MOSS|>": "assistant",
}
_PAIR_PROMPT_FIELDS = ("prompt", "question", "instruction", "input")


class _Comparison(NamedTuple):
    """Fields of a row with a prompt and two responses, and the meaning of its choice.

    Attributes:
        prompt: Field of the prompt.
        responses: Fields of the two responses.
        preferred: Index of the preferred response, by the value of the choice.
    """

    prompt: str
    responses: tuple[str, str]
    preferred: dict[int, int]


_COMPARISONS = {
    "better_response_id": _Comparison(
        prompt="prompt",
        responses=("response_0", "response_1"),
        preferred={0: 0, 1: 1},
    ),
    "preference_strength": _Comparison(
        prompt="prompt",
        responses=("response_1", "response_2"),
        preferred={-3: 0, -2: 0, -1: 0, 1: 1, 2: 1, 3: 1},
    ),
    "labels": _Comparison(
        prompt="history",
        responses=("human_ref_A", "human_ref_B"),
        preferred={1: 0, 0: 1},
    ),
}
"""The formats of comparisons in flat rows, by the field of the choice."""
_LABEL_RESPONSES = ("response_a", "response_b")
_LABEL_CHOICES = ("a", "b", "tie", "both_bad", "skip")
_SUMMARIES = _Comparison(
    prompt="info", responses=("summaries", "summaries"), preferred={0: 0, 1: 1}
)
"""The format of comparisons of summaries, in nested rows."""


def detect_format(row: Row, kind: RecordKind, columns: Collection[str] = ()) -> str:
    """Detect the format of a file, one of `FORMATS`, from the fields of its first row.

    Args:
        row: The first row.
        kind: The kind of records that the file is read for.
        columns: Fields that the user named. A prompt among them is preferred to a dialogue.

    Raises:
        RecordError: If no format has these fields. The message names the formats.
    """
    # Parquet files hold a null for every field that a row lacks.
    keys = {key for key, value in row.fields.items() if value is not None}
    if not set(_PAIR_PROMPT_FIELDS).isdisjoint(columns):
        keys -= {"conversations", "messages"}
    preference = _detect_preference(row, keys)
    if preference is not None and kind == "preference":
        return preference
    if "conversations" in keys:
        return "conversations"
    if "messages" in keys:
        return "messages"
    if preference is not None:
        return preference
    if _is_text_list(row.get("turns")):  # and not, for instance, their number
        return "turns"
    if {"instruction", "instances"} <= keys:
        return "instances"
    if "instruction" in keys:
        return "instruction" if keys & set(_OUTPUT_FIELDS) else "prompt"
    if "question" in keys and ("options" in keys or {"A", "B"} <= keys):
        return "multiple_choice"
    if keys & {"question", "prompt"}:
        return "question" if keys & set(_ANSWER_FIELDS) else "prompt"
    if "text" in keys:
        return "text"
    raise row.error(
        "no known format has these fields",
        detail=f"{', '.join(sorted(keys))}; docs/data.md describes the formats "
        f"{', '.join(FORMATS)}",
    )


def _detect_preference(row: Row, keys: set[str]) -> str | None:
    """The format of a row with two responses; None if it does not have two."""
    if {"chosen", "rejected"} <= keys:
        if "conversations" in keys:
            return "conversations"
        if _is_text_list(row.get("chosen")):
            return "turns"
        plain = isinstance(row.get("chosen"), str) and keys.isdisjoint(_PAIR_PROMPT_FIELDS)
        return "hh" if plain else "pairs"
    if {"prompt", *_LABEL_RESPONSES, "choice"} <= keys:
        return "labels"
    compared = any(
        {*comparison.responses, choice} <= keys for choice, comparison in _COMPARISONS.items()
    )
    return "comparison" if compared or {"summaries", "choice"} <= keys else None


def parse_row(row: Row, format: str, kind: RecordKind) -> list[Record]:
    """Parse a row into records.

    Args:
        row: The row.
        format: Its format, one of `FORMATS`.
        kind: The kind of records to build. `ptx` builds plain text from the format `text`, and
            demonstrations from the others.

    Returns:
        One record, or with the format `instances` one per instance. A row with `label: false` (as
        in data for KTO) is not a demonstration and gives none. A label without a preferred
        response gives none either, see `undecided_reason`.

    Raises:
        RecordError: If the row has no such record.
    """
    if kind == "ptx":
        kind = "text" if format == "text" else "demonstration"
    _check_supported(row)
    if kind == "text":
        text = row.read_string("text")
        row.check_text("text", text)
        return [TextRecord(text, row.source, row.location)]
    if format == "text":
        raise row.error(f"plain text has no {kind} in it", field="text")
    if kind == "prompt":
        # A prompt needs no answer, so an error in one must not cost the prompt.
        bad = {"rejected", *(name for name in _RESPONSE_FIELDS if row.get(name) == [])}
        fields = {name: value for name, value in row.fields.items() if name not in bad}
        prompts = _parse(replace(row, fields=fields), format, kind)
        # Rewards may need any field, even one that was left out here.
        return [replace(p, fields=row.fields) for p in prompts if isinstance(p, PromptRecord)]
    if kind != "preference":
        # Only preferences need the rejected response, so an error in it must not cost the others.
        fields = {name: value for name, value in row.fields.items() if name != "rejected"}
        row = replace(row, fields=fields)
    if undecided_reason(row, format) is not None:
        return []
    if kind != "demonstration":
        return _parse(row, format, kind)
    if row.get("label") is False:
        return []
    if "chosen" not in row.fields and str(row.get("label")).lower() in _FALSE_AS_TEXT:
        raise row.error(
            "expected true or false", field="label", detail="drop the field to go on without"
        )
    untrained = _has_untrained_turns(row)
    records = [r for r in _parse(row, format, kind) if isinstance(r, DemonstrationRecord)]
    return [replace(record, has_untrained_turns=untrained) for record in records]


def find_used_fields(row: Row, format: str, kind: RecordKind) -> list[str]:
    """Find the fields that a row's records are made of.

    Without one of them, `parse_row` would give other records, or none.

    Args:
        row: A row that `parse_row` takes.
        format: Its format, one of `FORMATS`.
        kind: The kind of records.
    """
    records = parse_row(row, format, kind)
    used_fields = []
    for name in row.fields:
        other_fields = {key: value for key, value in row.fields.items() if key != name}
        try:
            changed = parse_row(replace(row, fields=other_fields), format, kind) != records
        except RecordError:
            changed = True
        if changed:
            used_fields.append(name)
    return used_fields


def undecided_reason(row: Row, format: str) -> str | None:
    """Why a label by a person is no preference; `None` if it is one, or for other formats.

    A second look of the same person at the same responses is left out: it is asked to measure
    consistency, and would count the person twice.

    Args:
        row: The row.
        format: Its format, one of `FORMATS`.
    """
    if format != "labels":
        return None
    if row.get("repeat") is True:
        return "second look"
    reason = {"tie": "tie", "both_bad": "both bad", "skip": "skipped"}.get(str(row.get("choice")))
    responses = [row.get(name) for name in _LABEL_RESPONSES]
    if reason is None and any(isinstance(text, str) and not text.strip() for text in responses):
        return "empty response"  # what a policy wrote that ended at once, and people saw
    return reason


def _check_supported(row: Row) -> None:
    """Refuse what would change the meaning of a record if it were left out."""
    for name in _UNSUPPORTED_FIELDS:
        content = row.get(name)
        # some files hold JSON in a string
        if isinstance(content, list | Mapping | str) and content and content not in ("[]", "{}"):
            raise row.error(
                f"{name} are not supported", field=name, detail="drop the field to go on without"
            )


def _has_untrained_turns(row: Row) -> bool:
    """Whether an answer before the last turn has `weight: 0`; refuse it on the last one."""
    has_untrained = False
    for field in ("messages", "conversations"):
        turns = row.get(field)
        if not isinstance(turns, list) or not turns:
            continue
        untrained = [
            isinstance(turn, Mapping)
            and turn.get("weight") == 0
            and row.read_turn(turn, field).role == "assistant"
            for turn in turns
        ]
        if untrained[-1]:
            raise row.error("the last answer is not to be trained on", field=f"{field}.weight")
        has_untrained = has_untrained or any(untrained)
    return has_untrained


def count_unused_parts(row: Row, kind: RecordKind) -> dict[str, int]:
    """Count the parts of a row's turns that records of a `kind` leave out, by name.

    The only such part is the reasoning that an assistant's turn has in a separate field. Prompts
    have no use for it: templates drop it from earlier turns.
    """
    counts: dict[str, int] = {}
    if kind == "prompt":
        return counts
    for content in row.fields.values():
        for turn in content if isinstance(content, list) else (content,):
            for name in ("reasoning_content", "reasoning"):
                if isinstance(turn, Mapping) and "role" in turn and turn.get(name):
                    counts[name] = counts.get(name, 0) + 1
    return counts


def _parse(row: Row, format: str, kind: RecordKind) -> list[Record]:
    return [_make_record(row, kind, parts) for parts in _PARSERS[format](row, kind)]


def parse_prompts(prompts: Sequence[str]) -> list[PromptRecord]:
    r"""Parse prompts that were given as plain texts, or raise ValueError.

    Each is as in the field `prompt` of a data file: what the human says, or a dialogue
    `\n\nHuman: ...\n\nAssistant: ...\n\nHuman: ...`. A record's source is `prompts`, its line the
    number of the prompt from 1.
    """
    records = []
    for index, prompt in enumerate(prompts):
        row = Row({"prompt": prompt}, Location("prompts", index + 1), "prompts")
        try:
            turns = _read_prompt(row, "prompt")
            _check_prompt(row, turns, "prompt", answered=False)
        except RecordError as error:
            raise ValueError(
                f"prompts[{index}]: field {error.field!r}: {error.reason}, got {prompt!r:.100}"
            ) from error
        records.append(PromptRecord(turns, row.source, row.location))
    return records


def split_dialogue(text: str) -> _Turns | None:
    r"""Split a dialogue in HH-RLHF's format into turns, without outer whitespace.

    It starts with `\n\nHuman:` (the empty line before it may be missing); None for any other text.
    Every marker behind an empty line starts a turn; markers within a line are text. A turn that
    quotes a dialogue is therefore split too. Such a record has two turns of one speaker in a row,
    and `_make_record` refuses it.
    """
    parts = _TURN_MARKER.split("\n\n" + text.lstrip())
    if parts[0].strip() or parts[1:2] != ["Human"]:
        return None
    roles = {"Human": "user", "Assistant": "assistant"}
    return tuple(
        Message(roles[speaker], content.strip())
        for speaker, content in zip(parts[1::2], parts[2::2], strict=True)
    )


class _Parts(NamedTuple):
    """The parts that a parser finds in a row, unchecked; None for a missing part.

    Attributes:
        prompt: The turns before the response.
        prompt_field: The prompt's field, for errors.
        response: The response; in preferences the preferred one.
        response_field: The response's field, for errors.
        rejected: The rejected response of a preference.
        rejected_prompt: The turns before the rejected response, if the row repeats them.
        margin: By how much the preferred response is better, if the format says so.
        is_label: Whether a person labelled responses that policies sampled.
    """

    prompt: _Turns
    prompt_field: str
    response: Any = None
    response_field: str = ""
    rejected: Any = None
    rejected_prompt: _Turns | None = None
    margin: Any = None
    is_label: bool = False


class _Answered(NamedTuple):
    """A prompt with its response.

    Attributes:
        prompt: The turns before the response.
        response: The response, not yet checked; None if there is none.
    """

    prompt: _Turns
    response: Any


def _split_response(turns: _Turns) -> _Answered:
    """Take off the assistant's last turn, if there is one, as the response."""
    if turns[-1].role == "assistant":
        return _Answered(prompt=turns[:-1], response=turns[-1].content)
    return _Answered(prompt=turns, response=None)


def _read_hh_turns(row: Row, field: str) -> _Turns:
    turns = split_dialogue(row.read_string(field))
    if turns is None:
        raise row.error("the dialogue does not start with '\\n\\nHuman:'", field=field)
    return turns


def _is_text_list(value: Any) -> bool:  # noqa: ANN401 - whatever the file holds
    return isinstance(value, list) and bool(value) and all(isinstance(turn, str) for turn in value)


def _read_text_turns(row: Row, field: str) -> _Turns:
    """Read a list of strings: turns that begin with their speaker's marker, or alternate."""
    texts = row.get(field)
    if not _is_text_list(texts):
        raise row.error("not a list of strings", field=field, detail=type(texts).__name__)
    markers = [next((m for m in _SPEAKERS if text.startswith(m)), None) for text in texts]
    if None in markers:
        return tuple(
            Message("assistant" if turn % 2 else "user", text) for turn, text in enumerate(texts)
        )
    return tuple(
        Message(_SPEAKERS[marker], text.removeprefix(marker).strip())
        for marker, text in zip(markers, texts, strict=True)
        if marker is not None
    )


def _read_prompt(row: Row, field: str) -> _Turns:
    """Read a prompt: turns, a string, an HH-RLHF dialogue, or an instruction with its input."""
    if field == "instruction":
        input_field = row.find_field(*_INPUT_FIELDS)
        return _join_instruction(row, row.read_string(field), row.get(input_field), input_field)
    if isinstance(row.get(field), list):
        return row.read_turns(field)
    text = row.read_string(field)
    turns = split_dialogue(text) if text.startswith("\n\nHuman:") else None
    if turns is None:
        return (Message("user", text),)
    # HH prompts may end with an open "\n\nAssistant:", which is not a turn.
    is_open = turns[-1].role == "assistant" and not turns[-1].content
    return turns[:-1] if is_open else turns


def _join_instruction(row: Row, instruction: str, extra: Any, field: str) -> _Turns:  # noqa: ANN401
    """Make a prompt of an instruction and the input that follows it."""
    if extra is not None and not isinstance(extra, str):
        raise row.error("not a string", field=field, detail=type(extra).__name__)
    text = f"{instruction}\n\n{extra}" if extra and extra.strip() else instruction
    return (Message("user", text),)


def _add_system(row: Row, turns: _Turns) -> _Turns:
    """Put the system turn first that a row has in a separate field."""
    system = row.get("system")
    if not isinstance(system, str) or not system.strip() or turns[0].role == "system":
        return turns
    return (Message("system", system), *turns)


def _refuse_history(row: Row) -> None:
    """Refuse earlier turns in a separate field, beside a dialogue that has its own."""
    if row.get("history"):
        raise row.error(
            "expected a prompt without earlier turns beside it",
            field="history",
            detail="drop the field to go on without",
        )


def _add_history(row: Row, turns: _Turns) -> _Turns:
    """Put the earlier questions and answers first that a row has in a separate field."""
    history = row.get("history")
    if not history:
        return turns
    is_pairs = isinstance(history, list) and all(
        _is_text_list(pair) and len(pair) == 2 for pair in history
    )
    if not is_pairs:
        raise row.error("not a list of pairs, each a question and its answer", field="history")
    n_system = int(turns[0].role == "system")
    earlier = [
        message
        for question, answer in history
        for message in (Message("user", question), Message("assistant", answer))
    ]
    return (*turns[:n_system], *earlier, *turns[n_system:])


def _read_context(row: Row, field: str) -> _Turns:
    """Read a prompt with the system turn and the history that a row has in separate fields."""
    return _add_history(row, _add_system(row, _read_prompt(row, field)))


def _read_response(row: Row, prompt: _Turns, field: str) -> _Answered:
    """Read a response to a prompt: a string, a turn, or turns that may repeat the prompt."""
    response = row.get(field)
    if isinstance(response, list):
        turns = row.read_turns(field)
        return _split_response(turns if turns[: len(prompt)] == prompt else prompt + turns)
    if isinstance(response, Mapping):
        message = row.read_turn(response, field)
        if message.role != "assistant":
            raise row.error("not an assistant turn", field=field)
        response = message.content
    return _Answered(prompt, response)


_Parser = Callable[[Row, RecordKind], Iterator[_Parts]]


def _parse_dialogue(read: Callable[[Row, str], _Turns], *fields: str) -> _Parser:
    """A parser of a whole dialogue in one of several fields; `chosen` may have a `rejected`."""

    def parse(row: Row, kind: RecordKind) -> Iterator[_Parts]:
        _refuse_history(row)
        field = next((name for name in fields if row.get(name) is not None), fields[-1])
        dialogue = _split_response(_add_system(row, read(row, field)))
        rejected = None
        if field == "chosen" and row.get("rejected") is not None:
            rejected = _split_response(_add_system(row, read(row, "rejected")))
        yield _Parts(
            prompt=dialogue.prompt,
            prompt_field=field,
            response=dialogue.response,
            response_field=field,
            rejected=None if rejected is None else rejected.response,
            rejected_prompt=None if rejected is None else rejected.prompt,
        )

    return parse


def _parse_answer(prompts: Sequence[str], answers: Sequence[str]) -> _Parser:
    """A parser of a prompt and its answer, each in one of several fields."""

    def parse(row: Row, kind: RecordKind) -> Iterator[_Parts]:
        field = row.find_field(*prompts)
        answer_field = row.find_field(*answers)
        answered = _read_response(row, _read_context(row, field), answer_field)
        yield _Parts(
            prompt=answered.prompt,
            prompt_field=field,
            response=answered.response,
            response_field=answer_field,
        )

    return parse


def _parse_pairs(row: Row, kind: RecordKind) -> Iterator[_Parts]:
    field = row.find_field(*_PAIR_PROMPT_FIELDS)
    has_prompt = row.get(field) is not None
    stem = _read_context(row, field) if has_prompt else ()
    chosen = _read_response(row, stem, "chosen")
    rejected = _read_response(row, stem, "rejected")
    if not chosen.prompt:
        raise row.error("missing", field="prompt")
    prompt = chosen.prompt
    rejected_prompt = rejected.prompt
    if not has_prompt:  # whole dialogues
        _refuse_history(row)
        prompt = _add_system(row, prompt)
        rejected_prompt = _add_system(row, rejected_prompt) if rejected_prompt else ()
    yield _Parts(
        prompt=prompt,
        prompt_field=field,
        response=chosen.response,
        response_field="chosen",
        rejected=rejected.response,
        rejected_prompt=rejected_prompt,
    )


def _parse_conversations(row: Row, kind: RecordKind) -> Iterator[_Parts]:
    _refuse_history(row)
    field = "conversations"
    turns = _add_system(row, row.read_turns(field))
    if row.get("chosen") is None and row.get("rejected") is None:
        dialogue = _split_response(turns)
        yield _Parts(
            prompt=dialogue.prompt,
            prompt_field=field,
            response=dialogue.response,
            response_field=field,
        )
        return
    yield _Parts(
        prompt=turns,
        prompt_field=field,
        response=_read_response(row, turns, "chosen").response,
        response_field="chosen",
        rejected=_read_response(row, turns, "rejected").response,
    )


def _parse_comparison(row: Row, kind: RecordKind) -> Iterator[_Parts]:
    if row.get("summaries") is not None:
        choice_field = "choice"
        comparison = _SUMMARIES
        prompt: _Turns = (Message("user", _read_summary_prompt(row)),)
        responses = _read_summaries(row)
    else:
        choice_field = row.find_field(*_COMPARISONS)
        comparison = _COMPARISONS[choice_field]
        field = comparison.prompt
        read = _read_prompt if field == "history" else _read_context
        prompt = _add_system(row, read(row, field))
        responses = [row.get(name) for name in comparison.responses]
    if kind == "prompt":  # even where neither response is preferred
        yield _Parts(prompt=prompt, prompt_field=comparison.prompt)
        return
    choice = row.get(choice_field)
    preferred = comparison.preferred.get(choice) if isinstance(choice, int) else None
    if preferred is None:
        raise row.error("neither response is preferred", field=choice_field, detail=repr(choice))
    yield _Parts(
        prompt=prompt,
        prompt_field=comparison.prompt,
        response=responses[preferred],
        response_field=comparison.responses[preferred],
        rejected=responses[1 - preferred],
        # 1 to 3, as in the pairwise loss with margins of HelpSteer2-Preference (arXiv 2410.01257)
        margin=abs(choice) if choice_field == "preference_strength" else None,
    )


def _parse_label(row: Row, kind: RecordKind) -> Iterator[_Parts]:
    prompt = _read_prompt(row, "prompt")
    if kind == "prompt":
        yield _Parts(prompt=prompt, prompt_field="prompt")
        return
    choice = row.get("choice")
    if choice not in ("a", "b"):
        choices = ", ".join(_LABEL_CHOICES)
        raise row.error(f"not one of {choices}", field="choice", detail=repr(choice))
    preferred = 0 if choice == "a" else 1
    yield _Parts(
        prompt=prompt,
        prompt_field="prompt",
        response=row.get(_LABEL_RESPONSES[preferred]),
        response_field=_LABEL_RESPONSES[preferred],
        rejected=row.get(_LABEL_RESPONSES[1 - preferred]),
        is_label=True,
    )


def _read_summaries(row: Row) -> list[Any]:
    summaries = row.get("summaries")
    if not isinstance(summaries, list) or len(summaries) != 2:
        raise row.error("not a list of two summaries", field="summaries")
    return [summary.get("text") if isinstance(summary, Mapping) else None for summary in summaries]


def _read_summary_prompt(row: Row) -> str:
    """The text to summarize, laid out as in the data of Stiennon et al. (arXiv 2009.01325)."""
    info = row.get("info")
    if not isinstance(info, Mapping):
        raise row.error("not an object", field="info", detail=type(info).__name__)
    if info.get("post") is None:
        return f"{replace(row, fields=info).read_string('article')}\n\nTL;DR:"
    post = replace(row, fields=info).read_string("post")
    parts = {"SUBREDDIT": info.get("subreddit"), "TITLE": info.get("title")}
    heading = [f"{name}: {value}" for name, value in parts.items() if value]
    return "\n\n".join([*heading, f"POST: {post}", "TL;DR:"])


def _parse_multiple_choice(row: Row, kind: RecordKind) -> Iterator[_Parts]:
    _refuse_history(row)
    letters = _OPTION_LETTERS
    options = row.get("options")
    if options is None:
        given = [n for n, letter in enumerate(letters) if row.get(letter) is not None]
        last = max(given, default=-1)
        options = [row.get(letter) for letter in letters[: last + 1]]
    if not isinstance(options, list) or not 2 <= len(options) <= len(letters):
        raise row.error(f"not a list of 2 to {len(letters)} options", field="options")
    for letter, option in zip(letters, options, strict=False):
        if not isinstance(option, str | int | float) or not str(option).strip():
            raise row.error(f"option {letter} is missing or empty", field="options")
    lines = [f"{letter}. {option}" for letter, option in zip(letters, options, strict=False)]
    prompt = _add_system(row, (Message("user", "\n".join([row.read_string("question"), *lines])),))
    answer = row.get("answer")
    if answer is None or kind == "prompt":
        yield _Parts(prompt=prompt, prompt_field="question")
        return
    index = answer
    if isinstance(answer, str):
        index = letters.find(answer.strip()) if len(answer.strip()) == 1 else -1
    # bool is a subclass of int, but True is not the index of an option
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(options):
        raise row.error(
            "not the letter or the index of an option", field="answer", detail=repr(answer)
        )
    yield _Parts(
        prompt=prompt,
        prompt_field="question",
        response=lines[index],
        response_field="answer",
    )


def _parse_instances(row: Row, kind: RecordKind) -> Iterator[_Parts]:
    _refuse_history(row)
    instruction = row.read_string("instruction")
    instances = row.get("instances")
    if not isinstance(instances, list) or not instances:
        raise row.error("not a list of at least one instance", field="instances")
    for instance in instances:
        if not isinstance(instance, Mapping):
            raise row.error("an instance is not an object", field="instances")
        prompt = _join_instruction(row, instruction, instance.get("input"), "instances.input")
        yield _Parts(
            prompt=_add_system(row, prompt),
            prompt_field="instruction",
            response=instance.get("output"),
            response_field="instances.output",
        )


_PARSERS: dict[str, _Parser] = {
    "hh": _parse_dialogue(_read_hh_turns, "chosen"),
    "messages": _parse_dialogue(Row.read_turns, "messages"),
    "turns": _parse_dialogue(_read_text_turns, "turns", "chosen"),
    "pairs": _parse_pairs,
    "conversations": _parse_conversations,
    "comparison": _parse_comparison,
    "labels": _parse_label,
    "instruction": _parse_answer(["instruction"], _OUTPUT_FIELDS),
    "question": _parse_answer(["question", "prompt"], _ANSWER_FIELDS),
    "prompt": _parse_answer(["prompt", "question", "instruction"], [""]),
    "multiple_choice": _parse_multiple_choice,
    "instances": _parse_instances,
}


def _make_record(row: Row, kind: RecordKind, parts: _Parts) -> Record:
    """Check the parts that a kind of record needs, and build the record."""
    prompt = parts.prompt
    _check_prompt(row, prompt, parts.prompt_field, answered=parts.response is not None)
    if kind == "prompt":
        return PromptRecord(prompt, row.source, row.location)
    response = _check_response(
        row,
        parts.response,
        field=parts.response_field,
        missing_field=_name_missing_response(row, kind, parts),
    )
    if kind == "demonstration":
        messages = (*prompt, Message("assistant", response))
        return DemonstrationRecord(messages, row.source, row.location, is_label=parts.is_label)
    rejected = _check_response(row, parts.rejected, field="rejected", missing_field="rejected")
    if parts.rejected_prompt is not None and parts.rejected_prompt != prompt:
        raise row.error("chosen and rejected have different prompts", field="rejected")
    if response.strip() == rejected.strip():
        raise row.error("chosen and rejected are equal", field="rejected")
    _check_scores(row)
    return PreferenceRecord(
        prompt=prompt,
        chosen=response,
        rejected=rejected,
        source=row.source,
        margin=_read_margin(row, parts.margin),
        location=row.location,
        is_label=parts.is_label,
    )


def _check_scores(row: Row) -> None:
    """Refuse a preference whose own scores say that the rejected response is better."""
    for better, worse in _SCORES:
        of_chosen = _read_score(row, better)
        of_rejected = _read_score(row, worse)
        if of_chosen is not None and of_rejected is not None and of_chosen < of_rejected:
            raise row.error(
                f"below {worse}, so that the rejected response is the better one",
                field=better,
                detail=f"{of_chosen} and {of_rejected}",
            )


def _read_score(row: Row, field: str) -> float | None:
    """A score of a preference, which a table holds as text; `None` for what is no score."""
    score = row.get(field)
    if isinstance(score, str) and score.strip():
        try:
            return float(score)
        except ValueError:
            raise row.error("not a number", field=field, detail=f"{score!r:.100}") from None
    return score if isinstance(score, int | float) else None


def _name_missing_response(row: Row, kind: RecordKind, parts: _Parts) -> str:
    """The field that a row without a response should have."""
    if kind == "preference":
        return next((name for name in ("chosen", "rejected") if row.get(name) is None), "chosen")
    return parts.response_field or _ANSWER_FIELDS[0]


def _check_prompt(row: Row, prompt: _Turns, field: str, answered: bool) -> None:
    turns = prompt[1:] if prompt and prompt[0].role == "system" else prompt
    for message in prompt:
        if not message.content.strip():
            raise row.error(f"empty {_speaker(message.role)} turn", field=field)
        row.check_text(field, message.content)
    for turn, message in enumerate(turns):
        if message.role == "system":
            raise row.error("a system turn after the first turn", field=field)
        previous_role = turns[turn - 1].role if turn else "assistant"
        if message.role == previous_role:
            if turn == 0:
                raise row.error("the dialogue starts with an assistant turn", field=field)
            raise row.error(f"two {_speaker(previous_role)} turns in a row", field=field)
    if not turns:
        raise row.error("no human turn", field=field)
    if turns[-1].role == "assistant":
        if answered:  # this is the last but one of the dialogue's turns
            raise row.error("two assistant turns in a row", field=field)
        raise row.error("the prompt ends with an assistant turn", field=field)


def _check_response(row: Row, response: Any, *, field: str, missing_field: str) -> str:  # noqa: ANN401
    """Check a response, and raise the error of its field, or of the field that it should have."""
    if response is None:
        has = f"the row has {', '.join(row.fields)}"
        raise row.error("missing, or no assistant turn at the end", field=missing_field, detail=has)
    if not isinstance(response, str):
        raise row.error("not a string", field=field, detail=type(response).__name__)
    if not response.strip():
        raise row.error("empty assistant turn", field=field)
    row.check_text(field, response)
    return response


def _read_margin(row: Row, default: Any) -> float:  # noqa: ANN401 - whatever the file holds
    margin = default if row.get("margin") is None else row.get("margin")
    if margin is None:
        return 0.0
    is_number = isinstance(margin, int | float) and not isinstance(margin, bool)
    # compared and not passed to `isfinite`, which fails for an integer of 400 digits
    if not is_number or not 0 <= margin <= _LARGEST_MARGIN:
        raise row.error("not a number of at least 0", field="margin", detail=f"{margin!r:.100}")
    return float(margin)


def _speaker(role: str) -> str:
    return "human" if role == "user" else role
