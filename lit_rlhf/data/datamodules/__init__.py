"""The datamodules of the three stages."""

from lit_rlhf.data.datamodules.base import RecordDataModule
from lit_rlhf.data.datamodules.prompt import PromptDataModule
from lit_rlhf.data.datamodules.supervised import (
    DemonstrationDataModule,
    DynamicBatchDataModule,
    PreferenceDataModule,
)

__all__ = [
    "DemonstrationDataModule",
    "DynamicBatchDataModule",
    "PreferenceDataModule",
    "PromptDataModule",
    "RecordDataModule",
]
