"""Examples and batches: encoded records, one by one and collated.

Notation: `B` batch, `L` sequence tokens, `P` prompt tokens. Every mask is a bool tensor in which
True means keep. Masks come from lengths and never from the pad token, so a tokenizer whose pad
token is its EOS token loses nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from lit_rlhf.data.samplers import Index, IndexPair

Turns = Sequence[Mapping[str, str]]
"""Turns of a dialogue as chat templates take them, each with `role` and `content`."""


class TokenExample(NamedTuple):
    """One encoded sequence: a dialogue or a block of text.

    Attributes:
        input_ids: Token ids. Shape `(L,)`, int32 to halve the memory of a dataset.
        completion_mask: True on the tokens that are trained on as targets. Shape `(L,)`, bool.
        dropped_turns: Number of oldest turns left out to fit the length, the system turn included.
        cut_tokens: Number of tokens cut on the left of the last human turn, because it was too long
            by itself.
        escaped_tokens: Number of control tokens in plain text that were encoded as ordinary text.
    """

    input_ids: Tensor
    completion_mask: Tensor
    dropped_turns: int = 0
    cut_tokens: int = 0
    escaped_tokens: int = 0

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        return len(self.input_ids)


class PreferenceExample(NamedTuple):
    """An encoded preference: two dialogues with the same prompt ids.

    Attributes:
        chosen: The dialogue with the preferred response.
        rejected: The other dialogue.
        margin: By how much the chosen response is better, in units of the reward; 0 if unknown.
        source: Index of the pair's source in the datamodule's `source_names`.
    """

    chosen: TokenExample
    rejected: TokenExample
    margin: float = 0.0
    source: int = 0

    @property
    def dropped_turns(self) -> int:
        """Number of turns left out of the shared prompt."""
        return self.chosen.dropped_turns

    @property
    def cut_tokens(self) -> int:
        """Number of tokens cut from the shared prompt."""
        return self.chosen.cut_tokens

    @property
    def n_tokens(self) -> int:
        """Number of tokens of both responses with their prompts."""
        return self.chosen.n_tokens + self.rejected.n_tokens


class PromptExample(NamedTuple):
    """An encoded prompt.

    Attributes:
        input_ids: Token ids. Shape `(P,)`, int32 to halve the memory of a dataset.
        text: The rendered prompt, whose tokens the ids are.
        dropped_turns: Number of oldest turns left out to fit the length, the system turn included.
        cut_tokens: Number of tokens cut on the left of the last human turn, because it was too long
            by itself.
        index: Position in its dataset, set by `PromptDataset`.
        ptx: The pretraining example that goes with the prompt, set by `PromptDataset`.
        fields: The fields of the prompt's row by name, such as the answer that a reward compares
            with.
        turns: What is left of the prompt's turns, as chat templates take them.
    """

    input_ids: Tensor
    text: str
    dropped_turns: int = 0
    cut_tokens: int = 0
    index: int = 0  # type: ignore[assignment]  # hides tuple.index, which nobody calls
    ptx: TokenExample | None = None
    fields: Mapping[str, Any] = {}
    turns: Turns = ()


Example = TokenExample | PreferenceExample | PromptExample
AnyExample = TypeVar("AnyExample", bound=Example)


class TokenBatch(NamedTuple):
    """Right-padded token sequences.

    Attributes:
        input_ids: Token ids. Shape `(B, L)`, int64.
        attention_mask: True on real tokens. Shape `(B, L)`, bool.
        completion_mask: True on the tokens that are trained on as targets, the closing EOS token
            included, and never on the first position, which nothing predicts. Shape `(B, L)`, bool.
    """

    input_ids: Tensor
    attention_mask: Tensor
    completion_mask: Tensor

    def select(self, index: Tensor) -> "TokenBatch":
        """The sequences at `index`, `[n]` long, with all columns."""
        return TokenBatch(
            input_ids=self.input_ids[index],
            attention_mask=self.attention_mask[index],
            completion_mask=self.completion_mask[index],
        )


class PreferenceBatch(NamedTuple):
    """Pairs of dialogues with the same prompts; row `i` of both halves is one pair.

    Attributes:
        chosen: The dialogues with the preferred responses.
        rejected: The other dialogues.
        margin: By how much each chosen response is better, 0 if unknown. Shape `(B,)`, float32.
        source: Index of each pair's source in the datamodule's `source_names`. Shape `(B,)`, int64.
    """

    chosen: TokenBatch
    rejected: TokenBatch
    margin: Tensor
    source: Tensor


class PromptBatch(NamedTuple):
    """Left-padded prompts, ready for generation.

    Attributes:
        input_ids: Token ids. Shape `(B, P)`, int64.
        attention_mask: True on real tokens. Shape `(B, P)`, bool.
        texts: The rendered prompts.
        index: Position of each prompt in its dataset. Shape `(B,)`, int64.
        fields: The fields of each prompt's row by name.
        ptx: One pretraining example per prompt if the datamodule has `ptx_sources`, else None.
        turns: What is left of each prompt's turns, as chat templates take them.
    """

    input_ids: Tensor
    attention_mask: Tensor
    texts: list[str]
    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which nobody calls
    fields: list[Mapping[str, Any]]
    ptx: TokenBatch | None = None
    turns: Sequence[Turns] = ()

    def select(self, rows: Sequence[int]) -> "PromptBatch":
        """The prompts at `rows`, with all columns; a row may come more than once."""
        index = torch.tensor([*rows], device=self.input_ids.device)
        return PromptBatch(
            input_ids=self.input_ids[index],
            attention_mask=self.attention_mask[index],
            texts=[self.texts[row] for row in rows],
            index=self.index[index],
            fields=[self.fields[row] for row in rows],
            ptx=None if self.ptx is None else self.ptx.select(index),
            turns=[self.turns[row] for row in rows] if self.turns else (),
        )


class PaddedSequences(NamedTuple):
    """Sequences of different lengths in one tensor.

    Attributes:
        values: The sequences and their padding. Shape `(B, L)`, int64.
        mask: True where a sequence is, False on padding. Shape `(B, L)`, bool.
    """

    values: Tensor
    mask: Tensor


def pad_sequences(
    sequences: Sequence[Tensor], pad_value: int, *, left: bool = False
) -> PaddedSequences:
    """Stack sequences of different lengths.

    Args:
        sequences: At least one. Shape `(length,)` each.
        pad_value: What fills the sequences up to the longest.
        left: Pad on the left instead of the right.
    """
    if not sequences:
        raise ValueError("sequences: expected at least one, got none")
    for sequence in sequences:
        if sequence.dim() != 1:
            raise ValueError(f"sequences: expected shape (length,), got {tuple(sequence.shape)}")
    side = "left" if left else "right"
    values = [sequence.long() for sequence in sequences]
    masks = [torch.ones(len(sequence), dtype=torch.bool) for sequence in sequences]
    return PaddedSequences(
        values=pad_sequence(values, batch_first=True, padding_value=pad_value, padding_side=side),
        mask=pad_sequence(masks, batch_first=True, padding_value=False, padding_side=side),
    )


def collate_tokens(examples: Sequence[TokenExample], pad_token_id: int) -> TokenBatch:
    """Collate examples, padded on the right with `pad_token_id`, which both masks exclude."""
    for row, example in enumerate(examples):
        if len(example.input_ids) != len(example.completion_mask):
            raise ValueError(
                f"completion_mask: expected {len(example.input_ids)} entries in row {row}, got "
                f"{len(example.completion_mask)}"
            )
    padded = pad_sequences([example.input_ids for example in examples], pad_token_id)
    completion = pad_sequences([example.completion_mask for example in examples], pad_value=0)
    return TokenBatch(
        input_ids=padded.values,
        attention_mask=padded.mask,
        completion_mask=completion.values.bool(),
    )


def collate_preferences(
    examples: Sequence[PreferenceExample], pad_token_id: int
) -> PreferenceBatch:
    """Collate examples; each half is padded with `pad_token_id` to its own longest sequence."""
    return PreferenceBatch(
        chosen=collate_tokens([example.chosen for example in examples], pad_token_id),
        rejected=collate_tokens([example.rejected for example in examples], pad_token_id),
        margin=torch.tensor([example.margin for example in examples], dtype=torch.float32),
        source=torch.tensor([example.source for example in examples], dtype=torch.long),
    )


def collate_prompts(examples: Sequence[PromptExample], pad_token_id: int) -> PromptBatch:
    """Collate examples, padded on the left with `pad_token_id`; all or none have a ptx example."""
    padded = pad_sequences([example.input_ids for example in examples], pad_token_id, left=True)
    ptx = [example.ptx for example in examples if example.ptx is not None]
    return PromptBatch(
        input_ids=padded.values,
        attention_mask=padded.mask,
        texts=[example.text for example in examples],
        index=torch.tensor([example.index for example in examples], dtype=torch.long),
        fields=[example.fields for example in examples],
        ptx=collate_tokens(ptx, pad_token_id) if ptx else None,
        turns=[example.turns for example in examples],
    )


class PromptDataset(Dataset[PromptExample]):
    """Prompts with their positions, and with a ptx example each if there are any."""

    def __init__(self, prompts: Sequence[PromptExample], ptx: Sequence[TokenExample] = ()) -> None:
        self.prompts = prompts
        self.ptx = ptx

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: Index) -> PromptExample:
        """The prompt at a position, or for a pair of positions a prompt with its ptx example."""
        if isinstance(index, IndexPair):
            prompt = self.prompts[index.first]
            return prompt._replace(index=index.first, ptx=self.ptx[index.second])
        return self.prompts[index]._replace(index=index)
