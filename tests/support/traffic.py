"""What a rank's collectives carry, by phase of an iteration."""

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # the documented way to see every op
from torch.utils._pytree import tree_leaves

COLLECTIVES = {
    "allreduce_": "summed",
    "_reduce_scatter_base_": "scattered",
    "_allgather_base_": "gathered",
}
"""Names in `c10d` of the collectives that large tensors go through, and what they do."""


class CountTraffic(TorchDispatchMode):
    """Counts collectives and the bytes of their whole tensors, by phase and kind.

    A tensor of less than `least` bytes, such as a count or a norm, is left out. Ops of the backward
    are seen too: on a CPU it runs in the thread that calls it.
    """

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least
        self.phase = ""
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.partition("::")[2]
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            # the output of a gathering and the input of a scattering are whole
            size = max((tensor.nbytes for tensor in tensors), default=0)
            if size >= self.least:
                key = (self.phase, COLLECTIVES.get(name, name))
                self.bytes[key] += size
                self.calls[key] += 1
        return func(*args, **(kwargs or {}))
