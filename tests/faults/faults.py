"""Faults, and what a run that meets one may do."""

import errno
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


def send(*signals: signal.Signals) -> Callable[[], None]:
    """Send signals to this process, one after the other."""

    def strike() -> None:
        for number in signals:
            os.kill(os.getpid(), number)

    return strike


def fail(error: Callable[[], BaseException]) -> Callable[[], None]:
    """Raise an error."""

    def strike() -> None:
        raise error()

    return strike


def refuse_folders() -> None:
    """From now on, fsync of a folder fails, as it does on some network file systems."""
    fsync = os.fsync

    def refusing(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").resolve().is_dir():
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    owner: Any = os
    owner.fsync = refusing


def close_output() -> None:
    """Let nobody read standard output and error from now on."""
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 1)
    os.dup2(writing, 2)
    os.close(writing)


def fill_disk() -> None:
    """From now on, the system lets no file grow beyond 48 KiB, which is enough for the output."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (48 << 10, resource.RLIM_INFINITY))


def poison() -> None:
    """From now on, every linear layer that is trained returns NaN."""

    def spoil(module: torch.nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor | None:
        linear = isinstance(module, torch.nn.Linear) and module.weight.requires_grad
        return output * float("nan") if linear else None

    torch.nn.modules.module.register_module_forward_hook(spoil)


def system_error(number: int) -> Callable[[], None]:
    """Raise the system's error of a number."""
    return fail(lambda: OSError(number, os.strerror(number), "the file"))


@dataclass(frozen=True)
class Fault:
    """A fault and what it may lead to.

    Attributes:
        strike: What happens at the chosen moment.
        statuses: Exit statuses that are right, negative for the signal that ended the process.
        message: Words that the run has to say, in one line.
    """

    strike: Callable[[], None]
    statuses: tuple[int, ...]
    message: str = ""


FAULTS = {
    "TERM": Fault(send(signal.SIGTERM), (143, -15)),
    "INT": Fault(send(signal.SIGINT), (130, -2)),
    "INT twice": Fault(send(signal.SIGINT, signal.SIGINT), (1, 130, -2)),
    "HUP": Fault(send(signal.SIGHUP), (143, -1)),
    "KILL": Fault(send(signal.SIGKILL), (-9,)),
    "STOP": Fault(send(signal.SIGSTOP), (0,)),
    "ENOSPC": Fault(system_error(errno.ENOSPC), (1,), "No space left on device"),
    "EIO": Fault(system_error(errno.EIO), (1,), "Input/output error"),
    "ESTALE": Fault(system_error(errno.ESTALE), (1,), "Stale file handle"),
    "EACCES": Fault(system_error(errno.EACCES), (1,), "Permission denied"),
    "EINVAL": Fault(refuse_folders, (0,)),
    "EPIPE": Fault(close_output, (0,)),
    "memory": Fault(fail(lambda: torch.OutOfMemoryError("CUDA out of memory.")), (1,), "memory"),
    "NaN": Fault(poison, (1,), "not finite"),
    "full": Fault(fill_disk, (1,), "File too large"),
}
"""The faults by name."""
SIGNALS = ("TERM", "INT", "INT twice", "HUP", "KILL", "STOP", "EPIPE")
FILES = ("ENOSPC", "EIO", "ESTALE", "EACCES", "full")
