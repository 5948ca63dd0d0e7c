"""What a rollout yields: prompts and sampled responses.

Notation: `B` samples, `P` prompt tokens, `T` response tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RolloutBatch(NamedTuple):
    """`B` prompts and a sampled response to each.

    Attributes:
        prompt_ids: `[B, P]` long, padded on the left.
        prompt_mask: Real tokens, `[B, P]` bool.
        response_ids: `[B, T]` long, padded on the right.
        response_mask: Real tokens, `[B, T]` bool: a prefix of each row, EOS included, never empty.
        terminated: Whether the response ended with EOS, `[B]` bool; otherwise it was cut off.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    response_mask: Tensor
    terminated: Tensor

    @property
    def sequence_ids(self) -> Tensor:
        """Prompt and response, `[B, P+T]`."""
        return torch.cat([self.prompt_ids, self.response_ids], dim=1)

    @property
    def sequence_mask(self) -> Tensor:
        """Real tokens of prompt and response, `[B, P+T]` bool."""
        return torch.cat([self.prompt_mask, self.response_mask], dim=1)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each response, EOS included, `[B]` long."""
        return self.response_mask.sum(dim=1)
