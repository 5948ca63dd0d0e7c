"""Samplers: what is in a batch, on which rank, in which epoch."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from lit_rlhf.data.samplers import (
    EpochBatchSampler,
    FixedBatchSampler,
    PairedBatchSampler,
    TokenBudgetBatchSampler,
)

LENGTHS = [int(n) for n in np.random.default_rng(0).lognormal(4, 0.7, 500).clip(4, 512)]


def batches_of(sampler: EpochBatchSampler) -> list[list[Any]]:
    return [list(batch) for batch in sampler]


def flat(sampler: EpochBatchSampler, epoch: int = 0) -> list[Any]:
    sampler.set_epoch(epoch)
    return [index for batch in sampler for index in batch]


def test_fixed_epoch_is_one_pass() -> None:
    sampler = FixedBatchSampler(10, 4)
    assert [len(batch) for batch in sampler] == [4, 4, 2]
    assert (sorted(flat(sampler)), len(sampler)) == (list(range(10)), 3)
    assert [len(batch) for batch in FixedBatchSampler(10, 4, drop_last=True)] == [4, 4]
    assert flat(FixedBatchSampler(5, 2, shuffle=False), 7) == [0, 1, 2, 3, 4]


def test_fixed_epochs_differ_and_repeat() -> None:
    one, two = FixedBatchSampler(50, 4, seed=1), FixedBatchSampler(50, 4, seed=1)
    assert flat(one, 3) == flat(two, 3)
    assert flat(one, 3) != flat(one, 4)
    for other in ({"seed": 2}, {"seed": 1, "stream": 1}):
        assert flat(one, 3) != flat(FixedBatchSampler(50, 4, **other), 3)


@pytest.mark.parametrize("size", [10, 11, 12, 13])
@pytest.mark.parametrize("drop_last", [False, True])
def test_fixed_ranks_share_the_epoch(size: int, drop_last: bool) -> None:
    usual = {"drop_last": drop_last, "num_replicas": 3}
    ranks = [FixedBatchSampler(size, 2, rank=rank, **usual) for rank in range(3)]
    batches = [[len(batch) for batch in rank] for rank in ranks]
    assert batches[0] == batches[1] == batches[2]
    counts = Counter(index for rank in ranks for index in flat(rank))
    if drop_last:
        assert (set(counts.values()), len(counts)) == ({1}, size // 6 * 6)
    else:
        assert set(counts) == set(range(size))
        assert sum(counts.values()) - size < 3


def test_samples_per_epoch_go_through_all_before_any_repeats() -> None:
    sampler = FixedBatchSampler(10, 2, drop_last=True, samples_per_epoch=6)
    indices = [index for epoch in range(5) for index in flat(sampler, epoch)]
    assert len(indices) == 30
    for start in (0, 10, 20):
        assert sorted(indices[start : start + 10]) == list(range(10))
    assert indices[:10] != indices[10:20]


def test_samples_per_epoch_count_over_all_ranks() -> None:
    usual = {"drop_last": True, "samples_per_epoch": 24, "num_replicas": 2}
    ranks = [FixedBatchSampler(100, 4, rank=rank, **usual) for rank in range(2)]
    assert [len(rank) for rank in ranks] == [3, 3]
    assert len({index for rank in ranks for index in flat(rank)}) == 24


def padded(batch: list[Any]) -> int:
    return int(len(batch) * max(LENGTHS[index] for index in batch))


def test_token_budget_is_kept_and_used() -> None:
    sampler = TokenBudgetBatchSampler(LENGTHS, 2048)
    assert sorted(flat(sampler)) == list(range(len(LENGTHS)))
    batches = batches_of(sampler)
    assert max(padded(batch) for batch in batches) <= 2048
    tokens = sorted(sum(LENGTHS[i] for i in batch) for batch in batches)
    assert tokens[1] > 0.7 * 2048  # all but the last batch
    assert len(batches) < 1.25 * sum(LENGTHS) / 2048
    assert max(len(batch) for batch in TokenBudgetBatchSampler(LENGTHS, 2048, max_samples=8)) == 8


@pytest.mark.parametrize(
    ("size", "budget", "most", "sizes"),
    [
        (51, 1000, None, [4, 7, 10, 10, 10, 10]),  # the last batch borrows
        (9, 100, None, [4, 5]),  # it joins the one before
        (9, 100, 4, [1, 4, 4]),  # a maximum keeps it apart
    ],
)
def test_last_batch_is_minimal(size: int, budget: int, most: int | None, sizes: list[int]) -> None:
    sampler = TokenBudgetBatchSampler([100] * size, budget, min_samples=4, max_samples=most)
    assert sorted(len(batch) for batch in sampler) == sizes


def test_token_budget_epochs_differ_and_repeat() -> None:
    sampler, epochs = TokenBudgetBatchSampler(LENGTHS, 2048), []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        epochs.append(sampler.batches())
    assert {len(epoch) for epoch in epochs} == {len(sampler)}
    assert {frozenset(batch) for batch in epochs[0]} != {frozenset(batch) for batch in epochs[1]}
    resumed = TokenBudgetBatchSampler(LENGTHS, 2048)
    resumed.set_epoch(3)
    assert resumed.batches() == epochs[3]


def test_batches_do_not_come_in_order_of_length() -> None:
    batches = batches_of(TokenBudgetBatchSampler(LENGTHS, 2048))
    longest = [max(LENGTHS[i] for i in batch) for batch in batches]
    assert longest != sorted(longest, reverse=True)
    # with two lengths, shuffling within them alone would leave all long batches first
    lengths = [100] * 40 + [10] * 400
    sizes = [len(batch) for batch in batches_of(TokenBudgetBatchSampler(lengths, 400))]
    assert set(sizes) == {4, 40}
    assert sizes != sorted(sizes)


def test_token_budget_without_shuffling() -> None:
    sampler = TokenBudgetBatchSampler(LENGTHS, 2048, shuffle=False)
    first = flat(sampler, 0)
    assert first == flat(sampler, 1)
    assert [LENGTHS[i] for i in first] == sorted(LENGTHS, reverse=True)


@pytest.mark.parametrize("num_replicas", [2, 3, 64])
def test_token_budget_ranks(num_replicas: int) -> None:
    lengths = LENGTHS[:100]
    whole = {frozenset(batch) for batch in TokenBudgetBatchSampler(lengths, 1000)}
    ranks = [
        TokenBudgetBatchSampler(lengths, 1000, rank=rank, num_replicas=num_replicas)
        for rank in range(num_replicas)
    ]
    assert len({len(list(rank)) for rank in ranks} | {len(ranks[0])}) == 1
    assert {frozenset(batch) for rank in ranks for batch in rank} == whole


def test_pairs_stay_in_step() -> None:
    first = FixedBatchSampler(7, 3, drop_last=True, samples_per_epoch=12)
    second = FixedBatchSampler(5, 3, drop_last=True, samples_per_epoch=12, stream=1)
    sampler = PairedBatchSampler(first, second)
    pairs = flat(sampler, 2)
    assert [pair[0] for pair in pairs] == flat(first, 2)
    assert ([pair[1] for pair in pairs], len(sampler)) == (flat(second, 2), 4)
    with pytest.raises(ValueError, match="expected 3 batches"):
        PairedBatchSampler(FixedBatchSampler(6, 2), FixedBatchSampler(4, 2))


ONE = {"size": 3, "batch_size": 1}
BUDGET = {"lengths": [3, 4], "tokens_per_batch": 8}
OUT_OF_RANGE: list[tuple[type[EpochBatchSampler], dict[str, Any], str]] = [
    (FixedBatchSampler, ONE | {"size": 0}, "size"),
    (FixedBatchSampler, ONE | {"batch_size": 0}, "batch_size"),
    (FixedBatchSampler, ONE | {"num_replicas": 2, "rank": 2}, "rank"),
    (FixedBatchSampler, ONE | {"batch_size": 4, "drop_last": True}, "batch_size"),
    (TokenBudgetBatchSampler, BUDGET | {"lengths": []}, "lengths"),
    (TokenBudgetBatchSampler, BUDGET | {"lengths": [3, 0]}, "lengths"),
    (TokenBudgetBatchSampler, BUDGET | {"tokens_per_batch": 0}, "tokens_per_batch"),
    (TokenBudgetBatchSampler, BUDGET | {"min_samples": 0}, "min_samples"),
    (TokenBudgetBatchSampler, BUDGET | {"min_samples": 4, "max_samples": 3}, "max_samples"),
    (TokenBudgetBatchSampler, BUDGET | {"rank": 1}, "rank"),
]


@pytest.mark.parametrize(("sampler", "settings", "name"), OUT_OF_RANGE)
def test_arguments_out_of_range_are_refused(
    sampler: type[EpochBatchSampler], settings: dict[str, Any], name: str
) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        sampler(**settings)


def test_too_few_examples_for_the_ranks_are_counted() -> None:
    message = r"at least 2 examples per epoch, 1 for each rank \(2 in all\), got 1;"
    with pytest.raises(ValueError, match=message):
        FixedBatchSampler(1, 1, drop_last=True, num_replicas=2)
