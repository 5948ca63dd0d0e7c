"""`lit_rlhf label` and `lit_rlhf label convert` as commands."""

import json
import os
import signal
import socket
import stat
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lit_rlhf.data import DataSource, load_records
from lit_rlhf.files import lock_outputs
from lit_rlhf.tools.commands.label import (
    COMMAND,
    CONVERT,
    LabelOptions,
    _load_session,
    _read_guidelines,
    _read_responses,
)
from lit_rlhf.tools.evaluation.labels import read_labels
from tests.support.evaluation_folders import Folders, read_lines, refusal, write_lines
from tests.support.labelling import Browser, end_process, label_all, start_label_command
from tests.support.labels import make_label

main = partial(COMMAND.run, prog="lit_rlhf label")
convert = partial(CONVERT.run, prog="lit_rlhf label convert")


def write_two_files(folder: Path, n_prompts: int = 6) -> list[str]:
    return [
        write_lines(
            folder / f"{name}.jsonl",
            [{"prompt": f"p{i}", "response": f"{text} {i}"} for i in range(n_prompts)],
        )
        for name, text in (("sft", "bad"), ("ppo", "good"))
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "policies, responses: expected one of them, models that respond to --prompts"),
        (["--policies", "x/y"], "prompts: expected a file of prompts"),
        (["--responses", "lost.jsonl"], "lost.jsonl: no such file"),
        (["--responses", "a.jsonl", "--policies", "b"], "got both"),
        (["--responses", "a.jsonl", "--prompts", "b.jsonl"], "prompts: expected none with files"),
        (["--responses", "sft.jsonl", "--host", "0.0.0.0"], "the connection is not encrypted"),
        (["--responses", "sft.jsonl", "--guidelines", "x.md"], "or helpful or harmless"),
        (["--responses", "sft.jsonl", "--repeat_share", "2"], "repeat_share: expected a number"),
        (["--responses", "sft.jsonl", "--select", "spread"], "with reward models"),
        (["--responses", "sft.jsonl", "--annotators_per_comparison", "0"], "an integer >= 1"),
        (
            ["--responses", "sft.jsonl", "--port", "65536"],
            "port: expected a number from 0 to 65535",
        ),
        (
            ["--responses", "a.jsonl", "--output", "~/labels.jsonl"],
            "output: expected a path without",
        ),
        (["--responses", "a.jsonl", "--output", "s3://b/l"], "output: expected a path on this"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, words: list[str], message: str
) -> None:
    write_two_files(tmp_path)
    assert message in refusal(main, ["--output", "labels.jsonl", *words])


def test_port_that_is_taken_is_told_before_anything_is_sampled(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ["--output", "labels.jsonl", "--responses", *write_two_files(tmp_path)]
        assert "expected a free one" in refusal(main, [*words, "--port", port])


def test_file_that_another_command_writes_is_refused_before_anything_is_sampled() -> None:
    words = ["--output", "labels.jsonl", "--policies", "a/b", "--prompts", "p.jsonl"]
    Path("p.jsonl").touch()
    with lock_outputs(["labels.jsonl"]):
        assert "labels.jsonl: another run or command writes to it" in refusal(main, words)


@pytest.mark.parametrize("content", ["", "[]", '{"token": "a"}'])
def test_session_that_is_none_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / ".labels.jsonl.session.json").write_text(content)
    with pytest.raises(ValueError, match=r"\.labels\.jsonl\.session\.json: expected"):
        _load_session(tmp_path / "labels.jsonl")


def test_session_that_another_account_has_left_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _load_session(tmp_path / "labels.jsonl")
    (tmp_path / ".link.jsonl.session.json").symlink_to(".labels.jsonl.session.json")
    with pytest.raises(ValueError, match="expected a file of your own, got a link"):
        _load_session(tmp_path / "link.jsonl")
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(ValueError, match="or another account's"):
        _load_session(tmp_path / "labels.jsonl")


def test_page_keeps_its_token_in_a_file_for_the_user_alone(tmp_path: Path) -> None:
    session = _load_session(tmp_path / "labels.jsonl")
    assert _load_session(tmp_path / "labels.jsonl") == session
    assert _load_session(tmp_path / "others.jsonl") != session
    assert len(session["token"]) >= 32
    mode = (tmp_path / ".labels.jsonl.session.json").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600


def test_guidelines_are_in_both_languages(tmp_path: Path) -> None:
    for name in ("helpful", "harmless"):
        texts = _read_guidelines(name)
        assert texts["en"].startswith("# Which")
        assert "一样好" in texts["zh"]
    own_guidelines = tmp_path / "own.md"
    own_guidelines.write_text("# Ours", "utf-8")
    assert _read_guidelines(str(own_guidelines)) == {"en": "# Ours", "zh": "# Ours"}


def options(folders: Folders, tmp_path: Path, **values: Any) -> LabelOptions:
    return LabelOptions(
        **{
            "output": str(tmp_path / "labels.jsonl"),
            "policies": [folders.sft, folders.ppo],
            "prompts": folders.prompts,
            "max_new_tokens": 4,
            "device": "cpu",
            **values,
        }
    )


def test_responses_are_sampled_once_and_kept_with_their_manifest(
    folders: Folders, tmp_path: Path
) -> None:
    first = _read_responses(options(folders, tmp_path))
    assert list(first) == ["sft", "ppo"]
    folder = tmp_path / "labels.responses"
    assert {file.name for file in folder.iterdir()} == {
        f"{dot}{name}.jsonl{end}"
        for name in ("sft", "ppo")
        for dot, end in (("", ""), (".", ".lit_rlhf.json"))
    }
    before = (folder / "sft.jsonl").stat().st_mtime_ns
    assert _read_responses(options(folders, tmp_path)) == first
    assert (folder / "sft.jsonl").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.5}, "temperature: 0.8 there, 0.5 now"),
        ({"seed": 1}, "another value of seed"),
        ({"max_prompts": 2}, "another value of prompts"),
    ],
)
def test_responses_sampled_with_other_options_are_refused(
    folders: Folders, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    _read_responses(options(folders, tmp_path))
    with pytest.raises(ValueError, match=message):
        _read_responses(options(folders, tmp_path, **change))


def test_responses_that_were_changed_are_refused(folders: Folders, tmp_path: Path) -> None:
    _read_responses(options(folders, tmp_path))
    with (tmp_path / "labels.responses/ppo.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(ValueError, match=r"expected the responses that .* lists"):
        _read_responses(options(folders, tmp_path))


@pytest.mark.slow  # starts the command three times
def test_command_labels_over_http_and_goes_on(tmp_path: Path) -> None:
    words = ["--responses", *write_two_files(tmp_path), "--output", "labels.jsonl", "--port", "0"]
    started = start_label_command(words, tmp_path)
    browser = Browser(started.port)
    page = browser.enter("Ann", started.token)
    assert label_all(browser, page, limit=3) == 3
    second = start_label_command_refused(words, tmp_path)
    assert "another run or command writes" in second
    started.process.send_signal(signal.SIGINT)
    assert started.process.wait(60) == 0
    assert "3 labels in labels.jsonl" in end_process(started.process)
    restarted = start_label_command(words, tmp_path)
    assert restarted.token == started.token
    browser = Browser(restarted.port)
    assert label_all(browser, browser.enter("Ann", restarted.token)) >= 3
    end_process(restarted.process)
    labels = read_labels(str(tmp_path / "labels.jsonl"))
    assert len({label.comparison for label in labels if not label.repeat}) == 6
    assert {label.choice for label in labels} == {"b"}


def start_label_command_refused(words: list[str], folder: Path) -> str:
    with pytest.raises(RuntimeError) as refused:
        start_label_command(words, folder)
    return str(refused.value)


@pytest.mark.parametrize("format", ["hh", "trl"])
def test_converted_labels_are_the_same_preferences(
    tmp_path: Path, format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "labels.jsonl"
    labels = [make_label("1", "a"), make_label("2", "b"), make_label("3", "tie")]
    path.write_bytes(b"".join(label.as_line() for label in labels))
    output = tmp_path / "pairs.jsonl"
    convert(["--labels", str(path), "--output", str(output), "--format", format])
    assert "2 preferences in" in (printed := capsys.readouterr().out)
    assert "left out: 1 x tie" in printed
    rows = read_lines(output)
    if format == "hh":
        assert rows[0] == {
            "chosen": "\n\nHuman: 1\n\nAssistant: short",
            "rejected": "\n\nHuman: 1\n\nAssistant: a longer one",
        }
    else:
        assert rows[1] == {
            "prompt": [{"role": "user", "content": "2"}],
            "chosen": [{"role": "assistant", "content": "a longer one"}],
            "rejected": [{"role": "assistant", "content": "short"}],
        }
    read_back, written = (
        [(one.prompt, one.chosen, one.rejected) for one in load_records("preference", [source])]
        for source in (DataSource(str(path), name="x"), DataSource(str(output), name="x"))
    )
    assert read_back == written


def test_system_turn_has_no_place_in_the_format_of_hh(tmp_path: Path) -> None:
    row = json.loads(make_label("1", "a").as_line())
    row["prompt"] = [{"role": "system", "content": "Be brief."}, *row["prompt"]]
    path = write_lines(tmp_path / "labels.jsonl", [row])
    message = refusal(convert, ["--labels", path, "--output", "pairs.jsonl", "--format", "hh"])
    assert "use the format trl" in message
