"""Trying out, once for each network, whether a faster way through it gives the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lit_rlhf.forward.networks import eval_mode


@contextmanager
def trying_out(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation mode without gradients, in the precision of the weights.

    Training may try a network out under autocast, which rounds far more than ways differ.
    """
    with eval_mode(model), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def same_outputs(actual: Tensor, expected: Tensor) -> bool:
    """Whether two ways gave the same up to rounding: outputs of any shape, in the model's dtype."""
    error = (actual.float() - expected.float()).norm() / expected.float().norm()
    # bf16 rounds by 0.4 %, layer after layer; a token that saw a wrong one is off by far more
    return bool(error < (0.05 if expected.dtype in (torch.bfloat16, torch.float16) else 1e-3))
