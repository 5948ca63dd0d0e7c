from pathlib import Path

import pytest
import torch

from lit_rlhf.models import load_scalar_model, save_model_folder
from lit_rlhf.rollout import RolloutBatch
from tests.support.reward_inputs import TEXTS, make_rollouts
from tests.support.tiny_models import PAD_ID, tiny_causal_lm, tiny_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rewards")
    save_model_folder(tiny_causal_lm(), tiny_tokenizer(), root / "lm")
    for name, seed, heads in (("reward_1", 1, 1), ("reward_2", 2, 1), ("heads", 3, 2)):
        model = load_scalar_model(root / "lm", head_seed=seed, heads=heads)
        save_model_folder(model, tiny_tokenizer(), root / name)
    return root


@pytest.fixture(scope="session")
def rollouts() -> RolloutBatch:
    """Responses that say TEXTS; the second is cut off, the others end with EOS."""
    mask = torch.tensor([[True] * 4, [False, True, True, True], [False, False, True, True]])
    ids = torch.randint(4, 280, (3, 4)).masked_fill(~mask, PAD_ID)
    return make_rollouts(TEXTS, [True, False, True])._replace(prompt_ids=ids, prompt_mask=mask)
