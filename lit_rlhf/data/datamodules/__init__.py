"""The datamodules of the three stages."""

from lit_rlhf.data.datamodules.base import RecordDataModule
from lit_rlhf.data.datamodules.demonstration import DemonstrationDataModule
from lit_rlhf.data.datamodules.preference import PreferenceDataModule
from lit_rlhf.data.datamodules.prompt import PromptDataModule

__all__ = [
    "DemonstrationDataModule",
    "PreferenceDataModule",
    "PromptDataModule",
    "RecordDataModule",
]
