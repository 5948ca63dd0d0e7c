"""Responses of policies to prompts as text: just sampled, or read from files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import NamedTuple

from lit_rlhf.checks import check_count
from lit_rlhf.data import Location, Message, PromptRecord, RecordError, Row, parse_row, read_file

Turns = tuple[Message, ...]
"""The turns of a prompt; the last one is the user's."""


@dataclass(frozen=True)
class SampledResponse:
    """One response of a policy, with the fields of a line in a file of responses.

    Attributes:
        prompt: The turns of the prompt, before any was dropped to make it fit.
        prompt_text: The prompt as the policy read it.
        sample: Number of the response among the ones to its prompt, from 0.
        response: The response without special tokens.
        ended: Whether it ended; else it was cut off at `max_new_tokens`.
        length: Its length in tokens, EOS included.
    """

    prompt: Turns
    prompt_text: str
    sample: int
    response: str
    ended: bool
    length: int


@dataclass(frozen=True)
class Responses:
    """One response of each policy to each of `N` prompts.

    Attributes:
        prompts: The turns of each prompt.
        by_policy: Responses in the order of the prompts, by policy, the baseline first.
    """

    prompts: Sequence[Turns]
    by_policy: Mapping[str, Sequence[str]]


class ResponseLine(NamedTuple):
    """A line in a file of responses.

    Attributes:
        policy: Name of the policy.
        prompt: The turns of the prompt.
        response: The response.
        location: Where the line stands.
        ended: Whether the response ended; `None` if the line does not say.
    """

    policy: str
    prompt: Turns
    response: str
    location: Location
    ended: bool | None = None


def read_responses(paths: Sequence[str], limit: int | None = None) -> Responses:
    """Read the responses of several policies from files.

    `lit_rlhf generate` and `lit_rlhf evaluate --responses` write such files. If policies did not
    respond to the same prompts, the error names the first line that differs.

    Args:
        paths: JSON lines files with the fields `prompt` (in any format of a prompt file) and
            `response`, which may be empty. The field `policy` names the policy; without it, the
            file's name does, or the field `model` in a file with the responses of several models.
        limit: Number of responses to keep of each policy, from the first; `None` keeps all.
    """
    by_policy = read_response_lines(paths, limit)
    if len(by_policy) < 2:
        raise ValueError(
            "policies: expected the responses of two or more, the baseline first, got "
            f"{', '.join(by_policy) or 'none'} in {', '.join(paths)}"
        )
    check_same_prompts(by_policy)
    first = next(iter(by_policy.values()))
    return Responses(
        prompts=[line.prompt for line in first],
        by_policy={
            policy: [line.response for line in lines] for policy, lines in by_policy.items()
        },
    )


def read_response_lines(
    paths: Sequence[str], limit: int | None = None
) -> dict[str, list[ResponseLine]]:
    """Read the lines of files of responses by policy, see `read_responses`.

    Args:
        paths: The files.
        limit: Number of responses to keep of each policy, from the first; `None` keeps all.
    """
    if limit is not None:
        check_count("max_prompts", limit)
    by_policy: dict[str, list[ResponseLine]] = {}
    for path in paths:
        of_file: dict[str, list[ResponseLine]] = {}
        rows = list(read_file(path, PurePath(path).name))
        models = {str(row.get("model")) for row in rows if isinstance(row, Row)}
        name_field = "policy" if len(models) == 1 else "model"
        for row in rows:
            line = _parse_line(row, name_field)
            of_file.setdefault(line.policy, []).append(line)
        for policy, lines in of_file.items():
            if policy in by_policy:
                raise ValueError(
                    f"policies: expected the responses of each policy in one file, got {policy!r} "
                    f"in {by_policy[policy][0].location} and {lines[0].location}; rename one of "
                    "the files"
                )
            by_policy[policy] = lines[:limit]
    return by_policy


def check_same_prompts(by_policy: Mapping[str, Sequence[ResponseLine]]) -> None:
    """Refuse policies that did not respond to the same prompts; the error names the first line."""
    advice = "every policy has to respond to the same prompts in the same order"
    (baseline, first), *others = by_policy.items()
    for policy, lines in others:
        for expected, line in zip(first, lines, strict=False):
            if expected.prompt != line.prompt:
                raise ValueError(
                    f"{line.location}: expected the prompt of {expected.location}, got another "
                    f"one; {advice}"
                )
        if len(first) != len(lines):
            raise ValueError(
                f"policy {policy!r}: expected {len(first)} responses, as many as {baseline!r} "
                f"has, got {len(lines)}; {advice}"
            )


def _parse_line(row: Row | RecordError, name_field: str) -> ResponseLine:
    """Parse a line, which an error names.

    Args:
        row: The line.
        name_field: Field with the name of the policy if there is no `policy`.
    """
    if isinstance(row, RecordError):
        raise row
    response = row.get("response")
    if not isinstance(response, str):
        raise row.error("missing" if response is None else "not a string", field="response")
    # without the other fields, where the parser would look for a prompt if this one is missing
    prompt_row = replace(row, fields={"prompt": row.get("prompt")})
    (record,) = parse_row(prompt_row, "prompt", "prompt")
    assert isinstance(record, PromptRecord)  # for mypy: the kind that was asked for
    field = "policy" if "policy" in row.fields else name_field
    policy = row.fields.get(field, row.source.split(".")[0])
    if not isinstance(policy, str) or not policy:
        raise row.error("not a name", field=field, detail=repr(policy))
    ended = row.get("ended")
    return ResponseLine(
        policy=policy,
        prompt=record.prompt,
        response=response,
        location=row.location,
        ended=ended if isinstance(ended, bool) else None,
    )
