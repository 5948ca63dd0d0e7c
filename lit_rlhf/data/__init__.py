"""Data: from the rows of files and datasets to the batches of the three stages.

A preference takes four shapes on its way: a `Row` of a file with its location, a checked
`PreferenceRecord`, an encoded `PreferenceExample`, and a `PreferenceBatch`. Demonstrations, prompts
and plain text take the same way. The datamodules walk it from end to end.
"""

from lit_rlhf.data.contract import CONTRACT_FILE, TextContract, tokenizer_hash
from lit_rlhf.data.counts import (
    DataCounts,
    EncodingError,
    OnBadRecord,
    ResponseTooLongError,
    describe_bad_records,
)
from lit_rlhf.data.datamodules import (
    DemonstrationDataModule,
    DynamicBatchDataModule,
    PreferenceDataModule,
    PromptDataModule,
    RecordDataModule,
)
from lit_rlhf.data.dataset import (
    PreferenceBatch,
    PreferenceExample,
    PromptBatch,
    PromptExample,
    TokenBatch,
    TokenExample,
    Turns,
    collate_preferences,
    collate_prompts,
    collate_tokens,
    pad_sequences,
)
from lit_rlhf.data.encoding import (
    DialogueEncoder,
    TrainOn,
    encode_prompts,
    encode_records,
)
from lit_rlhf.data.formats import FORMATS, Format, detect_format, parse_prompts, parse_row
from lit_rlhf.data.loader import ResumableLoader
from lit_rlhf.data.readers import is_file_path, read_file
from lit_rlhf.data.records import (
    DemonstrationRecord,
    Location,
    Message,
    PreferenceRecord,
    PromptRecord,
    Record,
    RecordError,
    RecordKind,
    Row,
    TextRecord,
)
from lit_rlhf.data.samplers import (
    EpochBatchSampler,
    FixedBatchSampler,
    PairedBatchSampler,
    TokenBudgetBatchSampler,
)
from lit_rlhf.data.sources import (
    DataSource,
    load_records,
    prompt_of,
    split_records,
)
from lit_rlhf.data.templates import CHAT_TEMPLATES

__all__ = [
    "CHAT_TEMPLATES",
    "CONTRACT_FILE",
    "FORMATS",
    "DataCounts",
    "DataSource",
    "DemonstrationDataModule",
    "DemonstrationRecord",
    "DialogueEncoder",
    "DynamicBatchDataModule",
    "EncodingError",
    "EpochBatchSampler",
    "FixedBatchSampler",
    "Format",
    "Location",
    "Message",
    "OnBadRecord",
    "PairedBatchSampler",
    "PreferenceBatch",
    "PreferenceDataModule",
    "PreferenceExample",
    "PreferenceRecord",
    "PromptBatch",
    "PromptDataModule",
    "PromptExample",
    "PromptRecord",
    "Record",
    "RecordDataModule",
    "RecordError",
    "RecordKind",
    "ResponseTooLongError",
    "ResumableLoader",
    "Row",
    "TextContract",
    "TextRecord",
    "TokenBatch",
    "TokenBudgetBatchSampler",
    "TokenExample",
    "TrainOn",
    "Turns",
    "collate_preferences",
    "collate_prompts",
    "collate_tokens",
    "describe_bad_records",
    "detect_format",
    "encode_prompts",
    "encode_records",
    "is_file_path",
    "load_records",
    "pad_sequences",
    "parse_prompts",
    "parse_row",
    "prompt_of",
    "read_file",
    "split_records",
    "tokenizer_hash",
]
