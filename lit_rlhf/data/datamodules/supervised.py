"""The datamodules of supervised fine-tuning and of reward model training."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np

from lit_rlhf.data.cache import RecordEncoder
from lit_rlhf.data.counts import EncodingError
from lit_rlhf.data.datamodules.base import Part, RecordDataModule
from lit_rlhf.data.encoding import DialogueEncoder, TrainOn
from lit_rlhf.data.examples import (
    PreferenceBatch,
    PreferenceExample,
    TokenExample,
    collate_preferences,
    collate_tokens,
)
from lit_rlhf.data.loader import ResumableLoader
from lit_rlhf.data.records import DemonstrationRecord, PreferenceRecord, RecordKind, TextRecord
from lit_rlhf.data.samplers import EpochBatchSampler, FixedBatchSampler, TokenBudgetBatchSampler
from lit_rlhf.data.sources import DataSource


class DynamicBatchDataModule(RecordDataModule):
    """Base of the datamodules that can fill batches by tokens instead of examples (Section 4.2).

    Args:
        train_sources: Training data.
        batch_size: Examples per batch and rank; not used with `tokens_per_batch`.
        tokens_per_batch: Tokens per batch and rank, including padding (Section 4.2). For a pair,
            the tokens of both responses with their prompts count. Default: batches of `batch_size`
            examples.
        min_samples: Minimum number of examples per batch, with `tokens_per_batch`.
        max_samples: Maximum number of examples per batch, with `tokens_per_batch`.
        **record_options: Arguments of `RecordDataModule`.
    """

    collate: ClassVar[Callable[..., Any]]
    """Makes a batch from a list of examples and `pad_token_id`."""

    def __init__(
        self,
        train_sources: list[DataSource],
        batch_size: int = 8,
        tokens_per_batch: int | None = None,
        *,
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

    def make_loader(self, part: Part, shuffle: bool) -> ResumableLoader[Any]:
        """Make the loader of one part for this rank; `shuffle` gives every epoch a new order."""
        examples = self.examples[part]
        sampler: EpochBatchSampler
        options = self.sampler_options(shuffle)
        if self.tokens_per_batch is None:
            sampler = FixedBatchSampler(len(examples), self.batch_size, **options)
        else:
            options |= {"min_samples": self.min_samples, "max_samples": self.max_samples}
            lengths = [example.n_tokens for example in examples]
            sampler = TokenBudgetBatchSampler(lengths, self.tokens_per_batch, **options)
        collate = partial(self.collate, pad_token_id=self.require_encoder().pad_token_id)
        return ResumableLoader(examples, sampler, collate, self.num_workers)


class DemonstrationDataModule(DynamicBatchDataModule):
    """Loads `TokenBatch`es of dialogues to imitate, or of plain text.

    Args:
        train_sources: Training data: demonstrations, preferences for their chosen responses, or
            plain text (rows with `text`), which is cut into blocks of `max_length` tokens. All
            tokens of plain text are trained on, and the text of special tokens counts as ordinary
            text.
        train_on: `"last"` trains on the last response, `"all"` on every assistant turn.
        **options: Arguments of `DynamicBatchDataModule` and `RecordDataModule`.
    """

    kind: ClassVar[RecordKind] = "ptx"  # demonstrations or plain text
    collate = staticmethod(collate_tokens)

    def __init__(
        self, train_sources: list[DataSource], train_on: TrainOn = "last", **options: Any
    ) -> None:
        super().__init__(train_sources, **options)
        self.train_on: TrainOn = train_on

    def make_record_encoder(self) -> RecordEncoder:
        """Make the function that encodes a demonstration."""
        return partial(
            _encode_demonstration, encoder=self.require_encoder(), train_on=self.train_on
        )


class PreferenceDataModule(DynamicBatchDataModule):
    """Loads `PreferenceBatch`es of compared responses.

    Args:
        train_sources: Training data: preferences.
        meta_sources: Pairs of a policy's responses for MetaRM, see `RewardModule`. They are read as
            preferences, and which of the two is the chosen one does not matter.
        **options: Arguments of `DynamicBatchDataModule` and `RecordDataModule`.
    """

    kind: ClassVar[RecordKind] = "preference"
    collate = staticmethod(collate_preferences)

    def __init__(
        self,
        train_sources: list[DataSource],
        *,
        meta_sources: list[DataSource] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(train_sources, **options)
        self.meta_sources = meta_sources or []
        self.sources["meta"] = self.meta_sources
        labels = (source.label for source in self.meta_sources)
        self.source_names = list(dict.fromkeys([*self.source_names, *labels]))

    def draw_meta_pairs(self, size: int, *, epoch: int, batch_idx: int) -> PreferenceBatch:
        """Draw pairs of `meta_sources` for a batch of this rank, with replacement.

        The draws depend on the seed and on the place in the run. With batches of equal size, all
        ranks together draw what one rank would draw for a batch of all their examples.

        Args:
            size: Number of pairs for this rank.
            epoch: Epoch of the run, from 0.
            batch_idx: Index of the batch in the epoch, from 0.
        """
        generator = np.random.default_rng([self.seed, epoch, batch_idx])
        options = self.sampler_options(shuffle=True)
        pairs = self.examples["meta"]
        rows = generator.integers(len(pairs), size=size * options["num_replicas"])
        first = size * options["rank"]
        rank_rows = rows[first : first + size]
        return self.collate(
            [pairs[int(row)] for row in rank_rows], self.require_encoder().pad_token_id
        )

    def make_record_encoder(self) -> RecordEncoder:
        """Make the function that encodes a preference."""
        return partial(
            _encode_preference, encoder=self.require_encoder(), source_names=self.source_names
        )


def _encode_demonstration(
    record: DemonstrationRecord | TextRecord, encoder: DialogueEncoder, train_on: TrainOn
) -> list[TokenExample]:
    if isinstance(record, TextRecord):
        return encoder.encode_text(record.text)
    if train_on == "all" and record.has_untrained_turns:
        raise EncodingError(
            "an answer with `weight: 0` is not to be trained on", "train_on: last trains on none"
        )
    return [encoder.encode_dialogue(record.messages, train_on)]


def _encode_preference(
    record: PreferenceRecord, encoder: DialogueEncoder, source_names: list[str]
) -> list[PreferenceExample]:
    pair = encoder.encode_pair(
        record.prompt,
        chosen=record.chosen,
        rejected=record.rejected,
        margin=record.margin,
        source=source_names.index(record.source),
    )
    return [pair]
