"""Running statistics that live in checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rlhf.functional import Moments, merged_moments
from lit_rlhf.stats.buffers import UncastBuffers
from lit_rlhf.stats.distributed import global_masked_moments


class RunningMoments(UncastBuffers):
    """Mean and variance of all numbers that were ever seen, on all ranks (for Eq. 18).

    The state is three float64 buffers, so checkpoints hold it.

    Attributes:
        mean: Mean, 0-dim float64; 0 before the first number.
        m2: Sum of squared differences from the mean, 0-dim float64.
        count: How many numbers were seen, 0-dim float64.
    """

    mean: Tensor
    m2: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("mean", "m2", "count"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    def update(self, values: Tensor, mask: Tensor | None = None) -> None:
        """Take in the numbers of this step, of all ranks; every rank has to call it.

        Args:
            values: Floating-point, any shape; a single number is legal, and so is none.
            mask: Numbers to take in, bool, shape of `values`; `None` takes all.

        Raises:
            ValueError: If a number is NaN or infinite on any rank (it would stay in the statistics
                for ever; the state is left as it was), or for a wrong shape or dtype.
        """
        if mask is None:
            mask = torch.ones_like(values, dtype=torch.bool)
        new = global_masked_moments(values, mask)
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
        """Standard deviation with the count less one, 0-dim float64; 0 before the second number."""
        return (self.m2 / (self.count - 1).clamp(min=1)).sqrt()
