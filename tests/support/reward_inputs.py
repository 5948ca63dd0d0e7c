"""Rollouts with given texts as responses, and a service that scores them."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import torch

from lit_rlhf.rollout import RolloutBatch
from tests.support.tiny_models import EOS_ID, PAD_ID, tiny_tokenizer

PROMPTS = ["first prompt", "second", "third one"]
TEXTS = ["yes", "no way", ""]


def make_rollouts(texts: Sequence[str], terminated: Sequence[bool] | None = None) -> RolloutBatch:
    """Responses with these texts to prompts of two tokens; EOS follows where one ended."""
    tokenizer = tiny_tokenizer()
    terminated = [True] * len(texts) if terminated is None else terminated
    rows = [
        [*tokenizer(text, add_special_tokens=False)["input_ids"], *([EOS_ID] if ended else [])]
        for text, ended in zip(texts, terminated, strict=True)
    ]
    width = max(map(len, rows))
    return RolloutBatch(
        torch.full((len(rows), 2), 5),
        torch.ones(len(rows), 2, dtype=torch.bool),
        torch.tensor([row + [PAD_ID] * (width - len(row)) for row in rows]),
        torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None],
        torch.tensor(terminated),
    )


Answer = Callable[[dict[str, Any]], tuple[int, bytes]]


@contextmanager
def service(answer: Answer) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A scorer on a free port: its URL, and the requests that it gets.

    `answer` gives status and body for a request's JSON; status 0 closes the connection instead.
    """
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/json"
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, body = answer(requests[-1])
            if status == 0:
                return
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/score", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
