"""Checks of tensors; each error names the argument, what was expected and what it got.

They look at shapes and dtypes only: to look at a tensor's values, the host would wait for the
device.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Shape = int | Sequence[int] | None
"""Shape that tensors must have, number of their dimensions, or `None` for any."""


def check_floating(shape: Shape, **tensors: Tensor) -> None:
    """Raise ValueError unless tensors are floating-point and have one shape.

    Args:
        shape: Shape of all, or number of dimensions; `None` for any shape that all have.
        **tensors: Tensors by the names of their arguments.
    """
    for name, tensor in tensors.items():
        if not tensor.dtype.is_floating_point:
            raise ValueError(f"{name}: expected a floating-point dtype, got {tensor.dtype}")
    _check_shapes(shape, tensors)


def check_ids(shape: Shape, **tensors: Tensor) -> None:
    """Raise ValueError unless tensors hold integers, such as token ids, and have one shape.

    Args:
        shape: Shape of all, or number of dimensions; `None` for any shape that all have.
        **tensors: Tensors by the names of their arguments.
    """
    for name, tensor in tensors.items():
        dtype = tensor.dtype
        if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            raise ValueError(f"{name}: expected an integer dtype, got {dtype}")
    _check_shapes(shape, tensors)


def check_mask(shape: Shape, **masks: Tensor) -> None:
    """Raise ValueError unless masks are bool and have one shape.

    Args:
        shape: Shape of all, or number of dimensions; `None` for any shape that all have.
        **masks: Masks by the names of their arguments.
    """
    for name, mask in masks.items():
        if mask.dtype != torch.bool:
            raise ValueError(f"{name}: expected dtype torch.bool, got {mask.dtype}")
    _check_shapes(shape, masks)


def _check_shapes(shape: Shape, tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if isinstance(shape, int) and tensor.dim() != shape:
            raise ValueError(
                f"{name}: expected {shape} dimensions, got shape {tuple(tensor.shape)}"
            )
        if isinstance(shape, Sequence) and tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(tensor.shape)}")
        shape = tensor.shape  # all others have it too
