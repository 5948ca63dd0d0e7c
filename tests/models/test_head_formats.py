"""What other projects read from a scalar model that is saved under their names.

Their classes are restated here from plain transformers, as far as they make a score.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from lit_rlhf.forward import sequence_scores
from lit_rlhf.models import load_causal_lm, load_scalar_model, save_model_folder
from lit_rlhf.models.exchange import HeadFormat
from tests.models.foreign import FOREIGN, write_foreign
from tests.support.tiny_models import tiny_tokenizer

Folder = Callable[[str], Path]
IDS = torch.arange(4, 40).reshape(3, 12)


@torch.no_grad()
def transformers_scores(folder: Path) -> Tensor:
    loaded: Any = AutoModelForSequenceClassification.from_pretrained(
        folder, output_loading_info=True
    )
    model, info = loaded
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    scores: Tensor = model.eval()(IDS).logits[:, 0]
    return scores


@torch.no_grad()
def openrlhf_scores(folder: Path) -> Tensor:
    """Its RewardModel: a trunk, and a bias-free layer by the name that the config says."""
    name = json.loads((folder / "config.json").read_text("utf-8"))["value_head_prefix"]
    trunk: Any = AutoModel.from_pretrained(folder)
    trunk.eval()
    head = load_file(folder / "model.safetensors")[f"{name}.weight"]
    scores: Tensor = trunk(IDS).last_hidden_state[:, -1] @ head[0]
    return scores


@torch.no_grad()
def trl_scores(folder: Path) -> Tensor:
    """Its AutoModelForCausalLMWithValueHead: a language model, and `v_head.summary` beside it."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model.eval()
    weights = load_file(folder / "model.safetensors")
    head = torch.nn.Linear(weights["v_head.summary.weight"].shape[1], 1)
    state = {n.removeprefix("v_head.summary."): t for n, t in weights.items() if "v_head" in n}
    head.load_state_dict(state)
    hidden: Tensor = model(IDS, output_hidden_states=True).hidden_states[-1][:, -1]
    return head(hidden)[:, 0]  # type: ignore[no-any-return]


THEIRS = {"transformers": transformers_scores, "openrlhf": openrlhf_scores, "trl": trl_scores}


@torch.no_grad()
def our_scores(folder: Path) -> Tensor:
    model = load_scalar_model(folder).eval()
    return sequence_scores(model, IDS, torch.ones_like(IDS, dtype=torch.bool))


@pytest.mark.parametrize("head_format", get_args(HeadFormat))
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gemma"])
def test_scores_are_the_same_there_and_back(
    name: str, head_format: HeadFormat, scalar_folder: Folder, tmp_path: Path
) -> None:
    before = our_scores(scalar_folder(name))
    model = load_scalar_model(scalar_folder(name))
    save_model_folder(model, tiny_tokenizer(), tmp_path / "m", head_format=head_format)
    torch.testing.assert_close(our_scores(tmp_path / "m"), before, rtol=1e-6, atol=1e-6)
    there = THEIRS[head_format](tmp_path / "m")
    torch.testing.assert_close(there, before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("head_format", get_args(HeadFormat))
def test_weights_may_be_sharded(
    head_format: HeadFormat, scalar_folder: Folder, tmp_path: Path
) -> None:
    before = our_scores(scalar_folder("llama"))
    model = load_scalar_model(scalar_folder("llama"))
    save_model_folder(
        model,
        tiny_tokenizer(),
        tmp_path / "m",
        head_format=head_format,
        max_shard_size="8KB",
    )
    assert len(list((tmp_path / "m").glob("model-*.safetensors"))) > 2
    torch.testing.assert_close(our_scores(tmp_path / "m"), before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("head_format", ["transformers", "openrlhf"])
def test_the_config_says_what_vllm_needs_for_raw_scores(
    head_format: HeadFormat, scalar_folder: Folder, tmp_path: Path
) -> None:
    model = load_scalar_model(scalar_folder("llama"))
    save_model_folder(model, tiny_tokenizer(), tmp_path / "m", head_format=head_format)
    config = AutoConfig.from_pretrained(tmp_path / "m")
    assert config.architectures == ["LlamaForSequenceClassification"]
    assert config.num_labels == 1
    assert config.problem_type == "regression"


def test_a_value_heads_folder_is_a_language_models(scalar_folder: Folder, tmp_path: Path) -> None:
    model = load_scalar_model(scalar_folder("qwen3"))
    save_model_folder(model, tiny_tokenizer(), tmp_path / "m", head_format="trl")
    config = AutoConfig.from_pretrained(tmp_path / "m")
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert load_causal_lm(tmp_path / "m").can_generate()
    assert (tmp_path / "m" / "generation_config.json").is_file()


def test_an_output_layer_is_put_beside_a_value_head(scalar_folder: Folder, tmp_path: Path) -> None:
    model = load_scalar_model(scalar_folder("llama"))
    weight = torch.randn(288, 16)
    save_model_folder(
        model,
        tiny_tokenizer(),
        tmp_path / "m",
        head_format="trl",
        lm_head={"weight": weight},
    )
    assert torch.equal(load_causal_lm(tmp_path / "m").state_dict()["lm_head.weight"], weight)
    with pytest.raises(ValueError, match=r"lm_head: expected weight .*288, 16.*got .*7, 16"):
        save_model_folder(
            model,
            tiny_tokenizer(),
            tmp_path / "other",
            head_format="trl",
            lm_head={"weight": weight[:7]},
        )


def test_a_bias_survives_trl_and_not_openrlhf(tmp_path: Path) -> None:
    written = write_foreign(tmp_path / "theirs", FOREIGN["trl"])
    model = load_scalar_model(tmp_path / "theirs")
    save_model_folder(model, tiny_tokenizer(), tmp_path / "m", head_format="trl")
    expected = written.scores(IDS)
    torch.testing.assert_close(trl_scores(tmp_path / "m"), expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="OpenRLHF's scalar head has no bias"):
        save_model_folder(model, tiny_tokenizer(), tmp_path / "o", head_format="openrlhf")
    assert not (tmp_path / "o").exists()
