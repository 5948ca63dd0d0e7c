"""A time limit for calls of foreign code, such as reward functions and chat templates."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


def call_with_timeout(call: Callable[[], Result], timeout: float | None) -> Future[Result]:
    """Run `call` and wait at most `timeout` seconds; for `None` in this thread, without a limit.

    The future has its result or exception, a `SystemExit` too, and is not done if it took too long.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        # SystemExit would end a thread, or the process with the status of success, without a word.
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and timeout is None:
                raise
            future.set_exception(error)

    if timeout is None:
        run()
    else:
        # Python cannot stop a thread, so one that takes too long goes on running. A daemon thread
        # at least does not keep the process from exiting; the threads of ThreadPoolExecutor would.
        # Torch keeps the current device, autocast and the gradient mode per thread: they are at
        # their defaults in the new one.
        thread = Thread(target=run, daemon=True)
        thread.start()
        thread.join(timeout)
    return future
