"""The commands of pages on tools, run as readers type them after a quickstart."""

import csv
import gzip
import io
import json
import re
import runpy
import sys
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lit_rlhf.data import DataSource, DialogueEncoder, Message, TextContract, load_records
from lit_rlhf.data.formats import split_dialogue
from lit_rlhf.forward import sequence_scores
from lit_rlhf.models import load_scalar_model, load_tokenizer
from lit_rlhf.tools.evaluation.judge import JudgeOptions, judge_policies
from tests.support.docs_blocks import ROOT, blocks, commands
from tests.support.docs_running import read_page_commands, run_in_shell, run_process, run_small
from tests.support.docs_workspace import make_workspace, standing_in
from tests.support.judge_server import judge_server, longer_wins
from tests.support.tiny_runs import RUNS, SMALL, fit, logged, overlay, run, write_moved_config

LOGS = Path("runs/quickstart/logs")


def report(path: str) -> Any:
    return json.loads(Path(path).read_text("utf-8"))


# --- doctor.md


def test_doctor_shows_the_table_of_the_page(
    fresh_workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # the width of the page's tables
    with pytest.raises(SystemExit, match="1"):
        run_small(read_page_commands("doctor.md")[0], fresh_workspace)
    shown = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    page_table = next(b.text for b in blocks(ROOT / "docs/doctor.md") if b.language == "text")
    assert page_table.rstrip() in shown


def test_doctor_passes_the_run_that_starts_next(fresh_workspace: Path) -> None:
    doctor, fit_command = read_page_commands("doctor.md")[1:]
    finished = Path("runs/quickstart/ppo_checked/model.safetensors")
    run_small(doctor, fresh_workspace)
    assert report("doctor.json")["failed"] is False
    assert not finished.exists()  # the doctor saves nothing
    run_small(fit_command, fresh_workspace)
    assert finished.is_file()


# --- generate.md


def test_generate_answers_side_by_side(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(*read_page_commands("generate.md")[0])
    output = capsys.readouterr().out.split("user: ")[1:]
    for part, prompt in zip(
        output, ("name two metals.", "name three fruits, please."), strict=True
    ):
        assert part.startswith(f"{prompt}\nsft: ")
        assert "\nppo_max: " in part


def test_generate_in_a_pipe(workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (block,) = (b.text for b in blocks(ROOT / "docs/generate.md") if b.text.startswith("printf"))
    printed = block.split("'")[1].replace("\\n", "\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO(printed))
    run(*block.partition("| lit_rlhf ")[2].split())
    first, second = capsys.readouterr().out.split("\nyou: ")[1:]
    assert first.startswith("name two metals.\nppo_max: ")
    assert second.startswith("and three fruits, please.\nppo_max: ")


def test_generate_writes_the_fields_of_the_page(fresh_workspace: Path) -> None:
    run(*read_page_commands("generate.md")[-1])
    prompts = load_records("prompt", [DataSource("runs/quickstart/world/prompts_heldout.jsonl")])
    lines = Path("responses.jsonl").read_text("utf-8").splitlines()
    assert len(lines) == 2 * 2 * len(prompts)  # models and responses
    page = (ROOT / "docs/generate.md").read_text("utf-8")
    table = page.partition("| field |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(json.loads(lines[0]))
    assert len(load_records("prompt", [DataSource("responses.jsonl")])) == len(lines)


# --- reward_report.md, benchmarks.md


@pytest.mark.parametrize("number", [0, 1])
def test_reward_report_is_written(number: int, fresh_workspace: Path) -> None:
    run(*read_page_commands("reward_report.md")[number])
    folder = Path("runs/reward_report")
    assert (folder / "report.html").read_text("utf-8").startswith("<!doctype html>")
    # the folder has an output layer, the other one is read along
    names = list(report("runs/reward_report/report.json")["perplexity"])
    assert names == ["reward model", "language model"][: number + 1]


def test_benchmarks_compare_choices(fresh_workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # lm-evaluation-harness asks pip for all packages after every run, which takes seconds
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    run(*read_page_commands("benchmarks.md")[0])
    scores = report("tax.json")["benchmarks"]
    assert list(scores["models"]) == ["sft", "ppo_max"]
    assert scores["rows"][0]["questions"] == 3


# --- judging.md


@pytest.mark.parametrize("number", range(len(read_page_commands("judging.md"))))
def test_judge_compares_two_policies(fresh_workspace: Path, number: int) -> None:
    for name, text in {"sft": "four", "chatgpt": "longer"}.items():
        Path(f"{name}.jsonl").write_text(json.dumps({"prompt": "hi", "response": text}) + "\n")
    with judge_server(longer_wins) as server:
        flags = ["--judge.base_url", server.base_url, "--max_prompts", "1"]
        flags += ["--output", "report.json"]
        run(*read_page_commands("judging.md")[number], *flags)
    comparison = report("report.json")
    if "--best_of" in read_page_commands("judging.md")[number]:
        assert [row["n"] for row in comparison["best_of"]] == [1, 4, 16]
    else:
        assert len(comparison["judge"]["policies"]) == 2


def test_judge_in_python_judges(tmp_path: Path) -> None:
    (block,) = (b for b in blocks(ROOT / "docs/judging.md") if b.language == "python")
    namespace: dict[str, Any] = {}
    exec(block.text, namespace)
    with judge_server(longer_wins) as server:
        settings = JudgeOptions(namespace["options"].model, server.base_url, folder=str(tmp_path))
        judged = judge_policies(namespace["responses"], settings)
    assert [by for by, _ in judged.head_to_heads] == ["helpful", "harmless"]


def test_judge_has_every_setting_of_the_page() -> None:
    text = (ROOT / "docs/judging.md").read_text("utf-8")
    named = set(re.findall(r"judge\.([a-z_]+)", text)) - {"judge_policies"}
    assert named <= set(JudgeOptions.__dataclass_fields__)


# --- rewards.md


def test_rewards_of_the_page_are_logged_and_add_up(fresh_workspace: Path) -> None:
    run_small(read_page_commands("rewards.md")[0], fresh_workspace)
    metrics = logged(LOGS / "ppo_mixed")
    sources = yaml.safe_load(Path("rewards.yaml").read_text())["model"]["init_args"]["rewards"]
    total = 0.0
    for key, value in sources.items():
        source = value if isinstance(value, dict) else {"weight": value}
        scores = metrics.pop(f"rollout/score/{re.split('[/:]', key)[-1]}")
        # the mean of normalized scores over the first iteration is 0
        total += 0.0 if source.get("normalize") else source["weight"] * scores[0]
    assert metrics["rollout/score"][0] == pytest.approx(total, abs=1e-5)
    assert [key for key in metrics if key.startswith("rollout/score/")] == []


def test_heads_are_trained_and_disagree(fresh_workspace: Path) -> None:
    for words in read_page_commands("rewards.md")[1:3]:
        run_small(words, fresh_workspace)
    heads = AutoModelForSequenceClassification.from_pretrained("runs/quickstart/reward_heads")
    assert heads.config.num_labels == 4
    assert min(logged(LOGS / "ppo_heads")["rollout/score_spread"]) > 0


def test_rewards_of_a_service_are_logged(
    fresh_workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scorer import Scorer  # type: ignore[import-not-found]

    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(Scorer, "log_message", lambda *_: None)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scorer)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    config = Path("remote.yaml")
    address = f"127.0.0.1:{server.server_port}"
    config.write_text(config.read_text().replace("localhost:8000", address))
    try:
        run_small(read_page_commands("rewards.md")[3], fresh_workspace)
    finally:
        server.shutdown()
        server.server_close()
    assert logged(LOGS / "ppo_safety")["rollout/score/safety"] == [0.0, 0.0]


def test_rewards_evaluate_policies(fresh_workspace: Path) -> None:
    words = read_page_commands("rewards.md")[4]
    run(*words, *["--max_prompts", "2", "--max_new_tokens", "4", "--output", "report.json"])
    for policy in report("report.json")["policies"].values():
        assert policy["rewards"]["length"]["mean"] == -policy["response_length"]


# --- export.md

SAVE = {"class_path": "lit_callbacks.ResumeCheckpoint", "init_args": {"every_n_batches": 1}}
KEEP = {"trainer": {"enable_checkpointing": True, "callbacks+": [SAVE]}}


@pytest.fixture(scope="module")
def exported(quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`runs` after a quickstart that kept its checkpoints and all commands of export.md."""
    folder = make_workspace(tmp_path_factory.mktemp("export") / "workspace", quickstart)
    configs = folder / "own"
    config = write_moved_config(
        ROOT / "configs/quickstart/ppo_max.yaml", configs, {RUNS: folder / RUNS}
    )
    fit(
        [config, overlay(configs, "small", SMALL["ppo"]), overlay(configs, "keep", KEEP)],
        "--overwrite",
    )
    checkpoints = folder / LOGS / "ppo_max/checkpoints"
    (checkpoints / "batch=2.ckpt").rename(checkpoints / "batch=10.ckpt")
    with standing_in(folder):
        for words in read_page_commands("export.md"):
            if "--push_to_hub" not in words:
                run(*words)
    return folder / "runs"


def test_export_writes_what_a_finished_run_leaves(exported: Path) -> None:
    finished = exported / "quickstart/ppo_max"
    for name, left in (("policy", finished), ("critic", finished / "critic")):
        files = {path.name for path in left.iterdir() if path.is_file()}
        assert {path.name for path in (exported / "exported" / name).iterdir()} == files
    AutoModelForCausalLM.from_pretrained(exported / "exported/policy")
    AutoModelForSequenceClassification.from_pretrained(exported / "exported/critic")
    half = AutoModelForCausalLM.from_pretrained(exported / "exported/half")
    assert half.dtype == torch.bfloat16


def test_export_writes_a_contract_for_foreign_models(exported: Path) -> None:
    contract = TextContract.load(exported / "reward_en")
    assert contract.render(({"role": "user", "content": "a"},)) == f"Human:a{contract.eos_token}"
    assert TextContract.load(exported / "smollm2/base").chat_template


# --- models.md


def test_transformers_score_is_the_stages_score(workspace: Path) -> None:
    reward = "runs/quickstart/reward"
    (block,) = (b for b in blocks(ROOT / "docs/models.md") if "apply_chat_template" in b.text)
    names: dict[str, Any] = {}
    exec(compile(block.text, "models.md", "exec"), names)
    encoder = DialogueEncoder(load_tokenizer(reward), max_length=128)
    dialogue = (Message("user", "name two metals."), Message("assistant", "iron and zinc."))
    ids = encoder.encode_dialogue(dialogue).input_ids.long().unsqueeze(0)
    with torch.no_grad():
        score = sequence_scores(load_scalar_model(reward), ids, torch.ones_like(ids).bool())
    assert names["score"] == pytest.approx(float(score[0]), abs=1e-5)


# --- own_modules.md

WEIGHTS = "{'0.weight': (32, 4), '0.bias': (32,), '2.weight': (2, 32), '2.bias': (2,)}"


@pytest.fixture
def gan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the scripts of the page."""
    for block in blocks(ROOT / "docs/own_modules.md"):
        if block.title:
            (tmp_path / block.title).write_text(block.text, "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_script_trains_alone(gan: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["gan.py", "auto", "1"])
    runpy.run_path("gan.py", run_name="__main__")
    capsys.readouterr()
    runpy.run_path("read_gan.py", run_name="__main__")
    assert capsys.readouterr().out.strip() == WEIGHTS


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "multi_deepspeed_stage_2"])
def test_script_trains_in_two_processes(gan: Path, strategy: str) -> None:
    env = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    for command in (["gan.py", strategy, "2"], ["read_gan.py"]):
        done = run_process([sys.executable, *command], gan, **env)
        assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == WEIGHTS
    assert (gan / "checkpoints/gan.ckpt").is_dir() == (strategy != "ddp")


# --- first_run.md, on real preference pairs

PAIRS = 170


def write_pairs(source: Path, path: Path) -> None:
    with gzip.open(source, "rt", encoding="utf-8") as lines, path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["prompt", "chosen", "rejected"])
        rows = (json.loads(next(lines)) for _ in range(3 * PAIRS))
        dialogues = ([split_dialogue(row[side]) for side in ("chosen", "rejected")] for row in rows)
        for chosen, rejected in dialogues:
            if chosen and rejected and len(chosen) == 2 and chosen[-1] != rejected[-1]:
                table.writerow([chosen[0].content, chosen[1].content, rejected[1].content])


@pytest.mark.slow  # starts five commands in a shell
def test_commands_lead_from_pairs_to_an_evaluated_policy(shared_data: Path, tmp_path: Path) -> None:
    write_pairs(shared_data / "hh_rlhf/helpful_base_test.jsonl.gz", tmp_path / "pairs.csv")
    (shell,) = (block for block in blocks(ROOT / "docs/first_run.md") if block.language == "bash")
    assert len(list(commands(shell))) == 5
    script = shell.text.replace("ppo.yaml", "ppo.yaml --data.samples_per_epoch 256")
    done = run_in_shell(script, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "runs/pairs/evaluation.json").read_text("utf-8"))
    assert list(report["policies"]) == ["sft", "ppo"]
    assert "against sft" in done.stdout
    assert "PPO-max 4/4 100%" in done.stderr
