"""`lit_rlhf evaluate` with a judge: over models, over files of responses, and told wrongly."""

import json
from functools import partial
from pathlib import Path

import pytest

from lit_rlhf.files import write_manifest
from lit_rlhf.tools.commands.evaluate import COMMAND
from tests.support.judge_server import Asked, Failure, judge_server, longer_wins
from tests.tools.evaluation.folders import (
    CHARACTERS,
    QUESTIONS,
    refusal,
    write_lines,
    write_policy,
    write_prompts,
)

main = partial(COMMAND.run, prog="lit_rlhf evaluate")
SAID = {"sft": ["four", "four"], "ppo": ["longer", "a"], "raw": ["a", "b"]}


def write_responses(folder: Path) -> list[str]:
    files = []
    for name, responses in SAID.items():
        records = [{"prompt": f"p{i}", "response": text} for i, text in enumerate(responses)]
        files.append(write_lines(folder / f"{name}.jsonl", records))
    return files


def judged_by(base_url: str, folder: Path) -> list[str]:
    return [
        *("--judge.model", "tiny", "--judge.base_url", base_url),
        *("--judge.folder", str(folder), "--judge.max_retries", "0"),
    ]


def test_models_are_scored_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sft, ppo = (write_policy(tmp_path / n, seed=seed) for seed, n in enumerate(("sft", "ppo")))
    argv = [
        *("--policies", sft, ppo, "--prompts", write_prompts(tmp_path / "prompts.jsonl")),
        *("--rewards", json.dumps({CHARACTERS: 1.0}), "--max_new_tokens", "4", "--device", "cpu"),
        *("--chart", str(tmp_path / "chart.png"), "--output", str(tmp_path / "report.json")),
    ]
    with judge_server(longer_wins) as server:
        judge = judged_by(server.base_url, tmp_path / "judge")
        report = main([*argv, *judge, "--judge.criteria", "[helpful]"])
    written = (tmp_path / "report.json").read_text("utf-8")
    assert json.loads(written) == json.loads(json.dumps(report))
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    asked = {asked.data["conversation"][0]["content"] for asked in server.asked}
    assert asked <= set(QUESTIONS)  # as they were read, without the marks of the chat template
    # a judge that prefers the longer response says what the number of characters says
    (row,) = report["judge"]["policies"]
    by_reward = report["policies"]["ppo"]["rewards"]["characters"]["against_baseline"]
    assert row["against_baseline"] == by_reward
    assert "Judge tiny: " in capsys.readouterr().out


def test_files_of_responses_are_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with judge_server(longer_wins) as server:
        judge = judged_by(server.base_url, tmp_path / "judge")
        chart = ("--judge.criteria", "[harmless]", "--chart", str(tmp_path / "chart.svg"))
        files = write_responses(tmp_path)
        report = main(["--policies", *files, *judge, *chart])
        write_manifest(Path(files[1]), {"made": {"seed": 3}})
        assert main(["--policies", *files, *judge])["inputs"][files[1]]["seed"] == 3
        Path(files[1]).write_text("{}")
        with pytest.raises(SystemExit, match=r"expected the responses that .* lists, got another"):
            main(["--policies", *files, *judge])
    assert report["inputs"].keys() == set(files)
    assert (report["baseline"], report["n_prompts"]) == ("sft", 2)
    shares = [row["against_baseline"] for row in report["judge"]["policies"]]
    assert [(s["win"], s["tie"], s["lose"]) for s in shares] == [(0.5, 0.0, 0.5), (0.0, 0.0, 1.0)]
    printed = capsys.readouterr().out
    assert "8 questions, 0 of them answered by an earlier run" in printed
    assert "50 [9, 91]" in printed


def test_unread_replies_and_cut_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def half(asked: Asked) -> str:
        return longer_wins(asked) if asked.data["answer_a"] != "four" else "hm"

    with judge_server(half) as server:
        judge = judged_by(server.base_url, tmp_path / "judge")
        limits = ("--judge.max_attempts", "1", "--judge.max_characters", "5")
        policies = ("--policies", *write_responses(tmp_path))
        main([*policies, *judge, "--judge.criteria", "[helpful]", *limits])
    printed = capsys.readouterr().out
    assert "4 questions got no answer that could be read" in printed
    assert "questions had texts that were cut off after judge.max_characters" in printed


def test_a_judge_that_fails_ends_the_command_and_keeps_the_responses(tmp_path: Path) -> None:
    policies = [write_policy(tmp_path / name, seed) for seed, name in enumerate(("sft", "ppo"))]
    prompts = write_prompts(tmp_path / "prompts.jsonl", ["hi"])
    argv = ["--policies", *policies, "--prompts", prompts, "--max_new_tokens", "4"]
    argv += ["--device", "cpu", "--responses", str(tmp_path / "responses.jsonl")]
    with judge_server(lambda asked: Failure(401)) as server:
        said = refusal(main, [*argv, *judged_by(server.base_url, tmp_path / "judge")])
    assert said.startswith("lit_rlhf evaluate: the judge at http://127.0.0.1")
    assert len((tmp_path / "responses.jsonl").read_text("utf-8").splitlines()) == 2


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([], "judge.model: expected a judge to compare files of responses"),
        (["--prompts", "a.jsonl"], "prompts: expected none with files of responses"),
        (["--rewards", "{a: 1.0}"], "rewards: expected none with files of responses"),
        (["--output", "a", "--responses", "./a"], "responses: expected a file of its own, got ./a"),
        (["--chart", "chart.doc"], "chart: expected one of the suffixes"),
        (["--judge.concurrency", "0"], "judge.concurrency: expected an integer >= 1, got 0"),
    ],
)
def test_arguments_that_do_not_fit(tmp_path: Path, more: list[str], expected: str) -> None:
    said = refusal(main, ["--policies", *write_responses(tmp_path), *more])
    assert said.startswith(f"lit_rlhf evaluate: {expected}")


def test_models_and_files_cannot_be_mixed(tmp_path: Path) -> None:
    mixed = ["--policies", str(tmp_path / "sft"), *write_responses(tmp_path)]
    assert "got both; let" in refusal(main, mixed)


def test_a_config_file_names_the_judge(tmp_path: Path) -> None:
    config, folder = tmp_path / "evaluate.yaml", str(tmp_path / "judge")
    with judge_server(longer_wins) as server:
        judge = {"model": "tiny", "base_url": server.base_url, "criteria": ["helpful"]}
        content = {"policies": write_responses(tmp_path), "judge": judge | {"folder": folder}}
        config.write_text(json.dumps(content), "utf-8")
        report = main(["--config", str(config), "--judge.max_attempts", "1"])
    assert report["judge"]["usage"]["questions"] == 8
