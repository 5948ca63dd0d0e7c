"""The datamodule of PPO: prompts, each with a pretraining example if there is a ptx loss."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from lit_rlhf.checks import check_count
from lit_rlhf.data.cache import RecordEncoder
from lit_rlhf.data.datamodules.base import Part, RecordDataModule
from lit_rlhf.data.encoding import DialogueEncoder
from lit_rlhf.data.examples import (
    PromptBatch,
    PromptDataset,
    PromptExample,
    TokenExample,
    collate_prompts,
)
from lit_rlhf.data.loader import ResumableLoader
from lit_rlhf.data.records import DemonstrationRecord, PromptRecord, RecordKind, TextRecord
from lit_rlhf.data.samplers import FixedBatchSampler, PairedBatchSampler
from lit_rlhf.data.sources import DataSource
from lit_rlhf.rank_zero import rank_zero_only

_log_info = rank_zero_only(logging.getLogger(__name__).info)

_PTX_STREAM = 1  # the ptx examples have another order than the prompts, with the same seed


class PromptDataModule(RecordDataModule):
    """Loads `PromptBatch`es, each with the prompts of one PPO iteration.

    Training batches are always full. Prompts of an epoch that do not fill one are left out, and the
    log says once how many. Validation and test batches hold every prompt, in order, without ptx
    examples.

    Args:
        train_sources: Training data of any kind; only the prompts are read.
        batch_size: Prompts per iteration and rank. Each gets `responses_per_prompt` responses, an
            option of the module that is 1 by default.
        samples_per_epoch: Prompts per epoch over all ranks. An epoch is then
            `samples_per_epoch / (batch_size * ranks)` iterations, rounded down, and the prompts are
            shuffled again and repeated as necessary. Default: every prompt once.
        ptx_sources: Pretraining data for the ptx loss (Eq. 17): plain text, cut into blocks of
            `ptx_max_length` tokens, or demonstrations. Every prompt comes with one example.
        ptx_max_length: Longest block of plain text in tokens; default `max_length`. Long blocks
            cost most of an update; the length of a rollout is enough.
        **record_options: Arguments of `RecordDataModule`.
    """

    kind: ClassVar[RecordKind] = "prompt"

    def __init__(
        self,
        train_sources: list[DataSource],
        batch_size: int = 128,
        samples_per_epoch: int | None = None,
        *,
        ptx_sources: list[DataSource] | None = None,
        ptx_max_length: int | None = None,
        **record_options: Any,
    ) -> None:
        super().__init__(train_sources, **record_options)
        if samples_per_epoch is not None:
            check_count("samples_per_epoch", samples_per_epoch)
        if ptx_max_length is not None and not 2 <= ptx_max_length <= self.max_length:
            raise ValueError(
                f"ptx_max_length: expected 2 to max_length={self.max_length}, got {ptx_max_length}"
            )
        self.batch_size = batch_size
        self.samples_per_epoch = samples_per_epoch
        self.ptx_sources = ptx_sources or []
        self.ptx_max_length = ptx_max_length or self.max_length
        self.sources["ptx"] = self.ptx_sources
        self._has_told_rest = False

    def make_record_encoder(self) -> RecordEncoder:
        """Make the function that encodes a prompt or a ptx record."""
        encoder = self.require_encoder()
        return partial(_encode_record, encoder=encoder, ptx_max_length=self.ptx_max_length)

    def make_loader(self, part: Part, shuffle: bool) -> ResumableLoader[PromptBatch]:
        """Make the loader of one part for this rank."""
        prompts: Sequence[PromptExample] = self.examples[part]
        training = part == "train"
        options = {**self.sampler_options(shuffle), "drop_last": training}
        n_samples = self.samples_per_epoch if training else None
        sampler = FixedBatchSampler(
            len(prompts), self.batch_size, samples_per_epoch=n_samples, **options
        )
        if sampler.n_left_out and not self._has_told_rest:
            self._has_told_rest = True
            _log_info(
                f"{part}: each epoch leaves out {sampler.n_left_out} of {sampler.total} prompts, "
                f"which do not fill a batch of {self.batch_size} on each rank"
                f"{', other ones in each epoch' if shuffle else ''}"
            )
        collate = partial(collate_prompts, pad_token_id=self.require_encoder().pad_token_id)
        ptx: Sequence[TokenExample] = self.examples.get("ptx", [])
        if not training or not ptx:
            return ResumableLoader(PromptDataset(prompts), sampler, collate, self.num_workers)
        # An epoch has as many ptx examples as prompts, however many there are.
        options |= {"samples_per_epoch": sampler.total, "stream": _PTX_STREAM}
        ptx_sampler = FixedBatchSampler(len(ptx), self.batch_size, **options)
        paired = PairedBatchSampler(sampler, ptx_sampler)
        dataset = PromptDataset(prompts, ptx)
        return ResumableLoader(dataset, paired, collate, self.num_workers)


def _encode_record(
    record: PromptRecord | TextRecord | DemonstrationRecord,
    encoder: DialogueEncoder,
    ptx_max_length: int,
) -> Sequence[PromptExample | TokenExample]:
    if isinstance(record, PromptRecord):
        return [encoder.encode_prompt(record.prompt)._replace(fields=record.fields)]
    if isinstance(record, TextRecord):
        return encoder.encode_text(record.text, ptx_max_length)
    return [encoder.encode_dialogue(record.messages)]
