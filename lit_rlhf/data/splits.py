"""Seeded splits in which no prompt stands on both sides."""

import hashlib
import json
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from lit_rlhf.data.records import DemonstrationRecord, Message, Record, TextRecord

AnyRecord = TypeVar("AnyRecord", bound=Record)


class Splits(NamedTuple, Generic[AnyRecord]):
    """Records for training, validation and test."""

    train: list[AnyRecord]
    val: list[AnyRecord]
    test: list[AnyRecord]


def prompt_of(record: Record) -> tuple[Message, ...]:
    """The turns that a record's response answers.

    Args:
        record: Any record.

    Returns:
        The prompt; for plain text the text itself.
    """
    if isinstance(record, DemonstrationRecord):
        return record.messages[:-1]
    if isinstance(record, TextRecord):
        return (Message("user", record.text),)
    return record.prompt


def split_records(
    records: Sequence[AnyRecord], val_fraction: float, test_fraction: float, seed: int
) -> Splits[AnyRecord]:
    """Split records by prompt.

    Prompts are ordered by a hash of seed and prompt; the first go to validation, the last to test.
    So records with the same prompt stay together, and SFT, reward model and PPO hold out the same
    prompts (up to rounding) when they split the same data with the same seed.

    Args:
        records: The records.
        val_fraction: Share of the prompts for validation, in [0, 1).
        test_fraction: Share of the prompts for test, in [0, 1).
        seed: Seed of the split.

    Returns:
        The three parts, each in the order of ``records``. A fraction above 0 gives at least one
        prompt.

    Raises:
        ValueError: If a fraction is out of range, or nothing is left for training.
    """
    for name, value in (("val_fraction", val_fraction), ("test_fraction", test_fraction)):
        if not 0 <= value < 1:
            raise ValueError(f"{name}: expected 0 <= fraction < 1, got {value}")
    keys = [_key(record, seed) for record in records]
    order = sorted(set(keys))
    n_val, n_test = (
        max(1, round(fraction * len(order))) if fraction > 0 else 0
        for fraction in (val_fraction, test_fraction)
    )
    if n_val + n_test >= len(order):
        raise ValueError(
            "val_fraction, test_fraction: expected to leave prompts for training, got "
            f"{val_fraction} and {test_fraction} of {len(order)} different prompts"
        )
    val, test = set(order[:n_val]), set(order[len(order) - n_test :])
    parts = Splits[AnyRecord]([], [], [])
    for record, key in zip(records, keys, strict=True):
        (parts.val if key in val else parts.test if key in test else parts.train).append(record)
    return parts


def _key(record: Record, seed: int) -> bytes:
    turns = [[message.role, message.content] for message in prompt_of(record)]
    return hashlib.sha256(json.dumps([seed, turns]).encode("utf-8")).digest()
