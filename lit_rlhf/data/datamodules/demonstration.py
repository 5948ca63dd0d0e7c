"""Demonstrations for supervised fine-tuning."""

from functools import partial
from typing import ClassVar, Literal

from transformers import PreTrainedTokenizerBase

from lit_rlhf.data.batches import TokenBatch
from lit_rlhf.data.datamodules.base import Part, RecordDataModule
from lit_rlhf.data.datamodules.batching import BatchSizes
from lit_rlhf.data.encoding import TrainOn
from lit_rlhf.data.examples import (
    EncodingCounts,
    ExampleDataset,
    TokenExample,
    collated_tokens,
    demonstration_examples,
)
from lit_rlhf.data.loader import ResumableLoader
from lit_rlhf.data.records import DemonstrationRecord, RecordKind
from lit_rlhf.data.sources import DataSource


class DemonstrationDataModule(RecordDataModule):
    """Yields :class:`~lit_rlhf.data.batches.TokenBatch` of dialogues to imitate.

    Args:
        train_sources: Training data: demonstrations, or preferences for their chosen responses.
        val_sources: Validation data; default: ``val_fraction`` of the training prompts.
        test_sources: Test data; default: ``test_fraction`` of the training prompts.
        val_fraction: Share of the training prompts held out for validation.
        test_fraction: Share of the training prompts held out for test.
        seed: Seed of splits, weights and the order of the data.
        tokenizer: Path or hub id of a tokenizer, or a tokenizer; default: the module's.
        chat_template: ``"tokenizer"``, ``"hh"``, ``"paper-en"`` or ``"paper-zh"``.
        max_length: Longest dialogue in tokens, EOS counted.
        max_prompt_length: Longest prompt in tokens; default ``max_length``.
        train_on: ``"last"`` trains on the last response, ``"all"`` on every assistant turn.
        batch_size: Dialogues per batch and rank; not used with ``tokens_per_batch``.
        tokens_per_batch: Tokens per batch and rank, padding counted (Section 4.2); default: batches
            of ``batch_size`` dialogues.
        min_samples: Fewest dialogues in a batch, with ``tokens_per_batch``.
        max_samples: Most dialogues in a batch, with ``tokens_per_batch``.
        num_workers: Processes that collate batches.
        on_bad_record: ``"error"`` or ``"skip"``.

    Raises:
        ValueError: If an argument is out of range.
    """

    kind: ClassVar[RecordKind] = "demonstration"

    def __init__(
        self,
        train_sources: list[DataSource],
        val_sources: list[DataSource] | None = None,
        test_sources: list[DataSource] | None = None,
        val_fraction: float = 0.0,
        test_fraction: float = 0.0,
        seed: int = 0,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        chat_template: str = "tokenizer",
        max_length: int = 512,
        max_prompt_length: int | None = None,
        train_on: TrainOn = "last",
        batch_size: int = 8,
        tokens_per_batch: int | None = None,
        min_samples: int = 1,
        max_samples: int | None = None,
        num_workers: int = 0,
        on_bad_record: Literal["error", "skip"] = "error",
    ) -> None:
        super().__init__(
            train_sources,
            val_sources,
            test_sources,
            val_fraction,
            test_fraction,
            seed,
            tokenizer,
            chat_template,
            max_length,
            max_prompt_length,
            num_workers,
            on_bad_record,
        )
        self.train_on = train_on
        self.batch_sizes = BatchSizes(batch_size, tokens_per_batch, min_samples, max_samples)

    def encoded(self, record: DemonstrationRecord, counts: EncodingCounts) -> list[TokenExample]:
        """Encode one demonstration.

        Args:
            record: The record.
            counts: Counts that are added to.

        Returns:
            One example.
        """
        return demonstration_examples(record, self.built_encoder(), self.train_on, counts)

    def loader(self, part: Part, shuffle: bool) -> ResumableLoader[TokenBatch]:
        """Make the loader of one part.

        Args:
            part: ``"train"``, ``"val"`` or ``"test"``.
            shuffle: Draw a new order every epoch.

        Returns:
            The loader of this rank.
        """
        examples: list[TokenExample] = self.examples[part]
        sampler = self.batch_sizes.sampler(
            [len(example.input_ids) for example in examples],
            shuffle,
            self.seed,
            self.num_replicas,
            self.rank,
        )
        collate = partial(collated_tokens, pad_token_id=self.built_encoder().pad_token_id)
        return ResumableLoader(ExampleDataset(examples), sampler, collate, self.num_workers)
