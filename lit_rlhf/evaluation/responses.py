"""What policies said: responses to the same prompts, sampled just now or read from files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import NamedTuple

from lit_rlhf.data import (
    Location,
    Message,
    PromptRecord,
    RecordError,
    Row,
    parse_row,
    read_file,
)

Turns = tuple[Message, ...]
"""A prompt as it was read: the dialogue up to and with the last human turn."""


@dataclass(frozen=True)
class Responses:
    """One response of each policy to each of `N` prompts.

    Attributes:
        prompts: The prompts, `N` of them.
        by_policy: `N` responses by the policy's name, the baseline first.
    """

    prompts: Sequence[Turns]
    by_policy: Mapping[str, Sequence[str]]


class _Saved(NamedTuple):
    """One line of a file: who said what to which prompt, and where it stands."""

    policy: str
    prompt: Turns
    response: str
    location: Location


def read_responses(paths: Sequence[str], limit: int | None = None) -> Responses:
    """Read responses that another command wrote, `lit_rlhf generate` or `evaluate --responses`.

    Args:
        paths: JSON lines files with the fields `prompt` (in any form that a file of prompts may
            have) and `response`, which may be empty. A file is one policy, called like the file,
            unless its records have a field `policy`.
        limit: Use only this many of each policy's first responses; `None` takes all.

    Raises:
        RecordError: If a file or a record cannot be used.
        ValueError: If there are fewer than two policies, or they did not answer the same prompts in
            the same order, with the place where they differ.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"max_prompts: expected an integer >= 1, got {limit}")
    found: dict[str, list[_Saved]] = {}
    for path in paths:
        own: dict[str, list[_Saved]] = {}
        for row in read_file(path, PurePath(path).name):
            saved = _saved(row)
            own.setdefault(saved.policy, []).append(saved)
        for policy, records in own.items():
            if policy in found:
                raise ValueError(
                    f"policies: expected each in one file, got {policy!r} in "
                    f"{found[policy][0].location} and {records[0].location}; rename one"
                )
            found[policy] = records[:limit]
    if len(found) < 2:
        raise ValueError(
            "policies: expected saved responses of two or more, the baseline first, got "
            f"{', '.join(found) or 'none'} in {', '.join(paths)}"
        )
    baseline = next(iter(found.values()))
    for records in found.values():
        _check_same_prompts(baseline, records)
    return Responses(
        [record.prompt for record in baseline],
        {policy: [record.response for record in records] for policy, records in found.items()},
    )


def _saved(row: Row | RecordError) -> _Saved:
    if isinstance(row, RecordError):
        raise row
    response = row.get("response")
    if not isinstance(response, str):
        raise row.error("response", "missing" if response is None else "not a string")
    prompt_row = replace(row, fields={"prompt": row.get("prompt")})
    (record,) = parse_row(prompt_row, "prompt", "prompt")
    assert isinstance(record, PromptRecord)  # the kind that was asked for
    policy = row.get("policy") if "policy" in row.fields else row.source.split(".")[0]
    if not isinstance(policy, str) or not policy:
        raise row.error("policy", "not a name", repr(policy))
    return _Saved(policy, record.prompt, response, row.location)


def _check_same_prompts(baseline: Sequence[_Saved], records: Sequence[_Saved]) -> None:
    hint = "every policy has to answer the same prompts, in the same order"
    for theirs, ours in zip(baseline, records, strict=False):
        if theirs.prompt != ours.prompt:
            raise ValueError(
                f"{ours.location}: expected the prompt of {theirs.location}, got another one; "
                f"{hint}"
            )
    if len(baseline) != len(records):
        raise ValueError(
            f"policy {records[0].policy!r}: expected {len(baseline)} responses, as many as "
            f"{baseline[0].policy!r} has, got {len(records)}; {hint}"
        )
