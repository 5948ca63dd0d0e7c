import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lit_rlhf import forward, sandbox
from lit_rlhf.models import ModelOptions, load_causal_lm, load_scalar_model, save_model_folder
from lit_rlhf.models.build import load_adapter_folder
from lit_rlhf.models.config import read_config
from lit_rlhf.models.loading import build_random_scalar_model, load_tokenizer
from tests.support.tiny_models import EOS_ID, PAD_ID, move_adapters, tiny_causal_lm, tiny_tokenizer

Folder = Callable[[str], Path]
IDS = torch.arange(4, 24).reshape(2, 10)
MASK = torch.ones(2, 10, dtype=torch.bool)


def test_unreadable_weights_are_named(
    causal_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors says that there is no such file."""
    folder = causal_folder("llama")
    missing = Mock(side_effect=OSError("No such file"))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", missing)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).suffix != ".safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read by this account"):
        load_causal_lm(folder)


def test_loaded_models_are_saved_ones_in_training_mode(family: str, causal_folder: Folder) -> None:
    loaded = load_causal_lm(causal_folder(family))
    scalar = load_scalar_model(causal_folder(family), head_seed=0)
    assert all(module.training for model in (loaded, scalar) for module in model.modules())
    assert (scalar.config.num_labels, scalar.config.pad_token_id) == (1, PAD_ID)
    original = tiny_causal_lm(family)
    trunks = (forward.trunk_of(scalar).state_dict(), forward.trunk_of(original).state_dict())
    assert trunks[0].keys() == trunks[1].keys()
    for actual, expected in ((loaded.state_dict(), original.state_dict()), trunks):
        for name, weight in expected.items():
            torch.testing.assert_close(actual[name], weight, rtol=0, atol=0)


def test_a_new_head_is_seeded_small_and_without_bias(family: str, causal_folder: Folder) -> None:
    models = [load_scalar_model(causal_folder(family), head_seed=seed) for seed in (3, 3, 4)]
    heads = [forward.scalar_head_of(model).state_dict() for model in models]
    assert [list(head) for head in heads] == [["weight"]] * 3
    first, same, other = (head["weight"] for head in heads)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    draws = torch.randn(1, first.shape[1], generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(first, draws / (first.shape[1] + 1) ** 0.5)
    two_heads = forward.scalar_head_of(
        load_scalar_model(causal_folder(family), head_seed=3, heads=2)
    )
    assert torch.equal(two_heads.get_parameter("weight"), torch.cat([first, other]))


def test_random_scalar_model_is_seeded_and_apart(family: str, causal_folder: Folder) -> None:
    folder = causal_folder(family)
    first, same, other = (build_random_scalar_model(folder, seed=s) for s in (1, 1, 2))
    values = [forward.token_values(model.eval(), IDS, MASK) for model in (first, same, other)]
    assert torch.equal(values[0], values[1])
    assert not torch.allclose(values[0], values[2])
    trunks = (forward.trunk_of(first), forward.trunk_of(tiny_causal_lm(family)))
    untrained, trained = (trunk.get_input_embeddings().get_parameter("weight") for trunk in trunks)
    assert not torch.allclose(untrained, trained)


def test_bf16_weights_are_loaded_and_give_rounded_logits(
    family: str, causal_folder: Folder
) -> None:
    options, path = ModelOptions(dtype="bfloat16"), causal_folder(family)
    for model in (load_causal_lm(path, options), load_scalar_model(path, options, head_seed=0)):
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    exact = forward.token_logits(tiny_causal_lm(family), IDS, MASK)
    rounded = forward.token_logits(load_causal_lm(causal_folder(family), options).eval(), IDS, MASK)
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("rank", [0, 2])
def test_checkpointing_keeps_gradients(family: str, rank: int, causal_folder: Folder) -> None:
    gradients, calls = [], []
    for checkpointing in (False, True):
        options = ModelOptions(gradient_checkpointing=checkpointing, lora_rank=rank)
        model = forward.disable_dropout(load_causal_lm(causal_folder(family), options))
        move_adapters(model, std=0.1)
        count = [0]
        layers = [m for name, m in forward.trunk_of(model).named_modules() if ".0." in name]
        norm = next(layer for layer in layers if "Norm" in type(layer).__name__)
        norm.register_forward_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        torch.autograd.backward(forward.token_logits(model, IDS, MASK).logsumexp(-1).sum())
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        calls.append(count[0])
    assert calls == [1, 2]
    assert gradients[0]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)


def test_loading_leaves_the_global_generator_alone(causal_folder: Folder) -> None:
    torch.manual_seed(123)
    before, options = torch.random.get_rng_state(), ModelOptions(lora_rank=2)
    load_causal_lm(causal_folder("llama"), options)
    load_scalar_model(causal_folder("llama"), options, head_seed=0)
    build_random_scalar_model(causal_folder("llama"), options)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.fixture
def hub_is_asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths that transformers is called with; none is looked up."""
    requested: list[str] = []

    def look_up(path: str, **_: object) -> None:
        requested.append(path)
        raise OSError("not looked up")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else it tries again
    monkeypatch.setattr("lit_rlhf.models.config.AutoConfig.from_pretrained", look_up)
    monkeypatch.setattr("lit_rlhf.models.loading.AutoTokenizer.from_pretrained", look_up)
    monkeypatch.setattr("lit_rlhf.sandbox.cached_file", Mock(side_effect=OSError))
    return requested


LOADERS = [load_causal_lm, load_scalar_model, build_random_scalar_model, load_tokenizer]


@pytest.mark.parametrize(
    "path",
    [
        *("./missing", "../missing", "runs/sft/model", "/no/such/model", "no/such/", "such/"),
        *("~/model", "a b", "model_ü", "a/-b", "model.", ""),
    ],
)
@pytest.mark.parametrize("load", LOADERS)
def test_bad_path_is_refused_without_asking_the_hub(
    path: str, load: Callable[[str], object], hub_is_asked: list[str]
) -> None:
    with pytest.raises(ValueError, match=r"path: expected a folder .* not of the form of a hub id"):
        load(path)
    assert hub_is_asked == []


@pytest.mark.parametrize("load", LOADERS)
def test_missing_folder_in_another_is_named_without_asking_the_hub(
    load: Any, hub_is_asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "sft").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"got 'runs/sft_'.* 'runs' is a folder without 'sft_'"):
        load("runs/sft_")
    assert hub_is_asked == []


@pytest.mark.parametrize("path", ["gpt2", "Qwen/Qwen3-0.6B", "a/b_c", "_a/b.c-d"])
@pytest.mark.parametrize("load", LOADERS)
def test_hub_id_is_looked_up(
    path: str, load: Callable[[str], object], hub_is_asked: list[str]
) -> None:
    with pytest.raises(ValueError, match="not looked up"):
        load(path)
    assert hub_is_asked == [path]


@pytest.mark.parametrize("load", LOADERS)
def test_checkpoint_says_how_to_merge(load: Callable[[str], object], tmp_path: Path) -> None:
    run, engines, adapter = (tmp_path / name for name in ("run", "engines.ckpt", "adapter"))
    for path in (run, engines, adapter):
        path.mkdir()
    (run / "last.ckpt").touch()
    for path in (run / "last.ckpt", run, engines):
        with pytest.raises(ValueError, match=r"path: .*`lit_rlhf export` makes such a folder"):
            load(str(path))
    (adapter / "adapter_config.json").touch()
    with pytest.raises(ValueError, match="only a LoRA adapter; `lit_rlhf export` merges it"):
        load(str(adapter))
    (tmp_path / "empty").mkdir()
    for nothing in (tmp_path / "empty", Path("gpt2-missing")):  # a Path is never a hub id
        with pytest.raises(ValueError, match=r"path: expected a (folder|model|tokenizer)"):
            load(nothing)  # type: ignore[arg-type]


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-2000])


def change_weights(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return write


def set_config(**settings: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        (folder / "config.json").write_text(json.dumps(config | settings), "utf-8")

    return write


def list_parts(content: object) -> Callable[[Path], object]:
    return lambda folder: (folder / "m.safetensors.index.json").write_text(json.dumps(content))


def leave_earlier_parts(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights, folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    index = {"weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")


UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_short, "expected (whole weights|a whole safetensors file)"),
        (change_weights(lambda weights: weights.pop(UP)), f"expected all weights .* no {UP}$"),
        (change_weights(lambda weights: weights[UP].fill_(torch.nan)), f"got NaN or .* in {UP}$"),
        (change_weights(lambda weights: weights[NORM][3].fill_(torch.inf)), f"infinity in {NORM}$"),
        (set_config(vocab_size=100), r"sizes in the config.* of \[288, 16\], not \[100, 16\]"),
        (set_config(vocab_size=100, tie_word_embeddings=True), "whole weights and|sizes in the c"),
        (set_config(num_attention_heads=0), "config.json that .* got a size of 0: integer modulo"),
        (
            set_config(rope_parameters={"rope_type": "yarn", "factor": 1e308, "rope_theta": 0}),
            "valid configuration .* ValueError: math domain error",
        ),
        (set_config(num_attention_heads=3), "config.json that .* not a multiple of the number of"),
        (set_config(num_hidden_layers="two"), "config.json that .* expected int, got str"),
        (set_config(num_hidden_layers=9), r"got no model\S+(, \S+){4} and 58 more$"),
        (set_config(num_hidden_layers=1), r"without (model.layers.1\S+, ){4}\S+ and 4 more; its"),
        (change_weights(lambda weights: weights.update(more=Tensor([1.0]))), "without more; its"),
        (leave_earlier_parts, "expected weights once .*, got model.safetensors and those that"),
        (set_config(num_hidden_layers=0), "num_hidden_layers from 1 to 1000 .* got 0$"),
        (set_config(num_hidden_layers=200_000), "num_hidden_layers from 1 to 1000 .* got 200000"),
        (set_config(num_key_value_heads=-1), "num_key_value_heads from 1 to .* got -1$"),
        (set_config(id2label=dict.fromkeys(range(70_000), "")), "num_labels from 1 to 65536"),
        (set_config(text_config={"vocab_size": 1}), "config.json that .* unexpected text_config"),
        (set_config(hidden_act="os.system"), "valid configuration .* KeyError: 'os.system'$"),
        (set_config(pad_token_id=10**9), "valid configuration .* AssertionError: Padding_idx"),
        (set_config(model_type=["llama"]), "config.json that .* unhashable"),
        (lambda path: os.mkfifo(path / "pipe"), "a model's files, got the device or pipe .*/pipe"),
        (list_parts({"weight_map": {UP: "../b.safetensors"}}), "which lists ../b.safetensors$"),
        (list_parts({"weight_map": {UP: None}}), "list of files in .*index.json: TypeError"),
        (list_parts([]), "list of files in .*index.json: TypeError"),
        (set_config(quantization_config={"quant_method": "fp8"}), "not quantized, got .* fp8 in"),
        (
            change_weights(lambda w: w.update({UP: w[UP].to(torch.int8)})),
            "floating point in .* of I8$",
        ),
        (set_config(_attn_implementation="a/b"), "no code from the hub, got the attention a/b in"),
    ],
)
@pytest.mark.parametrize("scalar", [False, True])
def test_damaged_folder_is_refused_in_one_line(
    *,
    damage: Any,
    message: str,
    scalar: bool,
    causal_folder: Any,
    scalar_folder: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree((scalar_folder if scalar else causal_folder)("llama"), tmp_path / "m")
    (tmp_path / "m/lit_rlhf.json").unlink()  # without a manifest, as most models are
    damage(tmp_path / "m")
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with pytest.raises(ValueError, match=f"^path: .*({message})") as error:
        (load_scalar_model if scalar else load_causal_lm)(tmp_path / "m")
    assert "\n" not in str(error.value)
    assert "REPORT" not in caplog.text  # transformers' table


@pytest.mark.parametrize(
    "name",
    [
        "transformer.h.0.attn.masked_bias",
        "transformer.h.0.attn.attention.bias",  # GPT-Neo's
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "mtp.layers.0.mlp.up_proj.weight",
    ],
)
def test_what_only_other_releases_and_tasks_use_is_ignored(
    name: str, causal_folder: Folder, tmp_path: Path
) -> None:
    shutil.copytree(causal_folder("gpt2"), tmp_path / "m")
    (tmp_path / "m/lit_rlhf.json").unlink()
    change_weights(lambda weights: weights.update({name: torch.ones(4)}))(tmp_path / "m")
    for load in (load_causal_lm, partial(load_scalar_model, head_seed=0)):
        load(tmp_path / "m")


def test_config_that_gives_a_key_twice_is_refused(causal_folder: Folder, tmp_path: Path) -> None:
    folder = shutil.copytree(causal_folder("llama"), tmp_path / "m")
    text = (folder / "config.json").read_text("utf-8").strip().removesuffix("}")
    (folder / "config.json").write_text(f'{text}, "num_hidden_layers": 1}}', "utf-8")
    with pytest.raises(
        ValueError, match=r"each key of .*config.json once, got 'num_hidden_layers'"
    ):
        load_causal_lm(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such limits")
def test_regular_expression_of_modules_that_hangs_is_refused(
    causal_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = causal_folder("llama")
    load_causal_lm(folder, ModelOptions(lora_rank=1)).save_pretrained(str(tmp_path / "a"))
    config = json.loads((tmp_path / "a/adapter_config.json").read_text("utf-8"))
    config |= {"target_modules": "(.+)+X", "base_model_name_or_path": str(folder)}
    (tmp_path / "a/adapter_config.json").write_text(json.dumps(config), "utf-8")
    read_config(folder, ModelOptions())  # has tried it, without the new limit
    monkeypatch.setattr(sandbox, "SECONDS", 0.1)
    with pytest.raises(ValueError, match="takes very long"):
        load_adapter_folder(tmp_path / "a", ModelOptions())


def test_a_reward_model_is_no_policy(family: str, scalar_folder: Folder) -> None:
    with pytest.raises(ValueError, match="expected a causal language model, got a reward model"):
        load_causal_lm(scalar_folder(family))


def test_a_classifier_of_two_labels_is_no_reward_model(tmp_path: Path) -> None:
    config = tiny_causal_lm().config
    config.num_labels = 2
    plain = AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]
    plain.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"expected a model with 1 label, .* got 2"):
        load_scalar_model(tmp_path)


@pytest.mark.parametrize(
    ("special", "expected"),
    [
        ({"extra_special_tokens": ["<pad>"]}, "<pad>"),
        ({"unk_token": "<unk>"}, "<unk>"),
        ({"pad_token": "</s>"}, "</s>"),
        ({}, "</s>"),
    ],
)
def test_padding_token_is_found(special: dict[str, Any], expected: str, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(pad_token=None, special_pad="<pad>" in str(special))
    tokenizer.add_special_tokens(special)
    model = tiny_causal_lm()
    model.config.pad_token_id = None
    save_model_folder(model, tokenizer, tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.pad_token, len(loaded), loaded.eos_token_id) == (expected, 288, EOS_ID)
    if special.get("pad_token"):  # a scalar model leaves it open then
        assert load_scalar_model(tmp_path, head_seed=0).config.pad_token_id is None


def test_a_tokenizer_without_eos_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected a tokenizer with an EOS token"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_with_a_setting_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": {"a": 1}}))
    with pytest.raises(ValueError, match=r"expected a tokenizer at .*, got none"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("configured", "ids"), [(None, [EOS_ID]), (5, [EOS_ID, 5]), ([7, 5], [EOS_ID, 5, 7])]
)
def test_generation_ends_at_each_eos(configured: int | list[int] | None, ids: list[int]) -> None:
    model = tiny_causal_lm("llama")
    model.generation_config.eos_token_id = configured
    assert forward.stop_token_ids(model, tiny_tokenizer()) == ids
    for wrong in (["x"], [[5]]):
        model.generation_config.eos_token_id = wrong
        message = re.escape(f"ids of tokens in eos_token_id of a model, got {wrong}")
        with pytest.raises(ValueError, match=message):
            forward.stop_token_ids(model)


@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1, "a": 2}'])
def test_config_of_generation_that_is_no_object_is_refused(content: str, tmp_path: Path) -> None:
    """transformers would go on without it, and without the tokens that end a response."""
    save_model_folder(tiny_causal_lm("llama"), tiny_tokenizer(), tmp_path / "m")
    (tmp_path / "m/lit_rlhf.json").unlink()  # which lists the file
    (tmp_path / "m/generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"generation_config\.json: expected (JSON|an object)"):
        load_causal_lm(tmp_path / "m")


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
def test_a_text_in_another_encoding_is_named(name: str, tmp_path: Path) -> None:
    model = tiny_causal_lm("llama")
    save_model_folder(model, tiny_tokenizer(), tmp_path / "m")
    (tmp_path / "m/lit_rlhf.json").unlink()  # which lists the file
    (tmp_path / "m" / name).write_bytes(b'{"a": "\xe9"}')
    load = load_tokenizer if name.startswith("tokenizer") else load_causal_lm
    with pytest.raises(ValueError, match=f"{name}: expected text in UTF-8, got another encoding"):
        load(tmp_path / "m")
