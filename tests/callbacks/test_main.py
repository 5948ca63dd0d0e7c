"""`lit-callbacks`: the commands of the package alone."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from lit_callbacks import read_log
from lit_callbacks.__main__ import main

CALM = {"rollout/kl_per_token": 0.01, "rollout/response_length": 100.0}
FAR = {"rollout/kl_per_token": 0.2, "rollout/response_length": 300.0}


def write_log(path: Path, n_far: int) -> str:
    rows = [CALM] * 10 + [FAR] * n_far
    lines = [json.dumps({"step": step, **row}) for step, row in enumerate(rows, 1)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_watch_ends_with_the_status_of_its_verdict(tmp_path: Path) -> None:
    main(["watch", write_log(tmp_path / "calm.jsonl", 0)])
    with pytest.raises(SystemExit, match="1"):
        main(["watch", write_log(tmp_path / "far.jsonl", 3)])
    with pytest.raises(SystemExit, match="2"):
        main(["watch", str(tmp_path / "lost.jsonl")])


def test_watch_takes_names_and_votes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"step": step, "my/length": 100.0 if step < 10 else 300.0} for step in range(14)]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["watch", str(path), "--map", "rollout/response_length=my/length", "--votes", "1"]
    with pytest.raises(SystemExit, match="1"):
        main(words)
    assert "; it makes a collapse alone (votes: 1)" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["watch", str(path), "--map", "my/length"])
    assert "--map: expected KEY=NAME" in capsys.readouterr().err


def test_report_and_gain_are_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    main(["report", write_log(tmp_path / "log.jsonl", 0), "--output", str(page)])
    assert page.read_text("utf-8").startswith("<!doctype html>")
    with pytest.raises(SystemExit, match="2"):
        main(["gain", str(tmp_path / "lost.jsonl")])
    assert "lit-callbacks gain: error:" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["fit"])
    assert "no command 'fit'" in capsys.readouterr().err
    main([])
    assert "watch LOG" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform != "linux", reason="a full disk is pretended with /dev/full")
@pytest.mark.parametrize("command", ["watch", "report"])
def test_output_on_a_full_disk_is_an_error_and_one_that_nobody_reads_is_none(
    tmp_path: Path, command: str
) -> None:
    log = write_log(tmp_path / "log.jsonl", 0)
    words = [sys.executable, "-m", "lit_callbacks", command, log]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            words, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert re.fullmatch(r"lit-callbacks.*No space left on device\n", done.stderr)
    gone, output = os.pipe()
    os.close(gone)
    done = subprocess.run(
        words, cwd=tmp_path, stdout=output, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(output)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_log_that_is_no_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    for words in (["gain", pipe], ["watch", pipe], ["report", pipe], ["gain", "/dev/zero"]):
        with pytest.raises(SystemExit, match="2"):
            main(list(map(str, words)))
        assert capsys.readouterr().err.count("\n") == 1


def test_a_log_is_a_table_of_steps(tmp_path: Path) -> None:
    table = read_log(write_log(tmp_path / "log.jsonl", 1))
    assert table[0] == {"step": 1, **CALM}
    assert table[-1] == {"step": 11, **FAR}


@pytest.mark.parametrize("command", ["watch", "report"])
def test_error_is_one_line_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (tmp_path / "a.csv").write_text("step,\x1b[2Jkl,\x1b[2Jkl\n1,2,3\n")
    with pytest.raises(SystemExit, match="2"):
        main([command, str(tmp_path / "a.csv")])
    (tmp_path / "b.csv").write_text("step,\x1b[2Jkl\n1,2\n")
    if command == "watch":
        with pytest.raises(SystemExit, match="2"):
            main([command, str(tmp_path / "b.csv")])
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith(f"lit-callbacks {command}: error: ") for line in lines)
    assert not any("\x1b" in line for line in lines)


@pytest.mark.parametrize("seconds", ["inf", "nan", "-1"])
def test_pause_that_is_no_time_is_refused(tmp_path: Path, capsys: Any, seconds: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["watch", write_log(tmp_path / "calm.jsonl", 0), f"--follow={seconds}"])
    assert "follow: expected 0 to 604800 seconds" in capsys.readouterr().err


def test_interruption_is_told_in_one_line(tmp_path: Path, capsys: Any) -> None:
    log = write_log(tmp_path / "calm.jsonl", 0)
    with (
        patch("lit_callbacks.logs.read_run", side_effect=KeyboardInterrupt),
        pytest.raises(SystemExit, match="130"),
    ):
        main(["watch", log])
    assert capsys.readouterr().err == "\nlit-callbacks: interrupted\n"


def test_watch_ends_when_nobody_reads_it_any_more(tmp_path: Path) -> None:
    log = write_log(tmp_path / "calm.jsonl", 3)
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "lit_callbacks", "watch", log, "--follow", "0.01"]
    with subprocess.Popen(words, stdout=writer, stderr=subprocess.PIPE) as command:
        os.close(writer)
        # a further step, at which it has something to say
        write_log(tmp_path / "calm.jsonl", 6)
        assert command.wait() == 1
        assert command.stderr is not None
        assert command.stderr.read() == b""
