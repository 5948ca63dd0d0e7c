"""Datamodules whose batches hold a fixed number of examples, or one of tokens."""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from lit_rlhf.data.datamodules.base import Part, RecordDataModule
from lit_rlhf.data.examples import ExampleDataset
from lit_rlhf.data.loader import ResumableLoader
from lit_rlhf.data.samplers import EpochBatchSampler, FixedBatchSampler, TokenBudgetBatchSampler
from lit_rlhf.data.sources import DataSource


class DynamicBatchDataModule(RecordDataModule):
    """Base of the datamodules that can batch by tokens instead of examples (Section 4.2).

    Args:
        train_sources: Training data.
        batch_size: Examples per batch and rank; not used with ``tokens_per_batch``.
        tokens_per_batch: Tokens per batch and rank, padding counted (Section 4.2), those of both
            responses of a pair with their prompts; default: batches of ``batch_size`` examples.
        min_samples: Fewest examples in a batch, with ``tokens_per_batch``.
        max_samples: Most examples in a batch, with ``tokens_per_batch``.
        **record_options: Arguments of :class:`RecordDataModule`.

    Raises:
        ValueError: If bounds are given that would have no effect.
    """

    collate: ClassVar[Callable[..., Any]]
    """Makes a batch of a list of examples and ``pad_token_id``."""

    def __init__(
        self,
        train_sources: list[DataSource],
        batch_size: int = 8,
        tokens_per_batch: int | None = None,
        min_samples: int = 1,
        max_samples: int | None = None,
        **record_options: Any,
    ) -> None:
        super().__init__(train_sources, **record_options)
        if tokens_per_batch is None and (min_samples, max_samples) != (1, None):
            raise ValueError(
                "tokens_per_batch: expected a number where min_samples or max_samples is given, "
                "got None"
            )
        self.batch_size = batch_size
        self.tokens_per_batch = tokens_per_batch
        self.min_samples = min_samples
        self.max_samples = max_samples

    @abstractmethod
    def length(self, example: Any) -> int:  # noqa: ANN401
        """Count the tokens of one example.

        Args:
            example: The example.

        Returns:
            What it takes of ``tokens_per_batch``.
        """

    def loader(self, part: Part, shuffle: bool) -> ResumableLoader[Any]:
        """Make the loader of one part.

        Args:
            part: ``"train"``, ``"val"`` or ``"test"``.
            shuffle: Draw a new order every epoch.

        Returns:
            The loader of this rank.
        """
        examples = self.examples[part]
        sampler: EpochBatchSampler
        if self.tokens_per_batch is None:
            sampler = FixedBatchSampler(
                len(examples),
                self.batch_size,
                shuffle,
                self.seed,
                num_replicas=self.num_replicas,
                rank=self.rank,
            )
        else:
            sampler = TokenBudgetBatchSampler(
                [self.length(example) for example in examples],
                self.tokens_per_batch,
                self.min_samples,
                self.max_samples,
                shuffle,
                self.seed,
                num_replicas=self.num_replicas,
                rank=self.rank,
            )
        collate = partial(self.collate, pad_token_id=self.built_encoder().pad_token_id)
        return ResumableLoader(ExampleDataset(examples), sampler, collate, self.num_workers)
