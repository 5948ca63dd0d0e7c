"""Callbacks that show and watch training, and act when it goes wrong.

The core (`Watch`, the monitors and the verdict) needs neither Lightning nor torch; each name is
imported when it is first used. The page about training runs is in `lit_callbacks.report`.
"""

import ast
from importlib import import_module
from pathlib import Path

__version__ = "0.1.0"

# The stub lists the public names for type checkers and editors, and here they are read from it.
_MODULES = {
    alias.name: statement.module or ""
    for statement in ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8")).body
    if isinstance(statement, ast.ImportFrom)
    for alias in statement.names
}
_CORE = {
    "calibration",
    "files",
    "logs",
    "monitors",
    "runs",
    "signals",
    "trainer_callback",
    "verdict",
    "watch",
    "words",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if module.rpartition(".")[2] not in _CORE:
        # Lightning is needed anyway: a LightningCLI finds all callbacks by their short names
        for callback_module in set(_MODULES.values()):
            import_module(callback_module)
    return getattr(import_module(module), name)
