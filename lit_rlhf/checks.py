"""Argument checks; each error names the argument, what was expected and what it got.

They look at shapes, dtypes and plain numbers only. To look at a tensor's values, the host would
wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def check_dims(name: str, tensor: Tensor, dims: int) -> None:
    """Raise ValueError unless `tensor` has `dims` dimensions."""
    if tensor.dim() != dims:
        raise ValueError(f"{name}: expected {dims} dimensions, got shape {tuple(tensor.shape)}")


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless `tensor` has exactly this shape."""
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(tensor.shape)}")


def check_floating(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless `tensor` has a floating-point dtype."""
    if not tensor.is_floating_point():
        raise ValueError(f"{name}: expected a floating-point dtype, got {tensor.dtype}")


def check_integer(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless `tensor` has an integer dtype other than bool."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{name}: expected an integer dtype, got {tensor.dtype}")


def check_mask(mask: Tensor, shape: tuple[int, ...], name: str = "mask") -> None:
    """Raise ValueError unless `mask` is bool and has exactly this shape."""
    if mask.dtype != torch.bool:
        raise ValueError(f"{name}: expected dtype torch.bool, got {mask.dtype}")
    check_shape(name, mask, shape)


def check_same(shape: tuple[int, ...], **tensors: Tensor) -> None:
    """Raise ValueError unless all `tensors` are floating-point and have exactly this shape."""
    for name, tensor in tensors.items():
        check_floating(name, tensor)
        check_shape(name, tensor, shape)


def check_positive(name: str, value: float) -> None:
    """Raise ValueError unless `value` is finite and above 0."""
    check_number(name, value, "a finite number > 0", lambda number: 0 < number < math.inf)


def check_not_negative(name: str, value: float) -> None:
    """Raise ValueError unless `value` is finite and at least 0."""
    check_number(name, value, "a finite number >= 0", lambda number: 0 <= number < math.inf)


def check_unit_interval(name: str, value: float) -> None:
    """Raise ValueError unless `value` lies in [0, 1]."""
    check_number(name, value, "a number in [0, 1]", lambda number: 0 <= number <= 1)


def check_count(name: str, value: int, minimum: int = 1) -> None:
    """Raise ValueError unless `value` is an integer of at least `minimum`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name}: expected an integer >= {minimum}, got {value!r}")


def check_number(name: str, value: float, expected: str, holds: Callable[[float], bool]) -> None:
    """Raise ValueError unless `value` is a number for which `holds` returns True."""
    # PyYAML reads 1e-5, without a point, as text
    if not isinstance(value, int | float) or not holds(value):
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def check_fields(check: Callable[[str, Any], None], options: object, *names: str) -> None:
    """Run a check on fields of a group of options, and pass over those that are `None`."""
    for name in names:
        value = getattr(options, name)
        if value is not None:
            check(name, value)
