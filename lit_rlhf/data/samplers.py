"""Batch samplers: they assign examples to batches, ranks and epochs.

All samplers are deterministic in `(seed, epoch)` and use no global random state. Every rank gets
the same number of batches, and the number is the same in every epoch, since Lightning reads it
once.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import chain, count, islice
from typing import NamedTuple

import numpy as np
from torch.utils.data import Sampler

from lit_rlhf.checks import check_count


class IndexPair(NamedTuple):
    """Indices of two examples that go together, each in a dataset of its own.

    Attributes:
        first: Index in the first dataset, for instance of a prompt.
        second: Index in the second dataset, for instance of a pretraining example.
    """

    first: int
    second: int


Index = int | IndexPair
"""Index of an example, or of one in each of two datasets."""


class EpochBatchSampler(Sampler[list[Index]], ABC):
    """A batch sampler of one rank, with an order that depends on the epoch.

    Args:
        batch_size: Examples per batch and rank; the average if batches differ. Lightning's
            DeepSpeed strategy reads it for its throughput figures.
        shuffle: Whether the order changes with every epoch.
        seed: Seed of the order; the same on all ranks.
        num_replicas: Number of ranks.
        rank: Rank of this process, from 0.
    """

    def __init__(
        self, *, batch_size: int, shuffle: bool, seed: int, num_replicas: int, rank: int
    ) -> None:
        check_count("batch_size", batch_size)
        if num_replicas < 1 or not 0 <= rank < num_replicas:
            raise ValueError(f"rank: expected 0 to {num_replicas - 1}, got {rank}")
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.num_replicas = num_replicas
        self.rank = rank
        self.epoch = 0

    @property
    def sampler(self) -> "EpochBatchSampler":
        """This object, since Lightning calls `set_epoch` on `loader.batch_sampler.sampler`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from 0, of the next iteration."""
        self.epoch = epoch

    @abstractmethod
    def __len__(self) -> int:
        """Number of batches per rank and epoch, the same in every epoch."""

    @abstractmethod
    def batches(self) -> list[list[Index]]:
        """This rank's batches of the current epoch."""

    def __iter__(self) -> Iterator[list[Index]]:
        return iter(self.batches())

    def _generator(self, *stream: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *stream])


class FixedBatchSampler(EpochBatchSampler):
    """Batches with a fixed number of examples.

    By default an epoch is one pass over the dataset. With `samples_per_epoch`, an epoch takes that
    number of examples from an endless sequence of shuffled passes. Every example then comes once
    before any comes again, also across epochs.

    Args:
        size: Number of examples in the dataset.
        batch_size: Examples per batch and rank.
        shuffle: Whether each pass has an order of its own. Otherwise the order is the dataset's.
        seed: Seed of the order; the same on all ranks.
        drop_last: Leave out the last examples if they do not fill a batch on every rank. Otherwise
            the last batch is smaller, and some examples are repeated if ranks would differ.
        samples_per_epoch: Examples per epoch over all ranks; default: one pass.
        num_replicas: Number of ranks.
        rank: Rank of this process, from 0.
        stream: Number that tells the orders of samplers with the same seed apart.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        samples_per_epoch: int | None = None,
        num_replicas: int = 1,
        rank: int = 0,
        stream: int = 0,
    ) -> None:
        super().__init__(
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            num_replicas=num_replicas,
            rank=rank,
        )
        if size < 1:
            raise ValueError(f"size: expected at least 1 example, got {size}")
        self.size = size
        self.drop_last = drop_last
        self.samples_per_epoch = samples_per_epoch
        self.stream = stream
        self.total = size if samples_per_epoch is None else samples_per_epoch
        if len(self) < 1:
            raise ValueError(
                f"batch_size: expected at least {batch_size * num_replicas} examples per epoch, "
                f"{batch_size} for each rank ({num_replicas} in all), got {self.total}; take more "
                "data, fewer ranks or a smaller batch"
            )

    def __len__(self) -> int:
        global_size = self.batch_size * self.num_replicas
        return self.total // global_size if self.drop_last else math.ceil(self.total / global_size)

    @property
    def n_left_out(self) -> int:
        """Number of an epoch's examples that are left out, since they do not fill a batch."""
        return max(self.total - len(self) * self.batch_size * self.num_replicas, 0)

    def batches(self) -> list[list[Index]]:
        """This rank's batches of the current epoch: `len(self)` lists of example indices."""
        indices = self._epoch_indices()
        global_size = self.batch_size * self.num_replicas
        batches: list[list[Index]] = []
        for start in range(0, len(self) * global_size, global_size):
            global_batch = indices[start : start + global_size]
            share = math.ceil(len(global_batch) / self.num_replicas)
            # Repeat examples of a last batch that the ranks cannot share evenly.
            global_batch = (global_batch * self.num_replicas)[: share * self.num_replicas]
            batches.append([*global_batch[self.rank * share : (self.rank + 1) * share]])
        return batches

    def _epoch_indices(self) -> list[int]:
        if self.samples_per_epoch is None:
            return self._pass(self.epoch)
        # Position of the epoch's first example in the endless sequence of passes.
        number, offset = divmod(self.epoch * self.samples_per_epoch, self.size)
        passes = chain.from_iterable(map(self._pass, count(number)))
        return list(islice(passes, offset, offset + self.samples_per_epoch))

    def _pass(self, number: int) -> list[int]:
        """One pass over the dataset. Its order depends only on its number."""
        if not self.shuffle:
            return list(range(self.size))
        return [int(i) for i in self._generator(number, self.stream).permutation(self.size)]


class TokenBudgetBatchSampler(EpochBatchSampler):
    """Batches with about the same number of tokens instead of examples (Section 4.2).

    Examples of similar length (within 12.5 %) form a bucket and count as if padded to its longest.
    From long to short, every batch takes as many examples as fit into the budget. Every epoch
    shuffles the examples within their buckets and the order of the batches. The number and sizes of
    the batches stay the same.

    Args:
        lengths: Number of tokens of every example.
        tokens_per_batch: Budget of a batch on one rank, including padding.
        min_samples: Minimum number of examples per batch, even if they exceed the budget. One batch
            is smaller if the dataset is smaller, or if the last batch can neither borrow examples
            nor be merged without exceeding `max_samples`.
        max_samples: Maximum number of examples per batch; default: as many as fit.
        shuffle: Shuffle. Otherwise batches come from long to short, the same in every epoch.
        seed: Seed of the order; the same on all ranks.
        num_replicas: Number of ranks. Some batches are repeated if there is not one for each.
        rank: Rank of this process.
    """

    _BUCKET_RATIO = 1.125

    def __init__(
        self,
        lengths: Sequence[int],
        tokens_per_batch: int,
        *,
        min_samples: int = 1,
        max_samples: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int = 1,
        rank: int = 0,
    ) -> None:
        if len(lengths) == 0 or min(lengths) < 1:
            actual = f"a length of {min(lengths)}" if len(lengths) else "none"
            raise ValueError(
                f"lengths: expected at least one example, each of at least one token, got {actual}"
            )
        check_count("tokens_per_batch", tokens_per_batch)
        check_count("min_samples", min_samples)
        if max_samples is not None and max_samples < min_samples:
            raise ValueError(
                f"max_samples: expected at least min_samples={min_samples}, got {max_samples}"
            )
        self.lengths = [int(length) for length in lengths]
        self.tokens_per_batch = tokens_per_batch
        self.min_samples = min_samples
        self.max_samples = max_samples
        self._buckets = self._make_buckets()
        self._sizes = self._make_sizes()
        super().__init__(
            batch_size=max(1, round(len(lengths) / len(self._sizes))),
            shuffle=shuffle,
            seed=seed,
            num_replicas=num_replicas,
            rank=rank,
        )

    def __len__(self) -> int:
        return math.ceil(len(self._sizes) / self.num_replicas)

    def batches(self) -> list[list[Index]]:
        """This rank's batches of the current epoch: `len(self)` lists of example indices."""
        generator = self._generator(self.epoch) if self.shuffle else None
        order: list[int] = []
        for bucket in self._buckets:
            n_examples = len(bucket)
            positions = (
                range(n_examples) if generator is None else generator.permutation(n_examples)
            )
            order += [bucket[position] for position in positions]
        remaining = iter(order)
        # the batches of all ranks, from long to short
        batches = [list(islice(remaining, size)) for size in self._sizes]
        if generator is not None:
            batches = [batches[i] for i in generator.permutation(len(batches))]
        total = len(self) * self.num_replicas
        repeated = batches * math.ceil(total / len(batches))
        # Ranks take turns, so that without shuffling each gets long and short batches alike.
        return [[*batch] for batch in repeated[self.rank : total : self.num_replicas]]

    def _make_buckets(self) -> list[list[int]]:
        """Buckets of similar length, from long to short; each starts with its longest example."""
        # The sort is stable, so that all ranks build the same buckets.
        order = sorted(range(len(self.lengths)), key=lambda i: -self.lengths[i])
        buckets: list[list[int]] = []
        for index in order:
            if buckets and self.lengths[buckets[-1][0]] <= self._BUCKET_RATIO * self.lengths[index]:
                buckets[-1].append(index)
            else:
                buckets.append([index])
        return buckets

    def _make_sizes(self) -> list[int]:
        """Number of examples of each batch, over all ranks, from long to short."""
        # Each example counts with the longest length of its bucket. The sizes then hold for every
        # shuffle within the buckets, and the number of batches is the same in every epoch.
        padded = [self.lengths[bucket[0]] for bucket in self._buckets for _ in bucket]
        sizes: list[int] = []
        start = 0
        while start < len(padded):
            size = max(self.min_samples, self.tokens_per_batch // padded[start])
            size = min(size, self.max_samples or size, len(padded) - start)
            sizes.append(size)
            start += size
        # A last batch below the minimum borrows examples of the batch before or is merged into it.
        missing = self.min_samples - sizes[-1]
        if len(sizes) > 1 and missing > 0:
            if sizes[-2] - missing >= self.min_samples:
                sizes[-2:] = [sizes[-2] - missing, self.min_samples]
            elif self.max_samples is None or sizes[-2] + sizes[-1] <= self.max_samples:
                sizes[-2:] = [sizes[-2] + sizes[-1]]
        return sizes


class PairedBatchSampler(EpochBatchSampler):
    """Two samplers in step: every example of the first is paired with one of the second.

    Args:
        first: Sampler of the first dataset, whose options this sampler takes over.
        second: Sampler of the second dataset, with as many batches of the same size.
    """

    def __init__(self, first: FixedBatchSampler, second: FixedBatchSampler) -> None:
        if len(first) != len(second) or first.batch_size != second.batch_size:
            raise ValueError(
                f"second: expected {len(first)} batches of {first.batch_size}, got {len(second)} "
                f"of {second.batch_size}"
            )
        super().__init__(
            batch_size=first.batch_size,
            shuffle=first.shuffle,
            seed=first.seed,
            num_replicas=first.num_replicas,
            rank=first.rank,
        )
        self.first = first
        self.second = second

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of both samplers."""
        self.epoch = epoch
        self.first.set_epoch(epoch)
        self.second.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.first)

    def batches(self) -> list[list[Index]]:
        """This rank's batches of the current epoch, as lists of `IndexPair`."""
        return [
            [IndexPair(first, second) for first, second in zip(firsts, seconds, strict=True)]  # type: ignore[arg-type]
            for firsts, seconds in zip(self.first.batches(), self.second.batches(), strict=True)
        ]
