"""The weighted sum of rewards, each logged and normalized by itself, and its configuration."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from statistics import fmean, pstdev
from traceback import format_exception
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from lit_rlhf.forward import scalar_head_of
from lit_rlhf.functional import Ensemble
from lit_rlhf.models import ModelOptions
from lit_rlhf.rewards import (
    LengthRule,
    ModelReward,
    RemoteScorer,
    Scores,
    WeightedReward,
    parse_rewards,
)
from lit_rlhf.rewards.weighted import plain_rewards, shorten_names, untrusted_rewards
from lit_rlhf.rollout import RolloutBatch
from tests.support.ranks import run_on_ranks
from tests.support.reward_inputs import PROMPTS, make_rollouts
from tests.support.tiny_models import tiny_causal_lm, tiny_tokenizer

LENGTH = {"rule": "length", "unit": "characters", "longest": 0}
ENDS = {"rule": "format", "kind": "sentence"}
FUNCTIONS = "tests.support.reward_functions"
BATCHES = [["a", "abc.", "ab"], ["abcdefgh", "x.", "abc"], ["a.", "a", "a"]]


def weighted(normalize: bool = True, **rewards: Any) -> WeightedReward:
    usual = {"brevity": {**LENGTH, "weight": 0.5, "normalize": normalize}}
    rewards = rewards or usual | {"ends": {**ENDS, "weight": 2.0}}
    return WeightedReward(rewards, ModelOptions(), tiny_tokenizer())


def score(reward: WeightedReward, texts: list[str]) -> Scores:
    scores: Scores = reward(make_rollouts(texts), ["p"] * len(texts))
    return scores


def totals(reward: WeightedReward, texts: list[str]) -> Tensor:
    return score(reward, texts).total


def expected_totals(scores: list[float], texts: list[str]) -> list[float]:
    """Totals in plain Python.

    Args:
        scores: Brevity of all texts so far, `texts` included.
        texts: The texts to score.
    """
    mean = sum(scores) / len(scores)
    std = math.sqrt(sum((x - mean) ** 2 for x in scores) / len(scores))
    return [0.5 * (-len(text) - mean) / (std or 1.0) + 2.0 * text.endswith(".") for text in texts]


def test_a_normalized_reward_enters_the_sum_with_the_moments_of_all_its_scores_so_far() -> None:
    reward = weighted()
    scores_so_far: list[float] = []
    for texts in BATCHES:
        scores_so_far += [-float(len(text)) for text in texts]
        scores = score(reward, texts)
        assert scores.total.tolist() == pytest.approx(
            expected_totals(scores_so_far, texts), rel=1e-5
        )
        # logged as it came
        assert scores.by_name["brevity"].tolist() == [-float(len(text)) for text in texts]
        reward.commit_moments(scores)


def test_scores_that_are_not_committed_leave_no_trace() -> None:
    reward = weighted()
    first = totals(reward, BATCHES[0])
    for texts in BATCHES[1:]:
        totals(reward, texts)
    scores_again = score(reward, BATCHES[0])
    assert torch.equal(scores_again.total, first)
    reward.commit_moments(scores_again)
    (moments,) = reward.moments.values()
    assert float(moments.count) == 3


def test_scores_of_two_calls_count_as_one_batch() -> None:
    one_call = weighted()
    one_call.commit_moments(score(one_call, BATCHES[0] + BATCHES[1]))
    two_calls = weighted()
    joined = Scores.concatenate([score(two_calls, texts) for texts in BATCHES[:2]])
    two_calls.commit_moments(joined)
    (expected,) = one_call.moments.values()
    (moments,) = two_calls.moments.values()
    assert torch.equal(moments.count, expected.count)
    torch.testing.assert_close(moments.mean, expected.mean)
    torch.testing.assert_close(moments.var, expected.var)
    lengths = [-float(len(text)) for text in BATCHES[0] + BATCHES[1]]
    assert joined.by_name["brevity"].tolist() == lengths
    assert joined.total.shape == (6,)
    assert joined.head_scores is None


def test_nothing_is_learned_in_evaluation_mode() -> None:
    reward = weighted().eval()
    scores = score(reward, BATCHES[0])
    # before any score is known they stay as they are
    assert scores.total.tolist() == [-0.5, 0.0, -1.0]
    reward.commit_moments(scores)
    (moments,) = reward.moments.values()
    assert float(moments.count) == 0
    reward.commit_moments(score(reward.train(), BATCHES[0]))
    learned_scores = [-1.0, -4.0, -2.0]
    scores = totals(reward.eval(), BATCHES[1]).tolist()
    assert scores == pytest.approx(expected_totals(learned_scores, BATCHES[1]), rel=1e-5)


def test_a_reward_whose_scores_are_all_equal_is_normalized_to_0() -> None:
    reward = weighted(ends={**ENDS, "weight": 3.0, "normalize": True})
    assert totals(reward, ["a", "b"]).tolist() == [0.0, 0.0]


def test_scores_that_are_not_finite_leave_the_moments_alone() -> None:
    function = "tests.support.reward_functions:not_a_number"
    reward = weighted(**{function: {"normalize": True}, "brevity": {**LENGTH, "normalize": True}})
    with pytest.warns(UserWarning, match="not_a_number': expected finite scores"):
        scores = score(reward, BATCHES[0])
    assert torch.isnan(scores.total).tolist() == [False, True, False]
    reward.commit_moments(scores)
    assert [float(moments.count) for moments in reward.moments.values()] == [0.0, 0.0]


def test_the_state_holds_the_moments_of_normalized_rewards_by_index_and_name() -> None:
    reward = weighted(**{"a.b": ENDS, "c.d": {**LENGTH, "normalize": True}})
    assert set(reward.state_dict()) == {f"moments.1_c_d.{n}" for n in ("mean", "m2", "count")}
    reordered = weighted(**{"c.d": {**LENGTH, "normalize": True}, "a.b": ENDS})
    with pytest.raises(RuntimeError, match="Missing key"):
        reordered.load_state_dict(reward.state_dict())


def on_a_rank(rank: int) -> list[list[float]]:
    reward, results = weighted(), []
    for texts in BATCHES:
        local_texts = texts[:2] if rank == 0 else texts[2:]  # unlike numbers of responses
        scores = score(reward, local_texts)
        results.append(scores.total.tolist())
        reward.commit_moments(scores)
    return results


@pytest.mark.slow
def test_moments_are_those_of_all_ranks(tmp_path: Path) -> None:
    reward, ranks = weighted(), run_on_ranks(on_a_rank, 2, tmp_path)
    for i, texts in enumerate(BATCHES):
        scores = score(reward, texts)
        totals_of_ranks = [*ranks[0][i], *ranks[1][i]]
        assert totals_of_ranks == pytest.approx(scores.total.tolist(), rel=1e-5)
        reward.commit_moments(scores)


def test_a_number_is_a_weight_and_a_mapping_holds_options(tmp_path: Path) -> None:
    (tmp_path / "a:b").mkdir()  # a folder with the mark of a function
    rewards: dict[str, Any] = {
        "runs/reward": 1.0,
        "my.rules:polite": {"weight": -0.5, "normalize": True},
        "brevity": {"rule": "length", "weight": 0.1, "longest": 60, "unit": "words"},
        "safe.v2": {"rule": "http", "url": "http://localhost/", "timeout": 5},
        str(tmp_path / "a:b"): 1.0,
    }
    original = copy.deepcopy(rewards)
    specs = parse_rewards(rewards)
    assert rewards == original
    model, function, rule, remote, _ = specs
    assert [spec.name for spec in specs[:4]] == ["reward", "polite", "brevity", "safe.v2"]
    assert [spec.weight for spec in specs] == [1.0, -0.5, 0.1, 1.0, 1.0]
    assert [spec.normalize for spec in specs] == [False, True, False, False, False]
    assert [spec.is_model for spec in specs] == [True, False, False, False, True]
    assert (model.key, function.key) == ("runs/reward", "my.rules:polite")
    assert rule.source == LengthRule(longest=60, unit="words")
    assert remote.source == RemoteScorer("http://localhost/", timeout=5.0)


def test_names_are_short_where_that_tells_them_apart() -> None:
    short = {"runs/a/reward": "reward", "my.rules:polite": "polite", "hub/b": "b"}
    assert shorten_names([*short]) == short
    assert list(shorten_names(["a/reward", "b/reward"]).values()) == ["a/reward", "b/reward"]
    # a rule's name is a name already
    assert shorten_names(["x:y"], unchanged=["x:y"]) == {"x:y": "x:y"}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"rule": "lenght"}, r"\.rule: expected one of length, format, regex, equals"),
        (
            {"rule": "length", "longst": 3},
            r": Option 'longst' is not accepted \(rule: length takes shortest, longest, ",
        ),
        ({"rule": "length", "longest": "x"}, ": .*longest.*\n.*rule: length takes"),
        ({"rule": "length"}, ": shortest, longest: expected at least one of them"),
        ({"rule": "regex"}, ": .*pattern.* .rule: regex takes pattern, absent, time"),
        ({"rule": "http", "url": "x"}, ": url: expected http://host"),
        ({"rule": "length", "longest": 3, "weight": None}, ": expected a finite num"),
        ({"rule": "length", "longest": 3, "normalize": 1}, r"\.normalize: expected tr"),
        ({"weight": 1.0, "longest": 3}, ": expected no option but weight, normali"),
        (float("nan"), ": expected a finite number as weight, got nan"),
        (True, ": expected a finite number as weight, got True"),
        ("1", ": expected a finite number as weight, got '1'"),
    ],
)
def test_an_invalid_entry_is_named_with_its_option(entry: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)rewards.runs/a{message}"):
        parse_rewards({"runs/a": entry})


def test_non_finite_scores_of_a_model_are_shown(folder: Path, rollouts: RolloutBatch) -> None:
    path = str(folder / "reward_1")
    weighted = WeightedReward({path: 1.0}, ModelOptions(), tiny_tokenizer())
    (model,) = weighted.models
    head = scalar_head_of(model.model)
    head.register_forward_hook(lambda *args: args[-1].index_fill(0, torch.tensor(0), torch.inf))
    message = (
        f"reward model '{path}': expected finite .* prompt 'fir.*; 1 of {len(PROMPTS)} are not"
    )
    with pytest.warns(UserWarning, match=message):
        scores = weighted(rollouts, PROMPTS)
    assert scores.total.isinf().nonzero().tolist() == [[0]]


def test_several_rewards_add_up_by_their_weights(folder: Path, rollouts: RolloutBatch) -> None:
    paths = [str(folder / "reward_1"), str(folder / "reward_2")]
    first, second = (ModelReward(path, ModelOptions())(rollouts, PROMPTS, None) for path in paths)
    length = torch.tensor([3.0, 6.0, 0.0])
    sources = {paths[0]: 2.0, f"{FUNCTIONS}:length": -0.1, paths[1]: 0.5}
    weighted = WeightedReward(sources, ModelOptions(), tiny_tokenizer())
    expected = 2.0 * first - 0.1 * length + 0.5 * second
    torch.testing.assert_close(weighted(rollouts, PROMPTS).total, expected)
    assert [model.path for model in weighted.models] == paths
    rewards = {paths[0]: 1.0, f"{FUNCTIONS}:length": 1.0}
    single_model = WeightedReward(rewards, ModelOptions(), tiny_tokenizer())
    assert single_model(rollouts, PROMPTS).spread() is None


def standardized(column: list[float]) -> list[float]:
    return [(x - fmean(column)) / pstdev(column) for x in column]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("ensemble", ["mean", "min", "sum"])
def test_models_and_heads_count_as_one(
    folder: Path, rollouts: RolloutBatch, ensemble: Ensemble, offload: bool
) -> None:
    single, several = str(folder / "reward_1"), str(folder / "heads")
    models = [ModelReward(path, ModelOptions()) for path in (single, several)]
    first, (second, third) = models[0](rollouts, PROMPTS), models[1](rollouts, PROMPTS).unbind(1)
    expected = []
    for row, (single_score, second_score, third_score) in enumerate(
        zip(2.0 * first, second, third, strict=True)
    ):
        score = {
            "mean": (single_score + second_score + third_score) / 3,
            "min": min(single_score, second_score, third_score),
            "sum": single_score + (second_score + third_score) / 2,
        }[ensemble]
        expected.append(float(score) - 0.1 * (3.0, 6.0, 0.0)[row])
    rewards = {single: 2.0, f"{FUNCTIONS}:length": -0.1, several: 1.0}
    options: dict[str, Any] = {
        "options": ModelOptions(),
        "tokenizer": tiny_tokenizer(),
        "offload": offload,
        "ensemble": ensemble,
    }
    scores = WeightedReward(rewards, **options)(rollouts, PROMPTS, max_tokens_per_forward=8)
    assert scores.total.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    standardized_columns = [standardized(scores.tolist()) for scores in (first, second, third)]
    spread = [pstdev(scores) for scores in zip(*standardized_columns, strict=True)]
    assert scores.spread().tolist() == pytest.approx(spread, rel=1e-3, abs=1e-5)
    torch.testing.assert_close(scores.by_name["heads"], (second + third) / 2)
    torch.testing.assert_close(scores.head_scores, torch.stack([first, second, third], dim=1))
    if ensemble == "sum":
        return
    # one with weight 0 is only logged, and one head is too few
    lone = WeightedReward({single: 0.0, several: 1.0}, **options)(rollouts, PROMPTS).total
    members = torch.stack([second, third])
    torch.testing.assert_close(lone, members.mean(0) if ensemble == "mean" else members.amin(0))
    with pytest.raises(ValueError, match=f"ensemble: expected sum .*, got {ensemble}"):
        WeightedReward({single: 1.0, several: 0.0}, **options)


def test_heads_of_an_ensemble_have_scales_of_their_own(
    folder: Path, rollouts: RolloutBatch
) -> None:
    path = str(folder / "heads")
    heads = ModelReward(path, ModelOptions())(rollouts, PROMPTS)
    smallest_head = torch.tensor([standardized(column) for column in heads.T.tolist()]).amin(0)
    mean_of_heads = torch.tensor(standardized(heads.mean(1).tolist()))
    for ensemble, expected, n_moments in (("min", smallest_head, 2), ("sum", mean_of_heads, 1)):
        rewards = {path: {"normalize": True}}
        reward = WeightedReward(rewards, ModelOptions(), tiny_tokenizer(), ensemble=ensemble)
        assert len(reward.moments) == n_moments
        scores = reward(rollouts, PROMPTS)
        torch.testing.assert_close(scores.total, expected, rtol=1e-3, atol=1e-4)
        reward.commit_moments(scores)
        assert torch.equal(reward.eval()(rollouts, PROMPTS).total, scores.total)


def test_a_password_in_the_url_of_a_service_is_refused_and_not_shown() -> None:
    service = {"rule": "http", "url": "http://me:secret@localhost/"}
    with pytest.raises(ValueError, match=r"rewards\.safety: url: .*environment variable") as error:
        parse_rewards({"safety": service})
    assert "secret" not in "".join(format_exception(error.value))
    parse_rewards({"safety": service | {"url": "http://me:$SCORER_PASSWORD@localhost/"}})


def brevity(prompts: list[str], responses: list[str]) -> list[float]:
    return [-float(len(response)) for response in responses]


class Ends:
    """A reward with a state of its own, as an object."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __call__(self, prompts: list[str], responses: list[str]) -> list[float]:
        return [float(response.endswith(self.mark)) for response in responses]


def test_python_objects_are_rewards_by_themselves_in_a_list_or_with_a_weight() -> None:
    ends, path = Ends("."), f"{FUNCTIONS}:length"
    single, several, mapped = (
        WeightedReward(rewards, ModelOptions(), tiny_tokenizer())
        for rewards in (brevity, [brevity, path], {brevity: 0.5, ends: {"weight": 2.0}})
    )
    assert totals(single, BATCHES[0]).tolist() == [-1.0, -4.0, -2.0]
    of_several, of_mapped = score(several, BATCHES[0]), score(mapped, BATCHES[0])
    assert of_several.total.tolist() == [0.0, 0.0, 0.0]
    assert of_mapped.total.tolist() == [-0.5, 0.0, -1.0]
    assert list(of_mapped.by_name) == ["brevity", "Ends"]
    assert list(of_several.by_name) == ["brevity", "length"]


def test_a_checkpoint_holds_the_names_of_python_objects() -> None:
    def nested(prompts: list[str], responses: list[str]) -> list[float]:
        return [0.0] * len(responses)

    this = "tests.rewards.test_weighted"
    place = f"{this}:test_a_checkpoint_holds_the_names_of_python_objects.<locals>.nested"
    rewards = {brevity: 0.5, Ends("."): {"normalize": True}, nested: 1.0, "runs/reward": 2.0}
    named = {f"{this}:brevity": 0.5, f"{this}:Ends": {"normalize": True}}
    assert plain_rewards(rewards) == {**named, place: 1.0, "runs/reward": 2.0}
    assert [spec.name for spec in parse_rewards(rewards)] == ["brevity", "Ends", "nested", "reward"]
    paths = plain_rewards([brevity, Path("runs") / "reward"])
    assert paths == {f"{this}:brevity": 1.0, "runs/reward": 1.0}
    assert plain_rewards("runs/reward") == {"runs/reward": 1.0}
    assert plain_rewards(tiny_causal_lm()) == {"<LlamaForCausalLM>": 1.0}
    mixed = plain_rewards([brevity, tiny_causal_lm(), "runs/reward"])
    assert untrusted_rewards(mixed) == [f"{this}:brevity", "<LlamaForCausalLM>"]


def test_a_loaded_model_scores_as_from_its_folder(folder: Path, rollouts: RolloutBatch) -> None:
    path = str(folder / "reward_1")
    model = AutoModelForSequenceClassification.from_pretrained(path)
    weighted = WeightedReward([model], ModelOptions(), tiny_tokenizer())
    expected = ModelReward(path, ModelOptions())(rollouts, PROMPTS, None)
    torch.testing.assert_close(weighted(rollouts, PROMPTS).total, expected)
    assert [m.path for m in weighted.models] == [path]
    assert not any(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ValueError, match=r"expected a scalar model .* got LlamaForCausalLM"):
        WeightedReward(tiny_causal_lm(), ModelOptions(), tiny_tokenizer())


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (5, "rewards: expected a reward model, its folder, a callable, .*got 5"),
        ([5], "rewards: expected a reward model, its folder, a callable, .*got 5"),
        ([], "rewards: expected at least one entry"),
        (["a", "a"], "expected rewards of different names, got 'a' twice"),
        ({"a/b": 1.0, "./a/b/": 0.5}, "each reward model once, got a/b and ./a/b/, which are one"),
        ([lambda p, r: [0.0], lambda p, r: [1.0]], r"got '.*:<lambda>' twice; define functions by"),
        ({"brevity": brevity}, "rewards.brevity: expected a weight, got <function .* is the key"),
    ],
)
def test_objects_that_are_no_rewards_are_refused(rewards: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_rewards(rewards)
