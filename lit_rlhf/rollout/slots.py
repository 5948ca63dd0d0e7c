"""Keys and values of sequences that grow side by side, each at its own length.

A sequence has a slot: a row of buffers that are as long as the longest sequence can become, written
in place. Sequences in use fill the first slots without a gap, so that a step computes with as many
rows as there are sequences. Notation: `S` slots, `n` of them in use, `K` key-value heads, `A`
attention heads of size `D`, `C` capacity in tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lit_rlhf.forward.attention import AttentionInputs
from lit_rlhf.forward.packing import PackedLayout
from lit_rlhf.forward.row_attention import next_attention


class _Buffers(NamedTuple):
    keys: Tensor
    values: Tensor


class Slots:
    """The cache of up to `n_slots` sequences of up to `capacity` tokens.

    Args:
        n_slots: `S`.
        capacity: `C`.
        device: Where it lies.
    """

    def __init__(self, n_slots: int, capacity: int, device: torch.device) -> None:
        self.n_slots = n_slots
        self.capacity = capacity
        self.device = device
        self._buffers: dict[nn.Module, _Buffers] = {}

    def write(
        self, module: nn.Module, key: Tensor, value: Tensor, slots: Tensor, columns: Tensor
    ) -> _Buffers:
        """Put keys and values `[m, K, D]` of `m` tokens of one layer into their places."""
        if module not in self._buffers:
            shape = (self.n_slots, key.shape[1], self.capacity, key.shape[2])
            # under autocast keys come in float32 and attention casts them as it casts values
            self._buffers[module] = _Buffers(value.new_zeros(shape), value.new_zeros(shape))
        buffers = self._buffers[module]
        buffers.keys[slots, :, columns] = key.to(value.dtype)
        buffers.values[slots, :, columns] = value
        return buffers

    def move(self, sources: list[int], places: list[int], width: int) -> None:
        """Copy sequences of up to `width` tokens from slots to other slots."""
        for buffers in self._buffers.values():
            for buffer in buffers:
                for source, place in zip(sources, places, strict=True):
                    buffer[place, :, :width] = buffer[source, :, :width]


class PromptLayout:
    """Prompts that lie back to back and are put into slots as they are read.

    Args:
        slots: The cache.
        prompts: Lengths of the prompts, in tokens.
        first: The first prompt's slot; the others follow.
    """

    def __init__(self, slots: Slots, prompts: list[int], first: int) -> None:
        device = slots.device
        self.packed = PackedLayout.of(prompts, device)
        self.slots = slots
        sizes = torch.tensor(prompts, device=device)
        self.rows = torch.arange(first, first + len(prompts), device=device).repeat_interleave(
            sizes, output_size=sum(prompts)
        )
        self.last_tokens = sizes.cumsum(0) - 1

    def attend(self, module: nn.Module, inputs: AttentionInputs) -> Tensor:
        """Attention among the tokens of each prompt, see `AttentionLayout`."""
        columns = self.packed.position_ids[0]
        key, value = (states[0].transpose(0, 1) for states in (inputs.key, inputs.value))
        self.slots.write(module, key, value, self.rows, columns)
        return self.packed.attend(module, inputs)


class StepLayout:
    """The next token of each of the first `n` slots.

    Args:
        slots: The cache.
        lengths: Tokens of each sequence so far, `[n]` long.
        width: Length of the longest with its next token.
    """

    def __init__(self, slots: Slots, lengths: Tensor, width: int) -> None:
        self.slots = slots
        self.width = width
        self.rows = torch.arange(len(lengths), device=slots.device)
        self.columns = lengths
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, module: nn.Module, inputs: AttentionInputs) -> Tensor:
        """Attention of each token to its sequence so far, see `AttentionLayout`; `N` is 1."""
        key, value = inputs.key[:, :, 0], inputs.value[:, :, 0]
        buffers = self.slots.write(module, key, value, self.rows, self.columns)
        keys, values = (buffer[: len(self.rows), :, : self.width] for buffer in buffers)
        cached = inputs._replace(key=keys, value=values)
        return next_attention(cached, self._mask(inputs.window)).transpose(1, 2)

    def _mask(self, window: int | None) -> Tensor:
        """What each token sees, `[n, 1, 1, width]` bool; layers share it."""
        if window not in self._masks:
            places = torch.arange(self.width, device=self.columns.device)
            seen = places <= self.columns[:, None]
            if window is not None:
                seen &= places > self.columns[:, None] - window
            self._masks[window] = seen[:, None, None]
        return self._masks[window]
