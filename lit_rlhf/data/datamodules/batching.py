"""The choice between batches of a fixed number of examples and of a number of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from lit_rlhf.data.samplers import EpochBatchSampler, FixedBatchSampler, TokenBudgetBatchSampler


@dataclass(frozen=True)
class BatchSizes:
    """How large batches are.

    Attributes:
        batch_size: Examples per batch and rank; not used with ``tokens_per_batch``.
        tokens_per_batch: Tokens per batch and rank, padding counted; None for ``batch_size``.
        min_samples: Fewest examples in a batch, with ``tokens_per_batch``.
        max_samples: Most examples in a batch, with ``tokens_per_batch``.
    """

    batch_size: int
    tokens_per_batch: int | None
    min_samples: int
    max_samples: int | None

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            ValueError: If bounds are given that would have no effect.
        """
        if self.tokens_per_batch is None and (self.min_samples, self.max_samples) != (1, None):
            raise ValueError(
                "tokens_per_batch: expected a number where min_samples or max_samples is given, "
                "got None"
            )

    def sampler(
        self, lengths: Sequence[int], shuffle: bool, seed: int, num_replicas: int, rank: int
    ) -> EpochBatchSampler:
        """Make the sampler for some examples.

        Args:
            lengths: Tokens of every example.
            shuffle: Draw a new order every epoch.
            seed: Seed of the order.
            num_replicas: Number of ranks.
            rank: This rank.

        Returns:
            The sampler of this rank.
        """
        if self.tokens_per_batch is None:
            return FixedBatchSampler(
                len(lengths),
                self.batch_size,
                shuffle,
                seed,
                num_replicas=num_replicas,
                rank=rank,
            )
        return TokenBudgetBatchSampler(
            lengths,
            self.tokens_per_batch,
            self.min_samples,
            self.max_samples,
            shuffle,
            seed,
            num_replicas=num_replicas,
            rank=rank,
        )
