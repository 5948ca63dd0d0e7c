"""Forwards whose work grows with the real tokens: sequences back to back instead of padded.

Everything but attention works token by token, so the padding of a batch is left out there, and
attention goes over groups of rows of similar length. Notation: `B` rows, `L` columns, `N` real
tokens, `H` hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rlhf.models.attention import (
    BASE,
    NAME,
    AttentionInputs,
    layout_arguments,
    takes_layouts,
)
from lit_rlhf.models.row_attention import causal_attention
from lit_rlhf.models.trials import same_outputs, trying_out

SIMILAR = 0.75
"""Rows of a group are at least this long, compared with its longest."""


class Group(NamedTuple):
    """Rows that attention takes together.

    Attributes:
        start: Their first place among those of all groups.
        n_rows: How many.
        width: Length of the longest.
    """

    start: int
    n_rows: int
    width: int


@dataclass(frozen=True)
class PackedLayout:
    """`N` tokens of rows that lie back to back.

    Attributes:
        groups: How rows are taken together; `P` places in all, of which `N` are real.
        places: Which token lies at each place, `[P]` long; padding repeats a row's last token.
        tokens: The place of each token, `[N]` long.
        position_ids: Place of each token in its row, `[1, N]` long.
    """

    groups: list[Group]
    places: Tensor
    tokens: Tensor
    position_ids: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> PackedLayout:
        """The layout of rows of these lengths, one after the other."""
        order = sorted((row for row, n in enumerate(lengths) if n), key=lambda row: -lengths[row])
        sizes = torch.tensor(lengths)
        starts = sizes.cumsum(0) - sizes
        n_tokens = int(sizes.sum())
        tokens = torch.empty(n_tokens, dtype=torch.long)
        groups: list[Group] = []
        parts: list[Tensor] = []
        total = 0
        for rows in _similar(order, lengths):
            width = lengths[rows[0]]
            columns = torch.arange(width)
            size = sizes[rows].unsqueeze(1)
            places = starts[rows].unsqueeze(1) + columns.minimum(size - 1)
            real = columns < size
            numbers = torch.arange(total, total + places.numel()).view_as(places)
            tokens[places[real]] = numbers[real]
            groups.append(Group(total, len(rows), width))
            parts.append(places.flatten())
            total += places.numel()
        positions = torch.arange(n_tokens) - starts.repeat_interleave(sizes)
        # one transfer for all three
        packed = torch.cat([*parts, tokens, positions]).to(device, non_blocking=True)
        places, tokens, positions = packed.tensor_split([total, total + n_tokens])
        return cls(groups, places, tokens, positions.unsqueeze(0))

    def attend(self, module: nn.Module, inputs: AttentionInputs) -> Tensor:
        """Attention of each row among its own tokens, see `AttentionLayout`; `S` is 1."""
        spread = [self._spread(states) for states in inputs[:3]]
        outputs = []
        for group in self.groups:
            shape = (group.n_rows, group.width)
            last = group.start + group.n_rows * group.width
            rows = [
                states[group.start : last].view(*shape, *states.shape[1:]).transpose(1, 2)
                for states in spread
            ]
            grouped = inputs._replace(query=rows[0], key=rows[1], value=rows[2])
            output = causal_attention(grouped)
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        joined: Tensor = _Select.apply(torch.cat(outputs).flatten(1), self.tokens)  # type: ignore[no-untyped-call]
        return joined.view(1, len(self.tokens), *inputs.query.shape[1::2])

    def _spread(self, states: Tensor) -> Tensor:
        """The states `[1, A, N, D]` at every place, `[P, A, D]`."""
        by_token = states.transpose(1, 2).flatten(0, 1)
        spread: Tensor = _Spread.apply(by_token.flatten(1), self.places, self.tokens)  # type: ignore[no-untyped-call]
        return spread.view(-1, *by_token.shape[1:])


class _Spread(torch.autograd.Function):
    """Rows at `places`. Nothing flows back from padding, so the backward is a selection too."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, places: Tensor, tokens: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(tokens)
        return states.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:  # noqa: ANN401
        (tokens,) = ctx.saved_tensors
        return gradients[0].index_select(0, tokens), None, None


class _Select(torch.autograd.Function):
    """Rows at distinct `tokens`; the backward leaves zeros in the others."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, tokens: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(tokens)
        ctx.n_rows = len(states)
        return states.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:  # noqa: ANN401
        (tokens,) = ctx.saved_tensors
        (gradient,) = gradients
        spread = gradient.new_zeros((ctx.n_rows, *gradient.shape[1:]))
        return spread.index_copy_(0, tokens, gradient), None


def packed_states(trunk: PreTrainedModel, input_ids: Tensor, mask: Tensor) -> Tensor:
    """What the trunk hands to its head, computed for real tokens only.

    Args:
        trunk: One that `packs`.
        input_ids: Token ids, `[B, L]` long.
        mask: Real tokens, `[B, L]` bool, next to each other in each row.

    Returns:
        `[B, L, H]`, 0 at padding.
    """
    layout = PackedLayout.of(mask.sum(1).tolist(), input_ids.device)
    at = mask.flatten().nonzero().squeeze(1)
    states: Tensor = trunk(
        input_ids=input_ids.flatten().index_select(0, at).unsqueeze(0),
        position_ids=layout.position_ids,
        **layout_arguments(layout, input_ids.device),
    ).last_hidden_state[0]
    # the size of what is padding in the result costs little: it is not computed with
    padded = states.new_zeros((mask.numel(), states.shape[1])).index_copy(0, at, states)
    return padded.view(*mask.shape, -1)


def packs(trunk: PreTrainedModel) -> bool:
    """Whether `packed_states` gives what the trunk gives on padded rows.

    Tried once for each network, on rows of random tokens: what a model does with its tokens beside
    attention (recurrences, for instance) cannot be seen from outside.
    """
    if not hasattr(trunk, "_lit_rlhf_packs"):
        trunk._lit_rlhf_packs = _tried(trunk)  # type: ignore[assignment]
    return bool(trunk._lit_rlhf_packs)


def _tried(trunk: PreTrainedModel) -> bool:
    chosen = trunk.config._attn_implementation  # private, but there is no public reading of it
    if chosen != BASE or not takes_layouts(trunk):
        return False
    weight = trunk.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    device, n_tokens = weight.device, len(weight)
    mask = torch.arange(12) < torch.tensor([[12], [7], [9]])
    ids = torch.randint(n_tokens, mask.shape, generator=torch.Generator().manual_seed(0))
    ids, mask = ids.to(device), mask.to(device)
    with trying_out(trunk, device):
        padded = trunk(input_ids=ids, attention_mask=mask.long(), use_cache=False)
        trunk.set_attn_implementation(NAME)
        same = same_outputs(packed_states(trunk, ids, mask)[mask], padded.last_hidden_state[mask])
    if not same:
        trunk.set_attn_implementation(chosen)
    return same


def _similar(order: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Rows from long to short, cut where they become too short for the group."""
    groups: list[list[int]] = []
    for row in order:
        if groups and lengths[row] >= SIMILAR * lengths[groups[-1][0]]:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups
