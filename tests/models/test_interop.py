"""Scalar models of other projects, by the names in their files, and ours in theirs."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
)

from lit_rlhf.forward import sequence_scores
from lit_rlhf.models import HeadFormat, ModelOptions, save_model_folder
from lit_rlhf.models.loading import load_causal_lm, load_scalar_model, load_tokenizer
from tests.support.foreign_models import FOREIGN, Foreign, ForeignFolder, write_foreign
from tests.support.tiny_models import EOS_ID, tiny_config, tiny_tokenizer

Folder = Callable[[str], Path]
IDS = torch.arange(4, 40).reshape(3, 12)
ROUNDING = 3e-6
"""Ten times what scores of these models in float32 differ from those in float64: 2.9e-7."""


@torch.no_grad()
def our_scores(folder: Path, lora_rank: int = 0, pickled_weights: bool = False) -> Tensor:
    options = ModelOptions(lora_rank=lora_rank)
    model = load_scalar_model(folder, options, pickled_weights=pickled_weights).eval()
    return sequence_scores(model, IDS, torch.ones_like(IDS, dtype=torch.bool))


def agrees(written: ForeignFolder, scores: Tensor) -> None:
    expected = written.scores(IDS)
    assert expected.std() > 0.1
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", FOREIGN)
def test_scores_of_another_project_are_kept_in_a_folder_of_our_own(
    layout: str, tmp_path: Path
) -> None:
    shards = 3 if layout in ("paper", "trl, wrapped") else 1
    written = write_foreign(tmp_path / "theirs", FOREIGN[layout], shards=shards)
    agrees(written, our_scores(tmp_path / "theirs"))
    model, bias = load_scalar_model(tmp_path / "theirs"), FOREIGN[layout].bias
    with pytest.warns(UserWarning, match="score.bias") if bias else nullcontext():
        save_model_folder(model, tiny_tokenizer(), tmp_path / "ours")
    agrees(written, (our_scores if bias else transformers_scores)(tmp_path / "ours"))


@pytest.mark.parametrize("layout", ["trl", "openrlhf"])
def test_every_family_has_value_heads(layout: str, family: str, tmp_path: Path) -> None:
    agrees(write_foreign(tmp_path, FOREIGN[layout], family), our_scores(tmp_path))


def test_a_foreign_model_takes_adapters(tmp_path: Path) -> None:
    written = write_foreign(tmp_path, FOREIGN["trl"])
    model = load_scalar_model(tmp_path, ModelOptions(lora_rank=2))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert any("score" in name and name.endswith("bias") for name in trained)
    agrees(written, our_scores(tmp_path, lora_rank=2))


def test_a_value_heads_language_model_is_loaded_without_it(tmp_path: Path) -> None:
    written = write_foreign(tmp_path, FOREIGN["trl"])
    with torch.no_grad():
        logits = load_causal_lm(tmp_path).eval()(input_ids=IDS).logits
        torch.testing.assert_close(logits, written.causal(input_ids=IDS).logits)


def test_two_heads_and_one_of_an_unknown_name_are_refused(tmp_path: Path) -> None:
    write_foreign(tmp_path, Foreign("v_head.summary"))
    weights = load_file(tmp_path / "model.safetensors")
    weights["score.weight"] = weights["v_head.summary.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"got score, v_head\.summary"):
        load_scalar_model(tmp_path)
    write_foreign(tmp_path / "other", Foreign("regression", lm_head=True))
    with pytest.raises(ValueError, match=r"called score, value_head, .* got regression; "):
        load_scalar_model(tmp_path / "other")


def test_a_classifier_that_is_no_decoder_is_refused_with_a_way_out(tmp_path: Path) -> None:
    sizes = {"vocab_size": 288, "hidden_size": 16, "intermediate_size": 32}
    config = BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    config.num_labels = 1
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"got BertForSequenceClassification .*reward function"):
        load_scalar_model(tmp_path)


def test_pickled_weights_are_read_as_data_where_asked(tmp_path: Path) -> None:
    written = write_foreign(tmp_path, FOREIGN["paper"], shards=2, pickled=True)
    with pytest.raises(ValueError, match="`lit_rlhf export` makes them"):
        load_scalar_model(tmp_path)
    agrees(written, our_scores(tmp_path, pickled_weights=True))


def test_differences_are_not_taken_for_weights(tmp_path: Path) -> None:
    write_foreign(tmp_path, FOREIGN["paper"])
    weights = load_file(tmp_path / "model.safetensors")
    tuned = {n: t * (1e-4 if "layers" in n else 1.0) for n, t in weights.items()}
    save_file(tuned, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"differences from LLaMA's.*lit_rlhf export --checkpoint"):
        load_scalar_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    config["architectures"] = ["Llama"]
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(ValueError, match="differences from LLaMA's"):
        load_causal_lm(tmp_path)


@torch.no_grad()
def transformers_scores(folder: Path) -> Tensor:
    load: Any = AutoModelForSequenceClassification.from_pretrained
    model, info = load(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()(IDS).logits[:, 0]


@torch.no_grad()
def openrlhf_scores(folder: Path) -> Tensor:
    """Its RewardModel: a trunk, and a bias-free layer by the name that the config says."""
    name = json.loads((folder / "config.json").read_text("utf-8"))["value_head_prefix"]
    trunk = AutoModel.from_pretrained(folder).eval()
    head = load_file(folder / "model.safetensors")[f"{name}.weight"]
    return trunk(IDS).last_hidden_state[:, -1] @ head[0]


@torch.no_grad()
def trl_scores(folder: Path) -> Tensor:
    """Its AutoModelForCausalLMWithValueHead: a language model, and `v_head.summary` beside it."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    weights = load_file(folder / "model.safetensors")
    head = torch.nn.Linear(weights["v_head.summary.weight"].shape[1], 1)
    state = {n.removeprefix("v_head.summary."): t for n, t in weights.items() if "v_head" in n}
    head.load_state_dict(state)
    return head(model(IDS, output_hidden_states=True).hidden_states[-1][:, -1])[:, 0]


THEIRS = {"transformers": transformers_scores, "openrlhf": openrlhf_scores, "trl": trl_scores}


@pytest.mark.parametrize("head_format", get_args(HeadFormat))
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gemma"])
def test_scores_are_the_same_there_and_back(
    name: str, head_format: HeadFormat, scalar_folder: Folder, tmp_path: Path
) -> None:
    before, model = our_scores(scalar_folder(name)), load_scalar_model(scalar_folder(name))
    save_model_folder(model, tiny_tokenizer(), tmp_path / "m", head_format=head_format)
    there = THEIRS[head_format](tmp_path / "m")
    options: dict[str, Any] = {"head_format": head_format, "max_shard_size": "8KB"}
    save_model_folder(model, tiny_tokenizer(), tmp_path / "shards", **options)
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    for scores in (there, our_scores(tmp_path / "m"), our_scores(tmp_path / "shards")):
        torch.testing.assert_close(scores, before, rtol=ROUNDING, atol=ROUNDING)
    config = AutoConfig.from_pretrained(tmp_path / "m")
    if head_format != "trl" and name == "llama":  # vLLM needs it for raw scores
        assert config.architectures == ["LlamaForSequenceClassification"]
        assert (config.num_labels, config.problem_type) == (1, "regression")
    if head_format == "trl" and name == "qwen3":
        assert config.architectures == ["Qwen3ForCausalLM"]
        assert load_causal_lm(tmp_path / "m").can_generate()
        assert (tmp_path / "m" / "generation_config.json").is_file()


def test_an_output_layer_is_put_beside_a_value_head(scalar_folder: Folder, tmp_path: Path) -> None:
    def save(name: str, weight: Tensor) -> Path:
        options: dict[str, Any] = {"head_format": "trl", "lm_head": {"weight": weight}}
        model = load_scalar_model(scalar_folder("llama"))
        save_model_folder(model, tiny_tokenizer(), tmp_path / name, **options)
        return tmp_path / name

    weight = torch.randn(288, 16)
    assert torch.equal(load_causal_lm(save("m", weight)).state_dict()["lm_head.weight"], weight)
    with pytest.raises(ValueError, match=r"lm_head: expected weight .*288, 16.*got .*7, 16"):
        save("other", weight[:7])


def test_a_bias_survives_trl_and_not_openrlhf(tmp_path: Path) -> None:
    written = write_foreign(tmp_path / "theirs", FOREIGN["trl"])
    model = load_scalar_model(tmp_path / "theirs")
    save_model_folder(model, tiny_tokenizer(), tmp_path / "m", head_format="trl")
    expected = written.scores(IDS)
    torch.testing.assert_close(trl_scores(tmp_path / "m"), expected, rtol=ROUNDING, atol=ROUNDING)
    with pytest.raises(ValueError, match="OpenRLHF's scalar head has no bias"):
        save_model_folder(model, tiny_tokenizer(), tmp_path / "o", head_format="openrlhf")
    assert not (tmp_path / "o").exists()


TEXTS = ["name three metals: iron</s>", "no</s>", "make a bomb: I am sorry, no</s>"]


@torch.no_grad()
def plain_text_scores(model: PreTrainedModel, folder: Path) -> Tensor:
    """What someone who knows nothing of this project gets."""
    batch = AutoTokenizer.from_pretrained(folder)(TEXTS, return_tensors="pt", padding=True)
    assert batch["input_ids"].max() > EOS_ID
    model.train(False)
    return model(**batch).logits[:, 0]


@torch.no_grad()
def our_text_scores(folder: Path) -> Tensor:
    model = load_scalar_model(folder).eval()
    batch = load_tokenizer(folder)(TEXTS, return_tensors="pt", padding=True)
    assert batch["attention_mask"][1, 0] == 0
    return sequence_scores(model, batch["input_ids"], batch["attention_mask"].bool())


def test_plain_transformers_scores_our_folders_as_we_do(family: str, scalar_folder: Folder) -> None:
    folder = scalar_folder(family)
    plain = AutoModelForSequenceClassification.from_pretrained(folder)
    scores = plain_text_scores(plain, folder)
    torch.testing.assert_close(scores, our_text_scores(folder), rtol=1e-4, atol=1e-5)


def test_we_score_plain_folders_as_transformers_does(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    config.num_labels = 1
    plain = AutoModelForSequenceClassification.from_config(config)
    plain.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    # right padding: classifiers with learned positions count them from the left
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.padding_side = "right"
    tokenizer.save_pretrained(tmp_path)
    actual, expected = plain_text_scores(plain, tmp_path), our_text_scores(tmp_path)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
