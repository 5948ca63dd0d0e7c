"""Data: records, chat templates, encoding, batches and datamodules."""

from lit_rlhf.data.batches import PreferenceBatch, PromptBatch, TokenBatch
from lit_rlhf.data.contract import TextContract
from lit_rlhf.data.datamodules import (
    DemonstrationDataModule,
    PreferenceDataModule,
    PromptDataModule,
)
from lit_rlhf.data.encoding import DialogueEncoder, Encoded, EncodedPair, EncodingError
from lit_rlhf.data.prompts import encode_prompts, parsed_prompts
from lit_rlhf.data.records import (
    DemonstrationRecord,
    Message,
    PreferenceRecord,
    PromptRecord,
    RecordError,
    TextRecord,
)
from lit_rlhf.data.samplers import TokenBudgetBatchSampler
from lit_rlhf.data.sources import DataSource, LoadedRecords, load_records
from lit_rlhf.data.templates import CHAT_TEMPLATES, resolved_template

__all__ = [
    "CHAT_TEMPLATES",
    "DataSource",
    "DemonstrationDataModule",
    "DemonstrationRecord",
    "DialogueEncoder",
    "Encoded",
    "EncodedPair",
    "EncodingError",
    "LoadedRecords",
    "Message",
    "PreferenceBatch",
    "PreferenceDataModule",
    "PreferenceRecord",
    "PromptBatch",
    "PromptDataModule",
    "PromptRecord",
    "RecordError",
    "TextContract",
    "TextRecord",
    "TokenBatch",
    "TokenBudgetBatchSampler",
    "encode_prompts",
    "load_records",
    "parsed_prompts",
    "resolved_template",
]
