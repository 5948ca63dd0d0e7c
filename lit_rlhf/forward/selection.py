"""Rows picked by number, with backwards that add nothing up.

torch's own backward of a selection adds, as it cannot know that no row counts twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def selected(states: Tensor, rows: Tensor) -> Tensor:
    """Rows at distinct numbers.

    Args:
        states: `[N, ...]`.
        rows: Their numbers, `[M]` long.

    Returns:
        `[M, ...]`.
    """
    rows_of: Tensor = _Select.apply(states, rows)  # type: ignore[no-untyped-call]
    return rows_of


def spread(states: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
    """Rows in more places than there are rows; nothing flows back from the places in excess.

    Args:
        states: `[N, ...]`.
        places: Which row lies at each place, `[P]` long.
        tokens: The place of each row that counts, `[N]` long.

    Returns:
        `[P, ...]`.
    """
    states_of: Tensor = _Spread.apply(states, places, tokens)  # type: ignore[no-untyped-call]
    return states_of


class _Select(torch.autograd.Function):
    """The backward leaves zeros in the rows that are not picked."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, rows: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(rows)
        ctx.n_rows = len(states)
        return states.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:  # noqa: ANN401
        (rows,) = ctx.saved_tensors
        (gradient,) = gradients
        spread = gradient.new_zeros((ctx.n_rows, *gradient.shape[1:]))
        return spread.index_copy_(0, rows, gradient), None


class _Spread(torch.autograd.Function):
    """The backward is a selection too."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, places: Tensor, tokens: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(tokens)
        return states.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:  # noqa: ANN401
        (tokens,) = ctx.saved_tensors
        return gradients[0].index_select(0, tokens), None, None
