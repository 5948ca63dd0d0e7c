"""Log-probs of a nucleus by its definition, in float64."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lit_rlhf.forward import LanguageModel
from lit_rlhf.rollout import RolloutBatch, Sampler, SamplingOptions, generate_responses


def nucleus_logprobs(
    model: torch.nn.Module, rollouts: RolloutBatch, options: SamplingOptions
) -> Tensor:
    """Log-probs of the response tokens within the likeliest tokens that reach `top_p`, `[n]`."""
    with torch.no_grad():
        logits = model(rollouts.sequence_ids, attention_mask=rollouts.sequence_mask.long()).logits
    width = rollouts.response_ids.shape[1]
    policy = (logits[:, -width - 1 : -1].double() / options.temperature).softmax(-1)
    ordered, order = policy.sort(descending=True)
    before = ordered.cumsum(-1) - ordered  # a token stays while those before it have less
    nucleus = torch.where(before < options.top_p, ordered, 0)
    places = (order == rollouts.response_ids[..., None]).int().argmax(-1, keepdim=True)
    message = (nucleus / nucleus.sum(-1, keepdim=True)).gather(-1, places).squeeze(-1)
    return message.log()[rollouts.response_mask]


class Nucleus(Sampler):
    """A sampler that draws from a nucleus of its own `top_p`, whatever the options say."""

    calls = 0

    def __init__(self, top_p: float = 0.6) -> None:
        self.top_p = top_p

    def __call__(
        self,
        model: LanguageModel,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        options: SamplingOptions,
        **settings: Any,
    ) -> RolloutBatch:
        Nucleus.calls += 1
        in_nucleus = replace(options, top_p=self.top_p)
        return generate_responses(model, prompt_ids, prompt_mask, in_nucleus, **settings)
