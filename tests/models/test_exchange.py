"""Scalar models of other projects, by the names in their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
)

from lit_rlhf.forward import sequence_scores
from lit_rlhf.models import ModelOptions, load_causal_lm, load_scalar_model, save_model_folder
from tests.models.foreign import FOREIGN, Foreign, Written, write_foreign
from tests.support.tiny_models import tiny_tokenizer

Folder = Callable[[str], Path]
IDS = torch.arange(4, 40).reshape(3, 12)


@torch.no_grad()
def our_scores(folder: Path, **options: Any) -> Tensor:
    model = load_scalar_model(folder, ModelOptions(**options)).eval()
    return sequence_scores(model, IDS, torch.ones_like(IDS, dtype=torch.bool))


def agrees(written: Written, scores: Tensor) -> None:
    expected = written.scores(IDS)
    assert expected.std() > 0.1
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", FOREIGN)
def test_scores_are_those_of_the_other_project(layout: str, tmp_path: Path) -> None:
    written = write_foreign(tmp_path, FOREIGN[layout])
    agrees(written, our_scores(tmp_path))


@pytest.mark.parametrize("layout", ["paper", "trl, wrapped"])
def test_weights_may_be_in_several_files(layout: str, tmp_path: Path) -> None:
    written = write_foreign(tmp_path, FOREIGN[layout], shards=3)
    agrees(written, our_scores(tmp_path))


@pytest.mark.parametrize("layout", ["trl", "openrlhf"])
def test_every_family_has_value_heads(layout: str, family: str, tmp_path: Path) -> None:
    written = write_foreign(tmp_path, FOREIGN[layout], family)
    agrees(written, our_scores(tmp_path))


@pytest.mark.parametrize("layout", FOREIGN)
def test_a_foreign_model_is_saved_as_our_own(layout: str, tmp_path: Path) -> None:
    written = write_foreign(tmp_path / "theirs", FOREIGN[layout])
    model = load_scalar_model(tmp_path / "theirs")
    if not FOREIGN[layout].bias:
        save_model_folder(model, tiny_tokenizer(), tmp_path / "ours")
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "ours", output_loading_info=True
        )
        plain, info = loaded
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys"))
        with torch.no_grad():
            agrees(written, plain.eval()(IDS).logits[:, 0])
        return
    with pytest.warns(UserWarning, match="score.bias"):
        save_model_folder(model, tiny_tokenizer(), tmp_path / "ours")
    agrees(written, our_scores(tmp_path / "ours"))


def test_a_foreign_model_takes_adapters(tmp_path: Path) -> None:
    written = write_foreign(tmp_path, FOREIGN["trl"])
    model = load_scalar_model(tmp_path, ModelOptions(lora_rank=2))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert any("score" in name and name.endswith("bias") for name in trained)
    agrees(written, our_scores(tmp_path, lora_rank=2))


def test_a_value_heads_language_model_is_loaded_without_it(tmp_path: Path) -> None:
    written = write_foreign(tmp_path, FOREIGN["trl"])
    with torch.no_grad():
        actual: Any = load_causal_lm(tmp_path).eval()(input_ids=IDS)
        expected: Any = written.causal(input_ids=IDS)
    torch.testing.assert_close(actual.logits, expected.logits)


def test_a_head_of_an_unknown_name_is_refused_and_named(tmp_path: Path) -> None:
    write_foreign(tmp_path, Foreign("regression", lm_head=True))
    with pytest.raises(ValueError, match=r"called score, value_head, .* got regression; "):
        load_scalar_model(tmp_path)


def test_two_heads_are_refused(tmp_path: Path) -> None:
    write_foreign(tmp_path, Foreign("v_head.summary"))
    from safetensors.torch import load_file, save_file

    weights = load_file(tmp_path / "model.safetensors")
    weights["score.weight"] = weights["v_head.summary.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"got score, v_head\.summary"):
        load_scalar_model(tmp_path)


def test_a_language_model_still_gets_a_new_head(causal_folder: Folder) -> None:
    model = load_scalar_model(causal_folder("llama"), head_seed=3)
    other = load_scalar_model(causal_folder("llama"), head_seed=4)
    first, second = (m.get_parameter("score.weight") for m in (model, other))
    assert not torch.equal(first, second)


def test_a_classifier_that_is_no_decoder_is_refused_with_a_way_out(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=288,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
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
    from safetensors.torch import load_file, save_file

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
