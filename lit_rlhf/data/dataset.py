"""Examples and batches: encoded records one by one, in datasets, and collated.

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

from lit_rlhf.data.samplers import Index

Turns = Sequence[Mapping[str, str]]
"""Turns of a dialogue as chat templates take them, each with `role` and `content`."""


class TokenExample(NamedTuple):
    """One encoded sequence: a dialogue or a block of text.

    Ids are `(L,)`, int32 to halve the memory of a dataset; the mask `(L,)`, bool, is True on the
    targets. To fit the length, so many of the oldest turns were dropped, the system turn included,
    and tokens were cut on the left of a last human turn that was too long by itself. `escaped`
    tokens are control tokens in plain text that were encoded as ordinary text.
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

    The margin is 0 if unknown, and `source` an index into the datamodule's `source_names`.
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
    """An encoded prompt: ids `(P,)`, int32, and the rendered text that they are of.

    For what was dropped and cut see `TokenExample`; `turns` are what is left, as chat templates
    take them. `PromptDataset` sets the position in it (`index`) and the pretraining example that
    goes with the prompt (`ptx`). `fields` are those of its record by name.
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
    """Right-padded token sequences, `(B, L)`: int64 ids, and bool masks.

    The completion mask is True on the targets, the closing EOS token included, and never on the
    first position, which nothing predicts.
    """

    input_ids: Tensor
    attention_mask: Tensor
    completion_mask: Tensor


class PreferenceBatch(NamedTuple):
    """Pairs of dialogues with the same prompts; row `i` of both halves is one pair.

    Margins, 0 if the data have none, are `(B,)` float32, and sources `(B,)` int64.
    """

    chosen: TokenBatch
    rejected: TokenBatch
    margin: Tensor
    source: Tensor


class PromptBatch(NamedTuple):
    """Left-padded prompts, ready for generation, see `PromptExample`.

    Ids are `(B, P)` int64, the mask `(B, P)` bool, and positions in the dataset (`index`) `(B,)`
    int64. `ptx` is one example per prompt if the datamodule has `ptx_sources`, else None.
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
            self.input_ids[index],
            self.attention_mask[index],
            [self.texts[row] for row in rows],
            self.index[index],
            [self.fields[row] for row in rows],
            None if self.ptx is None else TokenBatch(*(tensor[index] for tensor in self.ptx)),
            [self.turns[row] for row in rows] if self.turns else (),
        )


def pad_sequences(
    sequences: Sequence[Tensor], pad_value: int, left: bool = False
) -> tuple[Tensor, Tensor]:
    """Stack sequences `(length,)` to `(B, L)` int64, and return the mask of real tokens too."""
    if not sequences:
        raise ValueError("sequences: expected at least one, got none")
    for sequence in sequences:
        if sequence.dim() != 1:
            raise ValueError(f"sequences: expected shape (length,), got {tuple(sequence.shape)}")
    side = "left" if left else "right"
    values = pad_sequence([sequence.long() for sequence in sequences], True, pad_value, side)
    real = [torch.ones(len(sequence), dtype=torch.bool) for sequence in sequences]
    return values, pad_sequence(real, True, False, side)


def collate_tokens(examples: Sequence[TokenExample], pad_token_id: int) -> TokenBatch:
    """Collate sequences, padded on the right; padding is outside of both masks."""
    for row, example in enumerate(examples):
        if len(example.input_ids) != len(example.completion_mask):
            raise ValueError(
                f"completion_mask: expected {len(example.input_ids)} entries in row {row}, got "
                f"{len(example.completion_mask)}"
            )
    values, mask = pad_sequences([example.input_ids for example in examples], pad_token_id)
    completion, _ = pad_sequences([example.completion_mask for example in examples], 0)
    return TokenBatch(values, mask, completion.bool())


def collate_preferences(
    examples: Sequence[PreferenceExample], pad_token_id: int
) -> PreferenceBatch:
    """Collate pairs. Each half is padded to its own longest sequence."""
    return PreferenceBatch(
        collate_tokens([example.chosen for example in examples], pad_token_id),
        collate_tokens([example.rejected for example in examples], pad_token_id),
        torch.tensor([example.margin for example in examples], dtype=torch.float32),
        torch.tensor([example.source for example in examples], dtype=torch.long),
    )


def collate_prompts(examples: Sequence[PromptExample], pad_token_id: int) -> PromptBatch:
    """Collate prompts, padded on the left; all or none of them have a ptx example."""
    ids = [example.input_ids for example in examples]
    values, mask = pad_sequences(ids, pad_token_id, left=True)
    ptx = [example.ptx for example in examples if example.ptx is not None]
    return PromptBatch(
        values,
        mask,
        [example.text for example in examples],
        torch.tensor([example.index for example in examples], dtype=torch.long),
        [example.fields for example in examples],
        collate_tokens(ptx, pad_token_id) if ptx else None,
        [example.turns for example in examples],
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
        if isinstance(index, tuple):
            prompt, ptx = index
            return self.prompts[prompt]._replace(index=prompt, ptx=self.ptx[ptx])
        return self.prompts[index]._replace(index=index)
