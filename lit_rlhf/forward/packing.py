"""Packed forwards: sequences lie back to back, so that the work grows with the real tokens only.

Attention is one kernel for all rows on CUDA in half precision (`varlen_attention`), and goes over
groups of rows of similar length elsewhere. Notation: `B` rows, `L` columns, `N` real tokens, `P`
places in the padded groups, `H` hidden size.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rlhf.forward.attention import (
    AttentionInputs,
    RowOffsets,
    causal_attention,
    run_with_layout,
    varlen_attention,
    varlen_obstacle,
)
from lit_rlhf.forward.cpu import NO_PADDING, PadToMultiple, matmul_dtype
from lit_rlhf.forward.lower import start_above
from lit_rlhf.tensor_checks import check_ids, check_mask

_MIN_LENGTH_RATIO = 0.75  # ratio of the shortest row of a group to its longest


class GroupSize(NamedTuple):
    """Size of a group of rows.

    Attributes:
        n_rows: Number of rows.
        width: Tokens of the longest row, to which the others are padded.
    """

    n_rows: int
    width: int


class RowGroups:
    """Rows that lie back to back, in groups of similar length.

    Args:
        lengths: Tokens of each row, in their order; some may be 0.
        device: Where attention is computed.

    Attributes:
        groups: Size of each group; `P` places in all.
        gather_indices: The token at each place, `[P]` long. Padding repeats the last token of its
            row.
        token_places: The place of each token, `[N]` long.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        order = sorted((row for row, n in enumerate(lengths) if n), key=lambda row: -lengths[row])
        sizes = torch.tensor(lengths)
        starts = sizes.cumsum(0) - sizes
        token_places = torch.empty(int(sizes.sum()), dtype=torch.long)
        self.groups: list[GroupSize] = []
        indices_by_group: list[Tensor] = []
        n_places = 0
        by_length: list[list[int]] = []
        for row in order:  # from long to short, until one is too short for its group
            if by_length and lengths[row] >= _MIN_LENGTH_RATIO * lengths[by_length[-1][0]]:
                by_length[-1].append(row)
            else:
                by_length.append([row])
        for rows in by_length:
            width = lengths[rows[0]]
            columns = torch.arange(width)
            size = sizes[rows].unsqueeze(1)
            indices = starts[rows].unsqueeze(1) + columns.minimum(size - 1)
            real = columns < size
            places = torch.arange(n_places, n_places + indices.numel()).view_as(indices)
            token_places[indices[real]] = places[real]
            self.groups.append(GroupSize(len(rows), width))
            indices_by_group.append(indices.flatten())
            n_places += indices.numel()
        # one transfer to the device for both
        joined = torch.cat([*indices_by_group, token_places]).to(device, non_blocking=True)
        self.gather_indices = joined[:n_places]
        self.token_places = joined[n_places:]

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """Attention of each row within itself, group by group, `[N, A * D]`."""
        sizes = [n_rows * width for n_rows, width in self.groups]
        by_group = []
        for states in inputs[:3]:
            by_token = states.transpose(1, 2).flatten(0, 1)
            padded = _gather(by_token.flatten(1), self.gather_indices, self.token_places)
            # The backward of `split` is one concatenation. Slices would each fill a tensor of the
            # full size with zeros.
            by_group.append(torch.split(padded.view(-1, *by_token.shape[1:]), sizes))
        outputs = []
        for group, *parts in zip(self.groups, *by_group, strict=True):
            query, key, value = (states.unflatten(0, group).transpose(1, 2) for states in parts)
            output = causal_attention(inputs._replace(query=query, key=key, value=value))
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        return _gather(torch.cat(outputs).flatten(1), self.token_places)


class PackedLayout:
    """`N` tokens of rows that lie back to back.

    Args:
        lengths: Tokens of each row; some may be 0.
        device: Where the forward is computed.

    Attributes:
        position_ids: Positions of the tokens in their rows, `[1, N]` long.
        rows: Where the rows begin.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = lengths
        self.device = device
        sizes = torch.tensor([0, *lengths])
        offsets = sizes.cumsum(0)
        n_tokens = int(offsets[-1])
        position_ids = torch.arange(n_tokens) - offsets[:-1].repeat_interleave(sizes[1:])
        # one transfer to the device for both
        joined = torch.cat([position_ids, offsets]).int().to(device, non_blocking=True)
        self.position_ids = joined[:n_tokens].long().unsqueeze(0)
        self.rows = RowOffsets(joined[n_tokens:], max(lengths))

    @cached_property
    def groups(self) -> RowGroups:
        """The rows by length, for devices and dtypes without `varlen_attention`."""
        return RowGroups(self.lengths, self.device)

    def attend(self, module: nn.Module, inputs: AttentionInputs) -> Tensor:
        """Attention of each row within itself, see `AttentionLayout`; `S` is 1."""
        if inputs.dropout or varlen_obstacle(inputs.value):
            output = self.groups.attend(inputs)
        else:
            query, key, value = (states[0].transpose(0, 1) for states in inputs[:3])
            by_token = inputs._replace(query=query, key=key, value=value)
            output = varlen_attention(by_token, self.rows, self.rows)
        return output.view(1, -1, *inputs.query.shape[1::2])


def packed_states(
    trunk: PreTrainedModel,
    input_ids: Tensor,
    mask: Tensor,
    *,
    padding: PadToMultiple = NO_PADDING,
    n_lower: int = 0,
    lower: Tensor | None = None,
) -> Tensor:
    """Final hidden states of a trunk, `[B, L, H]`, computed for the real tokens only; 0 at padding.

    Args:
        trunk: A trunk whose attention takes layouts, see `optimize_forward`.
        input_ids: Token ids, `[B, L]` long.
        mask: Real tokens, `[B, L]` bool; next to each other in each row.
        padding: How the number of tokens is padded.
        n_lower: Number of layers, from the bottom, that give `lower`.
        lower: What these layers give, `[B, L, H]`; `None` computes it.
    """
    check_ids(2, input_ids=input_ids)
    check_mask(input_ids.shape, mask=mask)
    device = input_ids.device
    real = mask.cpu()  # the only wait for the device
    indices = real.flatten().nonzero().squeeze(1)
    lengths = real.sum(1).tolist()
    n_tokens = len(indices)
    # the padding is one more row, of any token
    dtype = matmul_dtype(next(trunk.parameters()))
    n_padding = padding.n_padding(n_tokens, device, dtype)
    indices = torch.cat([indices, indices[:1].expand(n_padding)]).to(device, non_blocking=True)
    layout = PackedLayout([*lengths, n_padding], device)
    computed: AbstractContextManager[None] = nullcontext()
    if lower is not None:
        lower = lower.flatten(0, 1).index_select(0, indices).unsqueeze(0)
        computed = start_above(trunk, n_lower, lower)
    ids = input_ids.flatten().index_select(0, indices).unsqueeze(0)
    with computed:
        states = run_with_layout(trunk, ids, layout.position_ids, layout)[0, :n_tokens]
    # Back to the rectangle that callers index: it takes memory, but nothing is computed with it.
    rectangle = states.new_zeros((mask.numel(), states.shape[1]))
    return rectangle.index_copy(0, indices[:n_tokens], states).view(*mask.shape, -1)


def _gather(states: Tensor, indices: Tensor, places: Tensor | None = None) -> Tensor:
    """Select rows, `[M, ...]`, with a backward that copies.

    torch's own backward of `index_select` adds gradients up (`index_add`), because it cannot know
    which indices are distinct. That costs more, and on a GPU it adds in no fixed order.

    Args:
        states: Rows, `[N, ...]`.
        indices: Which rows, `[M]` long. They are distinct unless `places` are given.
        places: Where among the `M` each row is, `[N]` long; other places are padding, whose
            gradient is dropped.
    """
    rows: Tensor = _Gather.apply(states, indices, places)  # type: ignore[no-untyped-call]
    return rows


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, indices: Tensor, places: Tensor | None) -> Tensor:  # noqa: ANN401
        """`index_select`; the arguments are as for `_gather`.

        Args:
            ctx: torch's store between forward and backward.
            states: Rows, `[N, ...]`.
            indices: Which rows, `[M]` long.
            places: Where among the `M` each row is, `[N]` long, or `None`.
        """
        ctx.save_for_backward(indices, places)
        ctx.n_rows = len(states)
        return states.index_select(0, indices)

    @staticmethod
    def backward(  # call rules: autograd takes a tuple
        ctx: Any,  # noqa: ANN401
        *gradients: Any,
    ) -> tuple[Tensor, None, None]:
        indices, places = ctx.saved_tensors
        (gradient,) = gradients
        if places is not None:
            return gradient.index_select(0, places), None, None
        # rows that were not gathered have no part in the output: their gradient is 0
        full = gradient.new_zeros((ctx.n_rows, *gradient.shape[1:]))
        return full.index_copy_(0, indices, gradient), None, None
