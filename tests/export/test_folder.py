"""Folders of stages, of adapters and of other programs become ours."""

import filecmp
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification

from lit_rlhf.data import TextContract
from lit_rlhf.export import (
    NetworkName,
    load_checkpoint_model,
    load_folder_model,
    with_text_contract,
)
from lit_rlhf.files import hash_files, read_manifest
from lit_rlhf.forward import sequence_scores
from lit_rlhf.models import load_causal_lm, load_scalar_model, load_tokenizer, save_model_folder
from tests.support.exported_runs import Runs, weights
from tests.support.foreign_models import FOREIGN, write_foreign
from tests.support.tiny_models import tiny_causal_lm, tiny_tokenizer

IDS = torch.arange(4, 40).reshape(3, 12)
MASK = torch.ones_like(IDS, dtype=torch.bool)


@pytest.mark.parametrize("network", ["policy", "critic"])
def test_adapters_may_be_merged_later(network: NetworkName, runs: Runs, tmp_path: Path) -> None:
    saved = runs("ppo", True)
    adapters, merged = tmp_path / "adapters", tmp_path / "merged"
    load_checkpoint_model(saved.checkpoint, network).save_adapters(adapters)
    assert (adapters / "adapter_config.json").is_file()
    assert not (adapters / "config.json").exists()
    load_folder_model(adapters).save(merged)
    expected = weights(saved.finished if network == "policy" else saved.finished / "critic")
    actual = weights(merged)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=1e-6)
    assert TextContract.load(merged) == TextContract.load(saved.finished)
    other = "reward" if network == "policy" else "model"
    with pytest.raises(ValueError, match=f"network: expected .* for the adapters .*{other}"):
        load_folder_model(adapters, other)


def test_full_weights_are_no_adapters(runs: Runs, tmp_path: Path) -> None:
    exported = load_folder_model(runs("sft").finished)
    with pytest.raises(ValueError, match="merge_lora: expected true"):
        exported.save_adapters(tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_a_finished_folder_is_cast(runs: Runs, tmp_path: Path) -> None:
    saved = runs("ppo")
    load_folder_model(saved.finished, dtype="float16").save(tmp_path / "m")
    full = weights(saved.finished)
    half = weights(tmp_path / "m")
    assert {name: tensor.half() for name, tensor in full.items()}.keys() == half.keys()
    assert all(torch.equal(half[name], tensor.half()) for name, tensor in full.items())
    for name in ("README.md", "text_contract.json", "generation_config.json"):
        assert filecmp.cmp(tmp_path / "m" / name, saved.finished / name, shallow=False), name
    original = read_manifest(saved.finished)
    cast = read_manifest(tmp_path / "m")
    assert cast["made"] == original["made"]
    assert cast["files"] == hash_files(tmp_path / "m") != original["files"]
    tokenizer = load_tokenizer(tmp_path / "m")
    assert tokenizer.chat_template == load_tokenizer(saved.finished).chat_template


def test_a_folder_keeps_its_type(tmp_path: Path) -> None:
    model: Any = tiny_causal_lm()
    model.to(torch.bfloat16)
    save_model_folder(model, tiny_tokenizer(), tmp_path / "a")
    load_folder_model(tmp_path / "a").save(tmp_path / "b")
    assert {tensor.dtype for tensor in weights(tmp_path / "b").values()} == {torch.bfloat16}


@pytest.mark.parametrize("layout", ["paper", "trl", "openrlhf, older"])
@pytest.mark.parametrize("pickled", [False, True])
def test_a_foreign_reward_model_becomes_ours(layout: str, pickled: bool, tmp_path: Path) -> None:
    written = write_foreign(tmp_path / "theirs", FOREIGN[layout], shards=2, pickled=pickled)
    with_bias = FOREIGN[layout].bias
    exported = with_text_contract(load_folder_model(tmp_path / "theirs"), "paper-en")
    exported.save(tmp_path / "ours", format="trl" if with_bias else "transformers")
    with torch.no_grad():
        scores = sequence_scores(load_scalar_model(tmp_path / "ours").eval(), IDS, MASK)
    torch.testing.assert_close(scores, written.scores(IDS), rtol=1e-6, atol=1e-6)
    contract = TextContract.load(tmp_path / "ours")
    assert contract.render(({"role": "user", "content": "a"},)) == "Human:a</s>"
    if not with_bias:
        plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours")
        assert plain.config.num_labels == 1


@pytest.mark.parametrize("kind", ["reward", "policy"])
@pytest.mark.parametrize("pickled", [False, True])
def test_papers_differences_are_added_to_llama(kind: str, pickled: bool, tmp_path: Path) -> None:
    """As their merge_weight_en.py: what has `layers` in its name is a difference."""
    layout = FOREIGN["paper"]._replace(config={"architectures": ["Llama"]})
    written = write_foreign(tmp_path / "tuned", FOREIGN["paper"] if kind == "reward" else layout)
    base = tiny_causal_lm(seed=9)
    save_model_folder(base, tiny_tokenizer(), tmp_path / "llama")
    whole, llama = weights(tmp_path / "tuned"), weights(tmp_path / "llama")
    if kind == "policy":
        del whole["reward_head.weight"]
    published = {n: t - llama[n] if "layers" in n else t for n, t in whole.items()}
    published["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # older files
    (tmp_path / "tuned" / "model.safetensors").unlink()
    if pickled:
        torch.save(published, tmp_path / "tuned" / "pytorch_model.bin")
    else:
        save_file(published, tmp_path / "tuned" / "model.safetensors", {"format": "pt"})
    load_folder_model(tmp_path / "tuned", base=str(tmp_path / "llama")).save(tmp_path / "whole")
    with torch.no_grad():
        if kind == "reward":
            model = load_scalar_model(tmp_path / "whole").eval()
            actual, expected = sequence_scores(model, IDS, MASK), written.scores(IDS)
        else:
            actual = load_causal_lm(tmp_path / "whole").eval()(input_ids=IDS).logits
            expected = written.causal(input_ids=IDS).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_another_models_layers_are_no_base(tmp_path: Path) -> None:
    write_foreign(tmp_path / "tuned", FOREIGN["paper"])
    save_model_folder(tiny_causal_lm("qwen3"), tiny_tokenizer(), tmp_path / "other")
    with pytest.raises(ValueError, match="base: expected the model that the layers are"):
        load_folder_model(tmp_path / "tuned", base=str(tmp_path / "other"))


def test_pickled_weights_with_code_are_refused(tmp_path: Path) -> None:
    write_foreign(tmp_path / "theirs", FOREIGN["paper"], pickled=True)
    torch.save({"a": Path("a")}, tmp_path / "theirs" / "pytorch_model.bin")
    with pytest.raises(ValueError, match="expected plain tensors"):
        load_folder_model(tmp_path / "theirs")


@pytest.mark.parametrize(
    ("name", "weight", "problem"),
    [
        ("score.weight", torch.zeros(1).expand(1, 2**40), "expected a tensor that is stored as a"),
        ("any", torch.zeros(1).expand(2**40), "expected a tensor that is stored as a whole"),
        ("any", [1.0], "expected a tensor, got list"),
        (5, torch.zeros(1), "expected tensors by name, got one by 5"),
    ],
)
def test_pickled_weights_that_stand_for_more_than_is_stored_are_refused(
    tmp_path: Path, name: str | int, weight: object, problem: str
) -> None:
    write_foreign(tmp_path / "theirs", FOREIGN["paper"], pickled=True)
    file = tmp_path / "theirs" / "pytorch_model.bin"
    torch.save(torch.load(file) | {name: weight}, file)
    place = f"{name}: " if isinstance(name, str) else ""
    with pytest.raises(ValueError, match=rf"pytorch_model\.bin: {place}{problem}"):
        load_folder_model(tmp_path / "theirs")


def test_a_language_model_is_no_reward_model(root: Path, tmp_path: Path) -> None:
    policy, reward = root / "policy", root / "reward"
    with pytest.raises(ValueError, match="network: expected policy or model"):
        load_folder_model(policy, "reward")
    with pytest.raises(ValueError, match="expected a causal language model"):
        load_folder_model(reward, "policy")
    with pytest.raises(ValueError, match="format: expected transformers for a language model"):
        load_folder_model(policy).save(tmp_path / "m", format="trl")


def test_a_text_contract_is_not_replaced(runs: Runs) -> None:
    exported = load_folder_model(runs("sft").finished)
    with pytest.raises(ValueError, match="chat_template: expected none"):
        with_text_contract(exported, "hh")
