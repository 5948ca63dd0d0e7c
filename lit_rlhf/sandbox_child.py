"""The program of the sandboxed process, see `lit_rlhf.sandbox`. It is run and never imported.

It reads requests as lines of JSON, and answers each with a line: `{"result": ...}`, or
`{"error": [name, message]}` with the name of an exception's class.
"""

import json
import random
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any

_LIMITS: dict[str, float] = json.loads(sys.argv[1])
sys.path[:] = json.loads(sys.argv[2])  # -I leaves out PYTHONPATH

from jinja2.exceptions import SecurityError, TemplateError  # noqa: E402
from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from transformers.utils import chat_template_utils  # noqa: E402
from transformers.utils.chat_template_utils import render_jinja_template  # noqa: E402

from lit_rlhf.limits import limit_process, limit_time  # noqa: E402

_LARGEST_INTEGER = 4096  # bits
_LONGEST_SEQUENCE = 10**7  # characters or elements
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{5}|\*)")
_HARD_TEXT = 20_000  # characters
_LONGEST_MESSAGE = 500  # characters
_LARGEST_ANSWER = 2**20  # bytes; the program reads no more
PARTS = (*"aA1 \n\t.-_'é中", "ab", "a ", "a1", " \n", "a.")
# The last one has each character that a pattern may need, but behind another line.
_ENDINGS = ("", "!", "\n", "b", "\n\x00" + "".join(map(chr, range(32, 127))))


def _bound_operator(_: object, context: object, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401
    """Jinja's `call_binop` for `**`, `*`, `%` and `+`, refusing results that take long or much."""
    if operator == "**":
        if isinstance(left, int) and isinstance(right, int):
            check(right * left.bit_length(), _LARGEST_INTEGER, "**")
        return left**right
    if operator == "*":
        for first, second in ((left, right), (right, left)):
            if isinstance(first, int) and not isinstance(second, float):
                if isinstance(second, int):
                    check(first.bit_length() + second.bit_length(), _LARGEST_INTEGER, "*")
                else:
                    check(len(second) * first, _LONGEST_SEQUENCE, "*")
        return left * right
    if operator == "%":
        if isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise SecurityError("a result of '%' is too large")
        return left % right
    if isinstance(left, str | list | tuple):
        check(len(left) + len(right), _LONGEST_SEQUENCE, "+")
    return left + right


def check(size: int, largest: int, operator: str) -> None:
    """Refuse an operation whose result is too large.

    Args:
        size: Size of the result, in characters or items.
        largest: Largest size that is accepted.
        operator: The operation, for the message.
    """
    if size > largest:
        raise SecurityError(f"a result of {operator!r} is too large")


class Clock:
    """What `strftime_now` of templates reads the time from, in place of `datetime`.

    Attributes:
        time: The time that it gives.
    """

    time = datetime(1970, 1, 1)

    @classmethod
    def now(cls) -> datetime:
        """The time that was set."""
        return cls.time


def render(arguments: dict[str, Any], date: str = "1970-01-01") -> str:
    """Render a dialogue as transformers does, so that the text depends on the arguments only.

    Args:
        arguments: Arguments of `render_jinja_template`.
        date: The date that the template gets, in ISO format.
    """
    Clock.time = datetime.fromisoformat(date)
    random.seed(0)  # Jinja's `random` and `lipsum` draw from it
    rendered: Any = render_jinja_template(**arguments)
    return str(rendered[0][0])  # (texts, token spans)


def split_hard_texts(parts: dict[str, Any]) -> None:
    """Encode and decode texts on which a regular expression that backtracks takes very long."""
    model = parts.pop("model", None) or {}
    if model.get("type") == "WordPiece":  # takes long for long words, unless it says not to
        model = {**model, "vocab": {model["unk_token"]: 0}}
    else:
        model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    tokenizer = Tokenizer.from_str(
        json.dumps({"version": "1.0", "added_tokens": [], "model": model, **parts})
    )
    for part in PARTS:
        for ending in _ENDINGS:
            text = part * (_HARD_TEXT // len(part)) + ending
            tokenizer.encode(text)
            if tokenizer.decoder is not None:
                tokenizer.decoder.decode([text])


TASKS: dict[str, Callable[..., object]] = {
    "render": render,
    "split_hard_texts": split_hard_texts,
}


def answer(line: bytes) -> bytes:
    """Answer a request, both as lines of JSON."""
    encoded = encode(act(json.loads(line.decode("utf-8", "surrogatepass"))))
    if len(encoded) > _LARGEST_ANSWER:
        return encode({"error": ["SecurityError", "the text is too long"]})
    return encoded


def encode(content: dict[str, Any]) -> bytes:
    """A line of JSON; text may have halves of surrogate pairs."""
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def act(request: dict[str, Any]) -> dict[str, Any]:
    """Do what a request asks for."""
    try:
        return {"result": TASKS[request["task"]](**request["arguments"])}
    except SecurityError as error:
        return {"error": ["SecurityError", str(error)[:_LONGEST_MESSAGE]]}
    except TemplateError as error:
        return {"error": ["TemplateError", str(error)[:_LONGEST_MESSAGE]]}
    except BaseException as error:  # a panic in tokenizers is not an Exception
        return {"error": [type(error).__name__, str(error)[:_LONGEST_MESSAGE]]}


def main() -> None:
    """Answer requests until there are no more."""
    ImmutableSandboxedEnvironment.intercepted_binops = frozenset({"**", "*", "%", "+"})
    ImmutableSandboxedEnvironment.call_binop = _bound_operator  # type: ignore[assignment]
    vars(chat_template_utils)["datetime"] = Clock
    for template in ("{{ lipsum() }}{{ strftime_now('%c') | tojson }}", "{{ 1 / 0 }}"):
        with suppress(ZeroDivisionError):  # what is used, is imported
            render({"conversations": [[]], "chat_template": template})
    # from now on, it opens neither a file nor a socket
    limit_process(int(_LIMITS["memory"]), NOFILE=0)
    output = sys.stdout.buffer
    output.write(b"ready\n")
    output.flush()
    # up to the end of the input, which is the end of the program
    for line in sys.stdin.buffer:
        limit_time(_LIMITS["seconds"])  # the parent limits the time by the clock
        output.write(answer(line))
        output.flush()


main()
