"""The terminal that rich draws on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def stderr_console(who: str) -> Console:
    """A console on standard error: standard output keeps the results.

    Args:
        who: the callback that asks, for the error.

    Raises:
        ModuleNotFoundError: without rich.
    """
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{who} draws with rich: pip install lit-callbacks[live]"
        ) from error
    return Console(stderr=True)
