"""Sums and moments over the ranks of a distributed run, and over the course of a run.

All functions are collectives, and so is `RunningMoments.update`: under `torch.distributed` every
rank has to call them together.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Self

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from lit_rlhf.errors import UserError
from lit_rlhf.functional import Moments, masked_moments, merged_moments


def global_sum(tensor: Tensor) -> Tensor:
    """Sum of a tensor over all ranks.

    Args:
        tensor: Numbers, in the same shape and dtype on every rank; not bool.

    Returns:
        A new tensor of that shape on the device of `tensor`, without a graph.

    Examples:
        >>> global_sum(torch.tensor([1.0, 2.0])).tolist()  # a single process
        [1.0, 2.0]
    """
    if tensor.dtype == torch.bool:
        raise ValueError("tensor: expected a numeric dtype, got torch.bool")
    total = tensor.detach().clone()
    if not _is_distributed():
        return total
    reduced = total.to(_group_device(total.device))
    distributed.all_reduce(reduced)
    return reduced.to(total.device)


def global_max(number: int) -> int:
    """The largest of the ranks' numbers.

    Args:
        number: The number of this rank.

    Examples:
        >>> global_max(3)  # a single process
        3
    """
    if world_size() == 1:
        return number
    most = torch.tensor(number, device=_group_device(torch.device("cpu")))
    distributed.all_reduce(most, distributed.ReduceOp.MAX)
    return int(most)


def _group_device(device: torch.device) -> torch.device:
    """Device on which ranks can reduce a tensor of `device`.

    NCCL does not reduce on the host, and a teardown may have moved a tensor there.
    """
    return torch.device("cuda") if "nccl" in distributed.get_backend() else device


@contextmanager
def fail_together(action: str) -> Generator[None, None, None]:
    """Wait for all ranks at the end, and raise on all of them if the block fails on one.

    Otherwise the ranks that succeeded would wait in their next collective until the timeout.

    Args:
        action: What the block does, for the message, for instance "write the model".

    Examples:
        >>> with fail_together("write the model"):  # a single process
        ...     print("written")
        written
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    failed = bool(global_max(int(error is not None)))
    if error is not None:
        raise error
    if failed:
        raise UserError(f"another rank could not {action}: see its error")


def all_gather_rows(tensor: Tensor) -> Tensor:
    """The rows of all ranks, in the order of the ranks.

    Args:
        tensor: Rows of this rank, `[n, ...]`. `n` may differ between ranks and be 0; the other
            sizes may not differ.

    Returns:
        Rows, `[sum of n, ...]`, without a graph.

    Examples:
        >>> all_gather_rows(torch.tensor([[1, 2]])).tolist()  # a single process
        [[1, 2]]
    """
    tensor = tensor.detach()
    if not _is_distributed():
        return tensor
    counts = _all_gather(torch.tensor(len(tensor), device=tensor.device))
    # collectives gather tensors of one shape only
    padded = tensor.new_zeros((int(max(counts)), *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    parts = zip(_all_gather(padded), counts, strict=True)
    return torch.cat([rows[: int(count)] for rows, count in parts])


def _all_gather(tensor: Tensor) -> list[Tensor]:
    """Gather tensors of one shape, in the order of the ranks."""
    tensors = [torch.empty_like(tensor) for _ in range(distributed.get_world_size())]
    distributed.all_gather(tensors, tensor)
    return tensors


def global_denominator(count: Tensor | int, device: torch.device) -> Tensor:
    """Sum of a count over ranks, divided by the number of ranks.

    Each rank divides its sum of losses by this. Gradients and logged values are averaged over
    ranks afterwards. That gives the mean over the samples or tokens of all ranks, however unevenly
    they are spread.

    Args:
        count: Samples or tokens of this rank, a number or 0-dim tensor, at least 0.
        device: Device of the result.

    Returns:
        The denominator, 0-dim float32. A sum of 0 counts as 1.

    Examples:
        >>> global_denominator(3, torch.device("cpu")).item()  # a single process
        3.0
    """
    total = global_sum(torch.as_tensor(count, dtype=torch.float32, device=device))
    return torch.maximum(total, torch.ones_like(total)) / world_size()


def global_means(metrics: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Means of metrics over ranks, by a single reduction.

    A share in a global mean (see `global_denominator`) becomes that mean.

    Args:
        metrics: 0-dim tensors by name, with the same names on every rank. They may be on the host:
            times are, and a process group of GPUs does not reduce tensors there.
        device: Device to reduce on.

    Returns:
        Means by name, 0-dim float64 on that device.

    Examples:
        >>> global_means({"sft/loss": torch.tensor(0.5)}, torch.device("cpu"))["sft/loss"].item()
        0.5
    """
    values = [value.detach().to(device, torch.float64) for value in metrics.values()]
    means = global_sum(torch.stack(values)) / world_size()
    return dict(zip(metrics, means.unbind(), strict=True))


def world_size() -> int:
    """Number of ranks; 1 for a single process.

    Examples:
        >>> world_size()  # a single process
        1
    """
    return distributed.get_world_size() if _is_distributed() else 1


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is.

    Examples:
        >>> local_part(torch.ones(2)).tolist()
        [1.0, 1.0]
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_distributed() -> bool:
    """Whether there is a process group.

    A group with a single rank counts: its collectives check devices, too.
    """
    return distributed.is_available() and distributed.is_initialized()


def global_masked_moments(values: Tensor, mask: Tensor) -> Moments:
    """`masked_moments` of the kept values of all ranks, the same to the last bit on every rank.

    Args:
        values: Floating-point numbers of this rank, in any shape; it may differ between ranks.
        mask: Which to keep, bool of the same shape; it may be empty on some ranks.

    Returns:
        The moments, without a graph.

    Examples:
        >>> values, mask = torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False])
        >>> [x.item() for x in global_masked_moments(values, mask)]  # a single process
        [2.0, 1.0, 2.0]
    """
    moments = masked_moments(values, mask)
    if not _is_distributed():
        return moments
    # Merge in the order of the ranks, which is the same everywhere. An all_reduce of sums of
    # squares would cancel digits of a large mean.
    by_rank = _all_gather(torch.stack(moments))
    return reduce(merged_moments, (Moments(*numbers.unbind()) for numbers in by_rank))


class FixedDtypeBuffers(nn.Module):
    """A module whose buffers, and its submodules' buffers, keep their dtype when it is cast.

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
        # The method is private to torch, but all moves and casts go through it, and there is no
        # public hook. The tests that cast and move a module fail if it is ever renamed.
        original_buffers = [
            (module, dict(module.named_buffers(recurse=False))) for module in self.modules()
        ]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for module, buffers in original_buffers:
            for name, buffer in buffers.items():
                now = getattr(module, name)
                if now.dtype != buffer.dtype:
                    # copy the original: the cast to a smaller dtype has lost digits
                    setattr(module, name, buffer.to(now.device))
        return self


class RunningMoments(FixedDtypeBuffers):
    """Mean and variance of all numbers seen so far, on all ranks (for Eq. 18).

    The state is `mean`, `m2` (sum of squared differences from the mean) and `count`: float64
    buffers, so that checkpoints contain it.

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

    def update(self, values: Tensor) -> None:
        """Add the numbers of all ranks; every rank has to call it.

        Args:
            values: Numbers of this rank, floating-point, any shape; it may differ between ranks.

        Raises:
            ValueError: On every rank, if a number of any rank is not finite. No state has changed.
        """
        new = global_masked_moments(values, torch.ones_like(values, dtype=torch.bool))
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
