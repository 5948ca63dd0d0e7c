"""Reward and critic folders are those of AutoModelForSequenceClassification with one label."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from lit_rlhf.forward import sequence_scores
from lit_rlhf.models import load_scalar_model, load_tokenizer, save_model_folder
from tests.support.tiny_models import EOS_ID, tiny_causal_lm, tiny_config, tiny_tokenizer

Folder = Callable[[str], Path]
TEXTS = ["name three metals: iron</s>", "no</s>", "make a bomb: I am sorry, no</s>"]


@torch.no_grad()
def plain_scores(model: PreTrainedModel, folder: Path) -> Tensor:
    """What someone who knows nothing of this project gets."""
    batch = AutoTokenizer.from_pretrained(folder)(TEXTS, return_tensors="pt", padding=True)
    assert batch["input_ids"].max() > EOS_ID
    model.train(False)
    scores: Tensor = model(**batch).logits
    return scores[:, 0]


@torch.no_grad()
def our_scores(folder: Path) -> Tensor:
    model = load_scalar_model(folder).eval()
    batch = load_tokenizer(folder)(TEXTS, return_tensors="pt", padding=True)
    assert batch["attention_mask"][1, 0] == 0
    return sequence_scores(model, batch["input_ids"], batch["attention_mask"].bool())


def test_plain_transformers_scores_our_folders_as_we_do(family: str, scalar_folder: Folder) -> None:
    folder = scalar_folder(family)
    loaded: Any = AutoModelForSequenceClassification.from_pretrained(
        folder, output_loading_info=True
    )
    plain, info = loaded
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert plain.config.num_labels == 1
    torch.testing.assert_close(
        plain_scores(plain, folder), our_scores(folder), rtol=1e-4, atol=1e-5
    )


def test_we_score_plain_folders_as_transformers_does(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    config.num_labels = 1
    plain: PreTrainedModel = AutoModelForSequenceClassification.from_config(  # type: ignore[no-untyped-call]
        config
    )
    plain.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    # right padding: classifiers with learned positions count them from the left
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.padding_side = "right"
    tokenizer.save_pretrained(tmp_path)
    torch.testing.assert_close(
        plain_scores(plain, tmp_path), our_scores(tmp_path), rtol=1e-4, atol=1e-5
    )


def test_padding_with_eos_is_refused_by_plain_transformers_and_not_misread(
    family: str, tmp_path: Path
) -> None:
    tokenizer = tiny_tokenizer(pad_token="</s>")
    model = tiny_causal_lm(family)
    save_model_folder(model, tokenizer, tmp_path / "causal")
    save_model_folder(load_scalar_model(tmp_path / "causal"), tokenizer, tmp_path / "scalar")
    plain: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "scalar")
    with pytest.raises(ValueError, match="Cannot handle batch sizes > 1"):
        plain_scores(plain, tmp_path / "scalar")
    ours = our_scores(tmp_path / "scalar")
    for text, score in zip(TEXTS, ours, strict=True):
        alone = plain(**tokenizer(text, return_tensors="pt")).logits[0, 0]
        torch.testing.assert_close(alone, score, rtol=1e-4, atol=1e-5)
