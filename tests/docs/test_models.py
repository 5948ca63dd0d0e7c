"""docs/models.md agrees with the code on model folders, scores and adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_rlhf.data import DialogueEncoder, Message
from lit_rlhf.forward import forward_plan, sequence_scores
from lit_rlhf.models import ModelOptions, load_causal_lm, load_scalar_model, load_tokenizer
from lit_rlhf.modules import RewardModule
from tests.docs.blocks import ROOT, blocks

PAGE = ROOT / "docs" / "models.md"


def executed(word: str) -> dict[str, Any]:
    """Names after the page's Python block that has a word."""
    (block,) = (
        b for b in blocks(PAGE) if b.language == "python" and not b.title and word in b.text
    )
    namespace: dict[str, Any] = {}
    exec(compile(block.text, "models.md", "exec"), namespace)
    return namespace


def score(folder: str | Path, dialogue: tuple[Message, ...]) -> float:
    """Score of a dialogue, rendered with the model's own template."""
    encoder = DialogueEncoder(load_tokenizer(folder), max_length=128)
    ids = encoder.encode_dialogue(dialogue).input_ids.long().unsqueeze(0)
    model = load_scalar_model(folder)
    with torch.no_grad():
        return float(sequence_scores(model, ids, torch.ones_like(ids, dtype=torch.bool))[0])


def test_transformers_score_is_the_stages_score(workspace: Path) -> None:
    names = executed("apply_chat_template")

    dialogue = (Message("user", "name two metals."), Message("assistant", "iron and zinc."))
    assert names["score"] == pytest.approx(score("runs/quickstart/reward", dialogue), abs=1e-5)
    assert isinstance(names["response"], str)


def test_model_of_ones_own_is_optimized_by_the_same_call(workspace: Path) -> None:
    assert forward_plan(executed("optimize_forward")["model"]).chunked_logits


def test_adapters_stay_in_float32_on_bfloat16_weights(quickstart: Path) -> None:
    model = load_causal_lm(quickstart / "sft", ModelOptions(dtype="bfloat16", lora_rank=2))

    types = {(".lora_" in name, p.dtype) for name, p in model.named_parameters()}
    assert types == {(True, torch.float32), (False, torch.bfloat16)}


def test_reward_model_is_trained_on_without_the_language_models_loss(quickstart: Path) -> None:
    assert RewardModule(str(quickstart / "reward"), lm_coef=0.0).lm_head is None
    with pytest.raises(ValueError, match="expected a causal language model"):
        RewardModule(str(quickstart / "reward"))
