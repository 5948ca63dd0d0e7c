"""OpenMP's waiting threads beside other processes that need the cores.

Between two parallel regions, the threads of libgomp (OpenMP in torch's wheels for Linux) spin for
some milliseconds before they sleep. On idle cores this saves waking them; beside other processes it
takes the time of those that compute. libgomp spins a 3000th as long while it has more threads than
there are processors (`GOMP_SPINCOUNT` in its manual). `SpinLimit` therefore keeps spare threads
asleep while this process waits for cores. The number of threads that compute stays.
"""

import ctypes
import logging
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

_BUSY = 0.2
"""Seconds that this process's threads wait for a core, in each second, above which it is busy."""
_PERIOD = 0.5  # seconds between two looks
TOLD_AFTER = 10  # busy looks; short commands say nothing
OWN_CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Variables with which a user decides how long threads spin."""
_TASKS = Path("/proc/self/task")


class SpinLimit:
    """Spare threads of libgomp, as many as make it spin briefly; they sleep.

    Raises:
        AttributeError: If torch's OpenMP is not libgomp.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        self._start, self._nothing = library.GOMP_parallel, library.omp_get_thread_num
        self._count = library.omp_get_num_procs() - torch.get_num_threads() + 2  # itself included
        self._released = threading.Event()
        self._owner: threading.Thread | None = None

    @property
    def is_on(self) -> bool:
        """Whether threads spin briefly."""
        return self._owner is not None

    def set(self, on: bool) -> None:
        """Start or end the spare threads: libgomp keeps a team for each thread that has one."""
        if on and self._owner is None:
            self._owner = threading.Thread(target=self._own_team, name="SpinLimit", daemon=True)
            self._owner.start()
        elif not on and self._owner is not None:
            self._released.set()
            self._owner.join()
            self._owner = None
            self._released.clear()

    def _own_team(self) -> None:
        function = ctypes.cast(self._nothing, ctypes.c_void_p)
        self._start(function, None, ctypes.c_uint(self._count), ctypes.c_uint(0))
        self._released.wait()


def share_cores() -> None:
    """Watch from now on whether cores are busy, and limit the spinning while they are.

    The tenth time is logged. Nothing is done with one thread, where the user has set one of
    `OWN_CHOICES`, and where there is no libgomp or no Linux.
    """
    if torch.get_num_threads() == 1 or not _TASKS.is_dir() or set(OWN_CHOICES) & os.environ.keys():
        return
    with suppress(AttributeError, OSError):
        limit = SpinLimit()
        threading.Thread(target=_watch, args=(limit,), name="share_cores", daemon=True).start()


def _watch(limit: SpinLimit) -> None:
    times = 0
    waited, looked = waiting_seconds(), time.monotonic()
    while True:
        time.sleep(_PERIOD)
        before, then = waited, looked
        waited, looked = waiting_seconds(), time.monotonic()
        limit.set(waited - before > _BUSY * (looked - then))
        times += limit.is_on
        if limit.is_on and times == TOLD_AFTER:
            logger.warning("other processes use the cores: threads that wait sleep at once")


def waiting_seconds() -> float:
    """Seconds that the living threads of this process were ready to run and had no core."""
    total = 0
    for task in _TASKS.iterdir():
        with suppress(OSError):  # a thread that has just ended
            total += int((task / "schedstat").read_text("ascii").split()[1])
    return total / 1e9
