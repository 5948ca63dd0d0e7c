"""Demonstrations for supervised fine-tuning."""

from typing import Any, ClassVar

from lit_rlhf.data.datamodules.batching import DynamicBatchDataModule
from lit_rlhf.data.encoding import TrainOn
from lit_rlhf.data.examples import (
    EncodingCounts,
    TokenExample,
    collated_tokens,
    demonstration_examples,
)
from lit_rlhf.data.records import DemonstrationRecord, RecordKind
from lit_rlhf.data.sources import DataSource


class DemonstrationDataModule(DynamicBatchDataModule):
    """Yields :class:`~lit_rlhf.data.batches.TokenBatch` of dialogues to imitate.

    Args:
        train_sources: Training data: demonstrations, or preferences for their chosen responses.
        train_on: ``"last"`` trains on the last response, ``"all"`` on every assistant turn.
        **options: Arguments of :class:`DynamicBatchDataModule` and :class:`RecordDataModule`.
    """

    kind: ClassVar[RecordKind] = "demonstration"
    collate = staticmethod(collated_tokens)

    def __init__(
        self, train_sources: list[DataSource], train_on: TrainOn = "last", **options: Any
    ) -> None:
        super().__init__(train_sources, **options)
        self.train_on = train_on

    def encoded(self, record: DemonstrationRecord, counts: EncodingCounts) -> list[TokenExample]:
        """Encode one demonstration.

        Args:
            record: The record.
            counts: Counts that are added to.

        Returns:
            One example.
        """
        return demonstration_examples(record, self.built_encoder(), self.train_on, counts)

    def length(self, example: TokenExample) -> int:
        """Count the tokens of a dialogue.

        Args:
            example: The dialogue.

        Returns:
            The count.
        """
        return len(example.input_ids)
