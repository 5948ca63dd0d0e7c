"""Writing files so that they stay whole, and reading lines of JSON."""

import errno
import json
import os
import random
import resource
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest

from lit_callbacks.files import (
    LARGEST_TEXT,
    append_to,
    begins_like,
    check_output_path,
    json_lines,
    name_file,
    parse_json,
    read_json,
    read_text,
    replace_file,
    split_lines,
    write_text,
)
from lit_callbacks.gain import main as explain_gain

SEPARATORS = ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1e", "\r", "\n"]
OTHERS = ["\ud800", "é", '"', "a"]


def test_an_error_of_writing_is_named_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No space left on device: 'a.jsonl'"), name_file("a.jsonl"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(FileNotFoundError, match=r"missing'"), name_file("a.jsonl"):
        (tmp_path / "missing").read_text()


def test_only_files_of_a_limited_size_are_read_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"a": 1}')
    assert read_json(file, dict) == {"a": 1}
    with pytest.raises(ValueError, match=r"a\.json: expected an array of JSON, got dict"):
        read_json(file, list)
    file.write_text('{"a": ')
    with pytest.raises(ValueError, match=r"a\.json: expected JSON: Expecting value"):
        read_json(file, dict)
    os.truncate(file, LARGEST_TEXT + 1)
    with pytest.raises(ValueError, match=r"a\.json: expected at most 100,000,000 bytes, got 100,0"):
        read_json(file, dict)
    file.unlink()
    os.mkfifo(file)
    for place in (file, tmp_path):
        with pytest.raises(ValueError, match="expected a file, got a folder, pipe or device"):
            read_text(place)


def test_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = write_text(tmp_path / "new" / "file", "old\n")
    with suppress(KeyError), replace_file(path) as file:
        file.write(b"new")
        assert path.read_text() == "old\n"
        raise KeyError
    assert [(file.name, file.read_text()) for file in path.parent.iterdir()] == [("file", "old\n")]
    (path.parent / ".file.1234.partial").touch()  # an earlier writer was killed
    write_text(path, "new\n")
    assert path.read_bytes() == b"new\n"
    assert list(path.parent.iterdir()) == [path]


def test_writer_follows_no_link_that_another_account_has_left(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("kept")
    path = tmp_path / "report.html"
    for name in (".report.html.0.partial", path.name):
        (tmp_path / name).symlink_to("theirs")
    guessed = patch("lit_callbacks.files.token_hex", return_value="0")
    kept = patch.object(Path, "unlink", side_effect=PermissionError)  # it is another account's
    with guessed, kept, pytest.raises(FileExistsError, match=r"/report\.html"):
        write_text(path, "mine")
    write_text(path, "mine")
    assert path.read_text() == "mine"
    path.unlink()
    path.symlink_to("theirs")
    with pytest.raises(OSError, match="symbolic links"), append_to(path) as file:
        file.write(b"mine")
    assert (tmp_path / "theirs").read_text() == "kept"


def test_full_disk_keeps_the_old_file_and_is_named_with_it(tmp_path: Path) -> None:
    path = write_text(tmp_path / "report.json", "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # as on a full disk, no file can grow
    try:
        with pytest.raises(OSError, match=r"File too large: '.*/report\.json'"):
            write_text(path, "new" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(path.name, "old")]


def test_json_lines_are_read_as_they_were_written() -> None:
    """Texts of characters that end a line for somebody: 200 files, by a seed."""
    rng = random.Random(0)
    for _ in range(200):
        records = [
            {"text": "".join(rng.choices(SEPARATORS + OTHERS, k=rng.randrange(9))), "n": number}
            for number in range(rng.randrange(5))
        ]
        lines = list(split_lines(json_lines(records)))
        assert [parse_json(line.text) for line in lines] == records
        assert [(line.number, line.is_complete) for line in lines] == [
            (number, True) for number in range(1, len(records) + 1)
        ]


def test_last_line_without_an_end_is_told_apart() -> None:
    lines = list(split_lines('1\n\n  \n2\r\n{"a'))
    assert [tuple(line) for line in lines] == [(1, "1", True), (4, "2\r", True), (5, '{"a', False)]


def test_json_beyond_the_stack_is_a_value_error() -> None:
    for text in ("[" * 200_000, "{", "9" * 5000):
        with pytest.raises(ValueError, match=r"nested|Expecting|Exceeds"):
            parse_json(text)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"step": "x"}',
        '{"step": Infinity}',
        '{"step": 1e300}',
        '{"response": 3}',
        '{"prompt": null}',
        '{"score": []}',
        '{"metrics": 3}',
        "[" * 100_000,
    ],
)
def test_gain_of_a_strange_file_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text(json.dumps({"step": 0, "score": 1, "response": "a"}) + f"\n{line}\n")
    with pytest.raises(ValueError, match=r"samples\.jsonl:2: expected "):
        explain_gain([str(file)])


def test_gain_leaves_out_what_has_no_score(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text('{"step": 0}\n{"step": 1, "score": NaN}\n{"step": 2, "score": null}\n')
    with pytest.raises(ValueError, match="expected responses of at least two steps, got 0"):
        explain_gain([str(file)])


@pytest.mark.parametrize("path", ["", " ", "a\0b", "-"])
def test_what_names_no_file_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="output: expected a path, got"):
        check_output_path("output", path)


def test_a_text_that_is_cut_off_begins_as_the_whole_one() -> None:
    assert begins_like(b"", b'{"key"')
    assert begins_like(b'{"k', b'{"key"')
    assert begins_like(b'{"key": 1', b'{"key"')
    assert not begins_like(b'{"kay"', b'{"key"')
