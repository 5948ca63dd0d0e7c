"""The page of `lit_rlhf label`, served in this process or another, and annotators by a script."""

import html
import http.client
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import uvicorn

from lit_rlhf.data import Message
from lit_rlhf.tools.evaluation.labels import Comparison
from lit_rlhf.tools.labelling import (
    LabelStore,
    PageOptions,
    Schedule,
    ScheduleOptions,
    build_app,
)
from tests.support.docs_blocks import ROOT

TOKEN = "token-of-the-test"
GUIDELINES = {"en": "# Choose\n\n<script>alert(1)</script>", "zh": "# 请选"}


def make_comparisons(n: int, *, policies: tuple[str, str] = ("sft", "ppo")) -> list[Comparison]:
    """Comparisons of `good` and `bad` responses; the good ones are the second policy's."""
    return [
        Comparison(
            prompt=(Message("user", f"question {number}"),),
            response_a=f"bad {number}",
            response_b=f"good {number}",
            policy_a=policies[0],
            policy_b=policies[1],
        )
        for number in range(n)
    ]


class Answer(NamedTuple):
    """An answer of the page.

    Attributes:
        status: HTTP status.
        headers: Headers, with names in lower case.
        text: The body.
    """

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def inputs(self) -> dict[str, str]:
        """Values of the hidden fields of the form `label` by name."""
        form = self.text.partition('action="/label"')[2].partition("</form>")[0]
        return dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', form))

    def form_token(self, action: str) -> str:
        """Token of another form."""
        form = self.text.partition(f'action="/{action}"')[2]
        match = re.search(r'name="form_token" value="([^"]*)"', form)
        assert match is not None
        return match[1]

    @property
    def texts(self) -> list[str]:
        """The turns of the dialogue, and then the left and the right response."""
        found = re.findall(r'<div class="text" dir="auto">(.*?)</div>', self.text, re.DOTALL)
        return [html.unescape(text) for text in found]

    @property
    def left(self) -> str:
        """The response on the left."""
        return self.texts[-2]

    @property
    def right(self) -> str:
        """The response on the right."""
        return self.texts[-1]


@dataclass
class Browser:
    """Somebody's browser, as far as the page needs one.

    Attributes:
        port: Port of the page.
        cookies: Cookies by name.
        headers: Headers of every request.
    """

    port: int
    cookies: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        follow: bool = True,
    ) -> Answer:
        """Send a request, and follow a redirect."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        cookie = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        sent = {**({"Cookie": cookie} if cookie else {}), **self.headers, **(headers or {})}
        if body is not None:
            sent.setdefault("Content-Type", "application/x-www-form-urlencoded")
        try:
            connection.request(method, path, body, sent)
            reply = connection.getresponse()
            text = reply.read().decode()
        finally:
            connection.close()
        for line in reply.headers.get_all("set-cookie") or []:
            for name, morsel in SimpleCookie(line).items():
                self.cookies[name] = morsel.value
        answer = Answer(reply.status, {k.lower(): v for k, v in reply.headers.items()}, text)
        if follow and answer.status == 303:
            return self.request("GET", answer.headers["location"])
        return answer

    def get(self, path: str = "/", **options: Any) -> Answer:
        """Load a page."""
        return self.request("GET", path, **options)

    def post(self, path: str, fields: Mapping[str, str], **options: Any) -> Answer:
        """Send a form."""
        return self.request("POST", path, urlencode(fields).encode(), **options)

    def enter(self, name: str, token: str = TOKEN) -> Answer:
        """Open the address with the token, and give a name."""
        page = self.get(f"/?token={token}")
        return self.post("/name", {"form_token": page.form_token("name"), "name": name})

    def choose(self, page: Answer, choice: str, **fields: str) -> Answer:
        """Choose on a page, and return the next one."""
        return self.post("/label", {**page.inputs, "choice": choice, **fields})

    def undo(self, page: Answer) -> Answer:
        """Take back the last choice."""
        return self.post("/undo", {"form_token": page.form_token("undo")})


def prefer_good(page: Answer) -> str:
    """Choose the response that is good."""
    return "left" if page.left.startswith("good") else "right"


def label_all(
    browser: Browser, page: Answer, choose: Callable[[Answer], str] = prefer_good, limit: int = 9999
) -> int:
    """Label until nothing is left, and return the number of labels."""
    for done in range(limit):
        if 'action="/label"' not in page.text:
            assert 'id="done"' in page.text, page.text
            return done
        page = browser.choose(page, choose(page), seconds="1.5")
    return limit


class Served(NamedTuple):
    """A page that is being served.

    Attributes:
        port: Its port.
        schedule: Gives out comparisons.
        store: The labels.
    """

    port: int
    schedule: Schedule
    store: LabelStore

    def browser(self, **headers: str) -> Browser:
        """A new browser."""
        return Browser(self.port, headers=headers)


@contextmanager
def served_page(
    path: Path,
    comparisons: Sequence[Comparison],
    *,
    open_tasks: Path | None = None,
    **options: Any,
) -> Iterator[Served]:
    """Serve the page in a thread of this process.

    Args:
        path: The file of labels.
        comparisons: What is compared.
        open_tasks: The file of open tasks, see `Schedule`.
        **options: Fields of `ScheduleOptions`.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        store = LabelStore(path, comparisons)
        schedule = Schedule(
            comparisons,
            store,
            ScheduleOptions(**{"repeat_share": 0.0, **options}),
            policies={"sft": "hash of sft", "ppo": None},
            open_tasks=open_tasks,
        )
        page = PageOptions(
            token=TOKEN,
            secret=b"secret",
            guidelines=GUIDELINES,  # type: ignore[arg-type]
            hosts=[f"127.0.0.1:{port}"],
        )
        server = uvicorn.Server(
            uvicorn.Config(
                build_app(schedule, page), log_level="warning", lifespan="off", ws="none"
            )
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield Served(port, schedule, store)
        finally:
            server.should_exit = True
            thread.join()
            store.close()


class LabelProcess(NamedTuple):
    """`lit_rlhf label` in another process.

    Attributes:
        process: The process.
        port: Port of the page.
        token: Token of the page.
    """

    process: "subprocess.Popen[str]"
    port: int
    token: str


def start_label_command(words: Sequence[str], folder: Path) -> LabelProcess:
    """Start the command, and return when it has printed the address."""
    command = [sys.executable, "-W", "ignore", "-m", "lit_rlhf.cli.main", "label", *words]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "callbacks")])}
    with (folder / "label.log").open("a") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=log
        )
    assert process.stdout is not None
    for line in process.stdout:
        match = re.search(r"http://[^/]+:(\d+)/\?token=(\S+)", line)
        if match:
            return LabelProcess(process, int(match[1]), match[2])
    end_process(process)
    raise RuntimeError(f"the page did not open: {(folder / 'label.log').read_text('utf-8')}")


def end_process(process: "subprocess.Popen[str]") -> str:
    """Kill a process that has not ended, and return what else it has printed."""
    process.kill()
    return process.communicate()[0]


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def until_answered(request: Callable[[], Answer], seconds: float = 120.0) -> Answer:
    """Repeat a request while nothing listens, as a person reloads a page."""
    end = time.monotonic() + seconds
    while True:
        try:
            return request()
        except (OSError, http.client.HTTPException):
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
