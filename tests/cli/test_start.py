"""`lit_rlhf start`: configurations for one's own data, which the stages can run."""

import json
import random
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from transformers import AutoTokenizer

from lit_rlhf.cli import own_data
from lit_rlhf.cli.main import main
from lit_rlhf.cli.time_estimate import Work
from lit_rlhf.data import DataSource, load_records, prompt_of, split_records
from lit_rlhf.files import lock_outputs
from tests.support.evaluation_folders import write_lines
from tests.support.stages import write_models
from tests.support.tiny_models import tiny_config
from tests.support.tiny_runs import run

ROWS = [
    {"prompt": f"what is {n}?", "chosen": f"it is {n}", "rejected": "no idea"} for n in range(40)
]
CHINESE_ROWS = [
    {"prompt": f"第{n}种金属叫什么名字?", "chosen": f"第{n}种金属是铁。", "rejected": "我不知道。"}
    for n in range(40)
]
SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]


def write_text(rng: random.Random, n_words: int) -> str:
    """Words of no language, which a tokenizer cannot learn as a whole."""
    return " ".join("".join(rng.choices(SYLLABLES, k=3)) for _ in range(n_words))


def write_dialogues(n: int, longest: int) -> list[dict[str, str]]:
    """Pairs in HH-RLHF's format, of up to `longest` words in the first human turn."""
    rng = random.Random(0)
    rows = []
    for number in range(n):
        first = write_text(rng, 5 + longest * number // n)
        prompt = f"\n\nHuman: {first}\n\nAssistant: {write_text(rng, 8)}\n\nHuman: why?"
        answers = [f"{prompt}\n\nAssistant: {write_text(rng, k)}" for k in (12, 6)]
        rows.append(dict(zip(("chosen", "rejected"), answers, strict=True)))
    return rows


def configuration(path: Path) -> dict[str, Any]:
    loaded = yaml.safe_load(path.read_text("utf-8"))
    return {**loaded["model"]["init_args"], **loaded["data"]["init_args"]}


def configurations(root: str) -> dict[str, dict[str, Any]]:
    return {name: configuration(Path(f"{root}/{name}.yaml")) for name in ("sft", "reward", "ppo")}


def read_commands(shown: str) -> list[list[str]]:
    """The words of the commands that `start` has printed, without the program's name."""
    lines = shown.partition("Next, in this order:\n")[2].splitlines()
    return [shlex.split(line)[1:] for line in lines]


def option(command: Iterable[str], name: str) -> str:
    words = list(command)
    return words[words.index(f"--{name}") + 1]


def test_records_that_cannot_be_encoded_are_told_with_what_to_do(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    dialogues = [
        {**row, "prompt": f"hello\n\nAssistant: hi\n\nHuman: {row['prompt']}"} for row in ROWS[:10]
    ]
    write_lines(Path("pairs.jsonl"), [*dialogues, *ROWS[10:]])
    main(["start", "pairs.jsonl"])
    assert "left out 10 of 40 records: 10 x a turn contains the text of a control" in caplog.text
    shown = capsys.readouterr().out
    assert "A dialogue of several turns is a list of messages, or stands whole in" in shown
    assert "fits 128 tokens: 30 of 30 (100 %)\n" in shown


def test_sizes_follow_the_records_that_can_be_encoded() -> None:
    refused = [{**row, "prompt": f"hi\n\nAssistant: {row['prompt']}"} for row in ROWS[:38]]
    write_lines(Path("few.jsonl"), [*refused, *ROWS[38:]])
    main(["start", "few.jsonl"])
    config = configuration(Path("runs/few/sft.yaml"))
    # none of two prompts can be held out
    assert (config["val_fraction"], config["test_fraction"]) == (0.0, 0.0)
    long = [{"prompt": f"why {n}?", "chosen": "word " * 60, "rejected": "no"} for n in range(200)]
    write_lines(Path("long.jsonl"), long)
    main(["start", "long.jsonl"])
    refused = [{**row, "prompt": f"hi\n\nAssistant: {row['prompt']}"} for row in long]
    write_lines(Path("half.jsonl"), [*long, *refused])
    main(["start", "half.jsonl"])
    whole, half = (
        configuration(Path(f"runs/{name}/sft.yaml"))["tokens_per_batch"]
        for name in ("long", "half")
    )
    assert 128 < half == pytest.approx(whole, rel=0.1)  # the tokenizers differ a little


def test_adapters_save_the_gradients_of_the_weights() -> None:
    # 5 weights: 10 tokens at 6 operations, or at 4; 3 tokens at 2; 2 tokens at 4 times 2
    assert Work(learned=10, scored=3, sampled=2).operations(5) == 300 + 30 + 80
    assert Work(learned=10, scored=3, sampled=2, has_adapters=True).operations(5) == 310


def test_work_of_each_stage_is_its_tokens_by_hand() -> None:
    plain = {
        "trainer": {"max_epochs": 2},
        "model": {"init_args": {}},
        "data": {"init_args": {"samples_per_epoch": 5}},
    }
    adapters = {"model": {"init_args": {"network": {"lora_rank": 4}}}}
    lengths = own_data._Lengths(
        by_record=[10], dialogue=10.0, prompt=3.0, max_length=12, max_new_tokens=4
    )
    configs = {"sft": plain, "reward": plain | adapters, "ppo": plain}
    # 7 records twice: one dialogue of 10 tokens for SFT, two for the reward model
    # 5 prompts twice, of 3 tokens with responses of 4: two networks learn, and four score
    assert own_data._count_work(configs, lengths, n_records=7) == {
        "SFT": Work(learned=140.0),
        "the reward model": Work(learned=280.0, has_adapters=True),
        "PPO": Work(learned=140.0, scored=280.0, sampled=70.0),
    }


def test_plain_text_gets_sft_alone(capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(0)
    texts = [{"text": write_text(rng, 10 + n)} for n in range(40)]
    write_lines(Path("texts.jsonl"), texts)
    main(["start", "texts.jsonl"])
    shown = capsys.readouterr().out
    assert "texts.jsonl: 40 records that serve as plain text, for SFT alone, 0 equal" in shown
    assert "Columns that are read: text\n" in shown
    assert shown.count("\ntext:\n") == 3
    config = configuration(Path("runs/texts/sft.yaml"))
    length = config["max_length"]
    assert f"\nTexts are cut into blocks of {length} tokens; nothing is left out\n" in shown
    assert "\nWritten to runs/texts: sft.yaml\n" in shown
    assert "prompt, chosen and rejected: lit_rlhf start PAIRS runs/texts/sft\n" in shown
    assert read_commands(shown) == [["fit", "--config", "runs/texts/sft.yaml"]]
    assert (config["val_fraction"], config["test_fraction"]) == (0.05, 0.0)
    assert not Path("runs/texts/heldout.jsonl").exists()


def test_ppo_is_validated_at_its_end() -> None:
    write_lines(Path("pairs.jsonl"), ROWS)
    main(["start", "pairs.jsonl"])
    trainer = yaml.safe_load(Path("runs/pairs/ppo.yaml").read_text("utf-8"))["trainer"]
    assert (trainer["val_check_interval"], trainer["check_val_every_n_epoch"]) == (0.5, 1)


def test_pairs_get_3_stages(capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"{','.join(row.values())}\n" for row in [*ROWS, ROWS[0]])
    Path("pairs.csv").write_text(f"prompt,chosen,rejected\n{rows}")
    main(["start", "pairs.csv"])
    shown = capsys.readouterr().out
    equal = "1 equal an earlier one (drop_duplicates: true in train_sources leaves them out)"
    assert f"41 records that serve as preferences, {equal}\n" in shown
    assert "Columns that are read: prompt, chosen, rejected\n" in shown
    assert "fits 128 tokens: 41 of 41 (100 %)\n" in shown
    assert "  | Human: what is 0?\n  | \n  | Assistant:[[ it is 0<|endoftext|>]]\n" in shown
    assert shown.count("\nrejected:\n") == 3
    stages = {name: configuration(Path(f"runs/pairs/{name}.yaml")) for name in ("sft", "ppo")}
    assert stages["sft"]["model_path"] == "runs/pairs/base"
    assert stages["sft"]["tokens_per_batch"] == 128  # 41 short rows: as long as one may be
    assert stages["ppo"]["model_path"] == stages["sft"]["output_dir"] == "runs/pairs/sft"
    reward = configuration(Path("runs/pairs/reward.yaml"))
    assert stages["ppo"]["rewards"] == {reward["output_dir"]: 1.0}
    for stage in ("sft", "reward", "ppo"):
        assert f"\n  lit_rlhf fit --config runs/pairs/{stage}.yaml\n" in shown
    # the prompts of the evaluation are those that the stages leave out
    records = load_records("prompt", [DataSource("pairs.csv")])
    held_out = load_records("prompt", [DataSource("runs/pairs/heldout.jsonl")])
    test = split_records(records, val_fraction=0.05, test_fraction=0.05, seed=0).test
    assert [prompt_of(r) for r in held_out] == [*dict.fromkeys(map(prompt_of, test))]
    pairs = load_records("preference", [DataSource("runs/pairs/heldout_pairs.jsonl")])
    assert {prompt_of(pair) for pair in pairs} == set(map(prompt_of, test))
    answers = {row["prompt"]: (row["chosen"], row["rejected"]) for row in ROWS}
    for pair in pairs:
        assert (pair.chosen, pair.rejected) == answers[pair.prompt[0].content]
    report = "lit_rlhf report reward --model runs/pairs/reward --preferences"
    assert f"\n  {report} runs/pairs/heldout_pairs.jsonl --output runs/pairs/reward_rep" in shown
    trainer = yaml.safe_load(Path("runs/pairs/ppo.yaml").read_text("utf-8"))["trainer"]
    (timeline,) = (c for c in trainer["callbacks"] if "SampleTimeline" in c["class_path"])
    assert timeline["init_args"]["prompts"] == [prompt_of(record)[0].content for record in held_out]
    with pytest.raises(SystemExit, match="output_dir: expected a free name, got runs/pairs"):
        main(["start", "pairs.csv"])


def test_responses_get_sft_on_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_models(tmp_path)
    rows = [{"prompt": r["prompt"], "response": r["chosen"]} for r in ROWS]
    write_lines(tmp_path / "rows.jsonl", rows)
    main(["start", "rows.jsonl", "policy", "--output_dir", "mine"])
    assert "a reward model needs preferences" in capsys.readouterr().out
    assert configuration(Path("mine/sft.yaml"))["model_path"] == "policy"
    assert not Path("mine/ppo.yaml").exists()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            "prompt\na\n",
            r"pairs\.csv:2: field 'answer': missing, .*the row has prompt.*; columns of other names"
            r" are given by --columns '\{prompt: COLUMN, .*--map package\.module:function",
        ),
        ("a,b\nx,y\n", r"no known format has these fields \(a, b; docs.*--columns"),
    ],
)
def test_a_file_that_does_not_serve_leaves_nothing_behind(table: str, message: str) -> None:
    Path("pairs.csv").write_text(table)
    with pytest.raises(SystemExit, match=message):
        main(["start", "pairs.csv"])
    assert not Path("runs").exists()


def test_start_that_fails_leaves_the_name_free() -> None:
    write_lines(Path("pairs.jsonl"), ROWS)
    full = patch.object(own_data, "write_text", side_effect=OSError("No space left on device"))
    with full, pytest.raises(SystemExit, match="No space left"):
        main(["start", "pairs.jsonl", "--output_dir", "own"])
    assert not Path("own").exists()


def test_folder_that_another_start_writes_is_refused() -> None:
    write_lines(Path("pairs.jsonl"), ROWS)
    with lock_outputs(["runs/pairs"]), pytest.raises(SystemExit, match="another run or command"):
        main(["start", "pairs.jsonl"])


def test_data_that_cannot_be_loaded_get_no_advice_about_columns() -> None:
    Path("folder").mkdir()
    with pytest.raises(SystemExit) as error:
        main(["start", "folder"])
    assert "not a dataset that can be loaded" in str(error.value)
    assert "--columns" not in str(error.value)


@pytest.mark.parametrize("name", ["pairs.xlsx", "lost.xlsx", "pairs.docx"])
def test_a_file_of_another_kind_is_not_looked_for_on_the_hub(name: str) -> None:
    for file in ("pairs.xlsx", "pairs.docx"):
        Path(file).write_bytes(b"PK")
    with pytest.raises(SystemExit, match=rf"{name}: expected a file with one of .*saved as \.csv"):
        main(["start", name])


def test_what_is_left_out_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    write_lines(Path("pairs.jsonl"), [*ROWS, {"prompt": "why?", "chosen": "", "rejected": "b"}])
    main(["start", "pairs.jsonl"])
    assert caplog.text.count("skipped 1 of 41 records as bad") == 1


def test_columns_of_other_names_reach_all_stages(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"ask": row["prompt"], "good": row["chosen"], "bad": row["rejected"], "a\nb": "c"}
        for row in ROWS
    ]
    write_lines(Path("rows.jsonl"), rows)
    columns = {"prompt": "ask", "chosen": "good", "rejected": "bad"}
    main(["start", "rows.jsonl", "--columns", json.dumps(columns)])
    shown = capsys.readouterr().out
    read = "Columns that are read: prompt (ask), chosen (good), rejected (bad); not read: a\\nb\n"
    assert read in shown
    for config in configurations("runs/rows").values():
        assert config["train_sources"] == [{"path": "rows.jsonl", "columns": columns}]


def test_a_function_turns_rows_into_records_for_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(".")
    Path("own_rows.py").write_text(
        "def pair(row):\n"
        "    good, bad = row['answers']\n"
        "    return {'prompt': row['q'], 'chosen': good, 'rejected': bad}\n"
    )
    rows = [{"q": row["prompt"], "answers": [row["chosen"], row["rejected"]]} for row in ROWS]
    write_lines(Path("rows.jsonl"), rows)
    main(["start", "rows.jsonl", "--map", "own_rows:pair"])
    for config in configurations("runs/rows").values():
        assert config["train_sources"] == [{"path": "rows.jsonl", "map": "own_rows:pair"}]


def test_sizes_fit_the_model_and_what_is_lost_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(Path("long.jsonl"), write_dialogues(40, longest=400))
    main(["start", "long.jsonl"])
    shown = capsys.readouterr().out
    fits = re.search(r"^fits 512 tokens: (\d+) of 40 \((\d+) %\); (.*)$", shown, re.MULTILINE)
    assert fits is not None
    assert 0 < int(fits[1]) < 40
    assert int(fits[2]) == round(100 * int(fits[1]) / 40)
    needed = int(re.search(r"--max_length (\d+)$", fits[3])[1])  # type: ignore[index]
    assert needed % 64 == 0
    assert fits[3] == (
        f"the others lose their oldest turns, or are left out; {needed:,} would take all: "
        f"--max_length {needed}"
    )
    configs = configurations("runs/long")
    assert {config["max_length"] for config in configs.values()} == {512}
    new_tokens = configs["ppo"]["sampling"]["max_new_tokens"]
    assert configs["ppo"]["max_prompt_length"] + new_tokens == 512
    evaluate = read_commands(shown)[-1]
    assert int(option(evaluate, "max_new_tokens")) == new_tokens
    assert int(option(evaluate, "max_prompt_length")) == 512 - new_tokens
    assert re.search(r"^Time here, roughly: SFT .+, the reward model .+, PPO .+$", shown, re.M)
    main(["start", "long.jsonl", "--output_dir", "all", "--max_length", str(needed)])
    assert f"fits {needed:,} tokens: 40 of 40 (100 %)\n" in capsys.readouterr().out
    assert {config["max_length"] for config in configurations("all").values()} == {needed}


def test_sizes_follow_the_positions_of_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config("llama")
    config.max_position_embeddings = 8192
    write_models(tmp_path, config)
    write_lines(Path("long.jsonl"), write_dialogues(40, longest=400))
    main(["start", "long.jsonl", "policy"])
    configs = configurations("runs/long")
    length = configs["sft"]["max_length"]
    assert 1000 < length < 8192
    assert f"fits {length:,} tokens: " in capsys.readouterr().out
    assert configs["reward"]["max_length"] == configs["ppo"]["max_length"] == length
    assert all("max_prompt_length" not in configs[stage] for stage in ("sft", "reward"))
    with pytest.raises(SystemExit, match="max_length: expected at most the 8,192 positions of pol"):
        main(["start", "long.jsonl", "policy", "--output_dir", "b", "--max_length", "9000"])
    with pytest.raises(SystemExit, match="max_length: expected at least 16 tokens, got 2"):
        main(["start", "long.jsonl", "--output_dir", "b", "--max_length", "2"])
    assert not Path("b").exists()


def test_shown_texts_have_at_most_six_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    write_lines(Path("long.jsonl"), write_dialogues(40, longest=400)[30:])
    main(["start", "long.jsonl"])
    shown = capsys.readouterr().out
    texts = re.findall(r"^(?:chosen|rejected):\n((?:  \| .*\n)+)", shown, re.MULTILINE)
    assert len(texts) == 6
    for text in texts:
        assert 4 < len(text.splitlines()) <= 6
        assert max(map(len, text.splitlines())) <= 80
        assert re.search(r"^  \| \.\.\. \d+ more lines \.\.\.$", text, re.MULTILINE)
        assert "Assistant:[[" in text
        assert text.rstrip().endswith("<|endoftext|>]]")
    assert len(shown.splitlines()) < 75


def test_chinese_text_gets_the_chinese_template(capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(Path("pairs.jsonl"), CHINESE_ROWS)
    main(["start", "pairs.jsonl"])
    assert "  | <|Human|>第0种金属叫什么名字?<|endoftext|><|MOSS|>[[" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained("runs/pairs/base")
    assert len(tokenizer("<|Human|><|MOSS|>").input_ids) == 2


@pytest.mark.parametrize("template", ["hh", "paper-zh"])
def test_a_model_without_a_template_gets_one_for_its_text(tmp_path: Path, template: str) -> None:
    write_models(tmp_path)
    for file in ("chat_template.jinja", "text_contract.json"):
        (tmp_path / "policy" / file).unlink(missing_ok=True)
    write_lines(Path("pairs.jsonl"), CHINESE_ROWS if template == "paper-zh" else ROWS)
    main(["start", "pairs.jsonl", "policy"])
    assert configuration(Path("runs/pairs/sft.yaml"))["chat_template"] == template


def test_one_row_is_trained_on_and_evaluated(capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(Path("pairs.jsonl"), ROWS[:1])
    main(["start", "pairs.jsonl"])
    assert "Too few prompts to hold some out: the evaluation uses" in capsys.readouterr().out
    for config in configurations("runs/pairs").values():
        assert config["val_fraction"] == config["test_fraction"] == 0
    assert len(load_records("preference", [DataSource("runs/pairs/heldout_pairs.jsonl")])) == 1
    trainer = yaml.safe_load(Path("runs/pairs/ppo.yaml").read_text("utf-8"))["trainer"]
    assert not any("HealthyCheckpoint" in c["class_path"] for c in trainer["callbacks"])


def test_printed_rewards_are_read_whatever_the_data_are_called(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "pairs #1: {a}'s"
    write_lines(Path(f"{name}.jsonl"), ROWS)
    main(["start", f"{name}.jsonl"])
    evaluate = read_commands(capsys.readouterr().out)[-1]
    assert yaml.safe_load(option(evaluate, "rewards")) == {f"runs/{name}/reward": 1.0}


def run_printed_commands(shown: str, root: str) -> dict[str, Any]:
    """Run the printed commands as they are; return the evaluation."""
    commands = read_commands(shown)
    assert [words[0] for words in commands] == ["fit", "fit", "report", "fit", "evaluate"]
    for words in commands:
        run(*words)
    report = json.loads(Path(f"{root}/reward_report/report.json").read_text("utf-8"))
    n_pairs = len(load_records("preference", [DataSource(f"{root}/heldout_pairs.jsonl")]))
    assert report["accuracy"]["pairs"] == n_pairs
    evaluation: dict[str, Any] = json.loads(Path(f"{root}/evaluation.json").read_text("utf-8"))
    assert list(evaluation["policies"]) == ["sft", "ppo"]
    ppo = evaluation["policies"]["ppo"]["rewards"]["reward"]
    assert 0 <= ppo["against_baseline"]["win"] <= 1
    return evaluation


@pytest.mark.slow  # trains three stages of a small model
@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (write_dialogues(120, longest=700), []),
        (CHINESE_ROWS, []),
        (ROWS[:1], []),
        (
            [{"ask": r["prompt"], "good": r["chosen"], "bad": r["rejected"]} for r in ROWS],
            ["--columns", "{prompt: ask, chosen: good, rejected: bad}"],
        ),
    ],
    ids=["long dialogues", "Chinese", "one row", "own columns"],
)
def test_printed_commands_run_unchanged(
    capsys: pytest.CaptureFixture[str], rows: list[dict[str, str]], words: list[str]
) -> None:
    write_lines(Path("own pairs.jsonl"), rows)
    main(["start", "own pairs.jsonl", *words])
    evaluation = run_printed_commands(capsys.readouterr().out, "runs/own pairs")
    assert evaluation["n_prompts"] >= 1


@pytest.mark.slow  # trains a small model, and three stages on it
def test_a_model_trained_on_plain_text_goes_on_with_pairs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rng = random.Random(0)
    write_lines(Path("texts.jsonl"), [{"text": write_text(rng, 10 + n)} for n in range(40)])
    write_lines(Path("pairs.jsonl"), ROWS)
    main(["start", "texts.jsonl"])
    (fit,) = read_commands(capsys.readouterr().out)
    run(*fit)
    main(["start", "pairs.jsonl", "runs/texts/sft"])
    run_printed_commands(capsys.readouterr().out, "runs/pairs")


@pytest.mark.slow  # trains three stages of a small model
def test_printed_commands_run_with_a_model_of_8192_positions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config("llama")
    config.max_position_embeddings = 8192
    write_models(tmp_path, config)
    write_lines(Path("long.jsonl"), write_dialogues(40, longest=200))
    main(["start", "long.jsonl", "policy"])
    run_printed_commands(capsys.readouterr().out, "runs/long")
