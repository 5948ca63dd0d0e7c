"""The examples in the docstrings of `functional` and `stats` are executed."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest
import torch

from lit_rlhf import functional, stats

PACKAGES = (functional, stats)
MODULES = [
    f"{package.__name__}.{module.name}"
    for package in PACKAGES
    for module in pkgutil.iter_modules(package.__path__)
]


@pytest.mark.parametrize("module", MODULES)
def test_examples_give_what_they_show(module: str) -> None:
    results = doctest.testmod(importlib.import_module(module), extraglobs={"torch": torch})
    assert results.failed == 0


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_function_has_an_example(package: ModuleType) -> None:
    functions = {name: getattr(package, name) for name in package.__all__}
    without = [
        name
        for name, function in functions.items()
        if inspect.isfunction(function) and ">>>" not in str(function.__doc__)
    ]
    assert without == []
