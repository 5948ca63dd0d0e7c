"""Checks of plain arguments; each error names the argument, what was expected and what it got."""

import math
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from types import NoneType
from typing import Any, get_args, get_type_hints


def check_positive(name: str, value: float) -> None:
    """Raise ValueError about the argument `name` unless `value` is finite and above 0."""
    check_number(name, value, "a finite number > 0", lambda number: 0 < number < math.inf)


def check_not_negative(name: str, value: float) -> None:
    """Raise ValueError about the argument `name` unless `value` is finite and at least 0."""
    check_number(name, value, "a finite number >= 0", lambda number: 0 <= number < math.inf)


def check_unit_interval(name: str, value: float) -> None:
    """Raise ValueError about the argument `name` unless `value` lies in [0, 1]."""
    check_number(name, value, "a number in [0, 1]", lambda number: 0 <= number <= 1)


def check_count(name: str, value: int, minimum: int = 1) -> None:
    """Raise ValueError unless a value is an integer of at least a minimum.

    Args:
        name: Name of the argument, for the message.
        value: The value.
        minimum: Least value that is accepted.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name}: expected an integer >= {minimum}, got {value!r}")


def check_seed(name: str, value: int) -> None:
    """Raise ValueError about the argument `name` unless `value` is a seed that NumPy takes."""
    if not 0 <= value < 2**32:
        raise ValueError(f"{name}: expected a seed from 0 to {2**32 - 1}, got {value}")


def check_number(name: str, value: float, expected: str, holds: Callable[[float], bool]) -> None:
    """Raise ValueError unless a value is a number with some property.

    Args:
        name: Name of the argument, for the message.
        value: The value.
        expected: What the number should be, in words.
        holds: Tells whether a number is so.
    """
    # PyYAML reads 1e-5, without a point, as text
    if not isinstance(value, int | float) or not holds(value):
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ValueError unless a value is one of some words.

    Args:
        name: Name of the argument, for the message.
        value: The value.
        choices: The words.
    """
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def check_fields(check: Callable[[str, Any], None], options: object, *names: str) -> None:
    """Run a check on fields of a group of options, and pass over those that may be `None` and are.

    Args:
        check: Gets a field's name and value.
        options: The group. Attributes of what is no dataclass may be `None`.
        *names: Names of the fields.
    """
    types = get_type_hints(type(options)) if is_dataclass(options) else {}
    for name in names:
        value = getattr(options, name)
        may_be_none = name not in types or NoneType in get_args(types[name])
        if value is not None or not may_be_none:
            check(name, value)
