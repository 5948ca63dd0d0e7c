import io
import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from lit_rlhf.cli.main import main as command
from lit_rlhf.models import save_model_folder
from lit_rlhf.rewards import RewardError
from lit_rlhf.tools.commands.generate import COMMAND
from tests.support.evaluation_folders import QUESTIONS, Folders, Sampling, read_lines, refusal
from tests.support.tiny_models import tiny_causal_lm, tiny_tokenizer

main = partial(COMMAND.run, prog="lit_rlhf generate")


def arguments(folders: Folders, *more: str) -> list[str]:
    models = ("--models", folders.sft, folders.ppo)
    return [*models, "--max_new_tokens", "4", "--device", "cpu", *more]


def test_responses_are_written_to_a_file(folders: Folders, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "new" / "responses.jsonl"
    source = ["--prompts", folders.prompts, "--max_prompts", "3"]
    sampling = ["--responses_per_prompt", "2", "--seed", "5"]
    main(arguments(folders, *source, *sampling, "--output", str(output)))
    written = read_lines(output)
    models = [folders.sft] * 6 + [folders.ppo] * 6
    assert [record["model"] for record in written] == models
    assert [record["prompt"][0]["content"] for record in written[:6:2]] == QUESTIONS[:3]
    assert {record["seed"] for record in written} == {5}
    papers = {"top_p": 0.9, "temperature": 0.8, "repetition_penalty": 1.1}
    assert papers.items() <= written[0]["settings"].items()
    assert max(record["length"] for record in written) <= 4
    assert capsys.readouterr().out == f"Responses: {output}\n"


def test_prompts_of_arguments_are_printed(folders: Folders, capsys: Any) -> None:
    prompts = ["--prompt", "hi", "so", "--prompt", "why?"]
    generation = main(arguments(folders, *prompts))
    responses = [r for of_model in generation.responses.values() for r in of_model]
    printed = capsys.readouterr().out
    assert printed.startswith("user: hi\nsft: ")
    assert printed.count("(cut off at 4 tokens)") == sum(not r.ended for r in responses)
    assert (len(responses), printed.count("\nppo: ")) == (6, 3)


def test_words_before_all_flags_are_prompts(tmp_path: Path, capsys: Any) -> None:
    save_model_folder(tiny_causal_lm(), tiny_tokenizer(), tmp_path / "bare")
    flags = ["--prompt", "why?", "--responses_per_prompt", "2", "--chat_template", "hh"]
    flags += ["--max_new_tokens", "4", "--device", "cpu"]
    main(["hi", "so", "--models", str(tmp_path / "bare"), *flags])
    for source in (["--prompt", "hi"], ["--chat"]):
        argv = ["--models", str(tmp_path / "bare"), "--max_new_tokens", "4", *source]
        message = refusal(main, argv)
        assert "choose one of the built-in ones: 'hh', 'paper-en', 'paper-zh'" in message
    printed = capsys.readouterr().out
    asked = [line for line in printed.splitlines() if line.startswith("user: ")]
    assert asked == ["user: hi", "user: so", "user: why?"]
    assert printed.count("\nbare 1: ") == printed.count("\nbare 2: ") == 3


def test_standard_output_takes_records(folders: Folders, capsys: Any) -> None:
    generation = main(arguments(folders, "--prompt", "hi", "--output", "-"))
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == json.loads(json.dumps(generation.records()))


def test_shortened_prompts_are_told(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    main(arguments(folders, "--prompt", "a b c d e f g h i j k l m", "--max_prompt_length", "16"))
    assert "sft: 1 prompts were shortened" in capsys.readouterr().err


ONE_PLACE = "expected exactly one of them (--prompts FILE, --prompt 'TEXT' or --chat), got "


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--prompts", "in.jsonl", "--output", "./in.jsonl"], "output: expected a file of its own"),
        ([], f"{ONE_PLACE}none"),
        (["--prompt", "hi", "--chat"], f"{ONE_PLACE}prompt and chat"),
        (["--prompt", "hi", "--prompts", "prompts.jsonl"], f"{ONE_PLACE}prompts and prompt"),
        (["--chat", "--output", "a.jsonl"], "expected neither with --chat"),
        (["--chat", "--responses_per_prompt", "2"], "expected neither with --chat"),
        (["--prompt", "hi", ""], "prompts[1]: field 'prompt': empty, got ''"),
        (["--prompt", "hi", "a</s>"], "prompts:2: a turn contains the text of the EOS token"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    folders: Folders, flags: list[str], expected: str
) -> None:
    message = refusal(main, arguments(folders, *flags))
    assert message.startswith("lit_rlhf generate: ")
    assert expected in message


def test_a_chat_reads_from_a_pipe(folders: Folders, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n/reset\n\nhi\n/quit\nnever\n"))
    main(arguments(folders, "--chat"))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    turns = shown.split("\nyou: ")
    assert turns[0] == ""
    assert turns[1].startswith("hi\nsft: ")
    assert "\nppo: " in turns[1]
    assert turns[2] == "/reset\nthe dialogue starts anew\n"
    assert turns[-2] == turns[1]  # forgotten, and the same seeds
    assert turns[-1] == "/quit\n"


LIMIT = "out of memory, or at a limit (`ulimit -v`"
WORKER = "a process that loads data was ended, perhaps because memory ran out: DataLoader worker"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), LIMIT),
        (RuntimeError("can't start new thread"), LIMIT),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), WORKER),
        (RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"), WORKER),
        (RewardError("reward function a:b raised SystemExit: 3"), "reward function a:b raised"),
    ],
)
def test_errors_end_in_a_line(folders: Folders, error: Exception, expected: str) -> None:
    with patch("lit_rlhf.tools.evaluation.sampling.load_policy", side_effect=error):
        message = refusal(main, arguments(folders, "--prompt", "hi"))
    assert message.startswith(f"lit_rlhf generate: {expected}")
    assert "\n" not in message


def test_ctrl_c_says_how_to_continue(folders: Folders, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "out.jsonl"
    flags = ["--prompt", "a", "b", "--batch_size", "1", "--output", str(output)]
    argv = arguments(folders, *flags)
    stops = patch("lit_rlhf.tools.evaluation.sampling.generate_responses", Sampling(last=1))
    with stops, pytest.raises(SystemExit) as ended:
        command(["generate", *argv])
    assert ended.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"lit_rlhf generate: interrupted; {output}.partial has what is finished; the same command "
        "continues from it"
    )


def test_error_after_ctrl_c_is_its_own(folders: Folders, capsys: Any) -> None:
    def interrupted(*_: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise TimeoutError from None  # as a pool of workers does

    loads = patch("lit_rlhf.tools.evaluation.sampling.load_policy", interrupted)
    with loads, pytest.raises(SystemExit) as ended:
        command(["generate", *arguments(folders, "--prompt", "hi")])
    assert ended.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1] == "lit_rlhf generate: interrupted"
