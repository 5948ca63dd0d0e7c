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
    results = doctest.testmod(importlib.import_module(module), extraglobs={"torch": torch})
    assert results.failed == 0


@pytest.mark.parametrize("module", [functional, stats], ids=lambda module: module.__name__)
def test_every_public_function_has_an_example(module: ModuleType) -> None:
    functions = {name: getattr(module, name) for name in module.__all__}
    without = [
        name
        for name, function in functions.items()
        if inspect.isfunction(function) and ">>>" not in str(function.__doc__)
    ]
    assert without == []
