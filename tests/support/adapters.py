"""Networks with LoRA adapters."""

import torch
from torch import Tensor

from lit_rlhf.forward import token_logits
from lit_rlhf.forward.networks import LanguageModel
from lit_rlhf.models import ModelOptions

IDS = torch.arange(4, 24).reshape(2, 10)


MASK = torch.ones(2, 10, dtype=torch.bool)


LORA = ModelOptions(lora_rank=2, lora_alpha=8.0)


def perturb_trained_weights(model: LanguageModel) -> LanguageModel:
    """Move adapters and fully trained layers away from their start, in place of training."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def assert_equal_up_to_rounding(actual: Tensor, expected: Tensor) -> None:
    """Compare by the norm: float32 rounds by 1e-7 in each of some hundred operations."""
    assert actual.shape == expected.shape
    assert float((actual - expected).norm() / expected.norm()) < 1e-4


@torch.no_grad()
def logits(model: LanguageModel) -> Tensor:
    return token_logits(model, IDS, MASK)
