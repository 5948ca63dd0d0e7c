"""Prompts for PPO, each with a pretraining example where wanted."""

from functools import partial
from typing import Any, ClassVar

from lit_rlhf.data.batches import PromptBatch
from lit_rlhf.data.datamodules.base import Part, RecordDataModule
from lit_rlhf.data.examples import (
    EncodingCounts,
    PromptDataset,
    PromptExample,
    TokenExample,
    collated_prompts,
    encoded_examples,
    prompt_examples,
    ptx_examples,
)
from lit_rlhf.data.loader import ResumableLoader
from lit_rlhf.data.records import PromptRecord, RecordKind
from lit_rlhf.data.samplers import FixedBatchSampler, PairedBatchSampler
from lit_rlhf.data.sources import DataSource, weighted_records

_PTX_STREAM = 1  # keeps the order of the ptx examples apart from that of the prompts


class PromptDataModule(RecordDataModule):
    """Yields :class:`~lit_rlhf.data.batches.PromptBatch`: the prompts of one PPO iteration.

    Training batches are always full. Validation and test batches hold every prompt, in order,
    without ptx examples.

    Args:
        train_sources: Training data of any kind; only prompts are read.
        batch_size: Prompts, and so rollouts, per iteration and rank.
        samples_per_epoch: Prompts per epoch over all ranks, so that an epoch is
            ``samples_per_epoch / (batch_size * ranks)`` iterations, rounded down; the prompts are
            reshuffled and repeated as needed. Default: every prompt once.
        ptx_sources: Pretraining data for the ptx term (Eq. 17): plain text, cut into blocks of
            ``max_length`` tokens, or demonstrations. One example comes with every prompt.
        **record_options: Arguments of :class:`RecordDataModule`.

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

    def encoded(self, record: PromptRecord, counts: EncodingCounts) -> list[PromptExample]:
        """Encode one prompt.

        Args:
            record: The record.
            counts: Counts that are added to.

        Returns:
            One example.
        """
        return prompt_examples(record, self.built_encoder(), counts)

    def setup(self, stage: str | None = None) -> None:
        """Read, split and encode what a stage needs; for training the ptx data too.

        Args:
            stage: ``"fit"``, ``"validate"``, ``"test"``, ``"predict"`` or None for all.

        Raises:
            RecordError: If a record cannot be used and ``on_bad_record`` is ``"error"``.
            ValueError: If a part is left without examples.
        """
        super().setup(stage)
        for part, examples in self.examples.items():
            self.examples[part] = [
                example._replace(index=index) for index, example in enumerate(examples)
            ]
        if self.ptx_sources and not self.ptx and stage in ("fit", None):
            records: list[Any] = self._load("ptx", "ptx", self.ptx_sources)
            records = weighted_records(records, self.ptx_sources, self.seed)
            encode = partial(_encoded_ptx, encoder=self.built_encoder())
            self.ptx = encoded_examples(records, encode, self.counts, self.on_bad_record)
            if not self.ptx:
                raise ValueError(f"ptx_sources: no example is left of {len(records)} records")
            self._log(f"ptx: {len(self.ptx)} examples of {len(records)} records")

    def loader(self, part: Part, shuffle: bool) -> ResumableLoader[PromptBatch]:
        """Make the loader of one part.

        Args:
            part: ``"train"``, ``"val"`` or ``"test"``.
            shuffle: Draw a new order every epoch.

        Returns:
            The loader of this rank.
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
        collate = partial(collated_prompts, pad_token_id=self.built_encoder().pad_token_id)
        if not training or not self.ptx:
            dataset = PromptDataset(prompts)
            return ResumableLoader(dataset, sampler, collate, self.num_workers)
        partner = FixedBatchSampler(
            len(self.ptx),
            self.batch_size,
            shuffle,
            self.seed,
            drop_last=True,
            samples_per_epoch=sampler.total,
            stream=_PTX_STREAM,
            **ranks,
        )
        paired = PairedBatchSampler(sampler, partner)
        dataset = PromptDataset(prompts, self.ptx)
        return ResumableLoader(dataset, paired, collate, self.num_workers)


def _encoded_ptx(record: Any, counts: EncodingCounts, encoder: Any) -> list[TokenExample]:  # noqa: ANN401
    return ptx_examples(record, encoder, counts)
