"""Batches that the datamodules hand to the modules, and the padding that builds them.

Notation: ``B`` batch, ``L`` sequence tokens, ``P`` prompt tokens. Every mask is a bool tensor in
which True means keep. Masks are built from lengths and never from the pad token, so a tokenizer
whose pad token is its EOS token loses nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class TokenBatch(NamedTuple):
    """Right padded token sequences.

    Attributes:
        input_ids: Token ids. Shape ``(B, L)``, int64.
        attention_mask: True on real tokens. Shape ``(B, L)``, bool.
        completion_mask: True on the tokens that are trained on as targets, the closing EOS token
            among them; never on the first position, which nothing predicts. Shape ``(B, L)``, bool.
    """

    input_ids: Tensor
    attention_mask: Tensor
    completion_mask: Tensor


class PreferenceBatch(NamedTuple):
    """Pairs of responses to the same prompts; row ``i`` of both halves is one pair.

    Attributes:
        chosen: The preferred dialogues.
        rejected: The other dialogues, with the same prompt tokens.
        margin: Margin of every pair, 0 where the data have none. Shape ``(B,)``, float32.
        source: Index of every pair's source in the datamodule's ``source_names``. Shape ``(B,)``,
            int64.
    """

    chosen: TokenBatch
    rejected: TokenBatch
    margin: Tensor
    source: Tensor


class PromptBatch(NamedTuple):
    """Left padded prompts, ready for generation.

    Attributes:
        input_ids: Prompt token ids. Shape ``(B, P)``, int64.
        attention_mask: True on real tokens. Shape ``(B, P)``, bool.
        texts: The rendered prompts: the text that the ids stand for.
        index: Position of every prompt in its dataset. Shape ``(B,)``, int64.
        ptx: One pretraining example per prompt where the datamodule has ``ptx_sources``, else None.
    """

    input_ids: Tensor
    attention_mask: Tensor
    texts: list[str]
    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which nobody calls
    ptx: TokenBatch | None = None


class PaddedSequences(NamedTuple):
    """Padded rows and the mask that tells them from the padding, each of shape ``(B, L)``."""

    values: Tensor
    mask: Tensor


def padded_sequences(
    sequences: Sequence[Tensor], pad_value: int, left: bool = False
) -> PaddedSequences:
    """Stack sequences of different lengths.

    Args:
        sequences: At least one tensor of shape ``(length,)``.
        pad_value: What stands outside the mask; no result may depend on it.
        left: Pad on the left instead of the right.

    Returns:
        int64 values and bool mask, each of shape ``(B, longest)``.

    Raises:
        ValueError: If there is no sequence, or one is not one-dimensional.
    """
    if not sequences:
        raise ValueError("sequences: expected at least one, got none")
    for sequence in sequences:
        if sequence.dim() != 1:
            raise ValueError(f"sequences: expected shape (length,), got {tuple(sequence.shape)}")
    longest = max(len(sequence) for sequence in sequences)
    values = torch.full((len(sequences), longest), pad_value, dtype=torch.long)
    mask = torch.zeros(len(sequences), longest, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        span = slice(longest - len(sequence), longest) if left else slice(0, len(sequence))
        values[row, span] = sequence.long()
        mask[row, span] = True
    return PaddedSequences(values, mask)


def token_batch(
    input_ids: Sequence[Tensor], completion_masks: Sequence[Tensor], pad_token_id: int
) -> TokenBatch:
    """Collate token sequences and their completion masks, padded on the right.

    Args:
        input_ids: One integer tensor of shape ``(length,)`` per row.
        completion_masks: One bool tensor of the same length per row.
        pad_token_id: Fills the padding.

    Returns:
        The batch; padding is outside both masks.

    Raises:
        ValueError: If a row's mask and ids differ in length, or there is no row.
    """
    for row, (ids, mask) in enumerate(zip(input_ids, completion_masks, strict=True)):
        if len(ids) != len(mask):
            raise ValueError(
                f"completion_masks: expected {len(ids)} entries in row {row}, got {len(mask)}"
            )
    padded = padded_sequences(input_ids, pad_token_id)
    completion = padded_sequences(completion_masks, 0)
    return TokenBatch(padded.values, padded.mask, completion.values.bool())


def prompt_batch(
    input_ids: Sequence[Tensor],
    texts: Sequence[str],
    index: Sequence[int],
    pad_token_id: int,
    ptx: TokenBatch | None = None,
) -> PromptBatch:
    """Collate prompts, padded on the left.

    Args:
        input_ids: One integer tensor of shape ``(length,)`` per prompt.
        texts: The rendered prompts.
        index: The prompts' positions in their dataset.
        pad_token_id: Fills the padding.
        ptx: Pretraining examples that go with the prompts.

    Returns:
        The batch.

    Raises:
        ValueError: If the arguments differ in length, or there is no prompt.
    """
    if not len(input_ids) == len(texts) == len(index):
        raise ValueError(
            f"texts, index: expected {len(input_ids)} each, got {len(texts)} and {len(index)}"
        )
    padded = padded_sequences(input_ids, pad_token_id, left=True)
    return PromptBatch(
        padded.values, padded.mask, list(texts), torch.tensor(list(index), dtype=torch.long), ptx
    )
