"""Responses as text, for people to read."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_rlhf.rollout.batch import RolloutBatch
from lit_rlhf.rollout.estimates import Estimates


def decoded_responses(rollouts: RolloutBatch, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Text of each response, without special tokens."""
    return [
        str(tokenizer.decode(ids[mask], skip_special_tokens=True))
        for ids, mask in zip(rollouts.response_ids.cpu(), rollouts.response_mask.cpu(), strict=True)
    ]


def sample_table(
    prompts: Sequence[str],
    rollouts: RolloutBatch,
    scores: Tensor,
    estimates: Estimates,
    tokenizer: PreTrainedTokenizerBase,
    n_rows: int,
) -> str:
    """A Markdown table of `n_rows` responses beside score, KL (nats) and length (tokens)."""
    kl = (estimates.logprobs - estimates.ref_logprobs).sum(1)
    responses = decoded_responses(rollouts, tokenizer)
    rows = [
        "| score | KL, nats | tokens | ended | prompt | response |",
        "|---|---|---|---|---|---|",
    ]
    rows += [
        f"| {score:.2f} | {nats:.2f} | {length} | {'yes' if ended else 'no'} "
        f"| {cell(prompt)} | {cell(response)} |"
        for score, nats, length, ended, prompt, response in zip(
            scores.tolist()[:n_rows],
            kl.tolist(),
            rollouts.lengths.tolist(),
            rollouts.terminated.tolist(),
            prompts,
            responses,
            strict=False,
        )
    ]
    return "\n".join(rows)


def cell(text: str) -> str:
    """`text` so that it stays inside one cell of a Markdown table."""
    return text.strip().replace("|", "\\|").replace("\n", "<br>")
