"""A judge's endpoint made of the standard library: it reads the question and answers by a rule."""

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

_DATA = re.compile(r"^BEGIN DATA (\w+)\n(.*)\nEND DATA \1$", re.MULTILINE)


class JudgeRequest(NamedTuple):
    """A request to the judge.

    Attributes:
        number: Its number, from 1.
        body: Its JSON body.
        headers: Its headers, with names in lower case.
    """

    number: int
    body: dict[str, Any]
    headers: dict[str, str]

    @property
    def data(self) -> dict[str, Any]:
        """Conversation and answers, between the markers that the system message names."""
        system, user = (message["content"] for message in self.body["messages"][:2])
        ((mark, line),) = _DATA.findall(user)
        assert f"between BEGIN DATA {mark} and END DATA {mark}" in system
        data = json.loads(line)
        assert list(data) == ["conversation", "answer_a", "answer_b"]
        return dict(data)


class Failure(NamedTuple):
    """An HTTP status in place of a completion."""

    status: int
    message: str = "scripted"
    headers: Mapping[str, str] = {}


Rule = Callable[[JudgeRequest], str | Failure | dict[str, Any]]
"""The answer to a request: a reply, a failure, or fields in place of the usual ones."""


@dataclass
class JudgeServer:
    """The server as a test sees it.

    Attributes:
        base_url: Its address.
        requests: The requests so far.
        most_at_once: Largest number of requests in progress at a time.
    """

    base_url: str
    requests: list[JudgeRequest] = field(default_factory=list)
    most_at_once: int = 0


def verdict(letter: str, reason: str = "scripted") -> str:
    """A reply in the requested form."""
    return json.dumps({"reason": reason, "verdict": letter})


def longer_wins(request: JudgeRequest) -> str:
    """A rule: the longer answer is better."""
    a, b = (len(request.data[name]) for name in ("answer_a", "answer_b"))
    return verdict("A" if a > b else "B" if b > a else "tie", f"{a} and {b} characters")


@contextmanager
def judge_server(rule: Rule) -> Iterator[JudgeServer]:
    """Answer chat completions by a rule, each word of a request and of a reply being a token."""
    lock, running = threading.Lock(), 0

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal running
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                running += 1
                server.most_at_once = max(server.most_at_once, running)
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = JudgeRequest(len(server.requests) + 1, body, headers)
                server.requests.append(request)
            try:
                reply = rule(request)
                if self.path != "/v1/chat/completions":
                    reply = Failure(404, f"no such path: {self.path}")
                if isinstance(reply, Failure):
                    self.send(reply.status, reply.headers, {"error": {"message": reply.message}})
                else:
                    self.send(200, {}, self.completion(request, reply))
            finally:
                with lock:
                    running -= 1

        def completion(self, request: JudgeRequest, reply: str | dict[str, Any]) -> dict[str, Any]:
            if isinstance(reply, dict):
                return self.completion(request, "") | reply
            sent = sum(len(message["content"].split()) for message in request.body["messages"])
            received = len(reply.split())
            usage = {"prompt_tokens": sent, "completion_tokens": received}
            message = {"role": "assistant", "content": reply}
            return {
                **{"id": str(request.number), "object": "chat.completion", "created": 0},
                "model": request.body["model"],
                "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
                "usage": usage | {"total_tokens": sent + received},
            }

        def send(self, status: int, headers: Mapping[str, str], body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"content-type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = JudgeServer(f"http://127.0.0.1:{listener.server_address[1]}/v1")
    thread = threading.Thread(target=listener.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()
