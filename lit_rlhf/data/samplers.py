"""Which examples make up which batch, on which rank, in which epoch.

All samplers are deterministic in ``(seed, epoch)``, use no global random state, give every rank the
same number of batches, and keep that number from epoch to epoch: Lightning reads it once.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from torch.utils.data import Sampler

Index = int | tuple[int, int]


class EpochBatchSampler(Sampler[list[Index]], ABC):
    """A batch sampler whose order depends on the epoch and which serves one rank.

    Args:
        batch_size: Examples per batch and rank (an average where batches differ). DeepSpeed's
            strategy in Lightning reads it for its throughput figures.
        shuffle: Draw a new order every epoch.
        seed: Seed of the order; the same on all ranks.
        num_replicas: Number of ranks.
        rank: This rank.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self, batch_size: int, shuffle: bool, seed: int, num_replicas: int, rank: int
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
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
        """This object: Lightning calls ``set_epoch`` on ``loader.batch_sampler.sampler``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose batches the next iteration yields.

        Args:
            epoch: Number of the epoch, from 0.
        """
        self.epoch = epoch

    @abstractmethod
    def __len__(self) -> int:
        """Number of batches per rank and epoch, the same in every epoch."""

    @abstractmethod
    def batches(self) -> list[list[Index]]:
        """This rank's batches of the current epoch."""

    def __iter__(self) -> Iterator[list[Index]]:
        """Iterate over this rank's batches of the current epoch."""
        return iter(self.batches())

    def _generator(self, *stream: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *stream])


class FixedBatchSampler(EpochBatchSampler):
    """Batches of a fixed number of examples.

    Without ``samples_per_epoch`` an epoch is one pass over the data. With it, an epoch is the next
    ``samples_per_epoch`` examples of an endless sequence of reshuffled passes, so that no example
    comes a third time before every other has come twice, across epochs too.

    Args:
        size: Number of examples in the data set.
        batch_size: Examples per batch and rank.
        shuffle: Draw a new order every pass.
        seed: Seed of the order; the same on all ranks.
        drop_last: Leave out the examples at the end that do not fill a batch on every rank. Else
            the last batch is smaller, and examples are repeated where ranks would differ.
        samples_per_epoch: Examples per epoch, over all ranks.
        num_replicas: Number of ranks.
        rank: This rank.
        stream: Keeps the orders of two samplers with the same seed apart.

    Raises:
        ValueError: If an argument is out of range, or no batch would be left.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        samples_per_epoch: int | None = None,
        num_replicas: int = 1,
        rank: int = 0,
        stream: int = 0,
    ) -> None:
        super().__init__(batch_size, shuffle, seed, num_replicas, rank)
        if size < 1:
            raise ValueError(f"size: expected at least 1 example, got {size}")
        self.size = size
        self.drop_last = drop_last
        self.samples_per_epoch = samples_per_epoch
        self.stream = stream
        self.total = size if samples_per_epoch is None else samples_per_epoch
        if len(self) < 1:
            raise ValueError(
                f"batch_size: expected at most {self.total // num_replicas} with drop_last "
                f"({self.total} examples per epoch on {num_replicas} ranks), got {batch_size}"
            )

    def __len__(self) -> int:
        """Number of batches per rank and epoch."""
        everywhere = self.batch_size * self.num_replicas
        return self.total // everywhere if self.drop_last else math.ceil(self.total / everywhere)

    def batches(self) -> list[list[Index]]:
        """This rank's batches of the current epoch: ``len(self)`` lists of example indices."""
        indices = self._epoch_indices()
        everywhere = self.batch_size * self.num_replicas
        result: list[list[Index]] = []
        for start in range(0, len(self) * everywhere, everywhere):
            group = indices[start : start + everywhere]
            share = math.ceil(len(group) / self.num_replicas)
            group = (group * self.num_replicas)[: share * self.num_replicas]
            result.append([*group[self.rank * share : (self.rank + 1) * share]])
        return result

    def _epoch_indices(self) -> list[int]:
        if self.samples_per_epoch is None:
            return self._pass(self.epoch)
        first, offset = divmod(self.epoch * self.samples_per_epoch, self.size)
        indices: list[int] = []
        number = first
        while len(indices) < offset + self.samples_per_epoch:
            indices += self._pass(number)
            number += 1
        return indices[offset : offset + self.samples_per_epoch]

    def _pass(self, number: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.size))
        return [int(i) for i in self._generator(number, self.stream).permutation(self.size)]


class TokenBudgetBatchSampler(EpochBatchSampler):
    """Batches of about equal token count instead of equal sample count (Section 4.2).

    Examples of similar length (within 12.5 %) share a bucket and count as if padded to its longest.
    From long to short, every batch takes as many examples as then fit the budget; at most the last
    one is smaller. Each epoch draws anew who of a bucket goes into which batch, and the order of
    the batches; their number and sizes stay.

    Args:
        lengths: Tokens of every example.
        tokens_per_batch: Budget of a batch on one rank, padding counted.
        min_samples: Fewest examples in a batch; wins over the budget for very long examples. Only
            a data set smaller than that, or one whose last batch cannot borrow examples or be
            merged without exceeding ``max_samples``, gives a smaller one.
        max_samples: Most examples in a batch; default: as many as fit.
        shuffle: Shuffle; else batches come from long to short, the same in every epoch.
        seed: Seed of the order; the same on all ranks.
        drop_last: Leave out the batches at the end that do not give every rank one. Else some
            batches are repeated.
        num_replicas: Number of ranks.
        rank: This rank.

    Raises:
        ValueError: If an argument is out of range, or no batch would be left.
    """

    _GROWTH = 1.125

    def __init__(
        self,
        lengths: Sequence[int],
        tokens_per_batch: int,
        min_samples: int = 1,
        max_samples: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        num_replicas: int = 1,
        rank: int = 0,
    ) -> None:
        if len(lengths) == 0 or min(lengths) < 1:
            raise ValueError("lengths: expected at least one example, each of at least one token")
        if tokens_per_batch < 1:
            raise ValueError(f"tokens_per_batch: expected at least 1, got {tokens_per_batch}")
        if min_samples < 1:
            raise ValueError(f"min_samples: expected at least 1, got {min_samples}")
        if max_samples is not None and max_samples < min_samples:
            raise ValueError(
                f"max_samples: expected at least min_samples={min_samples}, got {max_samples}"
            )
        self.lengths = [int(length) for length in lengths]
        self.tokens_per_batch = tokens_per_batch
        self.min_samples = min_samples
        self.max_samples = max_samples
        self.drop_last = drop_last
        self._buckets = self._make_buckets()
        self._sizes = self._make_sizes()
        self._count = len(self._sizes)
        super().__init__(
            max(1, round(len(lengths) / self._count)), shuffle, seed, num_replicas, rank
        )
        if len(self) < 1:
            raise ValueError(
                f"num_replicas: expected at most {self._count}, the number of batches, with "
                f"drop_last, got {num_replicas}"
            )

    def __len__(self) -> int:
        """Number of batches per rank and epoch."""
        if self.drop_last:
            return self._count // self.num_replicas
        return math.ceil(self._count / self.num_replicas)

    def batches(self) -> list[list[Index]]:
        """This rank's batches of the current epoch: ``len(self)`` lists of example indices."""
        generator = self._generator(self.epoch) if self.shuffle else None
        everywhere = self._everywhere(generator)
        if generator is not None:
            everywhere = [everywhere[i] for i in generator.permutation(len(everywhere))]
        needed = len(self) * self.num_replicas
        repeated = everywhere * math.ceil(needed / len(everywhere))
        return [[*batch] for batch in repeated[self.rank : needed : self.num_replicas]]

    def _make_buckets(self) -> list[list[int]]:
        """Examples of similar length, from long to short; the longest of each comes first."""
        order = sorted(range(len(self.lengths)), key=lambda i: -self.lengths[i])
        buckets: list[list[int]] = []
        for index in order:
            if buckets and self.lengths[buckets[-1][0]] <= self._GROWTH * self.lengths[index]:
                buckets[-1].append(index)
            else:
                buckets.append([index])
        return buckets

    def _make_sizes(self) -> list[int]:
        """Number of examples in each batch over all ranks, from long to short."""
        counted = [self.lengths[bucket[0]] for bucket in self._buckets for _ in bucket]
        sizes: list[int] = []
        start = 0
        while start < len(counted):
            size = max(self.min_samples, self.tokens_per_batch // counted[start])
            size = min(size, self.max_samples or size, len(counted) - start)
            sizes.append(size)
            start += size
        # A last batch below the minimum borrows from the one before or joins it.
        missing = self.min_samples - sizes[-1]
        if len(sizes) > 1 and missing > 0:
            if sizes[-2] - missing >= self.min_samples:
                sizes[-2:] = [sizes[-2] - missing, self.min_samples]
            elif self.max_samples is None or sizes[-2] + sizes[-1] <= self.max_samples:
                sizes[-2:] = [sizes[-2] + sizes[-1]]
        return sizes

    def _everywhere(self, generator: np.random.Generator | None) -> list[list[int]]:
        """The epoch's batches over all ranks, from long to short."""
        order: list[int] = []
        for bucket in self._buckets:
            drawn = range(len(bucket)) if generator is None else generator.permutation(len(bucket))
            order += [bucket[i] for i in drawn]
        remaining = iter(order)
        return [list(islice(remaining, size)) for size in self._sizes]


class PairedBatchSampler(EpochBatchSampler):
    """Two samplers in step: every example of the first goes with one of the second.

    Args:
        first: Batches of the main data set.
        second: Batches of the same sizes from the other data set.

    Raises:
        ValueError: If the two do not have the same number of batches.
    """

    def __init__(self, first: FixedBatchSampler, second: FixedBatchSampler) -> None:
        if len(first) != len(second) or first.batch_size != second.batch_size:
            raise ValueError(
                f"second: expected {len(first)} batches of {first.batch_size}, got {len(second)} "
                f"of {second.batch_size}"
            )
        super().__init__(
            first.batch_size, first.shuffle, first.seed, first.num_replicas, first.rank
        )
        self.first = first
        self.second = second

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of both.

        Args:
            epoch: Number of the epoch, from 0.
        """
        self.epoch = epoch
        self.first.set_epoch(epoch)
        self.second.set_epoch(epoch)

    def __len__(self) -> int:
        """Number of batches per rank and epoch."""
        return len(self.first)

    def batches(self) -> list[list[Index]]:
        """Batches of index pairs ``(first, second)``."""
        pairs = zip(self.first.batches(), self.second.batches(), strict=True)
        return [list(zip(first, second, strict=True)) for first, second in pairs]  # type: ignore[arg-type]
