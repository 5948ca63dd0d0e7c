"""Responses as text, for people to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_rlhf.functional import kl_estimate
from lit_rlhf.rollout.batch import RolloutBatch
from lit_rlhf.rollout.scoring import TokenStatistics


def decode_responses(rollouts: RolloutBatch, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Text of each response, without special tokens."""
    return [
        str(tokenizer.decode(ids[mask], skip_special_tokens=True))
        for ids, mask in zip(rollouts.response_ids.cpu(), rollouts.response_mask.cpu(), strict=True)
    ]


def build_response_records(
    rollouts: RolloutBatch,
    scores: Tensor,
    estimates: TokenStatistics,
    tokenizer: PreTrainedTokenizerBase,
) -> list[dict[str, Any]]:
    """What is told of each response.

    Args:
        rollouts: Prompts and `B` responses.
        scores: Raw reward, `[B]`.
        estimates: What policy and reference make of them.
        tokenizer: The policy's.

    Returns:
        `B` records of `response` (text without special tokens), `score`, `kl` (nats, k1: it can be
        negative), `length` (tokens, EOS included) and `truncated` (cut off before it ended).
    """
    kl = kl_estimate(estimates.logprobs, estimates.ref_logprobs).sum(1)
    return [
        {
            "response": response,
            "score": score,
            "kl": nats,
            "length": length,
            "truncated": not ended,
        }
        for response, score, nats, length, ended in zip(
            decode_responses(rollouts, tokenizer),
            scores.tolist(),
            kl.tolist(),
            rollouts.lengths.tolist(),
            rollouts.terminated.tolist(),
            strict=True,
        )
    ]


def format_sample_table(prompts: Sequence[str], records: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of `build_response_records` beside their prompts."""
    rows = [
        "| score | KL, nats | tokens | ended | prompt | response |",
        "|---|---|---|---|---|---|",
    ]
    for prompt, record in zip(prompts, records, strict=True):
        ended = "no" if record["truncated"] else "yes"
        rows.append(
            f"| {record['score']:.2f} | {record['kl']:.2f} | {record['length']} | {ended} "
            f"| {cell(prompt)} | {cell(record['response'])} |"
        )
    return "\n".join(rows)


def cell(text: str) -> str:
    """`text` so that it stays inside one cell of a Markdown table."""
    return text.strip().replace("|", "\\|").replace("\n", "<br>")
