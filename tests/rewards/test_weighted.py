"""The weighted sum of sources: each logged by itself, and normalized by itself where asked."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_rlhf.models import ModelOptions
from lit_rlhf.rewards import WeightedReward
from tests.rollout.said import said
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import tiny_tokenizer

LENGTH = {"rule": "length", "unit": "characters", "longest": 0}
ENDS = {"rule": "format", "kind": "sentence"}
BATCHES = [["a", "abc.", "ab"], ["abcdefgh", "x.", "abc"], ["a.", "a", "a"]]


def weighted(normalize: bool = True, **rewards: Any) -> WeightedReward:
    rewards = rewards or {
        "brevity": {**LENGTH, "weight": 0.5, "normalize": normalize},
        "ends": {**ENDS, "weight": 2.0},
    }
    return WeightedReward(rewards, ModelOptions(), tiny_tokenizer())


def scored(reward: WeightedReward, texts: list[str]) -> Tensor:
    total: Tensor = reward(said(texts), ["p"] * len(texts), None)
    return total


def expected_totals(seen: list[float], texts: list[str]) -> list[float]:
    """The same in plain Python, after the scores that were seen, those of `texts` among them."""
    mean = sum(seen) / len(seen)
    std = math.sqrt(sum((x - mean) ** 2 for x in seen) / len(seen))
    return [0.5 * (-len(text) - mean) / (std or 1.0) + 2.0 * text.endswith(".") for text in texts]


def test_sources_add_up_by_their_weights() -> None:
    reward = weighted(normalize=False)
    assert scored(reward, BATCHES[0]).tolist() == [-0.5, 0.0, -1.0]
    assert list(reward.moments) == []
    metrics = reward.metrics()
    assert metrics.keys() == {"rollout/score/brevity", "rollout/score/ends"}
    assert float(metrics["rollout/score/brevity"]) == pytest.approx(-7 / 3)
    assert float(metrics["rollout/score/ends"]) == pytest.approx(1 / 3)


def test_a_normalized_source_enters_with_the_moments_of_all_its_scores_so_far() -> None:
    reward = weighted()
    seen: list[float] = []
    for texts in BATCHES:
        seen += [-float(len(text)) for text in texts]
        result = scored(reward, texts).tolist()
        assert result == pytest.approx(expected_totals(seen, texts), rel=1e-5)
        # logged as it came
        raw = float(reward.metrics()["rollout/score/brevity"])
        assert raw == pytest.approx(-sum(map(len, texts)) / 3)
        reward.accept()


def test_scores_that_are_not_accepted_are_forgotten() -> None:
    reward = weighted()
    first = scored(reward, BATCHES[0])
    for texts in BATCHES[1:]:
        scored(reward, texts)
    assert torch.equal(scored(reward, BATCHES[0]), first)
    reward.accept()
    (moments,) = reward.moments.values()
    assert float(moments.count) == 3


def test_nothing_is_learned_in_evaluation_mode() -> None:
    reward = weighted().eval()
    # before any score is known they stay as they are
    assert scored(reward, BATCHES[0]).tolist() == [-0.5, 0.0, -1.0]
    reward.accept()
    (moments,) = reward.moments.values()
    assert float(moments.count) == 0
    scored(reward.train(), BATCHES[0])
    reward.accept()
    seen = [-1.0, -4.0, -2.0]
    result = scored(reward.eval(), BATCHES[1]).tolist()
    assert result == pytest.approx(expected_totals(seen, BATCHES[1]), rel=1e-5)


def test_a_source_whose_scores_are_all_alike_is_normalized_to_0() -> None:
    reward = weighted(ends={**ENDS, "weight": 3.0, "normalize": True})
    assert scored(reward, ["a", "b"]).tolist() == [0.0, 0.0]


def test_scores_that_are_not_finite_leave_the_moments_alone() -> None:
    function = "tests.rewards.reward_functions:not_a_number"
    reward = weighted(**{function: {"normalize": True}, "brevity": {**LENGTH, "normalize": True}})
    with pytest.warns(UserWarning, match="not_a_number': expected finite scores"):
        result = scored(reward, BATCHES[0])
    assert torch.isnan(result).tolist() == [False, True, False]
    reward.accept()
    assert [float(moments.count) for moments in reward.moments.values()] == [0.0, 0.0]


def test_the_moments_are_state_of_the_sources_that_ask_for_them_by_place_and_name() -> None:
    reward = weighted(**{"a.b": ENDS, "c.d": {**LENGTH, "normalize": True}})
    assert set(reward.state_dict()) == {f"moments.1_c_d.{n}" for n in ("mean", "m2", "count")}
    other = weighted(**{"c.d": {**LENGTH, "normalize": True}, "a.b": ENDS})
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(reward.state_dict())


def on_a_rank(rank: int) -> tuple[list[list[float]], list[dict[str, float]]]:
    reward = weighted()
    totals, metrics = [], []
    for texts in BATCHES:
        own = texts[:2] if rank == 0 else texts[2:]  # unlike numbers of responses
        totals.append(scored(reward, own).tolist())
        metrics.append({key: float(value) for key, value in reward.metrics().items()})
        reward.accept()
    return totals, metrics


def test_moments_and_metrics_are_those_of_all_ranks(tmp_path: Path) -> None:
    reward = weighted()
    ranks = run_on_ranks(on_a_rank, 2, tmp_path)
    for i, texts in enumerate(BATCHES):
        whole = scored(reward, texts).tolist()
        assert [*ranks[0][0][i], *ranks[1][0][i]] == pytest.approx(whole, rel=1e-5)
        metrics = {key: float(value) for key, value in reward.metrics().items()}
        assert ranks[0][1][i] == ranks[1][1][i] == pytest.approx(metrics)
        reward.accept()
