"""Responses as text, and the table that people read."""

from __future__ import annotations

import torch

from lit_rlhf.rollout import Estimates, RolloutBatch, decoded_responses, sample_table
from tests.support.tiny_models import EOS_ID, PAD_ID, tiny_tokenizer

TEXTS = ("a|b", "two\nlines ", "铁")


def batch() -> RolloutBatch:
    """Responses that say TEXTS; the second is cut off. Padding is a letter that would show."""
    tokenizer = tiny_tokenizer()
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    ids = [[*ids[0], EOS_ID], ids[1], [*ids[2], EOS_ID]]
    lengths = torch.tensor([len(row) for row in ids])
    width = int(lengths.max()) + 1
    (letter,) = tokenizer("Z", add_special_tokens=False)["input_ids"]
    return RolloutBatch(
        torch.full((3, 2), PAD_ID),
        torch.ones(3, 2, dtype=torch.bool),
        torch.tensor([row + [letter] * (width - len(row)) for row in ids]),
        torch.arange(width) < lengths[:, None],
        torch.tensor([True, False, True]),
    )


def test_responses_are_decoded_without_special_tokens_and_padding() -> None:
    assert decoded_responses(batch(), tiny_tokenizer()) == list(TEXTS)


def test_the_table_shows_each_response_beside_its_numbers_and_stays_a_table() -> None:
    rollouts = batch()
    logprobs = torch.full(rollouts.response_ids.shape, -1.0).masked_fill(
        ~rollouts.response_mask, 0.0
    )
    estimates = Estimates(logprobs, 1.5 * logprobs, logprobs, logprobs, logprobs[:, 0])
    table = sample_table(
        ["say | it", "\n\nHuman: hi", "third"],
        rollouts,
        torch.tensor([0.125, -2.0, 3.0]),
        estimates,
        tiny_tokenizer(),
        2,
    )
    lines = table.split("\n")
    lengths = rollouts.lengths.tolist()
    assert lines == [
        "| score | KL, nats | tokens | ended | prompt | response |",
        "|---|---|---|---|---|---|",
        f"| 0.12 | {lengths[0] / 2:.2f} | {lengths[0]} | yes | say \\| it | a\\|b |",
        f"| -2.00 | {lengths[1] / 2:.2f} | {lengths[1]} | no | Human: hi | two<br>lines |",
    ]
