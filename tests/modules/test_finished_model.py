"""The folders that stages leave: plain transformers and the next stage load them."""

import json
import math
import re
import shutil
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import transformers
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.tuner import Tuner

from lit_rlhf.data import DataSource, PromptDataModule, TextContract
from lit_rlhf.files import hash_model, read_manifest
from lit_rlhf.modules import PPOModule, RewardModule, SFTModule
from lit_rlhf.modules.finished_model import training_sources
from tests.support.stages import (
    content,
    demonstrations,
    first_batch,
    fit_module,
    ppo_options,
    preferences,
    prompts,
    trainer,
)


@pytest.fixture(scope="module", params=["all weights", "LoRA"])
def chain(
    request: pytest.FixtureRequest, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The three stages one after the other, each from the folders of those before."""
    folder = tmp_path_factory.mktemp("chain")
    lora = {"network": {"lora_rank": 2}} if request.param == "LoRA" else {}
    optimizer = {"learning_rate": 1e-2}
    places = {name: str(folder / name) for name in ("sft", "reward", "ppo")}
    options: dict[str, Any] = {"optimizer": optimizer, **lora}
    sft = SFTModule(str(root / "policy"), places["sft"], **options)
    fit_module(sft, demonstrations(root), folder)
    reward = RewardModule(places["sft"], places["reward"], **options)
    # its tokenizer carries the template now
    fit_module(reward, preferences(root, chat_template="tokenizer"), folder)
    options = {"model_path": places["sft"], "rewards": {places["reward"]: 1.0}, **lora}
    options |= {"sampling": {"temperature": 0.7}, "policy_optimizer": optimizer}
    ppo = PPOModule(**ppo_options(root, output_dir=places["ppo"], **options))
    fit_module(ppo, prompts(root, chat_template="tokenizer"), folder)
    return {"folder": folder, "sft": sft, "reward": reward, "ppo": ppo}


@pytest.mark.parametrize("name", ["sft", "reward", "ppo", "ppo/critic"])
def test_networks_load_in_plain_transformers(chain: dict[str, Any], root: Path, name: str) -> None:
    networks = {"sft": chain["sft"].model, "reward": chain["reward"].model}
    networks |= {"ppo": chain["ppo"].policy, "ppo/critic": chain["ppo"].critic}
    scalar = name in ("reward", "ppo/critic")
    kinds = ("AutoModelForCausalLM", "AutoModelForSequenceClassification")
    load = getattr(transformers, kinds[scalar]).from_pretrained
    start, plain = load(root / ("reward" if scalar else "policy")), load(chain["folder"] / name)
    assert not scalar or plain.config.num_labels == 1
    batch = first_batch(demonstrations(root, batch_size=8), root)
    ids = batch.input_ids[0][batch.attention_mask[0]].unsqueeze(0)
    with torch.no_grad():
        before, actual, expected = (m(input_ids=ids).logits for m in (start, plain, networks[name]))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert (actual - before).abs().max() > 1e-2


def test_folders_hold_safetensors_tokenizer_contract_and_card(chain: dict[str, Any]) -> None:
    for name in ("sft", "reward", "ppo", "ppo/critic"):
        folder = chain["folder"] / name
        files = {path.name for path in folder.iterdir()}
        assert {"model.safetensors", "tokenizer.json", "text_contract.json", "README.md"} <= files
        assert not any(file.endswith((".bin", ".pt", ".pkl")) for file in files)
        card = (folder / "README.md").read_text("utf-8")
        assert "Training data: `" in card
        assert "\ndatasets:" not in card  # none of them is on the hub
        # safetensors' own files are for their owner only
        assert len({path.stat().st_mode for path in folder.iterdir() if path.is_file()}) == 1
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert tokenizer.chat_template == TextContract.load(folder).chat_template


def test_the_policys_folder_samples_as_the_rollouts_did(chain: dict[str, Any]) -> None:
    settings = transformers.GenerationConfig.from_pretrained(chain["folder"] / "ppo")
    assert settings.do_sample is True
    assert (settings.temperature, settings.eos_token_id) == (0.7, 2)


def test_manifest_has_the_hash_of_the_model_that_was_read(root: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(root / "policy", base)
    before = hash_model(base)

    def replace(*_: Any) -> None:
        shutil.copy(root / "reward/model.safetensors", base / "new")
        (base / "new").replace(base / "model.safetensors")

    module = SFTModule(str(base), str(tmp_path / "sft"))
    start = LambdaCallback(on_train_start=replace)
    fit_module(module, demonstrations(root), tmp_path, callbacks=[start])
    assert hash_model(base) != before
    assert read_manifest(tmp_path / "sft")["made"]["inputs"]["SHA-256 of base"] == before


def test_weights_written_over_during_a_run_are_noticed(root: Path, tmp_path: Path) -> None:
    base, output = tmp_path / "base", tmp_path / "sft"
    shutil.copytree(root / "policy", base)

    def write_over(*_: Any) -> None:
        with (base / "model.safetensors").open("r+b") as file:
            file.seek(-64, 2)
            file.write(bytes(64))

    def fit(**options: Any) -> None:
        module = SFTModule(str(base), str(output), network=options)
        start = LambdaCallback(on_train_start=write_over)
        fit_module(module, demonstrations(root), tmp_path, callbacks=[start])

    with pytest.raises(ValueError, match=f"^{base}.*: expected the weights .* written over"):
        fit(lora_rank=2)
    assert not output.exists()
    shutil.rmtree(base)
    shutil.copytree(root / "policy", base)
    fit()  # the first update moved all weights into memory of their own
    assert output.exists()


@pytest.mark.parametrize(
    ("name", "title", "label"),
    [
        ("sft", "# Supervised fine-tuning", None),
        ("reward", "# Reward model", "reward"),
        ("ppo", "# PPO policy", None),
        ("ppo/critic", "# PPO critic", "value"),
    ],
)
def test_cards_and_labels_name_the_network_and_no_path(
    chain: dict[str, Any], root: Path, name: str, title: str, label: str | None
) -> None:
    folder = chain["folder"] / name
    card = (folder / "README.md").read_text("utf-8")
    assert f"\n{title}\n" in card
    assert ("from `sft`" in card) == (name in ("reward", "ppo"))
    assert [w for w in card.split() if str(root) in w or str(chain["folder"]) in w] == []
    assert "Training data: `" in card
    assert [line for line in card.splitlines() if "_class_path" in line or "time/" in line] == []
    if label is not None:
        assert json.loads((folder / "config.json").read_text())["id2label"] == {"0": label}


@pytest.mark.parametrize("name", ["sft", "reward"])
def test_code_on_a_card_runs(
    chain: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = chain["folder"] / name
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(folder)
    exec(code.replace("max_new_tokens=64", "max_new_tokens=2"), {})


@pytest.fixture
def finished(root: Path, tmp_path: Path) -> Path:
    """The model that a run has left."""
    fit_module(SFTModule(str(root / "policy")), demonstrations(root), tmp_path)
    return tmp_path / "model"


def test_a_trial_leaves_a_finished_model_alone(root: Path, tmp_path: Path, finished: Path) -> None:
    before = content(finished)
    fast = {"optimizer": {"learning_rate": 1e-2, "lr_scheduler": "constant"}}
    fit_module(
        SFTModule(str(root / "policy"), **fast), demonstrations(root), tmp_path, fast_dev_run=1
    )
    assert content(finished) == before
    fit_module(PPOModule(**ppo_options(root)), prompts(root), tmp_path, fast_dev_run=True)
    assert content(finished) == before


@pytest.mark.parametrize("method", ["lr_find", "scale_batch_size"])
def test_tuner_leaves_a_finished_model_alone(
    root: Path, tmp_path: Path, finished: Path, method: str
) -> None:
    before, options = content(finished), {"learning_rate": 1e-2, "lr_scheduler": "constant"}
    module, data = SFTModule(str(root / "policy"), optimizer=options), demonstrations(root)
    run = trainer(tmp_path, max_epochs=4)
    finding = {"num_training": 4, "update_attr": False, "early_stop_threshold": None}
    arguments = {"lr_find": finding, "scale_batch_size": {"steps_per_trial": 1, "max_trials": 1}}
    tuned = getattr(Tuner(run), method)(module, datamodule=data, **arguments[method])
    assert content(finished) == before
    if method == "lr_find":
        losses, rates = tuned.results["loss"], tuned.results["lr"]
        assert len(losses) >= 3
        assert all(math.isfinite(loss) and loss > 0 for loss in losses)
        assert rates == sorted(set(rates))
    run.fit(module, datamodule=data)
    assert content(finished) != before


def test_a_sanity_check_saves_nothing(root: Path, tmp_path: Path) -> None:
    stop = LambdaCallback(on_sanity_check_end=Mock(side_effect=InterruptedError))
    options = {"num_sanity_val_steps": 1, "limit_val_batches": 1, "callbacks": [stop]}
    with pytest.raises(InterruptedError):
        fit_module(SFTModule(str(root / "policy")), demonstrations(root), tmp_path, **options)
    assert not (tmp_path / "model").exists()


def test_run_interrupted_while_saving_leaves_no_half_model(root: Path, tmp_path: Path) -> None:
    """A policy without its critic would look like a finished one."""
    write = PPOModule.write_network

    def interrupted(module: Any, network: Any, folder: Path, *more: Any, **options: Any) -> None:
        if folder.name == "critic":
            raise InterruptedError
        write(module, network, folder, *more, **options)

    with patch.object(PPOModule, "write_network", interrupted), pytest.raises(InterruptedError):
        fit_module(PPOModule(**ppo_options(root)), prompts(root), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]


def fit_best(root: Path, folder: Path, epochs: int, **options: Any) -> SFTModule:
    """Fit an SFT model whose loss falls, and finish it with the weights of its highest loss."""
    constant = {"learning_rate": 1e-2, "lr_scheduler": "constant"}
    module = SFTModule(str(root / "policy"), str(folder / "sft"), optimizer=constant)
    module.finished = "best"
    data = demonstrations(root, val_sources=[DataSource(root / "demonstrations.jsonl")])
    keep = ModelCheckpoint(folder / "kept", monitor="val/sft/loss", mode="max", save_last=True)
    options |= {"enable_checkpointing": True, "limit_val_batches": 1.0}
    fit_module(module, data, folder, max_epochs=epochs, callbacks=[keep], **options)
    return module


def test_finished_best_has_the_weights_and_metrics_of_the_best_checkpoint(
    root: Path, tmp_path: Path
) -> None:
    fit_best(root, tmp_path, 1)
    # the resumed run finds the folder of the first
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
    fit_best(root, tmp_path, 3, ckpt_path=tmp_path / "kept/last.ckpt")  # which remembers the best
    (best,) = (tmp_path / "kept").glob("epoch=*.ckpt")  # the first epoch's
    saved = torch.load(best, weights_only=True)
    expected = saved["state_dict"]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "sft")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[f"model.{name}"], rtol=0, atol=0)
    made = read_manifest(tmp_path / "sft")["made"]
    last = torch.load(tmp_path / "kept/last.ckpt", weights_only=True)
    losses = [kept["last_metrics"]["val/sft/loss"] for kept in (saved, last)]
    assert losses[0] > losses[1]
    assert made["best"] == {
        "monitor": "val/sft/loss",
        "score": losses[0],
        "updates": saved["global_step"],
    }
    assert made["metrics"]["val/sft/loss"] == losses[0]
    assert made["updates"] == saved["global_step"] < last["global_step"]
    card = (tmp_path / "sft/README.md").read_text("utf-8")
    assert f"best checkpoint, with `val/sft/loss` {losses[0]:.4g}" in card


def test_finished_best_without_a_monitor_is_refused_before_training(
    root: Path, tmp_path: Path
) -> None:
    module = SFTModule(str(root / "policy"))
    module.finished = "best"
    with pytest.raises(ValueError, match=r"^finished: expected one ModelCheckpoint .* got none"):
        fit_module(module, demonstrations(root), tmp_path)


def test_training_data_of_ppo_are_prompts_and_texts() -> None:
    data = PromptDataModule([DataSource("a.jsonl")], ptx_sources=[DataSource("b.jsonl")])
    assert [source.path for source in training_sources(data)] == ["a.jsonl", "b.jsonl"]
