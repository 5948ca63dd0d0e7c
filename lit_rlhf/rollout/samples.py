"""Rollouts as text for people: decoded responses, records for logs, a Markdown table."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_rlhf.data import decode_tokens
from lit_rlhf.functional import kl_estimate
from lit_rlhf.rollout.batch import RolloutBatch
from lit_rlhf.rollout.scoring import TokenStatistics


def decode_responses(rollouts: RolloutBatch, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Decode the responses to text without special tokens."""
    return [
        decode_tokens(tokenizer, ids[mask], skip_special_tokens=True)
        for ids, mask in zip(rollouts.response_ids.cpu(), rollouts.response_mask.cpu(), strict=True)
    ]


def build_response_records(
    rollouts: RolloutBatch,
    scores: Tensor,
    statistics: TokenStatistics,
    tokenizer: PreTrainedTokenizerBase,
) -> list[dict[str, Any]]:
    """Describe each response and its raw reward by plain values, for a log or a JSON lines file.

    A record has `response` (text without special tokens), `score`, `kl` (nats to the reference,
    estimator k1, so it can be negative), `length` (tokens, EOS included) and `truncated` (cut off
    at the length limit).

    Args:
        rollouts: Prompts and responses.
        scores: Raw rewards, `[B]`.
        statistics: Log-probs of the responses.
        tokenizer: Decodes the responses.
    """
    kl = kl_estimate(statistics.logprobs, statistics.ref_logprobs).sum(1)
    return [
        {"response": response, "score": score, "kl": nats, "length": length, "truncated": not ended}
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
    """Format prompts and their `build_response_records` as a Markdown table."""
    lines = [
        "| score | KL, nats | tokens | ended | prompt | response |",
        "|---|---|---|---|---|---|",
    ]
    for prompt, record in zip(prompts, records, strict=True):
        ended = "no" if record["truncated"] else "yes"
        lines.append(
            f"| {record['score']:.2f} | {record['kl']:.2f} | {record['length']} | {ended} "
            f"| {_escape_cell(prompt)} | {_escape_cell(record['response'])} |"
        )
    return "\n".join(lines)


def _escape_cell(text: str) -> str:
    """`text` with line breaks and bars escaped, so that it stays in one cell of the table."""
    return text.strip().replace("|", "\\|").replace("\n", "<br>")
