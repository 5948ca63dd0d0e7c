"""State that must not lose precision when the weights around it do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn


class UncastBuffers(nn.Module):
    """A module whose own buffers follow it to a device and keep their dtype in every cast.

    Casts are for weights (`.bfloat16()`, Lightning's true half precision). A running count in
    bfloat16 would stop at 256, and a coefficient that adapts by 0.1 % a step would never move.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # private, but what every move and cast of torch goes through, and it has no public hook
        buffers = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in buffers.items():
            setattr(self, name, buffer.to(getattr(self, name).device))
        return self
