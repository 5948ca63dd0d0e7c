"""Models around given weights, folders of adapters, and adapters merged in."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lit_rlhf.models import load_causal_lm, load_scalar_model, merge_adapters, save_adapter_folder
from lit_rlhf.models.build import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    build_for_saving,
    load_adapter_folder,
)
from lit_rlhf.models.config import ModelOptions
from tests.support.adapters import LORA, logits, perturb_trained_weights
from tests.support.tiny_models import tiny_tokenizer


@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        ModelOptions(),
        LORA,
        # no use for saving, where neither needs a GPU or a compiler
        ModelOptions(torch_compile="inductor", fused_kernels=True, gradient_checkpointing=True),
    ],
    ids=["plain", "lora", "fast"],
)
def test_model_is_built_around_tensors(options: ModelOptions, scalar: bool, folder: Path) -> None:
    load = partial(load_scalar_model, head_seed=0) if scalar else load_causal_lm
    weights = perturb_trained_weights(
        load(folder, ModelOptions(lora_rank=options.lora_rank))
    ).state_dict()
    built = build_for_saving(folder, options, weights, scalar=scalar).state_dict()
    assert built.keys() == weights.keys()
    assert all(built[name].data_ptr() == tensor.data_ptr() for name, tensor in weights.items())


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    weights = load_causal_lm(folder).state_dict()
    weights["model.norm.weight"] = torch.ones(3)
    with pytest.raises(ValueError, match=r"path: expected a model of the weights' shape"):
        build_for_saving(folder, ModelOptions(), weights, scalar=False)


def test_merged_adapters_compute_the_same(
    family: str, causal_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model = perturb_trained_weights(load_causal_lm(causal_folder(family), LORA))
    expected = logits(model)
    assert not torch.allclose(logits(load_causal_lm(causal_folder(family)).eval()), expected)
    save_adapter_folder(model, tiny_tokenizer(), tmp_path)  # type: ignore[arg-type]
    loaded = load_adapter_folder(tmp_path, ModelOptions(), str(causal_folder(family))).eval()
    torch.testing.assert_close(logits(loaded), expected)
    merged = merge_adapters(loaded).state_dict()
    plain = load_causal_lm(causal_folder(family)).eval()
    plain.load_state_dict(merged)
    torch.testing.assert_close(logits(plain), expected, rtol=1e-4, atol=1e-4)
    halved = merge_adapters(loaded, torch.bfloat16).state_dict()
    assert {tensor.dtype for tensor in halved.values()} == {torch.bfloat16}


@pytest.fixture
def adapters(folder: Path, tmp_path: Path) -> Path:
    """A folder of adapters without a manifest, with the model below them."""
    model = perturb_trained_weights(load_causal_lm(folder, LORA))
    save_adapter_folder(model, tiny_tokenizer(), tmp_path / "adapters")  # type: ignore[arg-type]
    (tmp_path / "adapters" / "lit_rlhf.json").unlink()
    return tmp_path / "adapters"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 3}, "expected adapters in .* that fit LlamaForCausalLM .* size mismatch"),
        ({"r": 10**9}, "expected adapters in .* at most the width of the network, 16, got 1000000"),
        ({"rank_pattern": {"q_proj": 17}}, "expected adapters in .* at most the .*, 16, got 17"),
        ({"r": "2"}, "expected adapters in .* not supported between instances of 'str' and 'int'"),
        ({"target_modules": "nothing"}, "expected adapters in .* that fit .* nothing not found"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    adapters: Path, folder: Path, change: dict[str, object], message: str
) -> None:
    config = json.loads((adapters / ADAPTER_CONFIG).read_text("utf-8"))
    (adapters / ADAPTER_CONFIG).write_text(json.dumps(config | change), "utf-8")
    with pytest.raises(ValueError, match=f"^path: {message}") as caught:
        load_adapter_folder(adapters, ModelOptions(), str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("scalar", [False, True])
def test_adapters_that_the_configuration_does_not_name_are_refused(
    scalar: bool, folder: Path, tmp_path: Path
) -> None:
    model = load_scalar_model(folder, LORA, head_seed=0) if scalar else load_causal_lm(folder, LORA)
    save_adapter_folder(model, tiny_tokenizer(), tmp_path)  # type: ignore[arg-type]
    load_adapter_folder(tmp_path, ModelOptions(), str(folder))
    (tmp_path / "lit_rlhf.json").unlink()  # which lists the file
    config = json.loads((tmp_path / ADAPTER_CONFIG).read_text("utf-8"))
    others = ("q_proj", "down_proj")
    named = [name for name in config["target_modules"] if not name.endswith(others)]
    assert len(named) == len(config["target_modules"]) - 4
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(config | {"target_modules": named}), "utf-8")
    module = r"base_model\.model\.model\.layers\.\d\.\S+\.weight"
    message = f"names all modules .*{ADAPTER_WEIGHTS}, got no place for {module}.* and 3 more$"
    with pytest.raises(ValueError, match=message):
        load_adapter_folder(tmp_path, ModelOptions(), str(folder))


def test_adapters_that_differ_from_their_manifest_are_refused(folder: Path, tmp_path: Path) -> None:
    save_adapter_folder(load_causal_lm(folder, LORA), tiny_tokenizer(), tmp_path)  # type: ignore[arg-type]
    config = json.loads((tmp_path / ADAPTER_CONFIG).read_text("utf-8"))
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(config | {"lora_alpha": 99}), "utf-8")
    with pytest.raises(ValueError, match=r"lists, got another .*adapter_config\.json: it"):
        load_adapter_folder(tmp_path, ModelOptions(), str(folder))


def test_adapters_that_are_cut_off_are_refused(adapters: Path, folder: Path) -> None:
    file = adapters / ADAPTER_WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=rf"expected a whole safetensors .*{file.name}, which"):
        load_adapter_folder(adapters, ModelOptions(), str(folder))


def test_adapters_of_an_unknown_model_ask_for_it(adapters: Path) -> None:
    config = json.loads((adapters / ADAPTER_CONFIG).read_text("utf-8"))
    config["base_model_name_or_path"] = None
    (adapters / ADAPTER_CONFIG).write_text(json.dumps(config), "utf-8")
    with pytest.raises(ValueError, match=r"^base: expected the model below the adapters, got none"):
        load_adapter_folder(adapters, ModelOptions())


def test_adapters_without_their_weights_are_refused(adapters: Path, folder: Path) -> None:
    weights = load_file(adapters / ADAPTER_WEIGHTS)
    lost = sorted(weights)[-1]
    save_file({name: weights[name] for name in weights if name != lost}, adapters / ADAPTER_WEIGHTS)
    module = lost.removesuffix(".weight")
    message = f"path: expected the weights of all adapters .* got none of 1, the first {module}"
    with pytest.raises(ValueError, match=message):
        load_adapter_folder(adapters, ModelOptions(), str(folder))
