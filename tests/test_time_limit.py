import threading
from unittest.mock import Mock

import pytest

from lit_rlhf.time_limit import call_with_timeout


def test_endless_call_does_not_keep_the_process_from_ending() -> None:
    done = call_with_timeout(lambda: threading.current_thread().daemon, timeout=60.0)
    assert done.result() is True


def test_slow_call_is_given_up() -> None:
    released = threading.Event()
    try:
        assert not call_with_timeout(released.wait, timeout=0.01).done()
    finally:
        released.set()


@pytest.mark.parametrize(
    ("error", "timeout"),
    [(SystemExit, None), (SystemExit, 60.0), (GeneratorExit, None), (KeyboardInterrupt, 60.0)],
)
def test_exit_is_an_exception_of_a_call(error: type[BaseException], timeout: float | None) -> None:
    assert isinstance(call_with_timeout(Mock(side_effect=error), timeout).exception(), error)
