"""The datamodule of PPO: prompts, each with a pretraining example if there is a ptx loss."""

import logging
from functools import partial
from typing import Any, ClassVar

from lightning.pytorch.utilities import rank_zero_only

from lit_rlhf.data.datamodules.base import Part, RecordDataModule
from lit_rlhf.data.dataset import (
    PromptBatch,
    PromptDataset,
    PromptExample,
    TokenExample,
    collate_prompts,
)
from lit_rlhf.data.encoding import encode_records
from lit_rlhf.data.loader import ResumableLoader
from lit_rlhf.data.records import DemonstrationRecord, PromptRecord, RecordKind, TextRecord
from lit_rlhf.data.samplers import FixedBatchSampler, PairedBatchSampler
from lit_rlhf.data.sources import DataSource, repeat_by_weight

_log_info = rank_zero_only(logging.getLogger(__name__).info)

_PTX_STREAM = 1  # the ptx examples have another order than the prompts, with the same seed


class PromptDataModule(RecordDataModule):
    """Loads `PromptBatch`es, each with the prompts of one PPO iteration.

    Training batches are always full. Validation and test batches hold every prompt, in order,
    without ptx examples.

    Args:
        train_sources: Training data of any kind; only the prompts are read.
        batch_size: Prompts per iteration and rank. Each gets `responses_per_prompt` responses, an
            option of the module that is 1 by default.
        samples_per_epoch: Prompts per epoch over all ranks. An epoch is then
            `samples_per_epoch / (batch_size * ranks)` iterations, rounded down, and the prompts are
            shuffled again and repeated as necessary. Default: every prompt once.
        ptx_sources: Pretraining data for the ptx loss (Eq. 17): plain text, cut into blocks of
            `max_length` tokens, or demonstrations. Every prompt comes with one example.
        **record_options: Arguments of `RecordDataModule`.

    Raises:
        ValueError: If an argument is out of range.
    """

    kind: ClassVar[RecordKind] = "prompt"

    def __init__(
        self,
        train_sources: list[DataSource],
        batch_size: int = 128,
        samples_per_epoch: int | None = None,
        ptx_sources: list[DataSource] | None = None,
        **record_options: Any,
    ) -> None:
        super().__init__(train_sources, **record_options)
        if samples_per_epoch is not None and samples_per_epoch < 1:
            raise ValueError(f"samples_per_epoch: expected at least 1, got {samples_per_epoch}")
        self.batch_size = batch_size
        self.samples_per_epoch = samples_per_epoch
        self.ptx_sources = ptx_sources or []
        self.ptx: list[TokenExample] = []

    def encode_record(self, record: PromptRecord) -> list[PromptExample]:
        """Encode a prompt.

        Args:
            record: The record.

        Returns:
            One example.

        Raises:
            EncodingError: If the record cannot be encoded.
        """
        example = self.require_encoder().encode_prompt(record.prompt)
        return [example._replace(fields=record.fields)]

    def encode_parts(self, stage: str | None) -> None:
        """Encode the parts of a stage; for training the ptx data too.

        Args:
            stage: As for `setup`.
        """
        super().encode_parts(stage)
        if self.ptx_sources and not self.ptx and stage in ("fit", None):
            records: list[Any] = self._load_part("ptx", "ptx", self.ptx_sources)
            records = repeat_by_weight(records, self.ptx_sources, self.seed)
            self.ptx = encode_records(records, self._encode_ptx, self.counts, self.on_bad_record)
            if not self.ptx:
                raise ValueError(f"ptx_sources: no example is left of {len(records)} records")
            _log_info(f"ptx: {len(self.ptx)} examples of {len(records)} records")

    def make_loader(self, part: Part, shuffle: bool) -> ResumableLoader[PromptBatch]:
        """Make the loader of one part for this rank.

        Args:
            part: `"train"`, `"val"` or `"test"`.
            shuffle: Draw a new order in every epoch.

        Returns:
            The loader.
        """
        prompts: list[PromptExample] = self.examples[part]
        training = part == "train"
        ranks = {"num_replicas": self.num_replicas, "rank": self.rank}
        sampler = FixedBatchSampler(
            len(prompts),
            self.batch_size,
            shuffle,
            self.seed,
            drop_last=training,
            samples_per_epoch=self.samples_per_epoch if training else None,
            **ranks,
        )
        collate = partial(collate_prompts, pad_token_id=self.require_encoder().pad_token_id)
        if not training or not self.ptx:
            return ResumableLoader(PromptDataset(prompts), sampler, collate, self.num_workers)
        # An epoch of the prompts decides how many ptx examples are drawn, however many there are.
        ptx_sampler = FixedBatchSampler(
            len(self.ptx),
            self.batch_size,
            shuffle,
            self.seed,
            drop_last=True,
            samples_per_epoch=sampler.total,
            stream=_PTX_STREAM,
            **ranks,
        )
        paired = PairedBatchSampler(sampler, ptx_sampler)
        dataset = PromptDataset(prompts, self.ptx)
        return ResumableLoader(dataset, paired, collate, self.num_workers)

    def _encode_ptx(self, record: TextRecord | DemonstrationRecord) -> list[TokenExample]:
        encoder = self.require_encoder()
        if isinstance(record, TextRecord):
            return encoder.encode_text(record.text)
        return [encoder.encode_dialogue(record.messages)]
