"""Float32 products by oneDNN, where torch's own leave half of a processor unused.

torch multiplies float32 matrices by MKL, which uses AVX-512 on Intel's processors alone: on an AMD
EPYC of 2024, 190 GFLOP/s on two cores, where oneDNN reaches 400 (`docs/speed.md`).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from lit_rlhf.forward.networks import ModuleT

LEAST = 2**24
"""Multiplications from which on a product gains more than it costs to hand its tensors over."""

TOKENS = 64
"""Where oneDNN multiplies, a network and its last MLP read a multiple of this many tokens.

It compiles a product for its sizes, which takes half a millisecond, and keeps about a thousand.
"""

ROWS = 8
"""The same for the rows of a decode step."""


class FastLinear(nn.Linear):
    """A linear layer that hands large float32 products on a CPU over to oneDNN."""

    def forward(self, input: Tensor) -> Tensor:  # the name that nn.Linear gave it
        """As `nn.Linear`, up to rounding."""
        if (
            input.is_cpu
            and input.dtype == self.weight.dtype == torch.float32
            and input.numel() * len(self.weight) >= LEAST
            and not torch.is_autocast_enabled("cpu")
            and not torch.compiler.is_compiling()
        ):
            # an input in oneDNN's layout is what tells torch whose product to take
            return super().forward(input.to_mkldnn()).to_dense()
        return super().forward(input)


def with_fast_products(network: ModuleT) -> ModuleT:
    """`network` with `FastLinear` in place of plain linear layers, if MKL is slow here.

    Args:
        network: Changed in place; weights and their names stay.
    """
    if mkl_is_slow():
        for module in network.modules():
            if type(module) is nn.Linear:
                module.__class__ = FastLinear  # adapters and wrappers hold this very object
    return network


@cache
def mkl_is_slow() -> bool:
    """Whether this is a processor with AVX-512 on which MKL does without it."""
    # torch 2.11 does not tell yet
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    by_amd = "AMD" in str(capabilities.get("cpu_name"))
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return by_amd and available and torch.backends.cpu.get_cpu_capability() == "AVX512"


def filling(network: nn.Module, n_tokens: int, multiple: int) -> int:
    """How many tokens of no use to read with `n_tokens`, so that sizes of products come back.

    Args:
        network: Reads them, in its own precision or under autocast.
        n_tokens: Of use.
        multiple: What both together are a multiple of, if oneDNN multiplies.
    """
    weight = next(network.parameters())
    if weight.device.type != "cpu":
        return 0
    compiled = torch.is_autocast_enabled("cpu") or weight.dtype.itemsize < 4
    if not compiled and mkl_is_slow():
        layers = (layer for layer in network.modules() if isinstance(layer, nn.Linear))
        compiled = n_tokens * max((layer.weight.numel() for layer in layers), default=0) >= LEAST
    return -n_tokens % multiple if compiled else 0
