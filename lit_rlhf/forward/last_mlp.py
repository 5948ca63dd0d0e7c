"""The last layer's MLP, run for the tokens whose states are asked for and for no others.

A head reads the tokens of a response, or one token of a sequence. Every layer but the last needs
all tokens all the same, as later ones attend to them, and so does the last one's attention; what
follows it works token by token, and most of a layer's weights are there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def spare_last_mlp(trunk: nn.Module) -> list[RemovableHandle]:
    """Have the last layer's MLP pass over tokens that a layout's `asked` does not name.

    Its output is 0 for them. A forward without a layout, or with one that asks for all, is as
    before.

    Args:
        trunk: One whose layers keep an `mlp`, as most of transformers' do; another stays as it is.

    Returns:
        What takes it back.
    """
    names = [name for name, _ in trunk.named_modules() if name.endswith(".mlp")]
    if not names:
        return []
    sparing = _Sparing()
    layer, mlp = (trunk.get_submodule(name) for name in (names[-1].removesuffix(".mlp"), names[-1]))
    # a layer that is computed again for a backward calls its parts again, but not always its hooks
    parts = [
        part.register_forward_pre_hook(sparing.learn, with_kwargs=True) for part in layer.children()
    ]
    return [
        layer.register_forward_pre_hook(sparing.begin),
        *parts,
        mlp.register_forward_pre_hook(sparing.pick),
        mlp.register_forward_hook(sparing.put_back),
    ]


class _Sparing:
    """What a layer and its parts tell each other in a forward."""

    def __init__(self) -> None:
        self.asked: Tensor | None = None
        self.shape = torch.Size()

    def begin(self, layer: nn.Module, args: Any) -> None:  # noqa: ANN401
        """Nothing is left of an earlier forward."""
        self.asked = None

    def learn(self, part: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:  # noqa: ANN401
        """Which tokens are asked for, `[M]` long: attention is handed the layout."""
        if "layout" in kwargs:
            self.asked = kwargs["layout"].asked

    def pick(self, mlp: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        """The states of those tokens, `[1, M, H]` of `[1, N, H]`."""
        if self.asked is None or len(args) != 1:  # Bloom's takes the residual as well
            self.asked = None
            return None
        self.shape = args[0].shape
        return (args[0].index_select(1, self.asked),)

    def put_back(self, mlp: nn.Module, args: Any, output: Any) -> Any:  # noqa: ANN401
        """What the MLP makes of them, in their places among zeros, `[1, N, H]`."""
        if self.asked is None:
            return None
        if isinstance(output, tuple):  # a mixture of experts may say how it chose
            return (self.put_back(mlp, args, output[0]), *output[1:])
        return output.new_zeros(self.shape).index_copy_(1, self.asked, output)
