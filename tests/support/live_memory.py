"""Counts the bytes of live tensors on the CPU, which has no allocation statistics."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # the documented way to see every op
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Counts the storages that ops in its context touch or make, until they are freed, in bytes.

    Ops of the backward are seen too: on a CPU it runs in the thread that calls it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._count(args)
        result = func(*args, **(kwargs or {}))
        self._count(result)
        return result

    def _count(self, tree: Any) -> None:
        for leaf in tree_leaves(tree):
            if not isinstance(leaf, Tensor) or leaf.device.type == "meta":
                continue
            storage = leaf.untyped_storage()
            key = storage._cdata  # the only name that a storage keeps
            if key not in self._known:
                self._known.add(key)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size
