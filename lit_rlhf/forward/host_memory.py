"""Memory that training on a CPU uses again instead of fetching it anew at every operation.

A large tensor's memory comes from the system, which hands out empty pages one by one as they are
touched, and glibc gives it back as soon as the tensor is freed. `docs/speed.md` says what that
costs.
"""

from __future__ import annotations

import ctypes
import os
import platform

# mallopt(3)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGE, DEFAULT = 2**30, 128 * 2**10
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Let glibc keep what is freed, in pieces of up to `LARGE` bytes, for what is allocated next.

    Nothing is changed where another C library is used or the user has set glibc's variables.

    Returns:
        Whether it will be kept.
    """
    if any(name in os.environ for name in VARIABLES):
        return False
    return _set_thresholds(LARGE)


def give_back_freed_memory() -> None:
    """Give all that is kept back to the system, from now on at once."""
    if _set_thresholds(DEFAULT):
        ctypes.CDLL(None).malloc_trim(0)


def _set_thresholds(n_bytes: int) -> bool:
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(option, n_bytes) for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD))
