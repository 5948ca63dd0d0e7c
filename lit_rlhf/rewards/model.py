"""A reward model as a reward.

Notation: `B` responses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lit_rlhf.data import CONTRACT_FILE, TextContract, tokenizer_hash
from lit_rlhf.forward import LanguageModel, Offloaded, freeze, on_device, sequence_scores
from lit_rlhf.models import ModelOptions, load_scalar_model, load_tokenizer
from lit_rlhf.rollout import RolloutBatch


class ModelReward(nn.Module):
    """Scores from a frozen reward model that shares the policy's tokenizer.

    Args:
        path: Its folder or hub id.
        options: How it is loaded. LoRA and gradient checkpointing are ignored.
        offload: Keep the weights in CPU memory between uses.
    """

    model: LanguageModel | Offloaded

    def __init__(self, path: str, options: ModelOptions, offload: bool = False) -> None:
        super().__init__()
        self.path = path
        # the options are the policy's, whose adapters and checkpointing serve training alone
        plain = replace(options, lora_rank=0, gradient_checkpointing=False)
        model = freeze(load_scalar_model(path, plain))
        self.model = Offloaded(model) if offload else model
        self.trust_remote_code = options.trust_remote_code

    @torch.no_grad()
    def forward(
        self,
        rollouts: RolloutBatch,
        prompts: Sequence[str],
        max_tokens_per_forward: int | None = None,
        records: Sequence[Mapping[str, Any]] = (),
    ) -> Tensor:
        """Score rollouts by the scalar head at each response's last token.

        Args:
            rollouts: `B` responses.
            prompts: Not used here: the model reads token ids.
            max_tokens_per_forward: Limit on real tokens, see `RolloutBatch.split`.
            records: Not used here.

        Returns:
            `[B]` float32.
        """
        with on_device(self.model, rollouts.response_ids.device) as model:
            return torch.cat(
                [
                    sequence_scores(model, part.sequence_ids, part.sequence_mask)
                    for part in rollouts.split(max_tokens_per_forward)
                ]
            )

    def check_contract(self, policy: TextContract) -> None:
        """Check that the model was trained on text rendered and tokenized like the policy's.

        A model folder without a text contract has only its tokenizer to compare, and a warning
        says so.

        Args:
            policy: The policy's text contract.

        Raises:
            ValueError: If the tokenizers differ, or the renderings do; with both renderings.
        """
        saved = TextContract.find(self.path)
        mismatch = self._compare_tokenizer(policy) if saved is None else saved.mismatch(policy)
        if mismatch is not None:
            raise ValueError(
                f"reward model {self.path!r} does not read what the policy writes: {mismatch}"
            )
        if saved is None:
            rank_zero_warn(
                f"reward model {self.path!r} has no {CONTRACT_FILE}: its tokenizer is the "
                "policy's, but whether it was trained with the policy's chat template cannot be "
                f"checked. The policy writes {policy.render()!r}",
                category=UserWarning,
            )

    def _compare_tokenizer(self, policy: TextContract) -> str | None:
        """How the tokenizer in the model's folder differs from the policy's; `None` if it does not.

        Raises:
            ValueError: If the folder has no tokenizer.
        """
        tokenizer = load_tokenizer(self.path, self.trust_remote_code)
        if tokenizer_hash(tokenizer) == policy.tokenizer_hash:
            return None
        return (
            f"it has another tokenizer, of {len(tokenizer)} tokens; the policy's has "
            f"{policy.vocab_size}. They differ in the vocabulary or split text differently"
        )
