"""The examples in the docstrings of `functional` and `stats` are executed."""

import doctest
import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest
import torch

from lit_rlhf import functional, stats

MODULES = [
    stats.__name__,
    *(f"{functional.__name__}.{m.name}" for m in pkgutil.iter_modules(functional.__path__)),
]


@pytest.mark.parametrize("module", MODULES)
def test_examples_give_what_they_show(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module), extraglobs={"torch": torch}).failed == 0


@pytest.mark.parametrize("module", [functional, stats], ids=lambda module: module.__name__)
def test_every_public_function_has_an_example(module: ModuleType) -> None:
    own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__]
    public = getattr(module, "__all__", None) or [name for name in own if not name.startswith("_")]
    functions = {name: getattr(module, name) for name in public}
    without = [
        name
        for name, function in functions.items()
        if inspect.isfunction(function) and ">>>" not in str(function.__doc__)
    ]
    assert without == []
