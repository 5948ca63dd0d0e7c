"""Tells tensors made on the host from tensors of a module, where both are on the CPU.

A process group of GPUs reduces only tensors on the GPU. On a CPU every tensor is on the one
device, so tensors that a GPU run would have on the host are marked by a subclass.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

FACTORIES = (torch.arange, torch.as_tensor, torch.empty, torch.from_numpy, torch.full)
FACTORIES += (torch.ones, torch.rand, torch.tensor, torch.zeros)
COLLECTIVES = ("all_gather", "all_gather_into_tensor", "all_reduce", "broadcast", "reduce")
COLLECTIVES += ("reduce_scatter_tensor",)


class HostTensor(Tensor):
    """A tensor that was made without a device."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = tree_leaves((args, dict(kwargs or {})))
        tensors = [leaf for leaf in inputs if isinstance(leaf, Tensor)]
        # a move to a device, or the device of another tensor, which on a GPU wins over the host's
        moved = any(isinstance(leaf, torch.device) for leaf in inputs)
        on_host = not moved and all(isinstance(leaf, HostTensor) for leaf in tensors)
        with torch._C.DisableTorchFunctionSubclass():  # as torch's guide to subclasses does
            result = func(*args, **(kwargs or {}))
        kind, kinds = HostTensor if on_host else Tensor, (Tensor, HostTensor)
        return tree_map(lambda x: x.as_subclass(kind) if type(x) in kinds else x, result)


class _MarkHostTensors(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = func in FACTORIES and (kwargs or {}).get("device") is None
        made &= not any(isinstance(leaf, Tensor) for leaf in tree_leaves(args))
        return result.as_subclass(HostTensor) if made else result


@contextmanager
def host_tensors_in_collectives() -> Iterator[list[str]]:
    """Mark tensors made on the host, and list the collectives that were given one."""
    calls: list[str] = []

    def watched(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.extend(
                f"{name} of {leaf.as_subclass(Tensor)}"
                for leaf in tree_leaves((args, kwargs))
                if isinstance(leaf, HostTensor)
            )
            with torch._C.DisableTorchFunctionSubclass():
                return collective(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch, _MarkHostTensors():
        for name in COLLECTIVES:
            patch.setattr(distributed, name, watched(name, getattr(distributed, name)))
        yield calls
