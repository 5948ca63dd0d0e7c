"""Data: records, chat templates, encoding, batches and datamodules."""

from lit_rlhf.data.batches import PreferenceBatch, PromptBatch, TokenBatch
from lit_rlhf.data.contract import CONTRACT_FILE, TextContract, tokenizer_hash
from lit_rlhf.data.datamodules import (
    DemonstrationDataModule,
    PreferenceDataModule,
    PromptDataModule,
    RecordDataModule,
)
from lit_rlhf.data.encoding import DialogueEncoder, Encoded, EncodedPair, EncodingError
from lit_rlhf.data.examples import PreferenceExample, PromptExample, TokenExample
from lit_rlhf.data.prompts import encode_prompts, parsed_prompts
from lit_rlhf.data.readers import is_file_path
from lit_rlhf.data.records import (
    DemonstrationRecord,
    Message,
    PreferenceRecord,
    PromptRecord,
    RecordError,
    TextRecord,
)
from lit_rlhf.data.samplers import TokenBudgetBatchSampler
from lit_rlhf.data.sources import DataSource, LoadedRecords, OnBadRecord, load_records
from lit_rlhf.data.splits import split_records
from lit_rlhf.data.templates import CHAT_TEMPLATES, resolved_template

__all__ = [
    "CHAT_TEMPLATES",
    "CONTRACT_FILE",
    "DataSource",
    "DemonstrationDataModule",
    "DemonstrationRecord",
    "DialogueEncoder",
    "Encoded",
    "EncodedPair",
    "EncodingError",
    "LoadedRecords",
    "Message",
    "OnBadRecord",
    "PreferenceBatch",
    "PreferenceDataModule",
    "PreferenceExample",
    "PreferenceRecord",
    "PromptBatch",
    "PromptDataModule",
    "PromptExample",
    "PromptRecord",
    "RecordDataModule",
    "RecordError",
    "TextContract",
    "TextRecord",
    "TokenBatch",
    "TokenBudgetBatchSampler",
    "TokenExample",
    "encode_prompts",
    "is_file_path",
    "load_records",
    "parsed_prompts",
    "resolved_template",
    "split_records",
    "tokenizer_hash",
]
