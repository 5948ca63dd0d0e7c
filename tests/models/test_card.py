from __future__ import annotations

from pathlib import Path

import torch
import yaml

from lit_rlhf.models import ModelCardInfo, save_model_folder
from lit_rlhf.models.card import render_model_card
from tests.support.tiny_models import tiny_causal_lm, tiny_tokenizer

CARD = ModelCardInfo(
    stage="reward",
    base_model="owner/base",
    config={"learning_rate": 1e-5, "pipe": "a|b"},
    metrics={"reward/accuracy": 0.71},
    command="lit_rlhf fit",
)


def metadata(card: str) -> object:
    """The block between the first two lines of dashes, as the hub reads it."""
    return yaml.safe_load(card.split("---\n")[1])


def test_the_card_in_a_folder_says_how_the_model_was_made(tmp_path: Path) -> None:
    save_model_folder(tiny_causal_lm(), tiny_tokenizer(), tmp_path / "m", card=CARD)
    text = (tmp_path / "m" / "README.md").read_text()
    for part in (
        "base_model: owner/base",
        "| `learning_rate` | 1e-05 |",
        "| `pipe` | a\\|b |",
        "| `reward/accuracy` | 0.71 |",
        "lit_rlhf fit",
        f"| `torch` | {torch.__version__} |",
    ):
        assert part in text


def test_the_hubs_metadata_names_task_tags_and_base_model() -> None:
    assert metadata(render_model_card(CARD, scalar=True)) == {
        "base_model": "owner/base",
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "tags": ["rlhf", "reward"],
    }


def test_any_stage_name_is_valid_metadata() -> None:
    card = render_model_card(ModelCardInfo(stage="my: stage", base_model="."), scalar=False)
    assert metadata(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rlhf", "my: stage"],
    }
    assert "# my: stage" in card


def test_a_local_base_model_stays_out_of_the_hub_metadata() -> None:
    card = render_model_card(ModelCardInfo("sft", base_model="runs/with/three/parts"), scalar=False)
    assert "base_model:" not in card
