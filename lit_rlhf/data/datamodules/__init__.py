"""The datamodules of the three stages."""

from lit_rlhf.data.datamodules.base import RecordDataModule as RecordDataModule
from lit_rlhf.data.datamodules.prompt import PromptDataModule as PromptDataModule
from lit_rlhf.data.datamodules.supervised import DemonstrationDataModule as DemonstrationDataModule
from lit_rlhf.data.datamodules.supervised import DynamicBatchDataModule as DynamicBatchDataModule
from lit_rlhf.data.datamodules.supervised import PreferenceDataModule as PreferenceDataModule
