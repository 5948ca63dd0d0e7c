"""What samples responses for PPO: a protocol that `generate_responses` fulfils."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from lit_rlhf.forward import LanguageModel
from lit_rlhf.rollout.batch import RolloutBatch
from lit_rlhf.rollout.sampling import SamplingOptions


class Sampler(Protocol):
    """Samples one response to each prompt from the policy as it is at the call.

    A sampler with weights of its own takes over the policy's first. It sets
    `RolloutBatch.sampler_logprobs`, by which PPO measures how far it is from the policy, and
    corrects for that.
    """

    def __call__(
        self,
        model: LanguageModel,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        options: SamplingOptions,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        seed: int,
        batch_size: int | None = None,
    ) -> RolloutBatch:
        """Sample; the arguments are as for `generate_responses`, on the device of the policy."""
