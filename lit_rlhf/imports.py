"""Functions and classes that a configuration names, and the modules that have them."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_folder: ContextVar[str | None] = ContextVar("_folder", default=None)
_own_modules: set[str] = set()
"""Top-level modules that were imported from the current folder."""


@contextmanager
def current_folder(folder: str) -> Iterator[None]:
    """Have modules looked for in a folder inside the block, wherever the block changes to.

    Args:
        folder: Absolute path of the folder that the command was started in.
    """
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


def import_configured_module(name: str) -> ModuleType:
    """Import a module that a configuration names, from the current folder if it is nowhere else.

    The folder is on the path only during this import. Libraries look for dozens of optional
    modules, and would otherwise run files of these names in a folder that somebody else has made.

    Args:
        name: Dotted name of the module.
    """
    top = name.partition(".")[0]
    folder = _folder.get() or os.getcwd()
    if _is_installed(top) or folder in sys.path:
        return importlib.import_module(name)
    sys.path.append(folder)
    importlib.invalidate_caches()  # the folder may have been looked at before the file was there
    try:
        module = importlib.import_module(name)
    finally:
        with suppress(ValueError):  # the module may have changed the path itself
            sys.path.remove(folder)
    _own_modules.add(top)
    return module


def import_class_module(class_path: str) -> None:
    """Import the module of a class that a configuration names, if it is in the current folder.

    A class that is not there is left to the parser, which says so.

    Args:
        class_path: Dotted path of the class.
    """
    module = class_path.rpartition(".")[0]
    top = class_path.partition(".")[0]
    folder = Path(_folder.get() or os.getcwd())
    is_here = os.path.isfile(folder / f"{top}.py") or os.path.isdir(folder / top)
    is_file = os.path.exists(folder / class_path)  # its name looks like a class's
    if not module or not is_here or is_file or _is_installed(top):
        return
    try:
        import_configured_module(module)
    except ModuleNotFoundError as error:
        if not f"{class_path}.".startswith(f"{error.name}."):
            raise  # the module is here, and imports another one that is not


def import_function(path: str, argument: str) -> Callable[..., Any]:
    """Import the callable that `package.module:name` names; errors call it `argument`."""
    module_name, _, name = path.partition(":")
    try:
        function = getattr(import_configured_module(module_name), name)
    except (Exception, SystemExit) as error:
        explains_itself = isinstance(error, ImportError | AttributeError | ValueError)
        message = str(error) if explains_itself else f"importing it ends with {error!r}"
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


def _is_installed(top: str) -> bool:
    """Whether a top-level module is loaded or found without the current folder."""
    return top not in _own_modules and (top in sys.modules or find_spec(top) is not None)
