"""Functions and their names, `package.module:function`."""

import importlib
from collections.abc import Callable
from typing import Any


def import_function(path: str, argument: str) -> Callable[..., Any]:
    """Import the callable that `package.module:name` names; errors call it `argument`."""
    module_name, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:
        known = isinstance(error, ImportError | AttributeError | ValueError)
        message = str(error) if known else f"importing it ends with {error!r}"
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]:
            message += (
                ": a module of your own must be in the current folder or in one of PYTHONPATH"
            )
        raise ValueError(
            f"{argument} {path!r}: expected 'package.module:function'; {message}"
        ) from error
    if not callable(function):
        raise ValueError(f"{argument} {path!r}: expected a callable, got {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def function_path(function: Callable[..., Any]) -> str:
    """Name a callable as `module:name`, which need not be importable: a notebook's is `__main__`.

    Objects that are not functions are named after their class.
    """
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"
