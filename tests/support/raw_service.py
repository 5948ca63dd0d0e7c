"""A server whose answers are raw bytes, so that they may be cut off or never end."""

import re
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from time import sleep


@contextmanager
def raw_service(
    pieces: Iterable[bytes] | Callable[[], Iterable[bytes]], client_left: Event | None = None
) -> Iterator[tuple[str, list[bytes]]]:
    """Serve on this machine; gives the URL, and the list that received requests are added to.

    Args:
        pieces: Bytes that answer a request, or a function that makes them anew for each.
        client_left: Is set when a client leaves before the end of its answer.
    """
    requests: list[bytes] = []
    stopped, listener = Event(), socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):  # the client or the test has gone
            while True:
                connection, _ = listener.accept()
                with connection, connection.makefile("rb") as stream:
                    # whole: closing a socket with unread bytes resets the connection
                    head = b""
                    while (line := stream.readline()).strip():
                        head += line
                    size = re.search(rb"(?i)^content-length: (\d+)", head, re.MULTILINE)
                    requests.append(head + stream.read(int(size[1]) if size else 0))
                    try:
                        for piece in pieces() if callable(pieces) else pieces:
                            if stopped.is_set():
                                return
                            connection.sendall(piece)
                    except OSError:
                        if client_left is not None:
                            client_left.set()

    thread = Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/score", requests
    finally:
        stopped.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def drip(beginning: bytes) -> Iterator[bytes]:
    """The beginning of an answer, and then blanks without an end."""
    yield beginning
    while True:
        sleep(0.01)
        yield b" "
