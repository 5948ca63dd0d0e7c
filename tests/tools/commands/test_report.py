import json
from pathlib import Path
from typing import Any

import pytest

from lit_rlhf.cli.main import main as command
from lit_rlhf.tools.commands.report import main, parse_source
from tests.support.evaluation_folders import Folders, refusal, write_lines
from tests.support.report_pages import write_run

PAIRS = [
    {"prompt": "hi", "chosen": "hello to you", "rejected": "no"},
    {"prompt": "why?", "chosen": "so", "rejected": "because it is what it is"},
]


def read_numbers(folder: Path) -> dict[str, Any]:
    numbers: dict[str, Any] = json.loads((folder / "report.json").read_text("utf-8"))
    return numbers


def test_report_writes_a_page_and_numbers(folders: Folders, tmp_path: Path, capsys: Any) -> None:
    pairs = write_lines(tmp_path / "pairs.jsonl", PAIRS)
    argv = ["reward", "--model", folders.reward, "--preferences", pairs, "--device", "cpu"]
    main([*argv, "--output", str(tmp_path / "new"), "--language_model", folders.sft])
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["report.html", "report.json"]
    numbers = json.loads((tmp_path / "new/report.json").read_text("utf-8"))
    assert numbers["accuracy"]["pairs"] == 2
    assert numbers["perplexity"]["language model"]["all"] > 1
    assert "<!doctype html>" in (tmp_path / "new/report.html").read_text("utf-8")
    printed = capsys.readouterr().out
    assert "right [95 % interval]" in printed
    assert f"Page: {tmp_path / 'new/report.html'}" in printed


def test_strengths_of_a_file_are_on_the_page(folders: Folders, tmp_path: Path) -> None:
    pairs = write_lines(tmp_path / "pairs.jsonl", PAIRS)
    rows = [PAIRS[0] | {"strength": -1.5}, PAIRS[1] | {"strength": 2.0}]
    measured = write_lines(tmp_path / "strengths.jsonl", rows)
    argv = ["reward", "--model", folders.reward, "--preferences", pairs, "--device", "cpu"]
    argv += ["--output", str(tmp_path / "out"), "--strengths", measured]
    main(argv)
    strengths = read_numbers(tmp_path / "out")["strengths"]
    assert strengths["by_source"]["strengths"] == {"pairs": 2, "mean": 0.25, "negative": 0.5}
    (weak,) = strengths["weakest"]
    assert weak["prompt"] == [{"role": "user", "content": "hi"}]
    assert weak["location"].endswith("strengths.jsonl:1")
    main([*argv, "--mistakes", "0", "--seed", "3"])
    assert read_numbers(tmp_path / "out")["strengths"]["weakest"] == []
    assert "field 'strength': not a number" in refusal(main, [*argv[:-1], pairs])


def test_longest_dialogue_and_number_of_pairs_reach_the_report(
    folders: Folders, tmp_path: Path
) -> None:
    pairs = write_lines(tmp_path / "pairs.jsonl", PAIRS)
    argv = ["reward", "--model", folders.reward, "--preferences", pairs, "--device", "cpu"]
    argv += ["--output", str(tmp_path / "out"), "--max_length", "48", "--max_pairs", "1"]
    main(argv)
    numbers = read_numbers(tmp_path / "out")
    assert numbers["accuracy"]["pairs"] == 1
    assert numbers["settings"] == {"max_length": 48, "max_pairs": 1, "dtype": "float32"}
    assert numbers["sources"] == {"pairs": pairs}


def test_bad_pairs_are_placed(folders: Folders, tmp_path: Path) -> None:
    bad = write_lines(tmp_path / "bad.jsonl", [PAIRS[0], {"prompt": "hi", "chosen": "a"}])
    argv = ["reward", "--model", folders.reward, "--preferences", bad, "--device", "cpu"]
    argv += ["--output", str(tmp_path / "out")]
    message = refusal(main, argv)
    assert message.startswith("lit_rlhf report reward: ")
    assert "bad.jsonl:2: field 'rejected': missing" in message
    assert message.endswith("; --on_bad_record skip leaves such records out")
    assert not (tmp_path / "out").exists()
    main([*argv, "--on_bad_record", "skip"])
    assert sum(read_numbers(tmp_path / "out")["skipped"].values()) == 1
    Path(bad).write_text("", "utf-8")
    assert refusal(main, argv).endswith("bad.jsonl: empty file")


def test_sources_can_be_named(tmp_path: Path) -> None:
    assert parse_source("data/pairs.jsonl", split="test").label == "pairs"
    named = parse_source("mine=data/pairs.jsonl", split="test[:5]")
    assert (named.label, named.path, named.split) == ("mine", "data/pairs.jsonl", "test[:5]")
    with pytest.raises(ValueError, match=r"expected PATH or NAME=PATH, got '=a\.jsonl'"):
        parse_source("=a.jsonl", split="test")
    path = tmp_path / "lr=0.1.jsonl"
    path.write_text("{}\n", "utf-8")
    assert parse_source(str(path), split="test").path == str(path)


def test_unknown_report_is_refused() -> None:
    expected = "expected `reward` or the folder of a run's log, got 'rewards'"
    assert expected in refusal(main, ["rewards"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        ('{"step": null}\n', r"samples.jsonl:1: expected the number of a step"),
        ('{"step": 1}\n', "expected responses of at least two steps"),
    ],
)
def test_gain_of_a_file_that_has_none_is_an_error_in_one_line(
    tmp_path: Path, content: str | None, said: str
) -> None:
    file = tmp_path / "samples.jsonl"
    if content is not None:
        file.write_text(content)
    message = refusal(main, ["gain", str(file)])
    assert message.startswith("lit_rlhf report gain: ")
    assert said in message


def test_runs_are_put_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, coef in (("base", 0.1), ("no_ptx", 0.0)):
        write_run(tmp_path / name, {"rollout/score": [0.0] * 18 + [1.0, 2.0], "ppo/only": [1.0]})
        arguments = {"loss": {"ptx_coef": coef}, "output_dir": f"runs/{name}"}
        config = {"trainer": {"logger": {"name": name}}, "model": {"init_args": arguments}}
        (tmp_path / name / "config.yaml").write_text(json.dumps({"seed_everything": 0} | config))
    page = tmp_path / "page.html"
    main([str(tmp_path / "base"), str(tmp_path / "no_ptx"), "--output", str(page)])
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert table[1] == ["rollout/score", "1.5", "1.5"]  # the means of the last tenth
    place = table.index(["settings", "that", "differ"])
    assert table[place + 1] == ["model.init_args.loss.ptx_coef", "0.1", "0.0"]
    assert table[-1] == ["Report:", str(page)]
    assert page.is_file()


CALM = {"my/kl": 0.01, "tokens": 50.0}
FAR = {"my/kl": 0.4, "tokens": 150.0}
NAMES = "{rollout/kl_per_token: my/kl, rollout/response_length: tokens}"


@pytest.mark.parametrize(("far", "status"), [(3, 1), (0, None)])
def test_verdicts_are_printed_and_a_collapse_is_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], far: int, status: int | None
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(record) + "\n" for record in [CALM] * 10 + [FAR] * far))
    exit_status = None
    try:
        command(["watch", str(log), "--map", NAMES])
    except SystemExit as end:
        exit_status = end.code
    assert exit_status == status
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"{log}: {'collapsed after 13' if far else 'healthy after 10'} steps")
