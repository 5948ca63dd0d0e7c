"""Score responses that are given as token ids with the reward that PPO would get."""

from collections.abc import Callable, Sequence

import torch

from lit_rlhf.data import DialogueEncoder, PromptExample, collate_prompts, pad_sequences
from lit_rlhf.rewards import Scores, WeightedReward
from lit_rlhf.rollout import RolloutBatch
from lit_rlhf.tools.evaluation.reward_probe.answers import Response

_BATCH = 32  # responses that the reward gets at a time


@torch.no_grad()
def score_encoded(
    reward: WeightedReward,
    encoder: DialogueEncoder,
    prompts: Sequence[PromptExample],
    responses: Sequence[Response],
    *,
    device: torch.device,
    report_progress: Callable[[int], object],
) -> Scores:
    """Score encoded responses to prompts, in batches.

    Args:
        reward: The reward, on `device`.
        encoder: Encodes the prompts.
        prompts: Prompts, `N` of them, at least one.
        responses: A response to each.
        device: Where the reward computes.
        report_progress: Gets the number of responses just scored.
    """
    parts = []
    for start in range(0, len(prompts), _BATCH):
        rows = slice(start, start + _BATCH)
        batch = collate_prompts(prompts[rows], encoder.pad_token_id)
        ids = pad_sequences(
            [torch.tensor(response.ids) for response in responses[rows]], encoder.pad_token_id
        )
        rollouts = RolloutBatch(
            prompt_ids=batch.input_ids.to(device),
            prompt_mask=batch.attention_mask.to(device),
            response_ids=ids.values.to(device),
            response_mask=ids.mask.to(device),
            terminated=torch.tensor([r.ended for r in responses[rows]], device=device),
        )
        parts.append(reward(rollouts, batch.texts, records=batch.fields, turns=batch.turns))
        report_progress(len(prompts[rows]))
    return Scores.concatenate(parts)
