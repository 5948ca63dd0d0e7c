"""Faster ways to run the same network: torch.compile, and Liger's fused kernels."""

from __future__ import annotations

import inspect
from typing import TypeVar

import torch
from torch import nn

from lit_rlhf.forward import trunk_of, unwrap_model

ModuleT = TypeVar("ModuleT", bound=nn.Module)

# its losses take the place of a model's own, which nothing here asks for
LOSSES = ("cross_entropy", "fused_linear_cross_entropy")


def compiled(model: ModuleT, backend: str) -> ModuleT:
    """`model` with its trunk behind torch.compile, for sequences of any length.

    Args:
        model: A causal language model or a scalar model, changed in place.
        backend: torch.compile's, for instance `inductor`.

    Raises:
        ValueError: If torch has no such backend.
    """
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise ValueError(f"torch_compile: expected one of {', '.join(known)}, got {backend!r}")
    trunk_of(model).compile(dynamic=True, backend=backend)
    return model


def with_fused_kernels(model: ModuleT) -> ModuleT:
    """`model` with Liger's kernels for norms, rotary positions and gated MLPs, on a CUDA device.

    Args:
        model: A causal language model or a scalar model, changed in place.

    Raises:
        ValueError: If liger-kernel is not installed, or does not know the architecture.
    """
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise ValueError(
            "fused_kernels: expected liger-kernel to be installed (pip install 'lit-rlhf[liger]'), "
            f"got {error}"
        ) from error
    inner = unwrap_model(model)
    kind = str(inner.config.model_type)
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(
            f"fused_kernels: expected an architecture among "
            f"{', '.join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))}, got {kind!r}"
        )
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN[kind]
    takes = inspect.signature(apply).parameters
    apply(model=inner, **{name: False for name in LOSSES if name in takes})
    return model
