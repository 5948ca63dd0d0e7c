"""B8: a reward may abstain, and the sum is over the others."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch

from lit_rlhf.data import DataSource, PromptDataModule
from lit_rlhf.models import ModelOptions
from lit_rlhf.modules import PPOModule
from lit_rlhf.ppo import AdvantageOptions
from lit_rlhf.ppo.algorithm import advantages_without_critic
from lit_rlhf.rewards import CallableReward, RemoteScorer, Scores, WeightedReward
from lit_rlhf.rollout import SamplingOptions
from lit_rlhf.tools.evaluation.compare import compare_policies
from tests.support.ranks import run_on_ranks
from tests.support.reward_inputs import make_rollouts, service
from tests.support.stages import fit_module, ppo_options, write_data, write_models
from tests.support.tiny_models import tiny_tokenizer

TEXTS = ["a", "abc", "ab", "abcdef", "abcd", "x"]
# By text: the length where it is even, and minus the length where it is odd or 4.
EVEN = [None, None, 2.0, 6.0, 4.0, None]
REST = [-1.0, -3.0, None, None, -4.0, -1.0]


def even(prompts: Sequence[str], responses: Sequence[str]) -> list[float | None]:
    return [None if len(text) % 2 else float(len(text)) for text in responses]


def rest(prompts: Sequence[str], responses: Sequence[str]) -> list[float | None]:
    return [-float(len(t)) if len(t) % 2 or len(t) == 4 else None for t in responses]


def broken(prompts: Sequence[str], responses: Sequence[str]) -> list[float | None]:
    return [None if len(text) % 2 else math.nan for text in responses]


def build_reward(*, normalize: bool = False, weight: float = 2.0) -> WeightedReward:
    rewards = {even: {"weight": weight, "normalize": normalize}, rest: 0.5}
    return WeightedReward(rewards, ModelOptions(), tiny_tokenizer())


def score(reward: WeightedReward, texts: Sequence[str]) -> Scores:
    scores: Scores = reward(make_rollouts(texts), ["p"] * len(texts))
    return scores


def test_sum_is_over_the_rewards_that_vote() -> None:
    scores = score(build_reward(), TEXTS)
    assert scores.total.tolist() == [-0.5, -1.5, 4.0, 12.0, 8.0 - 2.0, -0.5]
    assert scores.votes["even"].tolist() == [value is not None for value in EVEN]
    assert scores.votes["rest"].tolist() == [value is not None for value in REST]
    assert scores.by_name["rest"].nan_to_num(9.0).tolist() == [
        9.0 if v is None else v for v in REST
    ]


def test_moments_are_over_the_votes() -> None:
    reward = build_reward(normalize=True)
    scores = score(reward, TEXTS)
    std = math.sqrt((4 + 4 + 0) / 3)  # 2, 6 and 4 around their mean of 4
    expected = [-0.5, -1.5, 2 * -2 / std, 2 * 2 / std, 0.0 - 2.0, -0.5]
    assert scores.total.tolist() == pytest.approx(expected, rel=1e-6)
    reward.commit_moments(scores)
    (moments,) = reward.moments.values()
    assert (float(moments.count), float(moments.mean)) == (3.0, 4.0)
    # A batch without any vote changes nothing.
    reward.commit_moments(score(reward, ["a", "abc"]))
    assert (float(moments.count), float(moments.mean)) == (3.0, 4.0)


def test_scores_of_two_calls_count_the_votes_of_both() -> None:
    reward = build_reward(normalize=True)
    parts = [score(reward, TEXTS[:2]), score(reward, TEXTS[2:])]
    joined = Scores.concatenate(parts)
    assert joined.votes["even"].tolist() == [value is not None for value in EVEN]
    reward.commit_moments(joined)
    (moments,) = reward.moments.values()
    assert (float(moments.count), float(moments.mean)) == (3.0, 4.0)
    assert float(moments.var) == pytest.approx(8 / 3)


def test_response_without_any_vote_is_an_error() -> None:
    alone = WeightedReward([even], ModelOptions(), tiny_tokenizer())
    message = (
        r"^reward function '.*:even': expected 2 scores, one for each response, got None from all "
        r"rewards with a weight for prompt 'p' and response 'abc'; 1 of 2 responses have no score$"
    )
    with pytest.raises(ValueError, match=message):
        score(alone, ["ab", "abc"])
    with pytest.raises(ValueError, match=r":even', .*:rest': expected 1 scores.* response 'ab'"):
        score(build_reward(weight=0.0), ["ab"])  # what is only logged has no vote in the sum
    assert score(build_reward(weight=0.0), ["abcd"]).total.tolist() == [-2.0]


def test_nan_with_a_vote_is_a_broken_reward_and_no_abstention() -> None:
    reward = WeightedReward([broken, rest], ModelOptions(), tiny_tokenizer())
    with pytest.warns(UserWarning, match="broken': expected finite scores, got nan .* 1 of 2 are"):
        scores = score(reward, ["a", "abcd"])
    assert scores.total.isnan().tolist() == [False, True]


@pytest.mark.parametrize(
    "returned", [[1.0, None], (1.0, None), np.array([1.0, None], dtype=object)], ids=type
)
def test_none_is_read_from_lists_and_arrays(returned: Any) -> None:
    reward = CallableReward(lambda prompts, responses: returned, tiny_tokenizer())
    scores, mask = reward.vote(make_rollouts(["a", "b"]), ["p", "p"])
    assert mask.tolist() == [True, False]
    assert float(scores[0]) == 1.0
    assert scores.isnan().tolist() == [False, True]


@pytest.mark.parametrize("returned", [None, [None], [1.0, "good"], [[None], [1.0]]])
def test_other_results_stay_errors(returned: Any) -> None:
    reward = CallableReward(lambda prompts, responses: returned, tiny_tokenizer())
    with pytest.raises(ValueError, match="expected 2 scores, one for each response, got"):
        reward(make_rollouts(["a", "b"]), ["p", "p"])


@pytest.mark.parametrize("rule", ["equals", "contains"])
def test_rule_abstains_where_a_record_lacks_the_field(rule: str) -> None:
    rewards: Any = {
        "known": {"rule": rule, "field": "answer"},
        "rest": {"rule": "length", "longest": 9},
    }
    reward = WeightedReward(rewards, ModelOptions(), tiny_tokenizer())
    records = [{"answer": "a"}, {"answer": "b"}, {}]
    scores = reward(make_rollouts(["a", "a", "a"]), ["p"] * 3, records=records)
    assert scores.votes["known"].tolist() == [True, True, False]
    assert scores.total.tolist() == [1.0, 0.0, 0.0]


def test_service_abstains_by_null() -> None:
    def answer(request: dict[str, Any]) -> tuple[int, bytes]:
        scores = [None if text == "a" else 1.0 for text in request["responses"]]
        return 200, json.dumps({"scores": scores}).encode()

    with service(answer) as (url, _):
        assert RemoteScorer(url, batch_size=2)(["p"] * 3, ["b", "a", "b"]) == [1.0, None, 1.0]


def test_group_estimators_see_the_sum_of_those_that_voted() -> None:
    totals = score(build_reward(), ["a", "ab", "abcd", "x"]).total  # -0.5 and 4, 6 and -0.5
    advantages = advantages_without_critic(
        AdvantageOptions(estimator="rloo"),
        rewards=totals[:, None],
        mask=torch.ones(4, 1, dtype=torch.bool),
        loss_mask=torch.ones(4, 1, dtype=torch.bool),
        group_size=2,
    )
    assert advantages.flatten().tolist() == [-4.5, 4.5, 6.5, -6.5]


def score_on_a_rank(rank: int) -> tuple[list[float], list[float]]:
    """Totals of this rank's responses, and the moments of all."""
    reward = build_reward(normalize=True)
    scores = score(reward, TEXTS[:2] if rank == 0 else TEXTS[2:])  # all abstain on the first rank
    reward.commit_moments(scores)
    (moments,) = reward.moments.values()
    return scores.total.tolist(), [float(moments.count), float(moments.mean), float(moments.var)]


@pytest.mark.slow
def test_ranks_get_what_one_rank_gets(tmp_path: Path) -> None:
    (first, moments), (second, other_moments) = run_on_ranks(score_on_a_rank, 2, tmp_path)
    assert moments == other_moments == pytest.approx([3.0, 4.0, 8 / 3])
    alone = score(build_reward(normalize=True), TEXTS).total.tolist()
    assert first + second == pytest.approx(alone, rel=1e-6)


def test_ppo_learns_from_a_mixture_of_tasks(tmp_path: Path) -> None:
    root = write_models(write_data(tmp_path))
    rows = [{"prompt": "name a metal", "answer": "iron"}, {"prompt": "say hi"}]
    data = PromptDataModule([DataSource(rows * 2)], chat_template="hh", max_length=64, batch_size=4)
    module = PPOModule(
        **ppo_options(
            root,
            rewards={
                "known": {"rule": "equals", "field": "answer", "normalize": True},
                "short": {"rule": "length", "longest": 2, "weight": 0.1},
            },
            critic_init="policy",
            gold_reward=even,
        )
    )
    logged = fit_module(module, data, tmp_path / "run", limit_val_batches=0).callback_metrics
    assert float(logged["rollout/score/known"]) == 0.0
    assert math.isfinite(float(logged["rollout/score"]))
    (moments,) = module.reward.moments.values()
    assert float(moments.count) == 2


def test_evaluation_leaves_out_prompts_without_a_vote(tmp_path: Path) -> None:
    root = write_models(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"name metal {i}"} | ({"answer": "x"} if i else {}) for i in range(3)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewards: Any = {
        "known": {"rule": "equals", "field": "answer"},
        "short": {"rule": "length", "longest": 0},
    }
    copytree(root / "policy", root / "other")
    comparison = compare_policies(
        [str(root / "policy"), str(root / "other")],
        DataSource(str(prompts)),
        rewards,
        SamplingOptions(max_new_tokens=4),
        samples_per_prompt=2,
        best_of=[2],
    )
    report = comparison.policies["other"]
    assert (report.outcomes["known"].n, report.outcomes["short"].n) == (2, 3)
    assert report.scores["known"].mean == 0.0
    assert report.differences["known"].mean == report.differences["short"].mean == 0.0
    records = comparison.records()
    missing = [record["scores"]["known"] is None for record in records]
    assert (missing.count(True), len(missing)) == (4, 12)
    json.dumps(comparison.as_dict(), allow_nan=False)
