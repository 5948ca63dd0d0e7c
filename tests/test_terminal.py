"""Runs go on without their terminal."""

import json
import os
import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from lit_rlhf.terminal import one_line, outlive_terminal, printable
from tests.support.trainer_logs import CALM

PROGRAM = """
import os, sys
from lit_rlhf.terminal import one_line, outlive_terminal, printable

outlive_terminal()
assert sys.stdin.read() == ""
for stream in (sys.stdout, sys.stderr):
    for _ in range(3):
        print("a line", file=stream, flush=True)
os.write(result := int(sys.argv[1]), b"done")
assert result > 2
"""
"""Prints, and tells its end to a pipe."""


@pytest.mark.parametrize("terminal", ["whole", "its reader is gone", "on a full disk", "closed"])
def test_run_outlives_its_terminal(terminal: str) -> None:
    reader, writer = os.pipe()
    output = os.open("/dev/full", os.O_WRONLY) if terminal == "on a full disk" else None
    if terminal == "its reader is gone":
        gone, output = os.pipe()
        os.close(gone)
    command = [sys.executable, "-c", PROGRAM, str(writer)]
    if terminal == "closed":
        command = ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh", *command]
    streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    streams["stdout"] = subprocess.PIPE if output is None else output
    done = subprocess.run(command, **streams, pass_fds=[writer], text=True, check=False)
    os.close(writer)
    assert os.read(reader, 10) == b"done"
    os.close(reader)
    assert done.returncode == 0
    if terminal == "whole":
        assert done.stdout == 6 * "a line\n"
    if output is not None:
        os.close(output)


def test_text_without_letters_in_a_terminal_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    written = BytesIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, TextIOWrapper(written, "ascii", write_through=True))
    outlive_terminal()
    print("a\u94c1\ud800")
    assert written.getvalue() == b"a\\u94c1\\ud800\n"


@pytest.mark.skipif(sys.platform != "linux", reason="a full disk is pretended with /dev/full")
@pytest.mark.parametrize(("words", "status"), [("configs list", 1), ("watch log.jsonl", 2)])
def test_output_on_a_full_disk_is_an_error(words: str, status: int, tmp_path: Path) -> None:
    """The status 1 of `watch` is a collapse."""
    (tmp_path / "log.jsonl").write_text(f"{json.dumps(CALM)}\n" * 12)
    command = [sys.executable, "-m", "lit_rlhf.cli.main", *words.split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    message = "lit_rlhf: the output could not be written: [Errno 28] No space left on device\n"
    assert (done.returncode, done.stderr) == (status, message)


@pytest.mark.parametrize("words", ["--help", "--version", "fit --help", "configs list"])
def test_output_that_nobody_reads_is_no_error(words: str) -> None:
    gone, output = os.pipe()
    os.close(gone)
    command = [sys.executable, "-m", "lit_rlhf.cli.main", *words.split()]
    done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    os.close(output)
    assert (done.returncode, done.stderr) == (0, "")


def test_passwords_in_urls_are_hidden() -> None:
    text = "postgresql+psycopg2://me:a@b@host/x, https:/me@host, https://me:$VAR@host, s3://a/b@c"
    shown = "postgresql+psycopg2://***@host/x, https:/***@host, https://me:$VAR@host, s3://a/b@c"
    assert one_line(text) == shown


def test_control_characters_are_shown() -> None:
    text = "a\x1b]0;title\x07\x9b2J\x7f\u202e\r\r\nb\tc \u94c1\u200f"
    shown = "a\\x1b]0;title\\x07\\x9b2J\\x7f\\u202e\\r\nb\tc \u94c1\u200f"
    assert printable(text) == shown
    assert one_line(f" {text}\n") == shown.replace("\n", " ").replace("\t", " ")
    assert one_line("x" * 10**6) == "x" * 4000 + " ..."


QUOTES = """
import logging, sys, warnings
from lit_rlhf.terminal import print_line, show_control_characters
show_control_characters()
logging.basicConfig(stream=sys.stderr)
print_line("a\\x1b[31m\\nb\\u202e")
logging.getLogger("a").warning("of %s", "c\\x1b[2J")
warnings.warn("d\\x9b", stacklevel=1)
"""
"""Quotes names of other people, in each of the ways in which a command can."""


def test_control_characters_are_shown_in_lines_logs_and_warnings() -> None:
    done = subprocess.run(
        [sys.executable, "-c", QUOTES], capture_output=True, text=True, check=True
    )
    assert done.stdout == "a\\x1b[31m\\nb\\u202e\n"
    assert "WARNING:a:of c\\x1b[2J\n" in done.stderr
    assert "UserWarning: d\\x9b\n" in done.stderr
