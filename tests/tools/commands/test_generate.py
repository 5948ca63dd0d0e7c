import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lit_rlhf.models import save_model_folder
from lit_rlhf.tools.commands.generate import COMMAND
from tests.support.tiny_models import tiny_causal_lm, tiny_tokenizer
from tests.tools.evaluation.folders import QUESTIONS, refusal, write_policy, write_prompts

main = partial(COMMAND.run, prog="lit_rlhf generate")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `sft`, `ppo` and `bare`, without a template, and a file of prompts; read only."""
    folder = tmp_path_factory.mktemp("generate")
    write_policy(folder / "sft", seed=0)
    write_policy(folder / "ppo", seed=1)
    save_model_folder(tiny_causal_lm(), tiny_tokenizer(), folder / "bare")
    write_prompts(folder / "prompts.jsonl")
    return folder


def arguments(root: Path, *more: str, models: tuple[str, ...] = ("sft", "ppo")) -> list[str]:
    folders = [str(root / model) for model in models]
    return ["--models", *folders, "--max_new_tokens", "4", "--device", "cpu", *more]


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def refused(argv: list[str]) -> str:
    text = refusal(main, argv)
    assert text.startswith("lit_rlhf generate: ")
    return text


def test_responses_to_file(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "responses.jsonl"
    source = ("--prompts", str(root / "prompts.jsonl"), "--max_prompts", "3")
    sampling = ("--responses_per_prompt", "2", "--seed", "5")
    main(arguments(root, *source, *sampling, "--output", str(output)))
    written = records(output.read_text("utf-8"))
    models = [str(root / model) for model in ("sft", "ppo") for _ in range(6)]
    assert [record["model"] for record in written] == models
    assert [record["prompt"][0]["content"] for record in written[:6:2]] == QUESTIONS[:3]
    assert {record["seed"] for record in written} == {5}
    papers = {"top_p": 0.9, "temperature": 0.8, "repetition_penalty": 1.1}
    assert papers.items() <= written[0]["settings"].items()
    assert max(record["length"] for record in written) <= 4
    assert capsys.readouterr().out == f"Responses: {output}\n"


def test_prompts_of_arguments_are_printed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generation = main(arguments(root, "--prompt", "hi", "so", "--prompt", "why?"))
    responses = [r for of_model in generation.responses.values() for r in of_model]
    printed = capsys.readouterr().out
    assert printed.startswith("user: hi\nsft: ")
    for question in ("hi", "so", "why?"):
        assert printed.count(f"user: {question}\n") == 1
    assert printed.count("(cut off at 4 tokens)") == sum(not r.ended for r in responses)
    assert len(responses) == 6
    assert printed.count("\nppo: ") == 3


def test_words_before_all_flags_are_prompts(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--prompt", "why?", "--responses_per_prompt", "2")
    main(["hi", "so", *arguments(root, *flags, models=("sft",))])
    printed = capsys.readouterr().out
    asked = [line for line in printed.splitlines() if line.startswith("user: ")]
    assert asked == ["user: hi", "user: so", "user: why?"]
    assert printed.count("\nsft 1: ") == printed.count("\nsft 2: ") == 3


def test_standard_output_takes_records(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generation = main(arguments(root, "--prompt", "hi", "--output", "-"))
    printed = records(capsys.readouterr().out)
    assert printed == json.loads(json.dumps(generation.records()))


def test_shortened_prompts_are_told(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(arguments(root, "--prompt", "a b c d e f g h i j k l m", "--max_prompt_length", "16"))
    assert "sft: 1 prompts were shortened" in capsys.readouterr().err


def test_prompts_are_not_replaced_by_responses(root: Path) -> None:
    text = refused([*arguments(root, "--prompts", "in.jsonl"), "--output", "./in.jsonl"])
    assert "output: expected a file of its own, got ./in.jsonl, one that this command reads" in text


@pytest.mark.parametrize(
    ("flags", "got"),
    [
        ([], "got none"),
        (["--prompt", "hi", "--chat"], "got prompt and chat"),
        (["--prompt", "hi", "--prompts", "prompts.jsonl"], "got prompts and prompt"),
    ],
)
def test_prompts_come_from_one_place(root: Path, flags: list[str], got: str) -> None:
    text = refused(arguments(root, *flags))
    assert "expected exactly one of them (--prompts FILE, --prompt 'TEXT' or --chat)" in text
    assert got in text


@pytest.mark.parametrize("flags", [["--output", "a.jsonl"], ["--responses_per_prompt", "2"]])
def test_a_chat_has_no_file_of_responses(root: Path, flags: list[str]) -> None:
    assert "expected neither with --chat" in refused(arguments(root, "--chat", *flags))


@pytest.mark.parametrize("source", [["--prompt", "hi"], ["--chat"]])
def test_model_without_chat_template_says_which_there_are(root: Path, source: list[str]) -> None:
    text = refused(arguments(root, *source, models=("sft", "bare")))
    assert f"{root / 'bare'}" in text
    assert "choose one of the built-in ones: 'hh', 'paper-en', 'paper-zh'" in text
    main(arguments(root, "--prompt", "hi", "--chat_template", "hh", models=("sft", "bare")))


def test_a_bad_prompt_of_an_argument_is_named_by_its_number(root: Path) -> None:
    said = refused(arguments(root, "--prompt", "hi", ""))
    assert "prompts[1]: field 'prompt': empty, got ''" in said
    said = refused(arguments(root, "--prompt", "hi", "a</s>"))
    assert "prompts:2: a turn contains the text of the EOS token" in said


def test_a_chat_reads_from_a_pipe(root: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n/reset\n\nhi\n/quit\nnever\n"))
    main(arguments(root, "--chat"))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    turns = shown.split("\nyou: ")
    assert turns[0] == ""
    assert turns[1].startswith("hi\nsft: ")
    assert "\nppo: " in turns[1]
    assert turns[2] == "/reset\nthe dialogue starts anew\n"
    assert turns[-2] == turns[1]  # forgotten, and the same seeds
    assert turns[-1] == "/quit\n"
