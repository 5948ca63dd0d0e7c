"""Forks of this process that run a command, alone or as two ranks, and what is left of them."""

import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch

TIME_LIMIT = 120  # seconds of a run, after which it hangs


def fork(folder: Path, log: str, work: Callable[[], None], lead: bool = True) -> int:
    """Do `work` in a process of its own, in `folder`, leading a session; return its id."""
    folder.mkdir(exist_ok=True)
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        if lead:
            os.setsid()
        # whatever started this process: `nohup` ignores the one, and a shell's `&` the other
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        output = os.open(folder / log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        work()
        status = 0
    except SystemExit as ended:  # as the interpreter does it
        if ended.code is not None and not isinstance(ended.code, int):
            os.write(2, f"{ended.code}\n".encode())
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        status = 130
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        with suppress(OSError):  # nobody may read it
            sys.stdout.flush()
        os._exit(status)


def strike_later(seconds: float, strike: Callable[[], None]) -> None:
    """Call a function in this process after some processor time, wherever the program is by then.

    Args:
        seconds: The time.
        strike: The function.
    """
    signal.signal(signal.SIGPROF, lambda *_: strike())
    signal.setitimer(signal.ITIMER_PROF, max(seconds, 1e-3))


def on_two_ranks(work: Callable[[int], None], log: str) -> NoReturn:
    """Do `work(rank)` in two processes, and end with the status of the first, or of the second."""
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(asked.getsockname()[1])}
    os.environ |= {**meeting, "NODE_RANK": "0", "DS_ACCELERATOR": "cpu"}

    def rank(number: int) -> Callable[[], None]:
        def run() -> None:
            os.environ["LOCAL_RANK"] = str(number)
            work(number)

        return run

    ranks = [fork(Path(), name, rank(n), False) for n, name in enumerate((log, f"second_{log}"))]
    second, first = wait(ranks[1]), wait(ranks[0])
    status = first or second
    raise SystemExit(status if status >= 0 else 128 - status)


def wait(child: int) -> int:
    """Wait for the end of a process, waking it if it stops; its status, negative for a signal.

    Raises:
        TimeoutError: If it hangs; it is killed.
    """
    for _ in range(TIME_LIMIT * 50):
        ended, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
        if ended and os.WIFSTOPPED(status):
            os.kill(child, signal.SIGCONT)
        elif ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise TimeoutError


def session(leader: int) -> list[str]:
    """Names of the processes that a session still has."""
    left = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, fields = stat.read_text().partition("(")[2].rpartition(")")
        except OSError:  # ended meanwhile
            continue
        if fields.split()[3] == str(leader) and fields.split()[0] != "Z":
            left.append(name)
    return left


def last_line(log: Path) -> str:
    """The last thing that a run said."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].rpartition("\r")[2] if lines else "(nothing)"
