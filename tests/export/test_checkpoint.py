"""A checkpoint becomes what the finished stage leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lit_rlhf.export import NetworkName, checkpoint, load_checkpoint_model
from tests.support.exported_runs import Runs, assert_same_model, weights
from tests.support.saved_runs import as_engines_write_it, saved_run
from tests.support.stages import write_data, write_models
from tests.support.tiny_models import tiny_config

NETWORKS = [("sft", None), ("reward", None), ("ppo", None), ("ppo", "critic")]


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(("stage", "network"), NETWORKS)
def test_a_checkpoint_becomes_what_the_stage_leaves(
    stage: str, network: NetworkName | None, lora: bool, runs: Runs, tmp_path: Path
) -> None:
    saved = runs(stage, lora)
    load_checkpoint_model(saved.checkpoint, network, command="the command").save(tmp_path / "m")
    assert_same_model(tmp_path / "m", saved.finished / ("critic" if network else "."))
    card = (tmp_path / "m" / "README.md").read_text("utf-8")
    assert "the command" in card
    assert ("# PPO critic" in card) == (network == "critic")
    assert "| `global_step` |" in card
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_networks_of_one_trunk(root: Path, tmp_path: Path) -> None:
    saved = saved_run("ppo", root, tmp_path, critic_init="shared")
    for network, folder in (("policy", "."), ("critic", "critic")):
        model = load_checkpoint_model(saved.checkpoint, network)  # type: ignore[arg-type]
        model.save(tmp_path / network)
        assert_same_model(tmp_path / network, saved.finished / folder)
    assert not any("value_head" in name for name in weights(saved.finished))


def test_critic_has_the_shape_of_the_reward_model_that_it_started_from(tmp_path: Path) -> None:
    root = write_data(write_models(tmp_path / "root"))
    larger = tiny_config("llama")
    larger.num_hidden_layers += 1
    other = write_models(tmp_path / "other", larger)
    shutil.rmtree(root / "reward")
    (other / "reward").rename(root / "reward")
    saved = saved_run("ppo", root, tmp_path, critic_init="reward")
    load_checkpoint_model(saved.checkpoint, "critic").save(tmp_path / "m")
    assert_same_model(tmp_path / "m", saved.finished / "critic")
    card = json.loads((tmp_path / "m" / "lit_rlhf.json").read_text("utf-8"))
    assert card["made"]["base_model"] == "reward"


def test_a_policy_without_a_critic(root: Path, tmp_path: Path) -> None:
    options = {"advantages": {"estimator": "reinforce_plus_plus"}, "critic_init": "shared"}
    saved = saved_run("ppo", root, tmp_path, **options)
    load_checkpoint_model(saved.checkpoint).save(tmp_path / "policy")
    assert_same_model(tmp_path / "policy", saved.finished)
    with pytest.raises(ValueError, match=r"network: expected policy of a checkpoint .*'critic'"):
        load_checkpoint_model(saved.checkpoint, "critic")


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("stage", "lora"), [("ppo", False), ("ppo", True), ("reward", False)])
def test_engine_checkpoints_of_ranks(
    stage: str, lora: bool, ranks: int, runs: Runs, tmp_path: Path
) -> None:
    saved = runs(stage, lora)
    path = as_engines_write_it(saved, tmp_path / "step=1.ckpt", ranks)
    networks: dict[NetworkName | None, str] = {"policy": ".", "critic": "critic"}
    for network, place in networks.items() if stage == "ppo" else ((None, "."),):
        load_checkpoint_model(path, network).save(tmp_path / f"{network}")
        assert_same_model(tmp_path / f"{network}", saved.finished / place)


def test_tied_weights_are_there_once(tmp_path: Path) -> None:
    root = write_data(write_models(tmp_path / "root", tiny_config("qwen3")))
    saved = saved_run("ppo", root, tmp_path / "run")
    engines = as_engines_write_it(saved, tmp_path / "step=1.ckpt", 2)
    for number, path in enumerate((saved.checkpoint, engines)):
        output = tmp_path / str(number)
        load_checkpoint_model(path).save(output)
        assert_same_model(output, saved.finished)
        assert "lm_head.weight" not in weights(output)


def test_weights_are_cast_and_sharded(runs: Runs, tmp_path: Path) -> None:
    saved = runs("ppo", True)
    load_checkpoint_model(saved.checkpoint, dtype="bfloat16").save(tmp_path / "m", "8KB")
    assert len(list((tmp_path / "m").glob("model-*-of-*.safetensors"))) > 2
    full = weights(saved.finished)
    for name, tensor in weights(tmp_path / "m").items():
        # merged in float32 and rounded once
        assert torch.equal(tensor, full[name].to(torch.bfloat16)), name
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert plain.dtype == torch.bfloat16


def test_weights_that_are_not_finite_are_not_exported(runs: Runs, tmp_path: Path) -> None:
    content = torch.load(runs("sft").checkpoint, weights_only=True)
    next(iter(content["state_dict"].values())).fill_(torch.nan)
    torch.save(content, tmp_path / "nan.ckpt")
    with pytest.raises(ValueError, match="m: expected finite numbers, got NaN or infinity in"):
        load_checkpoint_model(tmp_path / "nan.ckpt").save(tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_weights_that_the_type_does_not_hold_are_not_exported(runs: Runs, tmp_path: Path) -> None:
    content = torch.load(runs("sft").checkpoint, weights_only=True)
    next(iter(content["state_dict"].values()))[0] = 1e6
    torch.save(content, tmp_path / "large.ckpt")
    with pytest.raises(ValueError, match=r"m: expected finite numbers, .* in float16"):
        load_checkpoint_model(tmp_path / "large.ckpt", dtype="float16").save(tmp_path / "m")
    load_checkpoint_model(tmp_path / "large.ckpt", dtype="bfloat16").save(tmp_path / "m")


def test_a_value_head_keeps_the_output_layer_that_was_trained(runs: Runs, tmp_path: Path) -> None:
    saved = runs("reward")
    load_checkpoint_model(saved.checkpoint, dtype="bfloat16").save(tmp_path / "m", format="trl")
    trained = saved.module.get_parameter("networks.lm_head.weight")
    assert torch.equal(weights(tmp_path / "m")["lm_head.weight"], trained.bfloat16())


def test_a_moved_model_is_given_as_base(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "root")
    saved = saved_run("sft", tmp_path / "root", tmp_path / "run")
    (tmp_path / "root" / "policy").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"the run started from .*give its new place as --base"):
        load_checkpoint_model(saved.checkpoint)
    load_checkpoint_model(saved.checkpoint, base=str(tmp_path / "elsewhere")).save(tmp_path / "m")
    assert_same_model(tmp_path / "m", saved.finished)


def test_the_tokenizer_has_to_be_the_runs(runs: Runs, root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "policy", tmp_path / "base")
    tokenizer = json.loads((tmp_path / "base" / "tokenizer.json").read_text("utf-8"))
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (tmp_path / "base" / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    with pytest.raises(ValueError, match="the run had another tokenizer"):
        load_checkpoint_model(runs("sft").checkpoint, base=str(tmp_path / "base"))


def test_checkpoint_cannot_run_a_models_code(runs: Runs, root: Path, tmp_path: Path) -> None:
    content = torch.load(runs("sft").checkpoint, weights_only=True)
    shutil.copytree(root / "policy", tmp_path / "evil")
    (tmp_path / "evil" / "evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n")
    config = json.loads((tmp_path / "evil" / "config.json").read_text("utf-8"))
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}
    (tmp_path / "evil" / "config.json").write_text(json.dumps(config), "utf-8")
    hparams = content["hyper_parameters"]
    hparams["model_path"] = str(tmp_path / "evil")
    hparams["network"]["trust_remote_code"] = True
    torch.save(content, tmp_path / "evil.ckpt")
    with pytest.raises(ValueError, match="evil"):
        load_checkpoint_model(tmp_path / "evil.ckpt")
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("trust_remote_code", [False, True])
def test_four_bits_are_the_runs_and_trust_is_the_callers(trust_remote_code: bool) -> None:
    run_options = {"dtype": "float32", "lora_rank": 0, "load_in_4bit": not trust_remote_code}
    run_options |= {"trust_remote_code": not trust_remote_code}
    options = checkpoint._model_options(
        run_options, dtype=None, trust_remote_code=trust_remote_code
    )
    assert options.trust_remote_code is trust_remote_code
    assert options.load_in_4bit is not trust_remote_code


def test_checkpoints_that_are_not_a_stages_are_refused(runs: Runs, tmp_path: Path) -> None:
    whole = runs("sft").checkpoint.read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(whole[: len(whole) // 2])
    torch.save({"state_dict": {}, "callbacks": Path("a")}, tmp_path / "evil.ckpt")
    theirs = {"_class_path": "their.Classifier"}
    other: Any = {"state_dict": {"encoder.weight": torch.ones(1)}, "hyper_parameters": theirs}
    torch.save(other, tmp_path / "other.ckpt")
    expected = {
        "cut": r"cut\.ckpt: is damaged or cut off",
        "evil": "could run code when it is loaded",
        "other": "SFTModule, .* got one of their.Classifier with weights of encoder",
    }
    for name, message in expected.items():
        with pytest.raises(ValueError, match=message):
            load_checkpoint_model(tmp_path / f"{name}.ckpt")


@pytest.mark.parametrize(
    ("stage", "network", "expected"),
    [("sft", "critic", "model"), ("reward", "policy", "reward"), ("ppo", "model", "policy or")],
)
def test_absent_network_is_refused(
    stage: str, network: NetworkName, expected: str, runs: Runs
) -> None:
    with pytest.raises(ValueError, match=f"network: expected {expected}"):
        load_checkpoint_model(runs(stage).checkpoint, network)
