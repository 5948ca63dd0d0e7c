import json
from pathlib import Path

import pytest

from lit_rlhf.tools.commands.report import main, parse_source
from tests.callbacks.reports import write_run
from tests.tools.evaluation.folders import refusal, write_lines, write_policy, write_reward

PAIRS = [
    {"prompt": "hi", "chosen": "hello to you", "rejected": "no"},
    {"prompt": "why?", "chosen": "so", "rejected": "because it is what it is"},
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `sft` and `reward` and a file of pairs; read only."""
    folder = tmp_path_factory.mktemp("report")
    write_reward(folder / "reward", write_policy(folder / "sft"))
    write_lines(folder / "pairs.jsonl", PAIRS)
    return folder


def arguments(root: Path, output: Path, *more: str, preferences: str = "pairs.jsonl") -> list[str]:
    return [
        *("reward", "--model", str(root / "reward"), "--preferences", str(root / preferences)),
        *("--output", str(output), "--device", "cpu", *more),
    ]


def test_page_and_numbers(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(arguments(root, tmp_path / "new", "--language_model", str(root / "sft")))
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["report.html", "report.json"]
    numbers = json.loads((tmp_path / "new/report.json").read_text("utf-8"))
    assert numbers["accuracy"]["pairs"] == 2
    assert numbers["perplexity"]["language model"]["all"] > 1
    assert "<!doctype html>" in (tmp_path / "new/report.html").read_text("utf-8")
    printed = capsys.readouterr().out
    assert "right [95 % interval]" in printed
    assert f"Page: {tmp_path / 'new/report.html'}" in printed


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "bad.jsonl: empty file"),
        (
            '{"prompt": "hi", "chosen": "a", "rejected": "b"}\n{"prompt": "hi", "chosen": "a"}\n',
            "bad.jsonl:2: field 'rejected': missing, or no assistant turn at the end "
            "(the row has prompt, chosen); --on_bad_record skip leaves such records out",
        ),
    ],
)
def test_bad_pairs_are_placed(root: Path, tmp_path: Path, content: str, expected: str) -> None:
    (tmp_path / "bad.jsonl").write_text(content, "utf-8")
    argv = arguments(root, tmp_path / "out", preferences=str(tmp_path / "bad.jsonl"))
    said = refusal(main, argv)
    assert said.startswith("lit_rlhf report reward: ")
    assert expected in said
    assert not (tmp_path / "out").exists()
    if content:
        report = main([*argv, "--on_bad_record", "skip"])
        assert sum(report.skipped.values()) == 1


def test_sources_can_be_named(tmp_path: Path) -> None:
    assert parse_source("data/pairs.jsonl", "test").label == "pairs"
    named = parse_source("mine=data/pairs.jsonl", "test[:5]")
    assert (named.label, named.path, named.split) == ("mine", "data/pairs.jsonl", "test[:5]")
    with pytest.raises(ValueError, match=r"expected PATH or NAME=PATH, got '=a\.jsonl'"):
        parse_source("=a.jsonl", "test")
    path = tmp_path / "lr=0.1.jsonl"
    path.write_text("{}\n", "utf-8")
    assert parse_source(str(path), "test").path == str(path)


def test_help_lists_the_reports(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    assert "reward" in capsys.readouterr().out
    expected = "expected `reward` or the folder of a run's log, got 'rewards'"
    assert expected in refusal(main, ["rewards"])


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
