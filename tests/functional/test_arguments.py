"""Every function refuses wrong shapes, dtypes and ranges by the argument's name.

The arguments come from a function's signature: a tensor's name says its shape and dtype, as
everywhere in `functional`. A new function is tried without a change here, if its arguments have the
names that others use.
"""

import inspect
import math
from collections.abc import Callable
from types import UnionType
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor

from lit_rlhf import functional as F

ROWS = {"bootstrap_values", "chosen", "lengths", "margin", "rejected", "sample_mask"}
ROWS |= {"denominators", "head_mask", "lam", "numerators", "scores", "weights"}
SCALARS = {"denominator", "lm_loss", "mean", "pairwise_loss", "responses", "std", "tokens"}
VOCABULARY = {"logits", "ref_logits"}
NOT_POSITIVE, NEGATIVE = (0.0, -1.0, math.inf), (-1.0, math.inf)
WRONG_NUMBERS: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(
        ("alpha", "buffer", "clip", "denominator", "error_clip", "horizon"), NOT_POSITIVE
    ),
    **dict.fromkeys(("ratio_clip_high", "target", "temperature", "value_clip"), NOT_POSITIVE),
    **dict.fromkeys(("center_coef", "coef", "kl_coef", "kl_penalty", "lm_coef"), NEGATIVE),
    **dict.fromkeys(("n_samples", "std"), NEGATIVE),
    **dict.fromkeys(("gamma", "lam"), (1.5, -0.5)),
    **dict.fromkeys(("kl", "mean"), (math.inf,)),
    **{"confidence": (0.0, 1.0, 1.5), "dual_clip": (1.0,), "label_smoothing": (-0.1, 0.5)},
    **{"group_size": (0, 3), "n": (0,), "ratio_clip": (0.0, 1.0), "successes": (-1, 3)},
}
"""Numbers beside NaN that an argument refuses."""

DEFAULTS: Any = {"confidence": 0.95, "error_clip": 0.2, "estimator": "k1", "gamma": 1.0, "lam": 0.9}
DEFAULTS |= {"ratio_clip": 0.2, "temperature": 1.0, "value_clip": 0.2}
FUNCTIONS = {name: getattr(F, name) for name in F.__all__ if inspect.isfunction(getattr(F, name))}
over_functions = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


def types_of(function: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """The types that each argument may have."""
    hints = get_type_hints(function)
    del hints["return"]
    return {n: h.__args__ if isinstance(h, UnionType) else (h,) for n, h in hints.items()}


def is_elementwise(function: Callable[..., Any]) -> bool:
    """Whether a function takes one tensor of any shape, or only moments: nothing can be wrong."""
    n_tensors = sum(Tensor in types for types in types_of(function).values())
    return n_tensors == 0 or (n_tensors == 1 and "any shape" in str(function.__doc__).lower())


def make_tensor(name: str) -> Tensor:
    if name in SCALARS:
        return torch.ones(())
    shape = (2,) if name in ROWS else (2, 3, 4) if name in VOCABULARY else (2, 3)
    if name.endswith("mask"):
        return torch.ones(shape, dtype=torch.bool)
    whole = name.endswith("ids") or name == "lengths"
    return torch.zeros(shape, dtype=torch.long if whole else torch.float32)


def valid_arguments(function: Callable[..., Any]) -> dict[str, Any]:
    """A tensor for each argument that may be one, and 1 or 0.5 for each number that is required."""
    types, arguments = types_of(function), dict[str, Any]()
    for name, parameter in inspect.signature(function).parameters.items():
        if Tensor in types[name]:
            arguments[name] = make_tensor(name)
        elif parameter.default is parameter.empty:
            arguments[name] = 1 if int in types[name] else 0.5
    return arguments


def refusal(function: Callable[..., Any], **arguments: Any) -> str:
    """The argument that the error names."""
    with pytest.raises(ValueError, match=r"^[a-z_]+: expected .*, got ") as error:
        function(**valid_arguments(function) | arguments)
    return str(error.value).partition(":")[0]


@over_functions
def test_wrong_tensor_is_named(function: Callable[..., Any]) -> None:
    if is_elementwise(function):
        return
    valid = valid_arguments(function)
    function(**valid)
    for name, value in valid.items():
        if not isinstance(value, Tensor):
            continue
        if value.dim() and (function, name) != (F.masked_sum, "values"):
            for dtype in [torch.long, torch.bool] if value.is_floating_point() else [torch.float32]:
                assert refusal(function, **{name: value.to(dtype)}) == name
        # where two tensors differ, either may be the wrong one
        assert refusal(function, **{name: torch.stack([value, value])}) in valid


@over_functions
def test_wrong_number_is_named(function: Callable[..., Any]) -> None:
    for name, types in types_of(function).items():
        for number in (*([math.nan] if float in types else []), *WRONG_NUMBERS.get(name, ())):
            assert refusal(function, **{name: number}) == name


def test_defaults_are_the_same_in_all_functions() -> None:
    for function in FUNCTIONS.values():
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.default is not parameter.empty:
                assert parameter.default == DEFAULTS.get(name, parameter.default), function
