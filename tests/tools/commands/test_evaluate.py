import errno
import json
import math
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from lit_rlhf.files import lock_outputs, write_manifest
from lit_rlhf.tools.commands.evaluate import COMMAND
from lit_rlhf.tools.evaluation.benchmarks import harness
from tests.support.evaluation_folders import (
    CHARACTERS,
    QUESTIONS,
    Folders,
    read_lines,
    refusal,
    write_lines,
    write_prompts,
)
from tests.support.judge_server import Failure, JudgeRequest, judge_server, longer_wins
from tests.support.labels import make_label

pytestmark = pytest.mark.usefixtures("no_environment_report")
main = partial(COMMAND.run, prog="lit_rlhf evaluate")


COMPARE = "lit_rlhf.tools.evaluation.compare_policies"


def arguments(folders: Folders, *more: str) -> list[str]:
    return [
        *("--policies", folders.sft, folders.ppo, "--prompts", folders.prompts),
        *("--rewards", json.dumps({CHARACTERS: 1.0})),
        *("--max_new_tokens", "4", "--device", "cpu"),
        *more,
    ]


def test_comparison_writes_its_report_and_responses(
    folders: Folders, tmp_path: Path, capsys: Any
) -> None:
    report_file, responses_file = tmp_path / "new" / "report.json", tmp_path / "responses.jsonl"
    main(arguments(folders, "--output", str(report_file), "--responses", str(responses_file)))
    printed = capsys.readouterr().out
    assert "against sft" in printed
    report = json.loads(report_file.read_text("utf-8"))
    assert list(report["policies"]) == ["sft", "ppo"]
    assert report["n_prompts"] == len(QUESTIONS)
    assert report["settings"]["max_new_tokens"] == 4
    lengths = [record["length"] for record in read_lines(responses_file)]
    assert len(lengths) == 2 * len(QUESTIONS)
    assert max(lengths) <= 4
    mean = report["policies"]["sft"]["response_length"]
    assert mean == pytest.approx(sum(lengths[: len(QUESTIONS)]) / len(QUESTIONS))
    # the paper's sampling changes the distribution, and that is said
    papers = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1}
    assert papers.items() <= report["settings"].items()
    note = "KL and perplexity are measured on samples with top_p, repetition_penalty"
    assert note in printed
    untruncated = ["--temperature", "1", "--top_p", "1", "--repetition_penalty", "1"]
    main(arguments(folders, *untruncated))
    assert note not in capsys.readouterr().out


def test_samples_are_kept_until_the_report_is_written(folders: Folders, tmp_path: Path) -> None:
    report, responses = str(tmp_path / "report.json"), str(tmp_path / "r.jsonl")
    words = arguments(folders, "--output", report, "--responses", responses)
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        patch("lit_rlhf.files.write_text", side_effect=full),
        pytest.raises(SystemExit, match="No space left"),
    ):
        main(words)
    written = read_lines(tmp_path / "r.jsonl")
    assert (tmp_path / "r.jsonl.partial").exists()
    with patch("lit_rlhf.tools.evaluation.sampling.generate_responses") as sample:
        main(words)  # the same command
    sample.assert_not_called()
    assert read_lines(tmp_path / "r.jsonl") == written
    names = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert names == {"report.json", "r.jsonl", ".r.jsonl.lit_rlhf.json"}


def test_file_that_another_command_writes_is_refused(folders: Folders, tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    with lock_outputs([output]):
        message = refusal(main, arguments(folders, "--output", str(output)))
    assert "report.json: another run or command writes to it: process" in message


def test_judges_folder_of_another_command_is_refused_before_anything_is_sampled(
    folders: Folders, tmp_path: Path
) -> None:
    words = ["--judge.model", "m", "--judge.folder", str(tmp_path / "judge")]
    with lock_outputs([tmp_path / "judge"]), patch(COMPARE) as compare:
        message = refusal(main, arguments(folders, *words))
    assert "judge: another run or command writes to it: process" in message
    compare.assert_not_called()


def test_options_reach_the_comparison_each_by_its_own_name(folders: Folders) -> None:
    expected = {
        "batch_size": 3,
        "tie_margin": 0.5,
        "chat_template": "hh",
        "max_prompt_length": 31,
        "max_prompts": 5,
        "on_bad_record": "skip",
        "seed": 7,
        "samples_per_prompt": 2,
    }
    words = [word for name, value in expected.items() for word in (f"--{name}", str(value))]
    enough = ValueError("enough")
    with patch(COMPARE, side_effect=enough) as compare:
        assert refusal(main, arguments(folders, *words)).endswith("enough")
    options = compare.call_args.kwargs
    assert {name: options[name] for name in expected} == expected


@pytest.mark.parametrize("output", ["s3://bucket/report.json", "~/report.json", ""])
def test_output_that_is_no_path_is_refused(folders: Folders, output: str) -> None:
    message = refusal(main, arguments(folders, "--output", output))
    assert "output: expected a path" in message
    assert list(Path().iterdir()) == []


def test_benchmarks_stand_alone_and_after_a_comparison(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"question": "One and one?", "choices": ["one", "two"], "answer": "B"}
    policies = {"sft": folders.sft, "ppo": folders.ppo}
    output = ["--choices", write_lines(tmp_path / "q.jsonl", [record])]
    output += ["--output", str(tmp_path / "report.json")]
    report_of_command = main(["--policies", *policies.values(), "--device", "cpu", *output])
    assert list(report_of_command) == ["inputs", "versions", "benchmarks", "settings"]
    assert "q.jsonl (acc)" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text("utf-8"))
    assert report["benchmarks"]["models"] == policies
    assert "policies" not in report
    assert report["settings"]["dtype"] == "float32"
    main(arguments(folders, *output))
    report = json.loads((tmp_path / "report.json").read_text("utf-8"))
    assert list(report["policies"]) == ["sft", "ppo"]
    assert report["benchmarks"]["rows"][0]["questions"] == 1


def test_shots_and_max_questions_reach_the_benchmarks(folders: Folders, tmp_path: Path) -> None:
    records = [
        {"question": f"One and {number}?", "choices": ["one", "two"], "answer": "B"}
        for number in range(5)
    ]
    questions = write_lines(tmp_path / "q.jsonl", records)
    limits = ("--shots", "1", "--max_questions", "3", "--benchmark_batch_size", "2")
    with patch.object(harness, "_run", wraps=harness._run) as run:
        report = main(["--policies", folders.sft, "--choices", questions, *limits])
    assert report["benchmarks"]["shots"] == 1
    assert [row["questions"] for row in report["benchmarks"]["rows"]] == [3]
    assert run.call_args.args[0].batch_size == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "to compare responses; or benchmarks or choices, got none of them"),
        (["--rewards", "{a:b: 1.0}"], "prompts: expected a file of prompts or a dataset's id with"),
        (["--choices", "q.jsonl", "--responses", "r.jsonl"], "id with responses, got none"),
        (["--choices", "q.jsonl", "--chart", "chart.png"], "id with chart, got none"),
    ],
)
def test_prompts_are_needed_for_responses(folders: Folders, words: list[str], message: str) -> None:
    assert message in refusal(main, ["--policies", folders.sft, *words])


def test_best_of_n_is_reported_and_drawn(folders: Folders, tmp_path: Path) -> None:
    options = ["--best_of", "1", "2", "4", "--kl_chart", str(tmp_path / "kl.svg")]
    report = main(arguments(folders, *options))
    assert [entry["n"] for entry in report["best_of"]] == [1, 2, 4]
    assert report["settings"]["samples_per_prompt"] == 4
    best = report["best_of"][2]
    assert best["kl"] == pytest.approx(math.log(4) - 0.75)
    assert set(best["differences"]["ppo"]["characters"]) == {"mean", "low", "high", "std"}
    assert report["policies"]["ppo"]["rewards"]["characters"]["minus_baseline"]["std"] > 0
    assert "best of n" in (tmp_path / "kl.svg").read_text("utf-8")
    with pytest.raises(SystemExit, match="rewards: expected at least one"):
        main([*arguments(folders)[:5], "--best_of", "2"])


def test_bad_prompts_are_placed(folders: Folders, tmp_path: Path) -> None:
    bad = write_lines(tmp_path / "bad.jsonl", [{"prompt": "hi"}, {"query": "hi"}])
    message = refusal(main, arguments(folders, "--prompts", bad))
    assert message.startswith(f"lit_rlhf evaluate: {bad}:2: field 'prompt': missing")


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


def test_models_are_scored_and_judged(folders: Folders, tmp_path: Path, capsys: Any) -> None:
    argv = [
        *("--policies", folders.sft, folders.ppo, "--prompts", folders.prompts),
        *("--rewards", json.dumps({CHARACTERS: 1.0}), "--max_new_tokens", "4", "--device", "cpu"),
        *("--chart", str(tmp_path / "chart.png"), "--output", str(tmp_path / "report.json")),
    ]
    with judge_server(longer_wins) as server:
        judge = judged_by(server.base_url, tmp_path / "judge")
        report = main([*argv, *judge, "--judge.criteria", "[helpful]"])
    written = (tmp_path / "report.json").read_text("utf-8")
    assert json.loads(written) == json.loads(json.dumps(report))
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    questions = {request.data["conversation"][0]["content"] for request in server.requests}
    assert questions <= set(QUESTIONS)  # as they were read, without the marks of the chat template
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
    def half(request: JudgeRequest) -> str:
        return longer_wins(request) if request.data["answer_a"] != "four" else "hm"

    with judge_server(half) as server:
        judge = judged_by(server.base_url, tmp_path / "judge")
        limits = ("--judge.max_attempts", "1", "--judge.max_characters", "5")
        policies = ("--policies", *write_responses(tmp_path))
        main([*policies, *judge, "--judge.criteria", "[helpful]", *limits])
    printed = capsys.readouterr().out
    assert "4 questions got no answer that could be read" in printed
    assert "questions had texts that were cut off after judge.max_characters" in printed


def test_a_judge_that_fails_ends_the_command_and_keeps_the_responses(
    folders: Folders, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", ["hi"])
    argv = ["--policies", folders.sft, folders.ppo, "--prompts", prompts, "--max_new_tokens", "4"]
    argv += ["--device", "cpu", "--responses", str(tmp_path / "responses.jsonl")]
    with judge_server(lambda request: Failure(401)) as server:
        message = refusal(main, [*argv, *judged_by(server.base_url, tmp_path / "judge")])
    assert message.startswith("lit_rlhf evaluate: the judge at http://127.0.0.1")
    assert len((tmp_path / "responses.jsonl").read_text("utf-8").splitlines()) == 2


def test_people_decide_beside_rewards_and_judge(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = [
        make_label(prompt, choice, name, policies={"sft": None})
        for prompt, choice in (("hi", "b"), ("a", "b"), ("why?", "a"), ("ok", "tie"))
        for name in ("ann", "bob")
    ]
    file = tmp_path / "labels.jsonl"
    file.write_bytes(b"".join(label.as_line() for label in labels))
    argv = ["--policies", folders.sft, folders.ppo, "--labels", str(file), "--device", "cpu"]
    argv += ["--page", str(tmp_path / "people.html"), "--output", str(tmp_path / "report.json")]
    argv += ["--rewards", json.dumps({CHARACTERS: 1.0, folders.reward: 1.0})]
    with judge_server(longer_wins) as server:
        judge = judged_by(server.base_url, tmp_path / "judge")
        report = main([*argv, *judge, "--chart", str(tmp_path / "chart.svg")])
    people = report["people"]
    assert report["baseline"] == "sft"
    outcomes = people["outcomes"]["ppo"]
    assert [outcomes[name] for name in ("win", "tie", "lose", "n")] == [0.5, 0.25, 0.25, 4]
    assert people["between"]["share"] == 1.0
    # B is the longer response; two of three preferences are for it
    names = ("characters", "longer is better", "judge: helpful", "judge: harmless")
    for name in names:
        assert (people["machines"][name]["n"], people["machines"][name]["share"]) == (3, 2 / 3)
    assert people["machines"]["reward"]["n"] == 3
    assert json.loads((tmp_path / "report.json").read_text("utf-8"))["people"] == people
    assert "most people with judge: helpful" in (tmp_path / "people.html").read_text("utf-8")
    assert "people" in (tmp_path / "chart.svg").read_text("utf-8")
    assert "most people with characters" in capsys.readouterr().out


def test_people_decide_about_files_of_responses(tmp_path: Path) -> None:
    files = write_responses(tmp_path)[:2]
    labels = [
        make_label("p0", "b", response_a="four", response_b="longer"),
        make_label("p1", "a", response_a="four", response_b="a"),
    ]
    file = tmp_path / "labels.jsonl"
    file.write_bytes(b"".join(label.as_line() for label in labels))
    report = main(["--policies", *files, "--labels", str(file)])
    assert report["people"]["outcomes"]["ppo"]["win"] == 0.5
    assert report["people"]["machines"]["longer is better"]["share"] == 1.0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--page", "people.html"], "labels: expected files of labels for the page"),
        (["--labels", "lost.jsonl"], "lost.jsonl: no such file"),
    ],
)
def test_labels_and_page_belong_together(folders: Folders, words: list[str], expected: str) -> None:
    argv = ["--policies", folders.sft, folders.ppo, "--prompts", folders.prompts, *words]
    assert expected in refusal(main, argv)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "judge.model: expected a judge to compare files of responses"),
        (["--prompts", "a.jsonl"], "prompts: expected none with files of responses"),
        (["--rewards", "{a: 1.0}"], "rewards: expected none with files of responses"),
        (["--output", "a", "--responses", "./a"], "responses: expected a file of its own, got ./a"),
        (["--chart", "chart.doc"], "chart: expected one of the suffixes"),
        (["--judge.concurrency", "0"], "judge.concurrency: expected an integer >= 1, got 0"),
        (["--policies", "sft", "ppo.jsonl"], "policies: expected only models or only files of"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    tmp_path: Path, words: list[str], expected: str
) -> None:
    message = refusal(main, ["--policies", *write_responses(tmp_path), *words])
    assert message.startswith(f"lit_rlhf evaluate: {expected}")


def test_a_config_file_names_the_judge(tmp_path: Path) -> None:
    config, folder = tmp_path / "evaluate.yaml", str(tmp_path / "judge")
    with judge_server(longer_wins) as server:
        judge = {"model": "tiny", "base_url": server.base_url, "criteria": ["helpful"]}
        content = {"policies": write_responses(tmp_path), "judge": judge | {"folder": folder}}
        config.write_text(json.dumps(content), "utf-8")
        report = main(["--config", str(config), "--judge.max_attempts", "1"])
    assert report["judge"]["usage"]["questions"] == 8
