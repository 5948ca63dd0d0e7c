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


def check_stored(name: str, tensor: object) -> None:
    """Raise ValueError for what is no tensor whose numbers are all in the file that it is from.

    A tensor can repeat one stored number as often as it likes, and its first copy would then take
    all memory.

    Args:
        name: Name of the tensor, and of the file.
        tensor: What the file has under the name.
    """
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    is_plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
    stored = tensor.untyped_storage().nbytes() if is_plain else 0
    if tensor.numel() * tensor.element_size() > stored:
        raise ValueError(
            f"{name}: expected a tensor that is stored as a whole, got one of the shape "
            f"{tuple(tensor.shape)} with {stored} bytes"
        )


def _check_shapes(shape: Shape, tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if isinstance(shape, int) and tensor.dim() != shape:
            raise ValueError(
                f"{name}: expected {shape} dimensions, got shape {tuple(tensor.shape)}"
            )
        if isinstance(shape, Sequence) and tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(tensor.shape)}")
        shape = tensor.shape  # all others have it too
