"""A service that fails on one rank ends the run on all of them, and none waits for another."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import distributed

from lit_rlhf.models import ModelOptions
from lit_rlhf.rewards import WeightedReward
from lit_rlhf.rollout import SamplingOptions, VLLMServerSampler
from tests.support.ranks import run_on_ranks
from tests.support.raw_service import raw_service
from tests.support.reward_inputs import make_rollouts, service
from tests.support.tiny_models import EOS_ID, PAD_ID, tiny_causal_lm, tiny_tokenizer

PROMPTS = ["first", "second"]
NO_ANSWER = b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n"


def outcome(call: Callable[[], object]) -> str:
    """The error of a call; then all ranks meet, which they can if none is left waiting."""
    try:
        call()
    except Exception as error:
        message = str(error)
    distributed.barrier()
    return message


def ask_services(rank: int, good: str, bad: str) -> list[str]:
    """Ask a service that knows no path on rank 1 alone, and one that samples for none."""
    scorer = {"rule": "http", "url": bad if rank == 1 else good}
    judge = {"rule": "judge", "model": "m", "base_url": bad, "retries": 0}
    messages = []
    for options in (scorer, judge if rank == 1 else {"rule": "length", "longest": 1}):
        reward = WeightedReward({"remote": options}, ModelOptions(), tiny_tokenizer()).eval()
        messages.append(outcome(partial(reward, make_rollouts(["yes", "no"]), PROMPTS)))
    sampler = VLLMServerSampler(bad, "weights", timeout=5.0)
    model = tiny_causal_lm()
    ids = torch.tensor([[5, 6]])
    sample = partial(
        sampler,
        model,
        ids,
        torch.ones_like(ids, dtype=torch.bool),
        SamplingOptions(max_new_tokens=2),
        eos_token_ids=[EOS_ID],
        pad_token_id=PAD_ID,
        seed=0,
    )
    messages.append(outcome(sample))
    return messages


def test_what_fails_on_one_rank_fails_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with (
        service(lambda request: (200, b'{"scores": [1.0, 2.0]}')) as (good, _),
        raw_service(lambda: [NO_ANSWER]) as (bad, _),
    ):
        first, second = run_on_ranks(ask_services, 2, tmp_path, good, bad)
    names = "score responses by reward 'remote'"
    assert f"another rank could not {names} (rule: http): see its error" == first[0]
    assert "got status 404" in second[0]
    assert f"another rank could not {names} (rule: length): see its error" == first[1]
    assert "the judge m at" in second[1]
    assert "expected a vLLM server" in first[2]  # rank 0 hands the weights over
    assert second[2] == "another rank could not hand the weights over to vLLM: see its error"
