"""Attention that is told where a sequence begins and ends, behind transformers' own interface.

A decoder whose attention goes through transformers' `AttentionInterface` hands extra keyword
arguments of its forward down to it. An `AttentionLayout` travels that way: it says how the tokens
in a forward belong together, so that they need not lie in a padded rectangle.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "lit_rlhf"
"""transformers' name of this attention."""

BASE = "sdpa"
"""The attention that it is without a layout, and that it takes the place of."""


class AttentionInputs(NamedTuple):
    """What attention is computed from.

    Attributes:
        query: `[S, A, N, D]`: `S` rows of `N` tokens, `A` heads of size `D`.
        key: `[S, K, N, D]`; `A` is a multiple of `K`.
        value: As `key`.
        scale: Of the scores; `None`: `1 / sqrt(D)`.
        dropout: Probability.
        window: A token sees itself and this many tokens less one before it; `None`: all.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float | None
    dropout: float
    window: int | None


class AttentionLayout(Protocol):
    """How the tokens of a forward attend to each other."""

    def attend(self, module: nn.Module, inputs: AttentionInputs) -> Tensor:
        """What the attention layer `module` yields, `[S, N, A, D]`."""
        ...


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    layout: AttentionLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: the layout's where one is given, `BASE` elsewhere."""
    if layout is not None:
        inputs = AttentionInputs(query, key, value, scaling, dropout, sliding_window)
        return _attended(layout, module, inputs), None
    output, _ = ALL_ATTENTION_FUNCTIONS[BASE](
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=scaling,
        sliding_window=sliding_window,
        **kwargs,
    )
    return output, None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attended(layout: AttentionLayout, module: nn.Module, inputs: AttentionInputs) -> Tensor:
    """What a layout yields; its sizes differ from batch to batch, so it is not compiled."""
    return layout.attend(module, inputs)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[BASE])


def takes_layouts(model: PreTrainedModel) -> bool:
    """Whether layouts reach the attention of `model`, by what it says of itself."""
    # private, but how transformers marks models whose attention goes through its interface
    return bool(getattr(model, "_supports_attention_backend", False))


def layout_arguments(layout: AttentionLayout, device: torch.device) -> dict[str, Any]:
    """Arguments of a model's forward that hand on a layout and keep it from building a mask."""
    # a mask with four dimensions is taken as ready made; the layout does not look at it
    ready_made = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
    return {"attention_mask": ready_made, "layout": layout, "use_cache": False}
