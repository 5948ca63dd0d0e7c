"""Responses as text, as records and as a Markdown table."""

import torch

from lit_rlhf import rollout
from tests.support.reward_inputs import make_rollouts
from tests.support.tiny_models import tiny_tokenizer

TEXTS = ("a|b", "two\nlines ", "铁")


def batch() -> rollout.RolloutBatch:
    """Responses that say TEXTS; the second is cut off. Padding is a letter that would show."""
    (letter,) = tiny_tokenizer()("Z", add_special_tokens=False)["input_ids"]
    rollouts = make_rollouts(TEXTS, [True, False, True])
    ids = rollouts.response_ids.masked_fill(~rollouts.response_mask, letter)
    return rollouts._replace(response_ids=ids)


def test_a_record_tells_text_score_kl_length_and_end() -> None:
    rollouts = batch()
    # nats per token: policy -1, reference -1.5; behind a response 0
    logprobs = -rollouts.response_mask.float()
    after = [logprobs[:, 0]] * 2
    estimates = rollout.TokenStatistics(logprobs, 1.5 * logprobs, logprobs, logprobs, *after)
    scores = torch.tensor([0.125, -2.0, 3.0])
    records = rollout.build_response_records(rollouts, scores, estimates, tiny_tokenizer())
    tokenizer = tiny_tokenizer()
    counts = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in TEXTS]
    assert records == [
        {"response": text, "score": score, "kl": 0.5 * n, "length": n, "truncated": truncated}
        for text, score, n, truncated in [
            (TEXTS[0], 0.125, counts[0] + 1, False),
            (TEXTS[1], -2.0, counts[1], True),
            (TEXTS[2], 3.0, counts[2] + 1, False),
        ]
    ]


def test_the_table_shows_each_response_beside_its_numbers_and_stays_a_table() -> None:
    records = [
        {"response": "a|b", "score": 0.125, "kl": 2.0, "length": 4, "truncated": False},
        {"response": "two\nlines ", "score": -2.0, "kl": -0.5, "length": 9, "truncated": True},
    ]
    assert rollout.format_sample_table(["say | it", "\n\nHuman: hi"], records).split("\n") == [
        "| score | KL, nats | tokens | ended | prompt | response |",
        "|---|---|---|---|---|---|",
        "| 0.12 | 2.00 | 4 | yes | say \\| it | a\\|b |",
        "| -2.00 | -0.50 | 9 | no | Human: hi | two<br>lines |",
    ]
