"""Preferences for reward model training."""

from typing import ClassVar

from lit_rlhf.data.datamodules.batching import DynamicBatchDataModule
from lit_rlhf.data.examples import (
    EncodingCounts,
    PreferenceExample,
    collated_preferences,
    preference_examples,
)
from lit_rlhf.data.records import PreferenceRecord, RecordKind


class PreferenceDataModule(DynamicBatchDataModule):
    """Yields :class:`~lit_rlhf.data.batches.PreferenceBatch` of compared responses.

    Its arguments are those of :class:`DynamicBatchDataModule` and :class:`RecordDataModule`.
    """

    kind: ClassVar[RecordKind] = "preference"
    collate = staticmethod(collated_preferences)

    def encoded(self, record: PreferenceRecord, counts: EncodingCounts) -> list[PreferenceExample]:
        """Encode one pair.

        Args:
            record: The record.
            counts: Counts that are added to.

        Returns:
            One example.
        """
        return preference_examples(record, self.built_encoder(), self.source_names, counts)

    def length(self, example: PreferenceExample) -> int:
        """Count the tokens of both responses with their prompts.

        Args:
            example: The pair.

        Returns:
            The count.
        """
        return len(example.chosen.input_ids) + len(example.rejected.input_ids)
