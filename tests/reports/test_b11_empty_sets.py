"""B11: a mean of nothing has no value, on one rank and on several."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_callbacks import Level, Watch
from lit_rlhf.data import PromptBatch, TokenBatch
from lit_rlhf.finite import find_non_finite
from lit_rlhf.micro_batches import LossShare, NetworkUpdate, accumulate
from lit_rlhf.ppo import (
    PPO,
    AdvantageOptions,
    CriticPretrainingOptions,
    MinibatchOptions,
    NetworkName,
    OptimizerStepper,
    PPOLossOptions,
    PPOOptions,
)
from lit_rlhf.rollout import Experience, RolloutMetrics, SamplingOptions
from lit_rlhf.stats import global_means
from tests.support.ppo_objects import tiny_networks
from tests.support.ranks import run_on_ranks
from tests.support.rollout_metrics import add_batch
from tests.support.stages import assert_equal_states, copy_state

# means over the tokens to learn from; the norm of a gradient is none
OF_TOKENS = {
    *("ppo/policy_loss", "ppo/clip_fraction", "ppo/approx_kl", "ppo/ratio", "ppo/ratio_first"),
    *("ppo/value_loss", "ppo/value_clip_fraction"),
}


def build_ppo(**options: Any) -> PPO:
    usual: dict[str, Any] = {
        "sampling": SamplingOptions(max_new_tokens=4),
        "advantages": AdvantageOptions(truncation="mask"),
        "minibatches": MinibatchOptions(minibatch_size=2, ppo_epochs=1),
        "critic_pretraining": CriticPretrainingOptions(iterations=0),
        "loss": PPOLossOptions(ptx_coef=0.0),
    }
    return PPO(tiny_networks(), PPOOptions(**usual | options))


def build_experience(ppo: PPO, ended: Iterable[bool]) -> Experience:
    """Experience from two prompts, of which the first two responses are to the first."""
    ids = torch.tensor([[5, 6, 7], [5, 6, 7], [4, 8, 9], [4, 8, 9]])
    batch = PromptBatch(
        ids, torch.ones_like(ids, dtype=torch.bool), list("aabb"), torch.arange(4), [{}] * 4
    )
    collected = ppo.collect(batch, seed=1)
    rollouts = collected.rollouts._replace(terminated=torch.tensor(list(ended)))
    return ppo.learn_from(collected._replace(rollouts=rollouts)).experience


def build_stepper(ppo: PPO) -> OptimizerStepper:
    networks: dict[NetworkName, Any] = {
        "policy": ppo.networks.policy,
        "critic": ppo.networks.critic,
    }
    return OptimizerStepper(
        {name: torch.optim.AdamW(net.parameters(), lr=1e-2) for name, net in networks.items()}
    )


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.filterwarnings("ignore:advantages.truncation. mask leaves nothing")
def test_update_without_tokens_has_no_metrics_and_moves_nothing() -> None:
    ppo = build_ppo()
    stepper = build_stepper(ppo)
    learned = ppo.update(build_experience(ppo, [True] * 4), stepper, generator())
    assert learned.keys() >= OF_TOKENS
    # The moments of Adam are not 0 any more: even a step with a gradient of 0 would move weights.
    before = [copy_state(network) for network in (ppo.networks.policy, ppo.networks.critic)]
    metrics = ppo.update(build_experience(ppo, [False] * 4), stepper, generator())
    assert metrics == {}
    for network, state in zip((ppo.networks.policy, ppo.networks.critic), before, strict=True):
        assert_equal_states(copy_state(network), state)
    assert (int(ppo.iteration), int(ppo.ppo_step)) == (2, 2)


def test_minibatch_without_tokens_does_not_count_in_means(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ppo = build_ppo()
    experience = build_experience(ppo, [False, False, True, True])

    def update(order: list[list[int]]) -> dict[str, float]:
        monkeypatch.setattr(
            "lit_rlhf.ppo.algorithm.iterate_minibatches",
            lambda *_, **__: iter(map(torch.tensor, order)),
        )
        ppo = build_ppo()
        metrics = ppo.update(experience, build_stepper(ppo), generator())
        return {key: float(value) for key, value in metrics.items()}

    alone = update([[2, 3]])
    assert update([[2, 3], [0, 1]]) == alone
    del alone["ppo/ratio_first"]  # a first minibatch has none
    assert update([[0, 1], [2, 3]]) == alone


@pytest.mark.filterwarnings("ignore:advantages.truncation. mask leaves nothing")
def test_critic_pretraining_does_not_end_without_a_value_loss() -> None:
    phase = CriticPretrainingOptions(iterations=3, target_value_loss=1e9)
    ppo = build_ppo(critic_pretraining=phase)
    assert ppo.update(build_experience(ppo, [False] * 4), build_stepper(ppo), generator()) == {}
    assert ppo.in_critic_pretraining()
    ppo.update(build_experience(ppo, [True] * 4), build_stepper(ppo), generator())
    assert not ppo.in_critic_pretraining()


@pytest.mark.filterwarnings("ignore:advantages.truncation. mask leaves nothing")
def test_text_alone_is_learned_from_without_responses() -> None:
    ppo = build_ppo(loss=PPOLossOptions(ptx_coef=0.5))
    experience = build_experience(ppo, [False] * 4)
    ids = torch.tensor([[5, 6, 7]] * 4)
    text = TokenBatch(ids, torch.ones_like(ids, dtype=torch.bool), torch.arange(3).expand(4, 3) > 0)
    metrics = ppo.update(experience, build_stepper(ppo), generator(), text)
    assert metrics.keys() == {"ppo/ptx_loss", "ppo/policy_grad_norm"}
    assert all(float(value) > 0 for value in metrics.values())
    assert int(ppo.ppo_step) == 2


def measure(ids: torch.Tensor, votes: list[bool], metrics: RolloutMetrics) -> None:
    add_batch(
        metrics,
        ids,
        mask=ids > 0,
        entropy=0.5,
        scores={"score": torch.arange(1.0, len(ids) + 1), "score/rule": torch.full((len(ids),), 3)},
        votes={"score/rule": torch.tensor(votes)},
    )


def test_shares_of_bigrams_and_scores_of_nobody_are_left_out() -> None:
    metrics = RolloutMetrics()
    measure(torch.tensor([[4], [5]]), [False, False], metrics)
    computed = metrics.compute()
    left_out = {"rollout/distinct_2", "rollout/repeated_2"}
    assert computed.keys() == {*RolloutMetrics.KEYS, "rollout/score"} - left_out
    assert (float(computed["rollout/score"]), float(computed["rollout/entropy"])) == (1.5, 0.5)
    measure(torch.tensor([[4, 5]]), [True], metrics)
    computed = metrics.compute()
    assert float(computed["rollout/distinct_2"]) == 1.0
    assert float(computed["rollout/repeated_2"]) == 0.0
    assert float(computed["rollout/score/rule"]) == 3.0


def test_missing_metrics_are_no_collapse() -> None:
    watch = Watch()
    usual = {"rollout/kl_per_token": 0.001, "rollout/response_length": 1.0, "rollout/entropy": 1.0}
    full = usual | {"ppo/ratio_first": 1.0, "rollout/distinct_2": 0.9}
    levels = {watch.step(full if step < 10 else usual).level for step in range(20)}
    assert levels == {Level.HEALTHY}


class StepsOfARank:
    """Makes no step. Like the stepper under a Trainer, it is a collective."""

    def update(self, network: NetworkName, shares: Iterable[LossShare]) -> NetworkUpdate:
        totals = accumulate(shares, torch.Tensor.backward)
        assert not find_non_finite(totals)
        return NetworkUpdate(totals, grad_norm=torch.tensor(1.0), applied=True)

    def end_minibatch(self, trains_policy: bool) -> None:
        """Do nothing."""


def update_on_a_rank(rank: int, ended: list[list[bool]]) -> dict[str, dict[str, float]]:
    """Metrics of an update and of rollouts, of which this rank has its own."""
    results = {}
    for name, own in (("some", ended[rank]), ("none", [False] * 4)):
        ppo = build_ppo(minibatches=MinibatchOptions(minibatch_size=4, ppo_epochs=1))
        experience = replace(build_experience(ppo, [True] * 4), loss_mask=mask_of(ppo, own))
        means = global_means(
            ppo.update(experience, StepsOfARank(), generator())
            | {"ppo/kl_coef": ppo.kl_coef.clone()},
            torch.device("cpu"),
        )
        results[name] = {key: float(value) for key, value in means.items()}
    metrics = RolloutMetrics()
    one = rank == 0
    measure(torch.tensor([[4], [5]] if one else [[4, 5], [6, 7]]), [not one, False], metrics)
    results["rollouts"] = {key: float(value) for key, value in metrics.compute().items()}
    return results


def mask_of(ppo: PPO, learned: list[bool]) -> torch.Tensor:
    """The loss mask of `build_experience` where only some responses are learned from."""
    experience = build_experience(ppo, [True] * 4)
    return experience.loss_mask & torch.tensor(learned)[:, None]


@pytest.mark.slow
def test_rank_without_values_neither_hangs_nor_counts(tmp_path: Path) -> None:
    first, second = run_on_ranks(
        update_on_a_rank, 2, tmp_path, [[False] * 4, [False, True, True, False]]
    )
    assert first == second
    # Both ranks have the same rollouts, so the second alone is what counts.
    ppo = build_ppo(minibatches=MinibatchOptions(minibatch_size=4, ppo_epochs=1))
    experience = build_experience(ppo, [True] * 4)
    experience = replace(experience, loss_mask=mask_of(ppo, [False, True, True, False]))
    alone = ppo.update(experience, StepsOfARank(), generator())
    assert first["some"].keys() - {"ppo/kl_coef"} == alone.keys() >= OF_TOKENS
    for key, value in alone.items():  # a rank's half of the tokens is scaled by 2 without rounding
        assert first["some"][key] == float(value), key
    assert first["none"].keys() == {"ppo/kl_coef"}
    assert first["rollouts"]["rollout/distinct_2"] == 1.0
    assert first["rollouts"]["rollout/score/rule"] == 3.0
    assert first["rollouts"]["rollout/score"] == 1.5
