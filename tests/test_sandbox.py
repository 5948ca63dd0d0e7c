"""The sandboxed process: its limits, and its end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest

from lit_rlhf import sandbox
from lit_rlhf.data import DataSource, PromptDataModule
from lit_rlhf.models import load_tokenizer
from tests.support.tiny_models import tiny_tokenizer

TEMPLATE = {"chat_template": "{{ messages[0] }}"}
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """The sandbox of this process, running."""
    start()
    yield sandbox._SANDBOX._processes[os.getpid()]
    sandbox._SANDBOX.stop()


def start() -> None:
    """Make a request."""
    assert sandbox.render_template({"conversations": [[{"a": "b"}]], **TEMPLATE}) == "{'a': 'b'}"


def split_by(regex: str) -> str:
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return json.dumps({"pre_tokenizer": split})


@LINUX
def test_process_opens_no_file_and_knows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    sandbox._SANDBOX.stop()
    start()
    folder = Path("/proc") / str(sandbox._SANDBOX._processes[os.getpid()].pid)
    lines = (folder / "limits").read_text().splitlines()
    limits = {line[:26].strip(): line[26:].split()[:2] for line in lines}
    assert limits["Max open files"] == limits["Max file size"] == ["0", "0"]
    assert int(limits["Max address space"][1]) < sandbox.MEMORY + 2**30
    assert int(limits["Max cpu time"][0]) < 60
    assert b"secret" not in (folder / "environ").read_bytes()


def test_process_is_started_again_after_its_end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    sandbox.check_tokenizer(split_by(r"\s+"))


def test_answer_that_nobody_waits_for_is_not_taken_for_the_next(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "_read_line", Mock(side_effect=TimeoutError))
    with pytest.raises(sandbox.SandboxError):
        sandbox.render_template({"conversations": [[]], "chat_template": "late"})
    monkeypatch.undo()
    start()


@LINUX
def test_process_ends_with_its_parent() -> None:
    code = (
        "import os, signal\nfrom lit_rlhf import sandbox\nsandbox.check_tokenizer('{}')\n"
        "print(sandbox._SANDBOX._processes[os.getpid()].pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while Path(f"/proc/{int(done.stdout)}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _pid_in_fork() -> int:
    start()
    return sandbox._SANDBOX._processes[os.getpid()].pid


def test_forked_process_has_its_own(process: subprocess.Popen[bytes]) -> None:
    with get_context("fork").Pool(1) as pool:
        assert pool.apply(_pid_in_fork) != process.pid


@pytest.mark.parametrize(
    "regex", [r"(a+)+$", r"([a-zA-Z]+)*\d\d", r"(.*a){12}x", r"(\w|\w\w)+;", "(.*)*x"]
)
def test_regular_expression_that_backtracks_is_refused(regex: str) -> None:
    begun = time.monotonic()
    with pytest.raises(sandbox.SandboxError):
        sandbox.check_tokenizer(split_by(regex))
    assert time.monotonic() - begun < 20


GPT_4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize("regex", [GPT_4, r"\p{N}", r"\s+(?!\S)|\s+"])
def test_usual_regular_expressions_are_fine(regex: str) -> None:
    sandbox.check_tokenizer(split_by(regex))


@pytest.mark.parametrize(
    "parts",
    [
        {"decoder": {"type": "Replace", "pattern": {"Regex": "(a|aa)+b"}, "content": ""}},
        {"normalizer": {"type": "Prepend", "prepend": "x" * 10**7}},
        {"padding": {"strategy": {"Fixed": 10**10}}},
    ],
    ids=" ".join,
)
def test_tokenizer_that_takes_too_much_is_refused(
    parts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    padding = {"direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    padding |= {"pad_to_multiple_of": None, **parts.get("padding", {})}
    content |= {**parts, "padding": padding} if "padding" in parts else parts
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    monkeypatch.setattr(sandbox, "SECONDS", 1.0)
    with pytest.raises(ValueError, match=r"tokenizer\.json: expected a tokenizer that encodes"):
        load_tokenizer(tmp_path)


def hang() -> None:
    re.match("(.+)+X", "a" * 60)


def take_memory() -> None:
    bytearray(2 * sandbox.MEMORY)


@LINUX
@pytest.mark.parametrize("work", [hang, take_memory])
def test_fork_has_limits(work: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.1)
    with pytest.raises(sandbox.SandboxError):
        sandbox.try_in_fork(work)


@LINUX
def test_fork_passes_no_exception_on(capfd: pytest.CaptureFixture[str]) -> None:
    sandbox.try_in_fork(lambda: print(1 / 0))
    sandbox.try_in_fork(lambda: print("done", flush=True))
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("added", [False, True], ids=["pre-tokenizer", "added token"])
def test_tokenizer_is_tried_before_it_is_loaded(tmp_path: Path, added: bool) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    load_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    replace = {"type": "Replace", "pattern": {"Regex": "(a|aa)+b"}, "content": "x"}
    content |= {"normalizer": replace} if added else json.loads(split_by("(a+)+$"))
    if added:
        content["added_tokens"][0] |= {"content": "a" * 60, "normalized": True}
    file.write_text(json.dumps(content))
    message = r"tokenizer\.json: expected a tokenizer that encodes .* 10 seconds and 1024 MiB"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hi"}\n', "utf-8")
    source = DataSource(str(prompts))
    for load in (load_tokenizer, PromptDataModule([source], tokenizer=str(tmp_path)).setup):
        with pytest.raises(ValueError, match=message):
            load(tmp_path if load is load_tokenizer else None)  # type: ignore[operator]


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Prepend", "prepend": '"' + "x" * 10**7}},
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [
                    {
                        "type": "Replace",
                        "pattern": {"String": "a"},
                        "content": '"' + "b" * 10**6,
                    }
                ],
            }
        },
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}] * 10**5
                + [{"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
                "special_tokens": {"[X]": {"id": "[X]", "ids": [1] * 1000, "tokens": ["a"] * 1000}},
            }
        },
    ],
    ids=["quoted prefix", "quoted content", "template"],
)
def test_growth_is_found_wherever_it_is_written(
    parts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}, **parts}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    monkeypatch.setattr(sandbox, "SECONDS", 1.0)
    with pytest.raises(ValueError, match=r"tokenizer\.json: .* got one that takes more$"):
        sandbox.check_tokenizer_file(str(tmp_path))


def test_affix_of_each_character_is_limited(tmp_path: Path) -> None:
    model = {"type": "BPE", "vocab": {}, "merges": [], "end_of_word_suffix": "x" * 10**6}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    with pytest.raises(ValueError, match="end_of_word_suffix has at most 64 characters, got 1000"):
        sandbox.check_tokenizer_file(str(tmp_path))


@pytest.mark.parametrize(
    "part",
    [
        None,
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}},
    ],
)
def test_usual_parts_are_not_tried(part: Any, tmp_path: Path) -> None:
    content = {"version": "1.0", "model": {"type": "BPE"}, "decoder": part}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with patch.object(sandbox, "check_tokenizer", side_effect=AssertionError):
        sandbox.check_tokenizer_file(str(tmp_path))


def test_process_outlives_the_thread_that_starts_it(process: subprocess.Popen[bytes]) -> None:
    sandbox._SANDBOX.stop()
    thread = Thread(target=start)
    thread.start()
    thread.join()
    begun = sandbox._SANDBOX._processes[os.getpid()]
    start()
    assert sandbox._SANDBOX._processes[os.getpid()] is begun
    assert begun.poll() is None


@pytest.mark.parametrize("letter", ["x", "\u94c1", "\U0001f600", "\ud83d"])
def test_text_of_any_letters_comes_back_and_too_long_a_one_is_refused(letter: str) -> None:
    def render(times: int) -> str:
        turn = {"role": "user", "content": letter * times}
        return sandbox.render_template({"conversations": [[turn]], "chat_template": CONTENT})

    assert render(1000) == letter * 1000
    begun = time.monotonic()
    with pytest.raises(sandbox.SandboxError, match="the text is too long"):
        render(2**20)
    assert time.monotonic() - begun < 60  # it was quadratic: two minutes


CONTENT = "{{ messages[0].content }}"


@contextmanager
def endless_line(content: bytes) -> Iterator[Any]:
    """A process that has begun a line of its output."""
    reader, writer = os.pipe()
    os.write(writer, content)
    with os.fdopen(reader, "rb") as output:
        yield SimpleNamespace(stdout=output)
    os.close(writer)


def test_line_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with endless_line(b"x" * 1000) as process, pytest.raises(TimeoutError):
        sandbox._read_line(process, seconds=0.01)
    monkeypatch.setattr(sandbox, "_LARGEST_ANSWER", 1000)
    with endless_line(b"x" * 2000) as process, pytest.raises(TimeoutError):
        sandbox._read_line(process, seconds=600.0)
    # the deadline holds while there is always more to read
    clock = iter(range(1000))
    monkeypatch.setattr(sandbox.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(sandbox, "_LARGEST_ANSWER", 10**9)
    monkeypatch.setattr(sandbox.os, "read", lambda descriptor, size: b"x")
    with endless_line(b"x") as process, pytest.raises(TimeoutError):
        sandbox._read_line(process, seconds=10.0)
    assert next(clock) < 20


def test_process_does_not_find_modules_in_the_current_folder(tmp_path: Path) -> None:
    sandbox._SANDBOX.stop()
    (tmp_path / "h2.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with patch.object(sys, "path", ["", str(tmp_path), *sys.path]):
        assert str(tmp_path) not in sandbox._import_path()
        assert "" not in sandbox._import_path()
        start()
    sandbox._SANDBOX.stop()


def test_fork_does_not_wait_for_a_request_of_its_parent() -> None:
    with sandbox._SANDBOX._lock:  # as another thread has it
        child = os.fork()
        if child == 0:
            os._exit(0 if sandbox._SANDBOX._lock.acquire(blocking=False) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
