"""Float32 products by oneDNN, where torch's own leave half of a processor unused.

torch multiplies float32 matrices by MKL, which uses AVX-512 on Intel's processors alone: on an AMD
EPYC of 2024, 190 GFLOP/s on two cores, where oneDNN reaches 400 (`docs/speed.md`).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from lit_rlhf.models.networks import ModuleT

LEAST = 2**24
"""Multiplications from which on a product gains more than it costs to hand its tensors over."""

TOKENS = 64
"""Where oneDNN multiplies, a network and its last MLP read a multiple of this many tokens.

It compiles a product for its sizes, which takes half a millisecond, and keeps about a thousand.
"""

ROWS = 8
"""The same for the rows of a decode step."""


def with_fast_products(network: ModuleT) -> ModuleT:
    """`network`, whose linear layers multiply large float32 matrices by oneDNN if MKL is slow here.

    Args:
        network: Changed in place; results differ by rounding alone.
    """
    if mkl_is_slow():
        for module in network.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(_hand_over)
                module.register_forward_hook(_take_back)
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


def _hand_over(layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
    """A linear layer's input in oneDNN's layout, so that torch leaves the product to it."""
    states, weight = args[0], layer.weight
    assert isinstance(weight, Tensor)
    if not (
        states.device.type == "cpu"
        and states.dtype == weight.dtype == torch.float32
        and states.numel() * len(weight) >= LEAST
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    ):
        return None
    return (states.to_mkldnn(),)


def _take_back(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
    """The product as other layers read it."""
    return output.to_dense() if output.is_mkldnn else None
