"""Statistics that grow over a run and live in its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from lit_rlhf.functional import Moments, merged_moments
from lit_rlhf.stats.distributed import global_masked_moments


class FixedDtypeBuffers(nn.Module):
    """A module whose buffers, and those of its submodules, keep their dtype when it is cast.

    Casts such as `.bfloat16()` or Lightning's true half precision are for weights. A running count
    in bfloat16 would stop at 256, a coefficient that adapts by 0.1 % per step would never change,
    and rotary frequencies in bfloat16 would turn late positions by whole radians. Moves to a device
    act on buffers as usual.

    Examples:
        >>> class Counter(FixedDtypeBuffers):
        ...     def __init__(self) -> None:
        ...         super().__init__()
        ...         self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        >>> Counter().bfloat16().count.dtype
        torch.float64
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # private to torch, but all moves and casts go through it and there is no public hook; the
        # tests that cast and move a module fail if it is ever renamed
        before = [(module, dict(module.named_buffers(recurse=False))) for module in self.modules()]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for module, buffers in before:
            for name, buffer in buffers.items():
                now = getattr(module, name)
                if now.dtype != buffer.dtype:
                    # from the original, as a cast to a smaller dtype has lost digits
                    setattr(module, name, buffer.to(now.device))
        return self


class RunningMoments(FixedDtypeBuffers):
    """Mean and variance of all numbers seen so far, on all ranks (for Eq. 18).

    The state is three float64 buffers, so that checkpoints contain it.

    Attributes:
        mean: Mean, 0-dim float64; 0 before the first number.
        m2: Sum of squared differences from the mean, 0-dim float64.
        count: Numbers seen, 0-dim float64.

    Examples:
        >>> moments = RunningMoments()
        >>> for batch in ([1.0, 2.0], [6.0]):
        ...     moments.update(torch.tensor(batch))
        >>> moments.count.item(), moments.mean.item(), round(moments.var.item(), 4)
        (3.0, 3.0, 4.6667)
    """

    mean: Tensor
    m2: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("mean", "m2", "count"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    def update(self, values: Tensor, mask: Tensor | None = None) -> None:
        """Add the numbers of all ranks; every rank has to call it.

        Args:
            values: Floating-point, any shape, possibly empty.
            mask: Numbers to add, bool, shape of `values`; `None` for all.

        Raises:
            ValueError: If a number is NaN or infinite on any rank. No rank's state changes then.
        """
        if mask is None:
            mask = torch.ones_like(values, dtype=torch.bool)
        new = global_masked_moments(values, mask)
        # one NaN would make the moments NaN for the rest of the run
        if not bool(torch.isfinite(new.mean) & torch.isfinite(new.var)):
            raise ValueError(
                f"values: expected finite numbers, got a mean of {float(new.mean)} over all ranks"
            )
        total = merged_moments(Moments(self.mean, self.var, self.count), new)
        self.mean.copy_(total.mean)
        self.m2.copy_(total.var * total.count)
        self.count.copy_(total.count)

    @property
    def var(self) -> Tensor:
        """Population variance, 0-dim float64; 0 before the second number."""
        return self.m2 / self.count.clamp(min=1)

    @property
    def std(self) -> Tensor:
        """Population standard deviation, 0-dim float64; 0 before the second number."""
        return self.var.sqrt()

    @property
    def sample_std(self) -> Tensor:
        """Sample standard deviation (divisor count - 1), 0-dim float64; 0 before the second."""
        return (self.m2 / (self.count - 1).clamp(min=1)).sqrt()
