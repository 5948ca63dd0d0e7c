"""Disagreement of reward models on which of two responses is better."""

from collections.abc import Sequence

import torch

from lit_rlhf.models import ModelOptions
from lit_rlhf.tools.evaluation.labels import Comparison
from lit_rlhf.tools.evaluation.loading import CPU
from lit_rlhf.tools.evaluation.people import PairScorer


def difference_spreads(
    comparisons: Sequence[Comparison],
    reward_models: Sequence[str],
    *,
    policy: str | None = None,
    model_options: ModelOptions = ModelOptions(),
    device: torch.device = CPU,
    chat_template: str = "tokenizer",
) -> list[float]:
    """Measure how much the members of an ensemble disagree on each comparison.

    The spread is the standard deviation over members of the difference of the two scores, each
    member's differences being over their root mean square: a member's scale says nothing about what
    it prefers.

    Args:
        comparisons: The comparisons, `N` of them.
        reward_models: Folders or hub ids of reward models with two or more heads altogether.
        policy: Folder or hub id of a policy, whose tokenizer writes the text; `None`: the first
            reward model's.
        model_options: How models are loaded.
        device: Where they compute.
        chat_template: Template of the dialogues; `tokenizer` for the policy's own.
    """
    scorer = PairScorer(
        dict.fromkeys(reward_models, 1.0),
        policy=policy,
        model_options=model_options,
        device=device,
        chat_template=chat_template,
    )
    heads = scorer.score(comparisons, "disagreement of reward models").head_scores
    if heads is None or heads.shape[1] < 2:
        raise ValueError(
            "reward_models: expected two or more reward models, or one with several heads, got "
            f"{', '.join(reward_models)} with one head"
        )
    first, second = heads.double().chunk(2)
    differences = second - first  # [N, K]
    scale = differences.square().mean(dim=0).sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    spreads: list[float] = (differences / scale).std(dim=1, correction=0).tolist()
    return spreads
