"""Argument checks; each error names the argument, what was expected and what it got.

They look at shapes, dtypes and plain numbers only. To look at a tensor's values, the host would
wait for the device.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def check_tensors(shape: int | Sequence[int] | None, **tensors: Tensor) -> None:
    """Raise ValueError unless `tensors` have one shape, and the dtypes that their names stand for.

    `shape` may be the number of dimensions. A `*mask` is bool, `*ids` and `lengths` are integers,
    and all others are floating-point.
    """
    for name, tensor in tensors.items():
        dtype = tensor.dtype
        if name.endswith("mask"):
            expected, fits = "dtype torch.bool", dtype == torch.bool
        elif name.endswith("ids") or name == "lengths":
            expected = "an integer dtype"
            fits = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
        else:
            expected, fits = "a floating-point dtype", dtype.is_floating_point
        if not fits:
            raise ValueError(f"{name}: expected {expected}, got {dtype}")
        if isinstance(shape, int) and tensor.dim() != shape:
            raise ValueError(
                f"{name}: expected {shape} dimensions, got shape {tuple(tensor.shape)}"
            )
        if isinstance(shape, Sequence) and tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(tensor.shape)}")
        shape = tensor.shape  # all others have it too


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
