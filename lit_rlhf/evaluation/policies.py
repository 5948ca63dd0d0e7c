"""Measuring one policy on prompts: its responses, their scores, and what gives a collapse away.

Notation: `N` prompts, `P` prompt tokens, `T` response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lit_rlhf.data import DialogueEncoder
from lit_rlhf.data.examples import PromptExample
from lit_rlhf.evaluation.sampling import SampledBatch, sampled_batches
from lit_rlhf.forward import LanguageModel
from lit_rlhf.functional import kl_estimate
from lit_rlhf.rewards import WeightedReward
from lit_rlhf.rollout import (
    RolloutBatch,
    SamplingOptions,
    compute_logprobs,
    compute_policy_statistics,
    decode_responses,
    rollout_metrics,
)

METRICS = (
    "response_length",
    "truncation_rate",
    "kl",
    "kl_per_token",
    "perplexity",
    "ref_perplexity",
    "entropy",
    "distinct_2",
)
"""What is measured of a policy besides its scores: the `rollout/*` metrics of the same name."""


@dataclass(frozen=True)
class PolicySamples:
    """A policy's responses to `N` prompts, in the order of the prompts.

    Attributes:
        prompts: Rendered prompts, `N` texts.
        responses: Decoded responses without special tokens, `N` texts.
        scores: Scores by reward, each `[N]` float32.
        kl: KL to the reference on each response, `[N]` float32, nats (k1, so it can be < 0).
        lengths: Tokens of each response, EOS included, `[N]` long.
        terminated: Whether each response ended by itself, `[N]` bool.
        metrics: Values by the names of `METRICS`, over all responses.
    """

    prompts: list[str]
    responses: list[str]
    scores: dict[str, Tensor]
    kl: Tensor
    lengths: Tensor
    terminated: Tensor
    metrics: dict[str, float]

    def records(self, policy: str) -> list[dict[str, Any]]:
        """One record for each response, for a JSON lines file."""
        return [
            {
                "policy": policy,
                "prompt": prompt,
                "response": self.responses[row],
                "scores": {name: scores[row].item() for name, scores in self.scores.items()},
                "kl": self.kl[row].item(),
                "response_length": int(self.lengths[row]),
                "terminated": bool(self.terminated[row]),
            }
            for row, prompt in enumerate(self.prompts)
        ]


@dataclass(frozen=True)
class _Part:
    """What is kept of one batch, on the CPU."""

    positions: list[int]
    texts: list[str]
    responses: list[str]
    rollouts: RolloutBatch
    scores: dict[str, Tensor]
    logprobs: Tensor
    ref_logprobs: Tensor
    entropy: Tensor


def policy_samples(
    policy: LanguageModel,
    reference: LanguageModel,
    encoder: DialogueEncoder,
    examples: Sequence[PromptExample],
    rewards: Mapping[str, WeightedReward],
    options: SamplingOptions,
    batch_size: int = 32,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> PolicySamples:
    """Sample one response to each prompt and measure it.

    Args:
        policy: The policy.
        reference: What KL is measured against, on the same device.
        encoder: The encoder of both.
        examples: The prompts, `N` of them.
        rewards: Rewards by name.
        options: How to sample; log-probs are taken at the same temperature.
        batch_size: Prompts per batch.
        seed: Of the sampling; the same seed gives every policy the same seeds, batch by batch.
        progress: Called with the number of prompts of each batch when it is done.

    Raises:
        ValueError: If there is no prompt, or prompts and responses do not fit into the model's
            positions.
    """
    if not examples:
        raise ValueError("examples: expected at least one prompt, got none")
    sampled = sampled_batches(policy, encoder, examples, options, batch_size, seed, 1, progress)
    parts = [
        _measured(policy, reference, encoder, batch, rewards, options.temperature)
        for batch in sampled
    ]
    order = torch.tensor([i for part in parts for i in part.positions]).argsort()
    logprobs, ref_logprobs, entropy = (
        _joined([getattr(part, name) for part in parts], order)
        for name in ("logprobs", "ref_logprobs", "entropy")
    )
    response_ids, response_mask, terminated = (
        _joined([getattr(part.rollouts, name) for part in parts], order)
        for name in ("response_ids", "response_mask", "terminated")
    )
    metrics = rollout_metrics(
        logprobs, ref_logprobs, entropy, response_mask, response_ids, terminated
    )
    texts = [text for part in parts for text in part.texts]
    responses = [text for part in parts for text in part.responses]
    return PolicySamples(
        prompts=[texts[row] for row in order.tolist()],
        responses=[responses[row] for row in order.tolist()],
        scores={name: _joined([part.scores[name] for part in parts], order) for name in rewards},
        kl=kl_estimate(logprobs, ref_logprobs).sum(dim=1),
        lengths=response_mask.sum(dim=1),
        terminated=terminated,
        metrics={name: float(metrics[f"rollout/{name}"]) for name in METRICS},
    )


def _measured(
    policy: LanguageModel,
    reference: LanguageModel,
    encoder: DialogueEncoder,
    batch: SampledBatch,
    rewards: Mapping[str, WeightedReward],
    temperature: float,
) -> _Part:
    texts, rollouts = batch.prompts.texts, batch.rollouts
    statistics = rollouts.statistics_at(temperature)
    if statistics is None:
        statistics = compute_policy_statistics(policy, rollouts, temperature)
    ref_logprobs = (
        statistics.logprobs
        if reference is policy
        else compute_logprobs(reference, rollouts, temperature)
    )
    scores = {name: reward(rollouts, texts, None).cpu() for name, reward in rewards.items()}
    return _Part(
        batch.positions,
        texts,
        decode_responses(rollouts, encoder.tokenizer),
        rollouts.map(lambda tensor: tensor.cpu()),
        scores,
        statistics.logprobs.cpu(),
        ref_logprobs.cpu(),
        statistics.entropy.cpu(),
    )


def _joined(parts: Sequence[Tensor], order: Tensor) -> Tensor:
    """Rows of all batches in `order`, as wide as the widest; what is filled up is outside masks."""
    if parts[0].dim() == 2:
        width = max(part.shape[1] for part in parts)
        parts = [functional.pad(part, (0, width - part.shape[1])) for part in parts]
    return torch.cat(list(parts))[order]
