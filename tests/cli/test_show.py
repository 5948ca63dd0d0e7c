"""`lit_rlhf show` on what a small PPO run leaves."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_callbacks import ResumeCheckpoint
from lit_rlhf.cli.show import COMMAND
from lit_rlhf.files import ProgressFile, code_versions, hash_model, lock_path
from lit_rlhf.modules import PPOModule
from tests.support.engine_folders import write
from tests.support.stages import fit_module, ppo_options, prompts, write_data, write_models


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_models(write_data(tmp_path_factory.mktemp("show")))
    module = PPOModule(**ppo_options(root, output_dir=str(root / "model")))
    keep = ResumeCheckpoint(every_n_batches=1, dirpath=str(root / "checkpoints"))
    fit_module(
        module, prompts(root, batch_size=8), root, callbacks=[keep], enable_checkpointing=True
    )
    return root


def shown(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, Any]:
    capsys.readouterr()  # what libraries have said so far
    COMMAND.run([str(path)], "lit_rlhf show")
    settings: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return dict(settings[str(path)])


def test_model_says_what_it_was_made_from(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = shown(capsys, run / "model")
    assert report["finished"] is True
    # 8 rollouts in minibatches of 4, twice, by each network
    assert (report["stage"], report["base_model"], report["updates"]) == ("ppo", "policy", 8)
    assert report["inputs"]["SHA-256 of policy"] == hash_model(run / "policy")
    assert report["inputs"]["SHA-256 of reward"] == hash_model(run / "reward")
    assert isinstance(report["inputs"]["training examples"], int)
    assert report["config"]["minibatches.ppo_epochs"] == 2
    assert torch.__version__.startswith(report["versions"]["torch"])  # without +cu128, too
    assert report["files"].endswith("as they were saved")
    assert str(run) not in yaml.safe_dump(report)


def test_changed_files_and_an_unfinished_run_are_shown(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card, mark = run / "model/README.md", lock_path(run / "model")
    before = card.read_text()
    card.write_text("mine")
    mark.touch()
    report = shown(capsys, run / "model")
    assert (report["finished"], report["files"]) == (False, {"changed": ["README.md"]})
    card.write_text(before)
    mark.unlink()


def test_checkpoint_says_which_run_it_is_of(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = shown(capsys, run / "checkpoints/batch=1.ckpt")
    assert (report["problem"], report["updates"]) == ("none", 8)
    assert report["made_by"] == "a script"
    assert report["settings"]["model_path"] == str(run / "policy")
    assert "training examples" in report["inputs"]
    assert report["versions"] == code_versions()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".", r"got \. without lit_rlhf\.json"),
        ("other.json", "expected the JSON file of an evaluation, got other.json"),
        ("pipe.ckpt", "got no file pipe.ckpt"),
        ("damaged", "expected JSON in damaged/lit_rlhf.json, got a damaged file"),
    ],
)
def test_other_paths_are_refused(name: str, message: str) -> None:
    Path("other.json").write_text("[]")
    os.mkfifo("pipe.ckpt")
    Path("damaged").mkdir()
    Path("damaged/lit_rlhf.json").write_text('{"made":')
    with pytest.raises(SystemExit, match=message):
        COMMAND.run([name], "lit_rlhf show")


def test_entry_of_the_cache_is_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr("lit_rlhf.data.cache.MIN_CACHED_RECORDS", 1)
    root = write_models(write_data(tmp_path))
    prompts(root, tokenizer=str(root / "policy")).setup("fit")
    entry = next((tmp_path / "lit_rlhf").glob("train-*"))
    report = shown(capsys, entry)
    assert (report["stage"], report["part"], report["records"]) == ("data", "train", 8)


def test_responses_say_their_sampling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.jsonl"
    with ProgressFile(path, {"seed": 1, "models": {"sft": "hash"}}) as progress:
        progress.finish([{"response": "a"}])
    report = shown(capsys, path)
    assert (report["seed"], report["models"]) == (1, {"sft": "hash"})
    assert (report["finished"], report["files"]) == (True, "1, as they were saved")
    path.write_text("mine")
    assert shown(capsys, path)["files"] == {"changed": ["r.jsonl"]}


def test_folder_checkpoint_has_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "last.ckpt")
    assert shown(capsys, path)["problem"] == "none"
    (path / "policy/rank_00002.safetensors").unlink()
    assert shown(capsys, path)["problem"] == "policy/rank_00002.safetensors is missing"
    (tmp_path / "lit_rlhf.json").write_text('{"files": 3, "made": 4, "versions": []}')
    assert shown(capsys, tmp_path)["versions"] == {}  # a manifest of other types


def test_control_characters_of_others_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = {"a\u202e": "b\x9b2J", "c": "\x85\u2066"}
    (tmp_path / "lit_rlhf.json").write_text(json.dumps({"made": made, "files": {}}))
    COMMAND.run([str(tmp_path)], "lit_rlhf show")
    assert {*"\u202e\x9b\x85\u2066"}.isdisjoint(capsys.readouterr().out)
