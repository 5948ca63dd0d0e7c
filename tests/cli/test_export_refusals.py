"""When `lit_rlhf export` refuses, and what it says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_rlhf.cli.export import main
from lit_rlhf.models import (
    save_model_folder,
)
from tests.cli.exported import Runs, assert_same_model, refused
from tests.models.foreign import FOREIGN, write_foreign
from tests.modules.saved_runs import saved_run
from tests.support.tiny_models import tiny_causal_lm, tiny_tokenizer

IDS = torch.arange(4, 40).reshape(3, 12)


def test_a_moved_model_is_given_as_base(stage_root: Path, runs: Runs, tmp_path: Path) -> None:
    shutil.copytree(stage_root, tmp_path / "root")
    saved = saved_run("sft", tmp_path / "root", tmp_path / "run")
    (tmp_path / "root" / "policy").rename(tmp_path / "elsewhere")
    arguments = ["--checkpoint", str(saved.checkpoint), "--output", str(tmp_path / "m")]
    said = refused(*arguments)
    assert f"the run started from {tmp_path / 'root' / 'policy'}" in said
    assert "give it as --base" in said
    main([*arguments, "--base", str(tmp_path / "elsewhere")])
    assert_same_model(tmp_path / "m", saved.finished)
    save_model_folder(tiny_causal_lm("qwen3"), tiny_tokenizer(), tmp_path / "other")
    said = refused(
        *("--checkpoint", str(saved.checkpoint), "--output", str(tmp_path / "n")),
        *("--base", str(tmp_path / "other")),
    )
    assert "n" not in {path.name for path in tmp_path.iterdir()}
    assert "path: expected a model of the weights' shape" in said


def test_the_tokenizer_has_to_be_the_runs(runs: Runs, stage_root: Path, tmp_path: Path) -> None:
    shutil.copytree(stage_root / "policy", tmp_path / "base")
    tokenizer = json.loads((tmp_path / "base" / "tokenizer.json").read_text("utf-8"))
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (tmp_path / "base" / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    said = refused(
        *("--checkpoint", str(runs("sft").checkpoint), "--output", str(tmp_path / "m")),
        *("--base", str(tmp_path / "base")),
    )
    assert "the run had another tokenizer" in said


def test_a_checkpoint_cannot_ask_to_run_a_models_code(
    runs: Runs, stage_root: Path, tmp_path: Path
) -> None:
    content = torch.load(runs("sft").checkpoint, weights_only=True)
    shutil.copytree(stage_root / "policy", tmp_path / "evil")
    (tmp_path / "evil" / "evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n")
    config = json.loads((tmp_path / "evil" / "config.json").read_text("utf-8"))
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}
    (tmp_path / "evil" / "config.json").write_text(json.dumps(config), "utf-8")
    content["hyper_parameters"] |= {
        "trust_remote_code": True,
        "model_path": str(tmp_path / "evil"),
    }
    torch.save(content, tmp_path / "evil.ckpt")
    refused("--checkpoint", str(tmp_path / "evil.ckpt"), "--output", str(tmp_path / "m"))
    assert not (tmp_path / "mark").exists()


class TestRefusals:
    def test_a_damaged_checkpoint(self, runs: Runs, tmp_path: Path) -> None:
        whole = runs("sft").checkpoint.read_bytes()
        (tmp_path / "cut.ckpt").write_bytes(whole[: len(whole) // 2])
        said = refused("--checkpoint", str(tmp_path / "cut.ckpt"), "--output", str(tmp_path / "m"))
        assert "cut.ckpt: is damaged or cut off" in said
        assert [path.name for path in tmp_path.iterdir()] == ["cut.ckpt"]

    def test_a_checkpoint_with_code(self, tmp_path: Path) -> None:
        torch.save({"state_dict": {}, "callbacks": Path("a")}, tmp_path / "evil.ckpt")
        said = refused("--checkpoint", str(tmp_path / "evil.ckpt"), "--output", str(tmp_path / "m"))
        assert "could run code when it is loaded" in said

    def test_pickled_weights_with_code(self, tmp_path: Path) -> None:
        write_foreign(tmp_path / "theirs", FOREIGN["paper"], pickled=True)
        torch.save({"a": Path("a")}, tmp_path / "theirs" / "pytorch_model.bin")
        said = refused("--checkpoint", str(tmp_path / "theirs"), "--output", str(tmp_path / "m"))
        assert "expected plain tensors" in said

    def test_another_module(self, tmp_path: Path) -> None:
        content: dict[str, Any] = {
            "state_dict": {"encoder.weight": torch.ones(1)},
            "hyper_parameters": {"_class_path": "their.Classifier"},
        }
        torch.save(content, tmp_path / "other.ckpt")
        said = refused(
            "--checkpoint", str(tmp_path / "other.ckpt"), "--output", str(tmp_path / "m")
        )
        assert "SFTModule, RewardModule or PPOModule" in said
        assert "got one of their.Classifier with weights of encoder" in said

    def test_what_is_no_checkpoint(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        output = ("--output", str(tmp_path / "m"))
        assert "does not exist" in refused("--checkpoint", str(tmp_path / "missing"), *output)
        assert "manifest.json" in refused("--checkpoint", str(tmp_path / "empty"), *output)

    @pytest.mark.parametrize(
        ("stage", "network", "expected"),
        [("sft", "critic", "model"), ("reward", "policy", "reward"), ("ppo", "model", "policy or")],
    )
    def test_a_network_that_is_not_there(
        self, stage: str, network: str, expected: str, runs: Runs, tmp_path: Path
    ) -> None:
        said = refused(
            *("--checkpoint", str(runs(stage).checkpoint), "--output", str(tmp_path / "m")),
            *("--network", network),
        )
        assert f"network: expected {expected}" in said

    def test_a_language_model_is_no_reward_model(self, stage_root: Path, tmp_path: Path) -> None:
        output = ("--output", str(tmp_path / "m"))
        policy, reward = str(stage_root / "policy"), str(stage_root / "reward")
        assert "network: expected policy or model" in refused(
            "--checkpoint", policy, *output, "--network", "reward"
        )
        assert "expected a causal language model" in refused(
            "--checkpoint", reward, *output, "--network", "policy"
        )
        assert "format: expected transformers for a language model" in refused(
            "--checkpoint", policy, *output, "--format", "trl"
        )

    def test_a_taken_name_unless_told(self, runs: Runs, stage_root: Path, tmp_path: Path) -> None:
        shutil.copytree(stage_root / "policy", tmp_path / "m")
        arguments = [
            "--checkpoint",
            str(runs("sft").checkpoint),
            "--output",
            str(tmp_path / "m"),
        ]
        assert "--overwrite true replaces a model" in refused(*arguments)
        assert_same_model(tmp_path / "m", stage_root / "policy")
        main([*arguments, "--overwrite", "true"])
        assert_same_model(tmp_path / "m", runs("sft").finished)
        (tmp_path / "m" / "thesis.docx").write_text("mine")
        assert "thesis.docx" in refused(*arguments, "--overwrite", "true")

    def test_two_ways_of_showing_text(self, runs: Runs, tmp_path: Path) -> None:
        arguments = [
            "--checkpoint",
            str(runs("sft").checkpoint),
            "--output",
            str(tmp_path / "m"),
        ]
        assert "chat_template: expected none" in refused(*arguments, "--chat_template", "hh")
