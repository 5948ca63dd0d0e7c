from pathlib import Path

import pytest
import torch

from lit_rlhf.models import load_scalar_model, save_model_folder
from lit_rlhf.rollout import RolloutBatch
from tests.rewards.said import TEXTS
from tests.support.tiny_models import EOS_ID, PAD_ID, tiny_causal_lm, tiny_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rewards")
    save_model_folder(tiny_causal_lm(), tiny_tokenizer(), root / "lm")
    for seed in (1, 2):
        model = load_scalar_model(root / "lm", head_seed=seed)
        save_model_folder(model, tiny_tokenizer(), root / f"reward_{seed}")
    return root


@pytest.fixture(scope="session")
def rollouts() -> RolloutBatch:
    """Responses that say TEXTS; the second is cut off, the others end with EOS."""
    tokenizer = tiny_tokenizer()
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    ids = [[*ids[0], EOS_ID], ids[1], [*ids[2], EOS_ID]]
    lengths = torch.tensor([len(row) for row in ids])
    width = int(lengths.max())
    padded = [row + [PAD_ID] * (width - len(row)) for row in ids]
    prompt_mask = torch.tensor([[True] * 4, [False, True, True, True], [False, False, True, True]])
    prompt_ids = torch.randint(4, 280, (3, 4)).masked_fill(~prompt_mask, PAD_ID)
    responses = (torch.tensor(padded), torch.arange(width) < lengths[:, None])
    return RolloutBatch(prompt_ids, prompt_mask, *responses, torch.tensor([True, False, True]))
