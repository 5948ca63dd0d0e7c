"""Splits records by prompt, and repeats them by the weight of their source."""

import hashlib
import json
from collections.abc import Sequence
from typing import Generic, NamedTuple

import numpy as np

from lit_rlhf.data.records import (
    AnyRecord,
    DemonstrationRecord,
    Message,
    Record,
    TextRecord,
)
from lit_rlhf.data.sources import DataSource


def repeat_by_weight(
    records: Sequence[AnyRecord], sources: Sequence[DataSource], seed: int
) -> list[AnyRecord]:
    """Repeat and subsample records by the weights of their sources.

    A source with `n` records and weight `w` gives `round(w * n)`: whole copies first, then a random
    subset in the order of the records.

    Args:
        records: Records of all sources.
        sources: The sources, whose labels the records name.
        seed: Seed of the subsets. The same seed and records give the same subset.
    """
    repeated: list[AnyRecord] = []
    for number, source in enumerate(sources):
        # Each source has a separate random stream, which the other sources do not shift.
        source_records = [record for record in records if record.source == source.label]
        copies, fraction = divmod(source.weight, 1)
        repeated += source_records * int(copies)
        order = np.random.default_rng([seed, number]).permutation(len(source_records))
        repeated += [
            source_records[i] for i in sorted(order[: round(fraction * len(source_records))])
        ]
    return repeated


class RecordSplits(NamedTuple, Generic[AnyRecord]):
    """Records split by prompt, each part in the order that it was read in.

    Attributes:
        train: What is left for training.
        val: Held out for validation.
        test: Held out for test.
    """

    train: list[AnyRecord]
    val: list[AnyRecord]
    test: list[AnyRecord]


def split_records(
    records: Sequence[AnyRecord], *, val_fraction: float, test_fraction: float, seed: int
) -> RecordSplits[AnyRecord]:
    """Split records by prompt into training, validation and test.

    Prompts are sorted by a hash of seed and prompt; the first go to validation, the last to test.
    Records with the same prompt therefore stay together. SFT, reward model and PPO hold out the
    same prompts (up to rounding) if they split the same data with the same seed.

    Args:
        records: What to split.
        val_fraction: Share of the prompts for validation, in [0, 1). A share above 0 gives at least
            one prompt.
        test_fraction: Share of the prompts for test, likewise.
        seed: Seed of the order of the prompts.
    """
    for name, value in (("val_fraction", val_fraction), ("test_fraction", test_fraction)):
        if not 0 <= value < 1:
            raise ValueError(f"{name}: expected 0 <= fraction < 1, got {value}")
    # A hash instead of a shuffle: a few records more or less hardly change the split of the others.
    keys = [_hash_prompt(record, seed) for record in records]
    order = sorted(set(keys))
    n_val = _count_held_out(val_fraction, len(order))
    n_test = _count_held_out(test_fraction, len(order))
    if n_val + n_test >= len(order):
        raise ValueError(
            "val_fraction, test_fraction: expected to leave prompts for training, got "
            f"{val_fraction} and {test_fraction} of {len(order)} different prompts"
        )
    val_keys = set(order[:n_val])
    test_keys = set(order[len(order) - n_test :])
    splits: RecordSplits[AnyRecord] = RecordSplits(train=[], val=[], test=[])
    for record, key in zip(records, keys, strict=True):
        if key in val_keys:
            splits.val.append(record)
        elif key in test_keys:
            splits.test.append(record)
        else:
            splits.train.append(record)
    return splits


def _hash_prompt(record: Record, seed: int) -> bytes:
    turns = [[turn.role, turn.content] for turn in prompt_of(record)]
    return hashlib.sha256(json.dumps([seed, turns]).encode("utf-8")).digest()


def _count_held_out(fraction: float, n_prompts: int) -> int:
    return max(1, round(fraction * n_prompts)) if fraction > 0 else 0


def prompt_of(record: Record) -> tuple[Message, ...]:
    """The turns before a record's response; for plain text the text itself as one turn."""
    if isinstance(record, DemonstrationRecord):
        return record.messages[:-1]
    if isinstance(record, TextRecord):
        return (Message("user", record.text),)
    return record.prompt
