"""Records turned into token ids once, ahead of training, with a count of what was lost."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lit_rlhf.data.batches import (
    PreferenceBatch,
    PromptBatch,
    TokenBatch,
    prompt_batch,
    token_batch,
)
from lit_rlhf.data.encoding import (
    DialogueEncoder,
    Encoded,
    EncodingError,
    ResponseTooLongError,
    TrainOn,
)
from lit_rlhf.data.records import (
    DemonstrationRecord,
    PreferenceRecord,
    PromptRecord,
    Record,
    RecordError,
    TextRecord,
)
from lit_rlhf.data.samplers import Index

AnyRecord = TypeVar("AnyRecord", bound=Record)
Example = TypeVar("Example")
_SHOWN = 5


class TokenExample(NamedTuple):
    """One sequence.

    Attributes:
        input_ids: Shape ``(L,)``, int32 to halve the memory.
        completion_mask: Shape ``(L,)``, bool.
    """

    input_ids: Tensor
    completion_mask: Tensor


class PreferenceExample(NamedTuple):
    """Two sequences with the same prompt ids, the pair's margin and the index of its source."""

    chosen: TokenExample
    rejected: TokenExample
    margin: float
    source: int


class PromptExample(NamedTuple):
    """One prompt (int32 ids of shape ``(P,)``), its text, its position, and its ptx partner."""

    input_ids: Tensor
    text: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls
    ptx: TokenExample | None = None


@dataclass
class EncodingCounts:
    """What encoding left out of the records.

    Attributes:
        dropped_turns: Oldest turns dropped so that dialogues fit.
        shortened: Dialogues that lost turns.
        cut_prompts: Dialogues whose last human turn was cut on the left.
        dropped_records: Records left out, by reason.
        examples: The first few records left out, as messages with file and line.
    """

    dropped_turns: int = 0
    shortened: int = 0
    cut_prompts: int = 0
    dropped_records: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def add(self, encoded: Encoded) -> None:
        """Count what one dialogue lost.

        Args:
            encoded: The dialogue.
        """
        self.dropped_turns += encoded.dropped_turns
        self.shortened += encoded.dropped_turns > 0
        self.cut_prompts += encoded.cut_tokens > 0

    def drop(self, location: str, error: EncodingError) -> None:
        """Count a record left out.

        Args:
            location: Where it was read from.
            error: Why it was left out.
        """
        self.dropped_records[error.reason] += 1
        if len(self.examples) < _SHOWN:
            self.examples.append(f"{location}: {error}")


def token_example(encoded: Encoded) -> TokenExample:
    """Pack an encoded dialogue into tensors.

    Args:
        encoded: The dialogue.

    Returns:
        The same ids and mask.
    """
    return TokenExample(
        torch.tensor(encoded.input_ids, dtype=torch.int32),
        torch.tensor(encoded.completion_mask, dtype=torch.bool),
    )


def encoded_examples(
    records: Sequence[AnyRecord],
    encode: Callable[[AnyRecord, EncodingCounts], list[Example]],
    counts: EncodingCounts,
    on_bad_record: str,
) -> list[Example]:
    """Encode records, leaving out those that cannot be.

    Args:
        records: The records.
        encode: Gives the examples of one record and counts what it lost.
        counts: Counts that are added to.
        on_bad_record: Of a record that cannot be encoded: ``"error"`` raises, ``"skip"`` counts.
            A response longer than ``max_length`` is not bad, and always counted.

    Returns:
        The examples, in the order of the records.

    Raises:
        RecordError: For the first bad record, if ``on_bad_record`` is ``"error"``.
    """
    examples: list[Example] = []
    for record in records:
        try:
            examples += encode(record, counts)
        except EncodingError as error:
            if on_bad_record == "error" and not isinstance(error, ResponseTooLongError):
                file, _, line = record.location.rpartition(":")
                place = (file, int(line)) if line.isdecimal() else (record.source, 0)
                raise RecordError(*place, error.reason, detail=error.detail) from error
            counts.drop(record.location or record.source, error)
    return examples


def demonstration_examples(
    record: DemonstrationRecord,
    encoder: DialogueEncoder,
    train_on: TrainOn,
    counts: EncodingCounts,
) -> list[TokenExample]:
    """Encode a demonstration.

    Args:
        record: The record.
        encoder: The encoder.
        train_on: Which assistant turns are trained on.
        counts: Counts that are added to.

    Returns:
        One example.

    Raises:
        EncodingError: If it cannot be encoded.
    """
    encoded = encoder.encode_dialogue(record.messages, train_on)
    counts.add(encoded)
    return [token_example(encoded)]


def preference_examples(
    record: PreferenceRecord,
    encoder: DialogueEncoder,
    source_names: Sequence[str],
    counts: EncodingCounts,
) -> list[PreferenceExample]:
    """Encode a preference.

    Args:
        record: The record.
        encoder: The encoder.
        source_names: Names that the example's source index points into.
        counts: Counts that are added to; what the shared prompt lost counts once.

    Returns:
        One example.

    Raises:
        EncodingError: If it cannot be encoded.
    """
    pair = encoder.encode_pair(record.prompt, record.chosen, record.rejected)
    counts.add(pair.chosen)
    source = source_names.index(record.source)
    return [
        PreferenceExample(
            token_example(pair.chosen), token_example(pair.rejected), record.margin, source
        )
    ]


def ptx_examples(
    record: TextRecord | DemonstrationRecord, encoder: DialogueEncoder, counts: EncodingCounts
) -> list[TokenExample]:
    """Encode pretraining data: blocks of plain text, or demonstrations.

    Args:
        record: The record.
        encoder: The encoder.
        counts: Counts that are added to.

    Returns:
        One example per block of at most ``max_length`` tokens, trained on everywhere but at the
        first position; or one demonstration.

    Raises:
        EncodingError: If it cannot be encoded.
    """
    if isinstance(record, DemonstrationRecord):
        return demonstration_examples(record, encoder, "last", counts)
    examples = []
    for block in encoder.encode_text(record.text):
        ids = torch.tensor(block, dtype=torch.int32)
        mask = torch.ones(len(block), dtype=torch.bool)
        mask[0] = False
        examples.append(TokenExample(ids, mask))
    return examples


class ExampleDataset(Dataset[Example]):
    """A list of examples.

    Args:
        examples: The examples.
    """

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = examples

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        """The example at a position."""
        return self.examples[index]


class PromptDataset(Dataset[PromptExample]):
    """Prompts, each looked up together with a ptx example if the index is a pair.

    Args:
        prompts: The prompts.
        ptx: Pretraining examples.
    """

    def __init__(self, prompts: Sequence[PromptExample], ptx: Sequence[TokenExample] = ()) -> None:
        self.prompts = prompts
        self.ptx = ptx

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.prompts)

    def __getitem__(self, index: Index) -> PromptExample:
        """The prompt at a position, or with the ptx example at a second position."""
        if isinstance(index, tuple):
            prompt, ptx = index
            return self.prompts[prompt]._replace(ptx=self.ptx[ptx])
        return self.prompts[index]


def prompt_examples(
    record: PromptRecord, encoder: DialogueEncoder, counts: EncodingCounts
) -> list[PromptExample]:
    """Encode a prompt; its index is set later, when it is known which prompts are kept.

    Args:
        record: The record.
        encoder: The encoder.
        counts: Counts that are added to.

    Returns:
        One example.

    Raises:
        EncodingError: If it cannot be encoded.
    """
    encoded = encoder.encode_prompt(record.prompt)
    counts.add(encoded)
    ids = torch.tensor(encoded.input_ids, dtype=torch.int32)
    return [PromptExample(ids, encoded.text, -1)]


def collated_tokens(examples: Sequence[TokenExample], pad_token_id: int) -> TokenBatch:
    """Collate sequences.

    Args:
        examples: At least one sequence.
        pad_token_id: Fills the padding.

    Returns:
        The right padded batch.
    """
    return token_batch(
        [example.input_ids for example in examples],
        [example.completion_mask for example in examples],
        pad_token_id,
    )


def collated_preferences(
    examples: Sequence[PreferenceExample], pad_token_id: int
) -> PreferenceBatch:
    """Collate pairs; each half is padded to its own longest sequence.

    Args:
        examples: At least one pair.
        pad_token_id: Fills the padding.

    Returns:
        The batch.
    """
    return PreferenceBatch(
        collated_tokens([example.chosen for example in examples], pad_token_id),
        collated_tokens([example.rejected for example in examples], pad_token_id),
        torch.tensor([example.margin for example in examples], dtype=torch.float32),
        torch.tensor([example.source for example in examples], dtype=torch.long),
    )


def collated_prompts(examples: Sequence[PromptExample], pad_token_id: int) -> PromptBatch:
    """Collate prompts, with their ptx examples if they have any.

    Args:
        examples: At least one prompt; all or none with a ptx example.
        pad_token_id: Fills the padding.

    Returns:
        The batch.
    """
    ptx = [example.ptx for example in examples if example.ptx is not None]
    return prompt_batch(
        [example.input_ids for example in examples],
        [example.text for example in examples],
        [example.index for example in examples],
        pad_token_id,
        collated_tokens(ptx, pad_token_id) if ptx else None,
    )
