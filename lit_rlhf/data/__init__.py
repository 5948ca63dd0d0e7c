"""Data: from the rows of files and datasets to the batches of the three stages.

A preference takes four shapes on its way: a `Row` of a file with its location, a checked
`PreferenceRecord`, an encoded `PreferenceExample`, and a `PreferenceBatch`. Demonstrations, prompts
and plain text take the same way. The datamodules walk it from end to end.
"""

import importlib
import typing

from lit_rlhf.data.contract import CONTRACT_FILE as CONTRACT_FILE
from lit_rlhf.data.contract import TextContract as TextContract
from lit_rlhf.data.contract import tokenizer_hash as tokenizer_hash
from lit_rlhf.data.counts import DataCounts as DataCounts
from lit_rlhf.data.counts import EncodingError as EncodingError
from lit_rlhf.data.counts import OnBadRecord as OnBadRecord
from lit_rlhf.data.counts import describe_bad_records as describe_bad_records
from lit_rlhf.data.encoding import DialogueEncoder as DialogueEncoder
from lit_rlhf.data.encoding import EncodedRecord as EncodedRecord
from lit_rlhf.data.encoding import check_size as check_size
from lit_rlhf.data.encoding import decode_tokens as decode_tokens
from lit_rlhf.data.encoding import encode_each as encode_each
from lit_rlhf.data.encoding import encode_prompts as encode_prompts
from lit_rlhf.data.encoding import encode_records as encode_records
from lit_rlhf.data.examples import PreferenceBatch as PreferenceBatch
from lit_rlhf.data.examples import PreferenceExample as PreferenceExample
from lit_rlhf.data.examples import PromptBatch as PromptBatch
from lit_rlhf.data.examples import PromptExample as PromptExample
from lit_rlhf.data.examples import TokenBatch as TokenBatch
from lit_rlhf.data.examples import TokenExample as TokenExample
from lit_rlhf.data.examples import Turns as Turns
from lit_rlhf.data.examples import collate_preferences as collate_preferences
from lit_rlhf.data.examples import collate_prompts as collate_prompts
from lit_rlhf.data.examples import collate_tokens as collate_tokens
from lit_rlhf.data.examples import pad_sequences as pad_sequences
from lit_rlhf.data.formats import parse_prompts as parse_prompts
from lit_rlhf.data.formats import parse_row as parse_row
from lit_rlhf.data.readers import is_file_path as is_file_path
from lit_rlhf.data.readers import read_file as read_file
from lit_rlhf.data.records import DemonstrationRecord as DemonstrationRecord
from lit_rlhf.data.records import Location as Location
from lit_rlhf.data.records import Message as Message
from lit_rlhf.data.records import PreferenceRecord as PreferenceRecord
from lit_rlhf.data.records import PromptRecord as PromptRecord
from lit_rlhf.data.records import Record as Record
from lit_rlhf.data.records import RecordError as RecordError
from lit_rlhf.data.records import RecordKind as RecordKind
from lit_rlhf.data.records import Row as Row
from lit_rlhf.data.records import TextRecord as TextRecord
from lit_rlhf.data.records import turns_as_dicts as turns_as_dicts
from lit_rlhf.data.sources import DataSource as DataSource
from lit_rlhf.data.sources import load_records as load_records
from lit_rlhf.data.splits import prompt_of as prompt_of
from lit_rlhf.data.splits import split_records as split_records
from lit_rlhf.data.templates import CHAT_TEMPLATES as CHAT_TEMPLATES

if typing.TYPE_CHECKING:
    from lit_rlhf.data.datamodules import DemonstrationDataModule as DemonstrationDataModule
    from lit_rlhf.data.datamodules import PreferenceDataModule as PreferenceDataModule
    from lit_rlhf.data.datamodules import PromptDataModule as PromptDataModule
    from lit_rlhf.data.datamodules import RecordDataModule as RecordDataModule

_DATAMODULES = (
    "DemonstrationDataModule",
    "PreferenceDataModule",
    "PromptDataModule",
    "RecordDataModule",
)


def __getattr__(name: str) -> object:
    """Import the datamodules when one of them is used: only they need Lightning."""
    if name not in _DATAMODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("lit_rlhf.data.datamodules"), name)


def __dir__() -> list[str]:
    return [*globals(), *_DATAMODULES]
