"""docs/models.md: transformers reads a reward model as the stages do."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_rlhf.data import DialogueEncoder, Message
from lit_rlhf.forward import sequence_scores
from lit_rlhf.models import load_scalar_model, load_tokenizer
from tests.docs.blocks import ROOT, blocks

REWARD = "runs/quickstart/reward"


def test_transformers_score_is_the_stages_score(workspace: Path) -> None:
    (block,) = (b for b in blocks(ROOT / "docs/models.md") if "apply_chat_template" in b.text)
    names: dict[str, Any] = {}
    exec(compile(block.text, "models.md", "exec"), names)
    encoder = DialogueEncoder(load_tokenizer(REWARD), max_length=128)
    dialogue = (Message("user", "name two metals."), Message("assistant", "iron and zinc."))
    ids = encoder.encode_dialogue(dialogue).input_ids.long().unsqueeze(0)
    with torch.no_grad():
        score = sequence_scores(load_scalar_model(REWARD), ids, torch.ones_like(ids).bool())
    assert names["score"] == pytest.approx(float(score[0]), abs=1e-5)
