"""The page as a web application, which takes nothing from outside and lets nobody in by chance.

A random token in the address lets a browser in; from then on a cookie does. Every form has a token
of its own, which another site cannot know, and a label has one that only the page with this very
comparison has. Responses are text: everything that a template inserts is escaped, and the browser
may run no script and load nothing but the page's own.
"""

import asyncio
import hashlib
import hmac
import math
import re
import secrets
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import parse_qs, quote, unquote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lit_rlhf.errors import UserError
from lit_rlhf.tools.evaluation.labels import Choice, Strength
from lit_rlhf.tools.labelling.schedule import Schedule
from lit_rlhf.tools.labelling.store import Task
from lit_rlhf.tools.labelling.words import OTHER_LANGUAGE, WORDS, Language, preferred_language

MAX_BODY = 64 * 1024
"""Longest form in bytes."""
BODY_SECONDS = 5.0
"""Longest time in which a form arrives. The end of the page waits for it."""
MAX_REMARK = 2000
"""Longest remark in characters."""
MAX_NAME = 64
"""Longest name in characters."""
_MAX_SECONDS = 24 * 3600.0
_YEAR = 365 * 24 * 3600
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # `no-referrer` would have browsers send a form's origin as null
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_CHOICES = ("left", "right", "tie", "both_bad", "skip")
_STATIC = {"style.css": "text/css", "label.js": "text/javascript"}


@dataclass(frozen=True, kw_only=True)
class PageOptions:
    """What the page shows, and who gets in.

    Attributes:
        token: The token in the address.
        secret: Key of the tokens in forms and cookies. With the same one after a restart, pages
            that are open in browsers stay valid.
        guidelines: Guidelines in Markdown by language.
        hosts: Hosts that a request may name, against rebinding of DNS names; empty for any.
        cookie: Beginning of the cookies' names. Cookies do not tell ports of a host apart.
    """

    token: str
    secret: bytes
    guidelines: Mapping[Language, str]
    hosts: Sequence[str] = ()
    cookie: str = "lit_rlhf_label"


class _Visitor(NamedTuple):
    """Who sends a request.

    Attributes:
        session: Random name of the browser.
        name: The annotator; `None` if the browser has not said.
        language: Language of the page.
    """

    session: str
    name: str | None
    language: Language


class _RefusedError(Exception):
    """A form that is not the page's own."""


@dataclass(frozen=True)
class _Page:
    """Handles the requests.

    Attributes:
        schedule: Gives out comparisons and stores labels.
        options: What the page shows, and who gets in.
        tasks: Looks up tasks by their tokens, by annotator.
    """

    schedule: Schedule
    options: PageOptions
    tasks: dict[str, dict[str, Task]] = field(default_factory=dict)

    def sign(self, *parts: str) -> str:
        """A token that only this page can make."""
        message = "\n".join(quote(part) for part in parts).encode()
        return hmac.new(self.options.secret, message, hashlib.sha256).hexdigest()

    def task_token(self, task: Task) -> str:
        """Token of one look at one comparison, which says nothing about either."""
        return self.sign("task", task.annotator, task.comparison, str(task.repeat))

    def find_task(self, annotator: str, token: str) -> Task | None:
        """The task with this token; `None` if the annotator was given no such task.

        Nobody can make a token, so whoever has one was given it, by this process or by an earlier
        one with the same secret.
        """
        if annotator not in self.tasks:
            looks = [
                Task(annotator, one.key, repeat)
                for one in self.schedule.order
                for repeat in (False, True)
            ]
            self.tasks[annotator] = {self.task_token(task): task for task in looks}
        task = self.tasks[annotator].get(token)
        return task if task is not None and self.schedule.is_known(task) else None

    def find_visitor(self, request: Request) -> _Visitor | None:
        """Read the cookies; `None` for a browser that was not let in."""
        session, _, signature = request.cookies.get(self.options.cookie, "").partition(".")
        if not session or not hmac.compare_digest(
            signature.encode(), self.sign("session", session).encode()
        ):
            return None
        name = unquote(request.cookies.get(f"{self.options.cookie}_name", ""))
        language = request.cookies.get(f"{self.options.cookie}_language", "")
        if language not in WORDS:
            language = preferred_language(request.headers.get("accept-language", ""))
        return _Visitor(
            session=session,
            name=name if is_name(name) else None,
            language=language,
        )

    async def show(self, request: Request) -> Response:
        """The page: a name, a comparison, or thanks."""
        token = request.query_params.get("token")
        if token is not None and hmac.compare_digest(token.encode(), self.options.token.encode()):
            response: Response = RedirectResponse("/", 303)
            session = secrets.token_urlsafe(16)
            value = f"{session}.{self.sign('session', session)}"
            self.set_cookie(response, "", value)
            return response
        visitor = self.find_visitor(request)
        if visitor is None or token is not None:
            return self.refuse_entry(request)
        if visitor.name is None:
            return self.render("name.html", visitor, error="")
        return await run_in_threadpool(self.show_task, visitor)

    def show_task(self, visitor: _Visitor) -> Response:
        """The next comparison of a visitor who has a name."""
        assert visitor.name is not None  # for mypy
        task = self.schedule.next_task(visitor.name)
        progress = self.schedule.progress(visitor.name)
        if task is None:
            return self.render("done.html", visitor, progress=progress)
        comparison = self.schedule.store.comparisons[task.comparison]
        answers = [comparison.response_a, comparison.response_b]
        if self.schedule.left_side(task) == "b":
            answers.reverse()
        return self.render(
            "compare.html",
            visitor,
            turns=comparison.prompt,
            left=answers[0],
            right=answers[1],
            task=self.task_token(task),
            is_repeat=task.repeat,
            progress=progress,
            guidelines=render_markdown(self.options.guidelines[visitor.language]),
            max_remark=MAX_REMARK,
        )

    async def set_name(self, request: Request) -> Response:
        """Take the annotator's name."""
        visitor, form = await self.read_form(request, "name")
        name = unicodedata.normalize("NFC", form.get("name", "").strip())
        if name and not is_name(name):
            return self.render("name.html", visitor, status=422, error="name_error")
        response = RedirectResponse("/", 303)
        self.set_cookie(response, "_name", quote(name))
        return response

    async def set_language(self, request: Request) -> Response:
        """Switch to the other language."""
        visitor, _ = await self.read_form(request, "language")
        response = RedirectResponse("/", 303)
        self.set_cookie(response, "_language", OTHER_LANGUAGE[visitor.language])
        return response

    async def label(self, request: Request) -> Response:
        """Save a choice, and only then move on."""
        visitor, form = await self.read_form(request, "label")
        if visitor.name is None:
            raise _RefusedError
        task = self.find_task(visitor.name, form.get("task", ""))
        side = form.get("choice")
        strength = form.get("strength") or None
        remark = form.get("remark", "").replace("\r\n", "\n").strip()
        if (
            task is None
            or side not in _CHOICES
            or strength not in (None, "slightly", "clearly")
            or len(remark) > MAX_REMARK
        ):
            raise _RefusedError
        choice = self.choice_of(task, side)
        await run_in_threadpool(
            self.schedule.save,
            task,
            choice,
            strength=cast("Strength | None", strength if choice in ("a", "b") else None),
            remark=remark,
            seconds=read_seconds(form.get("seconds", "")),
        )
        return RedirectResponse("/", 303)

    def choice_of(self, task: Task, side: str) -> Choice:
        """Which response is on the side that was chosen."""
        if side in ("left", "right"):
            left = self.schedule.left_side(task)
            return left if side == "left" else ("b" if left == "a" else "a")
        return cast("Choice", side)

    async def undo(self, request: Request) -> Response:
        """Take back the last label."""
        visitor, _ = await self.read_form(request, "undo")
        if visitor.name is None:
            raise _RefusedError
        await run_in_threadpool(self.schedule.undo, visitor.name)
        return RedirectResponse("/", 303)

    async def static(self, request: Request) -> Response:
        """The style sheet and the script."""
        name = request.path_params["name"]
        if self.find_visitor(request) is None:
            return self.refuse_entry(request)
        if name not in _STATIC:
            raise HTTPException(404)
        return Response(_read_static(name), media_type=_STATIC[name])

    async def read_form(self, request: Request, action: str) -> "_Form":
        """Read a form of the page; raises `_RefusedError` for any other.

        Args:
            request: The request.
            action: What the form does, which its token is for.
        """
        visitor = self.find_visitor(request)
        if visitor is None or not _is_same_origin(request):
            raise _RefusedError
        if request.headers.get("content-type", "").split(";")[0] != (
            "application/x-www-form-urlencoded"
        ):
            raise _RefusedError
        try:
            fields = parse_qs(
                (await request.body()).decode(),
                keep_blank_values=True,
                strict_parsing=True,
                errors="strict",
                max_num_fields=10,
            )
        except ValueError as error:  # UnicodeDecodeError is one
            raise _RefusedError from error
        form = {name: values[0] for name, values in fields.items()}
        expected = self.sign("form", action, visitor.session)
        if not hmac.compare_digest(form.get("form_token", "").encode(), expected.encode()):
            raise _RefusedError
        return _Form(visitor, form)

    def set_cookie(self, response: Response, suffix: str, value: str) -> None:
        """Keep a value in the browser, for this site alone and out of reach of scripts.

        Args:
            response: The response that sets the cookie.
            suffix: End of the cookie's name.
            value: The value.
        """
        response.set_cookie(
            self.options.cookie + suffix, value, max_age=_YEAR, httponly=True, samesite="lax"
        )

    def render(
        self, template: str, visitor: _Visitor, status: int = 200, **values: Any
    ) -> Response:
        """Render a template.

        Args:
            template: Its name.
            visitor: Who sees it.
            status: HTTP status.
            **values: What the template inserts.
        """
        page = (
            _environment()
            .get_template(template)
            .render(
                words=WORDS[visitor.language],
                visitor=visitor,
                form_token=lambda action: self.sign("form", action, visitor.session),
                **values,
            )
        )
        return HTMLResponse(page.encode("utf-8", "replace"), status)

    def refuse_entry(self, request: Request) -> Response:
        """Tell somebody without a token how to get in."""
        words = WORDS[preferred_language(request.headers.get("accept-language", ""))]
        page = _environment().get_template("forbidden.html").render(words=words)
        return HTMLResponse(page, 403)

    async def refuse_form(self, request: Request, error: Exception) -> Response:
        """Answer a form that is not the page's own."""
        visitor = self.find_visitor(request)
        if visitor is None:
            return self.refuse_entry(request)
        text = WORDS[visitor.language]["refused"]
        return self.render("error.html", visitor, status=403, title="not_saved_title", text=text)

    async def report_disk(self, request: Request, error: Exception) -> Response:
        """Tell an annotator that a file could not be written, for instance to a full disk.

        The file of labels is as it was before. What a form asked for is not done, and a comparison
        that was about to be shown is shown at the next request.
        """
        visitor = self.find_visitor(request)
        if visitor is None:
            return self.refuse_entry(request)
        cause = error.__cause__ if isinstance(error, UserError) else error
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(error)
        kind = "not_saved" if request.method == "POST" else "not_shown"
        words = WORDS[visitor.language]
        return self.render(
            "error.html",
            visitor,
            status=507,
            title=f"{kind}_title",
            text=words[kind].format(reason=reason),
        )


class _Form(NamedTuple):
    """A form that a visitor sent.

    Attributes:
        visitor: Who sent it.
        fields: Values by name.
    """

    visitor: _Visitor
    fields: Mapping[str, str]


def build_app(schedule: Schedule, options: PageOptions) -> ASGIApp:
    """Build the web application.

    Args:
        schedule: Gives out comparisons and stores labels.
        options: What the page shows, and who gets in.
    """
    page = _Page(schedule, options)
    app = Starlette(
        routes=[
            Route("/", page.show),
            Route("/name", page.set_name, methods=["POST"]),
            Route("/language", page.set_language, methods=["POST"]),
            Route("/label", page.label, methods=["POST"]),
            Route("/undo", page.undo, methods=["POST"]),
            Route("/static/{name}", page.static),
        ],
        exception_handlers={
            _RefusedError: page.refuse_form,
            OSError: page.report_disk,
            UserError: page.report_disk,
        },
    )
    return _Guard(app, options.hosts)


class _Guard:
    """Refuses foreign hosts and long or slow bodies before anything else, and adds the headers.

    Args:
        app: The application.
        hosts: Hosts that a request may name; empty for any.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app = app
        self._hosts = {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own_headers = [(k.lower().encode(), v.encode()) for k, v in _HEADERS.items()]
                message["headers"] = [*message["headers"], *own_headers]
            await send(message)

        headers = {name.lower(): value for name, value in scope["headers"]}
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self._hosts and host not in self._hosts:
            await Response("unknown host", 421)(scope, receive, send_with_headers)
            return
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await _read_body(receive, headers.get(b"content-length", b"0"))
        except TimeoutError:
            await Response("too slow", 408)(scope, receive, send_with_headers)
            return
        if body is None:
            await Response("too long", 413)(scope, receive, send_with_headers)
            return
        parts = [body]

        async def receive_body() -> Message:
            if parts:
                return {"type": "http.request", "body": parts.pop(), "more_body": False}
            return await receive()

        await self._app(scope, receive_body, send_with_headers)


async def _read_body(receive: Receive, declared: bytes) -> bytes | None:
    """Read a body of at most `MAX_BODY` bytes; `None` for a longer one."""
    if not declared.isdigit() or int(declared[:20]) > MAX_BODY:
        return None
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > MAX_BODY:
            return None
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return bytes(body)


def _is_same_origin(request: Request) -> bool:
    """Whether a form comes from this site, by the headers that browsers send."""
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = request.headers.get("origin")
    host = request.headers.get("host", "")
    return origin is None or origin in (f"http://{host}", f"https://{host}")


def is_name(text: str) -> bool:
    """Whether a text can be the name of an annotator."""
    return 0 < len(text) <= MAX_NAME and not any(
        unicodedata.category(char).startswith("C") or char in "\u2028\u2029" for char in text
    )


def read_seconds(text: str) -> float | None:
    """The time on the page as the browser tells it; `None` if it cannot be a time."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return round(seconds, 1) if math.isfinite(seconds) and 0 <= seconds <= _MAX_SECONDS else None


_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202d\u202e\ud800-\udfff]")
"""Control characters but tab and line feed, overrides of the direction, and halves of pairs."""


def show_text(text: str) -> str:
    """A text with visible signs in place of control characters.

    Browsers would drop them, or show the text behind an override of the direction backwards.
    """

    def sign(match: re.Match[str]) -> str:
        code = ord(match[0])
        if code in (0x202D, 0x202E):
            return f"⟨U+{code:04X}⟩"
        return chr(0x2400 + code) if code < 0x20 else "\ufffd"

    return _UNSEEN.sub(sign, text.replace("\r\n", "\n"))


def render_markdown(text: str) -> str:
    """Render guidelines as HTML; HTML in them is shown as text."""
    html: str = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    return html


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("lit_rlhf.tools.labelling"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shown"] = show_text
    return environment


@cache
def _read_static(name: str) -> bytes:
    return Path(__file__).with_name("static").joinpath(name).read_bytes()
