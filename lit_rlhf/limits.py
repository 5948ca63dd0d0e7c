"""Limits of processes that act on what others have written."""

import ctypes
import os
import resource
import signal
import sys
from contextlib import suppress


def end_with_parent(parent: int) -> None:
    """Have this process killed when the one that started it ends, however it ends (on Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended meanwhile
            os.kill(os.getpid(), signal.SIGKILL)


def limit_process(memory: int, **limits: int) -> None:
    """Limit the memory that this process takes from now on, and forbid to write.

    Args:
        memory: Bytes.
        **limits: Others, by their names in `resource` without `RLIMIT_`.
    """
    address_space = 0
    with suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        address_space = int(file.read().split()[0]) * resource.getpagesize()
    limits = {"AS": address_space + memory, "CORE": 0, "FSIZE": 0, **limits}
    for name, limit in limits.items():
        with suppress(ValueError, OSError):  # macOS lacks some
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))


def limit_time(seconds: float) -> None:
    """Limit the processor time that this process takes from now on."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(usage.ru_utime + usage.ru_stime + seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
