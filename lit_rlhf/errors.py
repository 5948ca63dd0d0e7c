"""Errors that end a command with one line instead of a traceback."""

import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from lit_rlhf.terminal import one_line

_OUT_OF_MEMORY = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator",
    "can't start new thread",
)
"""Phrases of torch, CUDA and Python for memory, or room for a thread, that is not there."""

_LOST_WORKER = "DataLoader worker (pid"
"""How torch begins to say that a worker was killed, wherever the program is by then."""


class UserError(RuntimeError):
    """An error whose message tells the user what to change."""


_USER_ERRORS = (UserError, ValueError, OSError, ImportError)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory of the device or of the host ran out."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY)


def no_advice(message: str) -> str:
    """Add nothing to a message."""
    return ""


def end_with_message(
    error: Exception,
    prefix: str,
    advise: Callable[[str], str] = no_advice,
    status: int = 1,
) -> NoReturn:
    """End with one line for an error that the user can mend; raise others again.

    Args:
        error: The error of a command.
        prefix: What the line begins with: the command.
        advise: Gets the message and returns what to do about it, as the end of the line.
        status: Exit status. Python's own for an exception is 1: with another status, errors of any
            kind end with it, the others after their traceback.
    """
    if isinstance(error.__context__, KeyboardInterrupt):  # a pool of workers that Ctrl-C ended
        raise error.__context__
    message = one_line(str(error)) or type(error).__name__
    if is_out_of_memory(error):
        if "out of memory" not in message:
            limits = "`ulimit -v`, `ulimit -u`, a container"
            message = f"out of memory, or at a limit ({limits}): {message}"
    elif _LOST_WORKER in message:
        message = (
            f"a process that loads data was ended, perhaps because memory ran out: {message}. With "
            "data.num_workers: 0 there are no such processes"
        )
    elif not isinstance(error, _USER_ERRORS):
        if status == 1:
            raise error
        traceback.print_exception(error)
        raise SystemExit(status) from error
    line = f"{prefix}: {message}{advise(message)}"
    if status == 1:
        raise SystemExit(line) from error
    print(line, file=sys.stderr)
    raise SystemExit(status) from error
