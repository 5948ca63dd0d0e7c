"""Runs programs that come with a model in a process with limits.

Its chat template and its tokenizer's regular expressions are programs. A few words of Jinja take
years or all memory, and no thread can stop them. One process (`sandbox_child.py`) has a limit of
time and of memory per request, opens neither files nor sockets, inherits no environment, and gives
back text only. It starts at the first request, in about a second, and ends when this process does,
at the end of its input.

Its configuration decides how much is built, and names modules by regular expressions. A fork of
this process, which has imported torch, tries both (`try_in_fork`).
"""

import atexit
import itertools
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from transformers.utils.hub import cached_file

from lit_rlhf.limits import end_with_parent, limit_process, limit_time

SECONDS = 10.0
"""Most processor time of a request. By the clock it may take six times as long."""

MEMORY = 2**30
"""Most memory of a request, in bytes."""

_TOKENIZER_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "padding")
_START_SECONDS = 300.0  # on a busy machine
_LARGEST_ANSWER = 2**20  # bytes; a longer one is not read

# Parts of a tokenizer that take time in proportion to the text and add a few characters at most,
# by their type. Any other part is tried before it is loaded.
_HARMLESS_TYPES = {
    *("BPE", "Unigram", "WordLevel"),
    *("Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Strip", "StripAccents"),
    *("BertNormalizer", "ByteLevel"),
    *("BertPreTokenizer", "CharDelimiterSplit", "Digits", "Metaspace", "Punctuation"),
    *("UnicodeScripts", "Whitespace", "WhitespaceSplit"),
    *("ByteFallback", "Fuse"),
    *("BertProcessing", "RobertaProcessing"),
}
_LONGEST_TEMPLATE = 2000  # characters of the special tokens around a text
_LONGEST_AFFIX = 64  # characters


class SandboxError(ValueError):
    """A request that failed.

    Attributes:
        name: Name of the exception's class in the sandbox; empty if a limit was exceeded.
    """

    def __init__(self, name: str, message: str = "") -> None:
        self.name = "" if name == "MemoryError" else name
        super().__init__(message)

    @property
    def expected(self) -> str:
        """The limits, for an error message."""
        return f"within {SECONDS:g} seconds and {MEMORY >> 20} MiB of memory"

    @property
    def cause(self) -> str:
        """What has gone wrong, for the end of an error message."""
        return f", which fails with {self.name}: {self}" if self.name else ""


class _Sandbox:
    """The sandboxed process of this process."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # by process; a fork has its own
        self.unlock()

    def unlock(self) -> None:
        """Take a new lock: another thread may hold the old one when this process is forked."""
        self._lock = Lock()

    def call(self, task: str, arguments: dict[str, Any]) -> Any:  # noqa: ANN401 - plain data
        request = _encode({"task": task, "arguments": arguments})
        with self._lock:
            process = self._running()
            try:
                assert process.stdin is not None
                process.stdin.write(request)
                process.stdin.flush()
                answer = json.loads(_read_line(process, 6 * SECONDS))
            except BaseException as error:
                self.stop()  # an answer that nobody reads would be taken for the next one
                if isinstance(error, OSError | ValueError):
                    raise SandboxError("") from error
                raise
        if "error" in answer:
            raise SandboxError(*answer["error"])
        return answer["result"]

    def stop(self) -> None:
        """End the process."""
        process = self._processes.pop(os.getpid(), None)
        if process is not None:
            process.kill()
            process.communicate()

    def _running(self) -> subprocess.Popen[bytes]:
        process = self._processes.get(os.getpid())
        if process is None or process.poll() is not None:
            self.stop()
            limits = json.dumps({"seconds": SECONDS, "memory": MEMORY})
            program = str(Path(__file__).with_name("sandbox_child.py"))
            process = subprocess.Popen(
                [sys.executable, "-I", program, limits, json.dumps(_import_path())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={"USE_TORCH": "0", "HF_HUB_OFFLINE": "1"},
                start_new_session=True,  # a Ctrl-C in the terminal is for this process
            )
            self._processes[os.getpid()] = process
            if _read_line(process, _START_SECONDS) != b"ready":
                self.stop()
                raise RuntimeError(f"{program}: expected it to start with {sys.executable}")
        return process


def _read_line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """The next line of a process's output, or what there is of it if the process ends.

    None in time, or one that is too long, is a TimeoutError.
    """
    assert process.stdout is not None
    deadline = time.monotonic() + seconds
    read = bytearray()
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    while not read.endswith(b"\n"):
        seconds_left = deadline - time.monotonic()
        if seconds_left <= 0 or len(read) > _LARGEST_ANSWER or not poll.poll(seconds_left * 1000):
            raise TimeoutError
        if not (data := os.read(process.stdout.fileno(), 2**16)):
            break
        read += data
    return bytes(read).rstrip(b"\n")


def _encode(request: dict[str, Any]) -> bytes:
    """A line of JSON; text may have halves of surrogate pairs."""
    return json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def _import_path() -> list[str]:
    """Where the sandboxed process finds this package and others: not in the current folder."""
    here = os.getcwd()
    folders = [folder for folder in sys.path if os.path.abspath(folder) != here]
    return [*folders, str(Path(__file__).parents[1])]


_SANDBOX = _Sandbox()
atexit.register(_SANDBOX.stop)
os.register_at_fork(after_in_child=_SANDBOX.unlock)


def render_template(arguments: dict[str, Any], date: str = "1970-01-01") -> str:
    """Render a dialogue in the sandbox, or raise SandboxError.

    Args:
        arguments: Arguments of transformers' `render_jinja_template`, as plain data.
        date: The date that the template is told, in ISO format.
    """
    return str(_SANDBOX.call("render", {"arguments": arguments, "date": date}))


def check_tokenizer_file(path: str) -> None:
    """Try what a model's tokenizer does to texts, before it is loaded; else ValueError."""
    try:
        file = cached_file(path, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
        if file is None:
            return
        content = json.loads(Path(file).read_text("utf-8"))
        model = content.get("model", {})
        parts = {name: content.get(name) for name in _TOKENIZER_PARTS}
        parts["model"] = {**model, "vocab": {}, "merges": []}
        is_harmless = all(map(_is_harmless, parts.values()))
        parts["added_tokens"] = content.get("added_tokens") or []
        text = json.dumps(parts, sort_keys=True, ensure_ascii=False)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return  # loading it fails with a better message
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(affix := str(model.get(name))) > _LONGEST_AFFIX:
            raise ValueError(
                f"{file}: expected a model whose {name} has at most {_LONGEST_AFFIX} characters, "
                f"got {len(affix)}: it is added to each character of a text"
            )
    if is_harmless:
        return
    try:
        check_tokenizer(text)
    except SandboxError as error:
        raise ValueError(
            f"{file}: expected a tokenizer that encodes and decodes any text of 20,000 "
            f"characters {error.expected}, got one that takes more{error.cause}"
        ) from error


def _is_harmless(part: Any) -> bool:  # noqa: ANN401  # any JSON value
    """Whether a part of a tokenizer takes little time and makes no text much longer."""
    if part is None:
        return True
    if not isinstance(part, dict):
        return False
    match part.get("type"):
        case "Sequence":
            lists = [value for value in part.values() if isinstance(value, list)]
            return all(_is_harmless(inner) for inner in itertools.chain(*lists))
        case "Split":
            return _is_text(part.get("pattern"))
        case "Replace":
            return _is_text(part.get("pattern")) and _is_short(part.get("content"))
        case "Prepend":
            return _is_short(part.get("prepend"))
        case "TemplateProcessing":
            return len(json.dumps(part)) <= _LONGEST_TEMPLATE
        case kind:
            return kind in _HARMLESS_TYPES


def _is_text(pattern: object) -> bool:
    """Whether a pattern is a text to look for, and no regular expression."""
    return isinstance(pattern, dict) and pattern.keys() == {"String"}


def _is_short(text: object) -> bool:
    return isinstance(text, str) and len(text) <= 1


@cache
def check_tokenizer(parts: str) -> None:
    """Try parts of a tokenizer in the sandbox, on texts that are hard for regular expressions.

    `parts` are a `tokenizer.json` without its vocabulary. A failure is a SandboxError.
    """
    _SANDBOX.call("split_hard_texts", {"parts": json.loads(parts)})


def try_in_fork(work: Callable[[], object]) -> None:
    """Do `work` in a fork of this process with limits (on Linux), which gives nothing back.

    An exception there is not passed on: this process meets it too and can say more about it. An
    exceeded limit is a SandboxError.
    """
    if sys.platform != "linux":
        return
    reading, writing = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        ended = b""
        try:
            end_with_parent(parent)
            limit_process(MEMORY)
            limit_time(SECONDS)
            for output in (1, 2):  # this process says the same
                os.dup2(os.open(os.devnull, os.O_WRONLY), output)
            work()
            ended = b"."
        except BaseException as error:
            ended = b"" if isinstance(error, MemoryError) else b"."
        finally:
            os.write(writing, ended)
            os._exit(0)
    os.close(writing)
    try:
        poll = select.poll()
        poll.register(reading, select.POLLIN)
        if not poll.poll(6 * SECONDS * 1000) or not os.read(reading, 1):
            raise SandboxError("")
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def match_names(patterns: object, names: Iterable[str]) -> None:
    """Match each text in nested values with each name, as its regular expression."""
    names = list(names)
    if isinstance(patterns, Mapping):
        patterns = [*patterns, *patterns.values()]
    if isinstance(patterns, list | tuple | set):
        for part in patterns:
            match_names(part, names)
    elif isinstance(patterns, str):
        for name in names:
            with suppress(re.error):
                re.match(patterns, name)
                re.fullmatch(patterns, name)
