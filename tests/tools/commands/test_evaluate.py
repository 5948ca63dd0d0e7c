import json
import math
from functools import partial
from inspect import signature
from pathlib import Path

import pytest

from lit_rlhf.tools.commands.evaluate import COMMAND, EvaluateOptions
from lit_rlhf.tools.commands.generate import GenerateOptions
from tests.tools.evaluation.folders import (
    CHARACTERS,
    QUESTIONS,
    refusal,
    write_lines,
    write_policy,
    write_prompts,
)

main = partial(COMMAND.run, prog="lit_rlhf evaluate")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `sft` and `ppo` and a file of prompts; read only."""
    folder = tmp_path_factory.mktemp("evaluate")
    write_policy(folder / "sft", seed=0)
    write_policy(folder / "ppo", seed=1)
    write_prompts(folder / "prompts.jsonl")
    return folder


def arguments(root: Path, *more: str, prompts: str = "prompts.jsonl") -> list[str]:
    return [
        *("--policies", str(root / "sft"), str(root / "ppo")),
        *("--prompts", str(root / prompts)),
        *("--rewards", json.dumps({CHARACTERS: 1.0})),
        *("--max_new_tokens", "4", "--device", "cpu"),
        *more,
    ]


def test_comparison_reports(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report_file, responses_file = tmp_path / "new" / "report.json", tmp_path / "responses.jsonl"
    main(arguments(root, "--output", str(report_file), "--responses", str(responses_file)))
    assert "against sft" in capsys.readouterr().out
    report = json.loads(report_file.read_text("utf-8"))
    assert list(report["policies"]) == ["sft", "ppo"]
    assert report["n_prompts"] == len(QUESTIONS)
    assert report["settings"]["max_new_tokens"] == 4
    lines = responses_file.read_text("utf-8").splitlines()
    assert len(lines) == 2 * len(QUESTIONS)
    lengths = [json.loads(line)["length"] for line in lines]
    assert max(lengths) <= 4
    mean = report["policies"]["sft"]["response_length"]
    assert mean == pytest.approx(sum(lengths[: len(QUESTIONS)]) / len(QUESTIONS))


def test_papers_sampling(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    papers = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1}
    report_file = tmp_path / "report.json"
    main(arguments(root, "--output", str(report_file)))
    assert papers.items() <= json.loads(report_file.read_text("utf-8"))["settings"].items()
    note = "KL and perplexity are those of samples with top_p, repetition_penalty"
    assert note in capsys.readouterr().out
    main(arguments(root, "--temperature", "1", "--top_p", "1", "--repetition_penalty", "1"))
    assert note not in capsys.readouterr().out
    for command in (EvaluateOptions, GenerateOptions):
        parameters = signature(command).parameters
        assert {name: parameters[name].default for name in papers} == papers


def test_bad_prompts_are_placed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "hi"}\n{"query": "hi"}\n', encoding="utf-8")
    said = refusal(main, arguments(root, prompts=str(tmp_path / "bad.jsonl")))
    assert said.startswith("lit_rlhf evaluate: ")
    assert "bad.jsonl:2: field 'prompt': missing" in said


@pytest.fixture
def no_environment_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-evaluation-harness asks pip for all packages after every run, which takes seconds."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


def write_question(folder: Path) -> str:
    record = {"question": "One and one?", "choices": ["one", "two"], "answer": "B"}
    return write_lines(folder / "q.jsonl", [record])


@pytest.mark.usefixtures("no_environment_report")
def test_benchmarks_alone(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policies = {name: str(root / name) for name in ("sft", "ppo")}
    output = ("--choices", write_question(tmp_path), "--output", str(tmp_path / "report.json"))
    result = main(["--policies", *policies.values(), "--device", "cpu", *output])
    assert list(result) == ["inputs", "versions", "benchmarks", "settings"]
    assert "q.jsonl (acc)" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text("utf-8"))
    assert report["benchmarks"]["models"] == policies
    assert "policies" not in report
    assert report["settings"]["dtype"] == "float32"


@pytest.mark.usefixtures("no_environment_report")
def test_benchmarks_come_after_a_comparison_in_one_report(root: Path, tmp_path: Path) -> None:
    output = ("--choices", write_question(tmp_path), "--output", str(tmp_path / "report.json"))
    main(arguments(root, *output))
    report = json.loads((tmp_path / "report.json").read_text("utf-8"))
    assert list(report["policies"]) == ["sft", "ppo"]
    assert report["benchmarks"]["rows"][0]["questions"] == 1


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "to compare responses; or benchmarks or choices, got none of them"),
        (["--rewards", "{a:b: 1.0}"], "prompts: expected a file of prompts or a dataset's id with"),
        (["--choices", "q.jsonl", "--responses", "r.jsonl"], "id with responses, got none"),
        (["--choices", "q.jsonl", "--chart", "chart.png"], "id with chart, got none"),
    ],
)
def test_prompts_are_needed_for_responses(root: Path, more: list[str], said: str) -> None:
    assert said in refusal(main, ["--policies", str(root / "sft"), *more])


def test_best_of_n_is_reported_and_drawn(root: Path, tmp_path: Path) -> None:
    more = ("--best_of", "1", "2", "4", "--kl_chart", str(tmp_path / "kl.svg"))
    report = main(arguments(root, *more))
    assert [entry["n"] for entry in report["best_of"]] == [1, 2, 4]
    assert report["settings"]["samples_per_prompt"] == 4
    best = report["best_of"][2]
    assert best["kl"] == pytest.approx(math.log(4) - 0.75)
    assert set(best["differences"]["ppo"]["characters"]) == {"mean", "low", "high", "std"}
    assert report["policies"]["ppo"]["rewards"]["characters"]["minus_baseline"]["std"] > 0
    assert "best of n" in (tmp_path / "kl.svg").read_text("utf-8")
    with pytest.raises(SystemExit, match="rewards: expected at least one"):
        main([*arguments(root)[:5], "--best_of", "2"])
