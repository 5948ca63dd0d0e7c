"""Result files: atomic, or continued after a kill; errors name the file."""

import json
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lit_rlhf.files import (
    MANIFEST,
    ProgressFile,
    check_outputs,
    check_responses,
    code_versions,
    manifest_path,
    read_manifest,
    write_json_lines,
    write_manifest,
    write_text,
)
from lit_rlhf.paths import check_data_paths

SETTINGS = {"seed": 1, "models": ["sft"]}


def test_lines_are_json_in_utf_8(tmp_path: Path) -> None:
    # a model's text read from JSON may hold half of a surrogate pair
    records = [{"text": "铁、铜\n"}, {"text": "half \ud800 of a pair, 铁"}]
    path = write_json_lines(tmp_path / "new" / "records.jsonl", records)
    lines = path.read_bytes().decode("utf-8").splitlines()
    assert all("铁" in line for line in lines)
    assert [json.loads(line) for line in lines] == records


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    def broken() -> Iterator[dict[str, str]]:
        yield {"text": "new"}
        raise RuntimeError("on the way")

    path = write_text(tmp_path / "records.jsonl", "old\n")
    with pytest.raises(RuntimeError, match="on the way"):
        write_json_lines(path, broken())
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "new\n\ud800")
    (file,) = tmp_path.iterdir()
    assert (file.name, file.read_text("utf-8")) == ("records.jsonl", "old\n")


def test_outputs_replace_no_input_or_output(tmp_path: Path) -> None:
    write_text("in.jsonl", "")
    Path("link").symlink_to("in.jsonl")
    check_outputs({"output": "a", "chart": "b", "responses": None}, ["in.jsonl", None])
    check_outputs({"output": "/dev/null", "responses": "/dev/null"})
    refused_paths: list[dict[str, str | None]] = [{"a": "a", "output": "./a"}, {"output": "link"}]
    for outputs in (*refused_paths, {"output": str(tmp_path)}):
        with pytest.raises(ValueError, match=r"^output: expected a file of its own"):
            check_outputs(outputs, ["in.jsonl"])


def test_outputs_replace_nothing_in_a_folder_that_is_read(tmp_path: Path) -> None:
    write_text("model/config.json", "{}")
    for output in ("model/config.json", "./model/../model/config.json"):
        with pytest.raises(ValueError, match=r"^output: expected a file of its own"):
            check_outputs({"output": output}, ["model"])
    check_outputs({"output": "model/new.jsonl", "responses": "model.jsonl"}, ["model"])


def test_pipe_in_place_of_data_is_refused_before_the_hub_is_asked(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"pipe: expected a file with one of the suffixes"):
        check_data_paths([str(tmp_path / "pipe")])


def finished(path: Path, settings: dict[str, Any] = SETTINGS) -> list[Any]:
    progress = ProgressFile(path, settings)
    return [*progress.batches("sft"), *progress.batches("ppo")]


def interrupted(path: Path) -> None:
    """Two batches of one name and one of another, then the end."""
    with suppress(KeyboardInterrupt), ProgressFile(path, SETTINGS) as progress:
        progress.add("ppo", {"text": "\ud800 铁"})
        for number in (1, 2):
            progress.add("sft", [number, 0.1])
        raise KeyboardInterrupt


def test_finished_batches_are_there_after_an_interruption(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.jsonl"
    interrupted(path)
    assert finished(path) == [[1, 0.1], [2, 0.1], {"text": "\ud800 铁"}]
    with ProgressFile(path, SETTINGS) as progress:
        progress.add("sft", [3, 0.1])
        assert finished(path)[:3] == [[1, 0.1], [2, 0.1], [3, 0.1]]
    assert list(path.parent.iterdir()) == []


def test_finished_output_has_a_manifest_with_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    for text in ("old", "new"):  # a second command replaces both
        with ProgressFile(path, SETTINGS) as progress:
            progress.add("sft", text)
            progress.finish([{"response": text}])
    manifest = read_manifest(path)
    assert (manifest["made"], manifest["versions"]) == (SETTINGS, code_versions())
    made = check_responses(path)
    assert made == SETTINGS | {"file": manifest["files"]["out.jsonl"]}
    assert {file.name for file in tmp_path.iterdir()} == {path.name, f".{path.name}.{MANIFEST}"}
    path.write_text(path.read_text().replace("new", "own"))
    with pytest.raises(
        ValueError, match=r"policies: expected the responses that .*jsonl\.lit_rlhf"
    ):
        check_responses(path)
    manifest_path(path).unlink()
    assert check_responses(path).keys() == {"file"}


def test_a_batch_that_was_cut_off_is_computed_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    interrupted(path)
    partial = tmp_path / "out.jsonl.partial"
    whole = partial.read_bytes()
    for cut in range(len(whole)):
        partial.write_bytes(whole[:cut])
        number = whole[:cut].count(b"\n") - 1
        assert len(finished(path)) == max(number, 0)
    partial.write_bytes(whole[:-3])
    with suppress(KeyboardInterrupt), ProgressFile(path, SETTINGS) as progress:
        progress.add("sft", [2, 0.1])
        raise KeyboardInterrupt
    assert partial.read_bytes() == whole


def test_batches_of_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    interrupted(path)
    message = r"out\.jsonl\.partial: .* another value of seed; repeat that command to finish it, or"
    with pytest.raises(ValueError, match=message):
        finished(path, SETTINGS | {"seed": 2})
    assert len(finished(path)) == 3


def test_file_of_batches_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl.partial").symlink_to("theirs")
    with pytest.raises(OSError, match="symbolic links"):
        interrupted(tmp_path / "out.jsonl")
    assert not (tmp_path / "theirs").exists()


def test_manifest_is_written_as_a_whole(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "out.jsonl", [{"response": "a"}])
    write_manifest(path, {"made": SETTINGS})
    before = manifest_path(path).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_manifest(path, {"made": {}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert manifest_path(path).read_bytes() == before
    manifest_path(path).unlink()
    manifest_path(path).symlink_to("theirs")
    write_manifest(path, {})
    assert not (tmp_path / "theirs").exists()


def test_a_command_that_finished_no_batch_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(MemoryError), ProgressFile(tmp_path / "out.jsonl", SETTINGS):
        raise MemoryError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content", ["no json\n", "no end", "[1]\n[2]\n", '{"seed": 1}\n{"a": 1}\n']
)
def test_another_file_of_that_name_is_refused(tmp_path: Path, content: str) -> None:
    partial = tmp_path / "out.jsonl.partial"
    partial.write_text(content)
    with pytest.raises(ValueError, match=r"partial: expected the finished batches of an inter"):
        ProgressFile(tmp_path / "out.jsonl", SETTINGS)
    assert partial.read_text() == content


def test_a_full_disk_is_named_with_the_file_of_batches(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    interrupted(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # as on a full disk, no file can grow beyond this size
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        error = pytest.raises(OSError, match=r"File too large: '.*out\.jsonl\.partial'")
        with error, ProgressFile(path, SETTINGS) as progress:
            progress.add("sft", ["x" * 200])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(finished(path)) == 3


def test_without_an_output_nothing_is_kept(tmp_path: Path) -> None:
    with ProgressFile(None, SETTINGS) as progress:
        progress.add("sft", [1])
        assert progress.batches("sft") == []
    assert list(tmp_path.iterdir()) == []


def test_pipe_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with ProgressFile(pipe, SETTINGS) as progress:
        progress.add("sft", [1])
        write_text(pipe, "all")
    assert os.read(reader, 100) == b"all"
    os.close(reader)
    assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
