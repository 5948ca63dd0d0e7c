"""Speed on CPUs: oneDNN matmul, and sizes padded to multiples.

Nothing here changes a result by more than rounding. `optimize_forward` decides what a network uses;
`docs/speed.md` has the measurements.
"""

import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

MIN_MULTIPLICATIONS = 2**22
"""Smallest matmul, in multiplications, that oneDNN computes faster, its call included."""

TOKEN_MULTIPLE = 64
"""Packed forwards read a multiple of this many tokens where oneDNN multiplies."""

ROW_MULTIPLE = 8
"""Decoding steps read a multiple of this many rows where oneDNN multiplies."""

FEW_ROWS = 8
MANY_ROWS = 16
"""MKL multiplies 16 rows by a large float32 weight in less time than 8 to 15 of them.

12 rows of 576 numbers by a head of 49,152 tokens take 44 ms, and 16 rows 24 ms (one thread, Xeon).
"""

LARGE_WEIGHT = 2**22
"""Numbers in the largest weight of a network from which these rows are padded."""

MAX_CACHED_KERNELS = 128
"""Compiled kernels that each cache of oneDNN holds."""

OWN_PAGES = Path("/proc/self/statm")
CPU_INFO = Path("/proc/cpuinfo")


class OneDNNLinear(nn.Linear):
    """A linear layer that hands large float32 matmuls on a CPU to oneDNN.

    torch multiplies float32 matrices with MKL, which uses AVX-512 on Intel processors only: 190
    GFLOP/s on two cores of an AMD EPYC of 2024, where oneDNN reaches 400.
    """

    def forward(self, input: Tensor) -> Tensor:  # the name that nn.Linear gave it
        """`nn.Linear.forward`, up to rounding."""
        if (
            input.is_cpu
            and input.dim() > 1
            and input.dtype == self.weight.dtype == torch.float32
            and input.numel() * len(self.weight) >= MIN_MULTIPLICATIONS
            and not torch.is_autocast_enabled("cpu")
            and not torch.compiler.is_compiling()
        ):
            # the autograd function alone takes as long as a small matmul
            multiply = _OneDNNMatmul.apply if torch.is_grad_enabled() else _multiply
            output: Tensor = multiply(input, self.weight, self.bias)
            return output
        return super().forward(input)


class _OneDNNMatmul(torch.autograd.Function):
    """`functional.linear` with forward and backward by oneDNN."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ANN401
        """`_multiply`, which keeps `input` and `weight` in `ctx`.

        Args:
            ctx: torch's store between forward and backward.
            input: Rows, `[..., K]` float32.
            weight: `[N, K]` float32.
            bias: `[N]` float32, or `None`.
        """
        ctx.save_for_backward(input, weight)
        return _multiply(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        input, weight = ctx.saved_tensors
        for_input, for_weight, for_bias = ctx.needs_input_grad
        (gradient,) = gradients
        rows = gradient.flatten(0, -2)
        return (
            _multiply(gradient, weight.t()) if for_input else None,
            _multiply(rows.t(), input.flatten(0, -2).t()) if for_weight else None,
            rows.sum(0) if for_bias else None,
        )


def _multiply(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # torch has no switch for the matmul library. The public way to oneDNN, an input in oneDNN's
    # memory layout, copies every input, output and gradient, and keeps the copies of the inputs for
    # the backward. This operator, which torch.compile emits, reads tensors as they are.
    output: Tensor = torch.ops.mkldnn._linear_pointwise(
        input, weight, bias, attr="none", scalars=[], algorithm=""
    )
    return output


def limit_cached_kernels() -> None:
    """Let a process keep fewer kernels of oneDNN, unless its environment says how many.

    oneDNN and torch's binding keep 1,024 each, of up to half a MiB. A run meets new sizes of
    matmuls all the time, so that it would grow by hundreds of MiB over hundreds of iterations. Both
    read their limit at their first matmul; neither has a public function for it.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(MAX_CACHED_KERNELS))


def use_onednn_matmul(network: nn.Module) -> None:
    """Turn the plain linear layers of `network` into `OneDNNLinear`; weights and names stay."""
    for module in network.modules():
        if type(module) is nn.Linear:
            # Replacing the module would break references that adapters and wrappers hold, and
            # overriding `forward` on the instance would not survive a deep copy.
            module.__class__ = OneDNNLinear


@cache
def mkl_is_slow() -> bool:
    """Whether this is an AMD processor with AVX-512, which MKL does not use there."""
    # torch 2.11 has no get_capabilities yet
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    by_amd = "AMD" in str(capabilities.get("cpu_name"))
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return by_amd and available and torch.backends.cpu.get_cpu_capability() == "AVX512"


@dataclass(frozen=True)
class PadToMultiple:
    """Pads the size of a forward to a multiple where oneDNN multiplies, so that sizes recur.

    oneDNN compiles a kernel for each shape of a matmul, which takes half a millisecond, and caches
    `MAX_CACHED_KERNELS` of them. It multiplies on CPUs in less than float32, and in networks that
    `use_onednn_matmul` in float32 too, from `min_float32_size` on.

    Attributes:
        multiple: Sizes of forwards that oneDNN computes are padded to it; 1 pads nothing.
        min_float32_size: Smallest forward in float32 that oneDNN computes; `None`: none.
        pads_few_rows: Pad 8 to 15 rows in float32 to 16, which MKL computes faster.
    """

    multiple: int = 1
    min_float32_size: int | None = None
    pads_few_rows: bool = False

    @classmethod
    def for_network(cls, network: nn.Module, multiple: int) -> "PadToMultiple":
        """The padding for the largest linear layer of `network`, after `use_onednn_matmul`."""
        layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear)]
        uses_onednn = any(isinstance(layer, OneDNNLinear) for layer in layers)
        largest = max((layer.weight.numel() for layer in layers), default=0)
        if not uses_onednn or not largest:
            return cls(multiple, pads_few_rows=largest >= LARGE_WEIGHT)
        return cls(multiple, min_float32_size=-(-MIN_MULTIPLICATIONS // largest))

    def n_padding(self, size: int, device: torch.device, dtype: torch.dtype) -> int:
        """Number of rows or tokens to add to a forward.

        Args:
            size: Rows or tokens of the forward.
            device: Where the network is.
            dtype: What its linear layers multiply in, see `matmul_dtype`.
        """
        if device.type != "cpu":
            return 0
        uses_onednn = dtype.itemsize < 4
        if not uses_onednn and self.min_float32_size is not None:
            uses_onednn = size >= self.min_float32_size
        if uses_onednn:
            return -size % self.multiple
        return MANY_ROWS - size if self.pads_few_rows and FEW_ROWS <= size < MANY_ROWS else 0


def matmul_dtype(weight: Tensor) -> torch.dtype:
    """The dtype in which a linear layer with this weight multiplies now; autocast may lower it."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


NO_PADDING = PadToMultiple()


@cache
def has_bfloat16() -> bool:
    """Whether this CPU multiplies in bfloat16 by itself, as far as Linux says; else True."""
    with suppress(OSError):
        words = set(CPU_INFO.read_text(encoding="utf-8").split())
        return not words & {"flags", "Features"} or bool(
            words & {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"}
        )
    return True


def resident_bytes() -> int:
    """The memory that this process occupies, in bytes; Linux only."""
    return int(OWN_PAGES.read_text("ascii").split()[1]) * mmap.PAGESIZE
