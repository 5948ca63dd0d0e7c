"""Each switch of PPO's tricks changes what it should and nothing else, bit by bit.

One iteration is recorded phase by phase. Policy and reference differ from the start, so that KL and
ratios are not trivial; minibatches and epochs make the clips act.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_rlhf.models import load_scalar_model, save_model_folder
from lit_rlhf.modules import PPOModule
from lit_rlhf.ppo import PPO
from lit_rlhf.rewards import Scores
from lit_rlhf.rollout import Experience, RolloutBatch, TokenStatistics
from tests.support.stages import causal_lm, copy_state, encoder_of, fit_module, ppo_options, prompts
from tests.support.tiny_models import tiny_config, tiny_tokenizer

Record = dict[str, Tensor]
Recorder = Callable[[dict[str, Any]], Record]

RETURNS = {"advantages", "returns", "policy", "critic"}
BASE: dict[str, Any] = {
    **dict.fromkeys(("policy_optimizer.learning_rate", "critic_optimizer.learning_rate"), 2e-2),
    **dict.fromkeys(("policy_optimizer.grad_clip", "critic_optimizer.grad_clip"), 0.5),
    **dict.fromkeys(("loss.value_clip", "loss.ratio_clip"), 0.05),
    "advantages.lam": 0.9,
    "advantages.gamma": 0.99,
    "reward_shaping.kl_coef": 0.1,
    "reward_shaping.clip": 3.0,
}
UNSCALED = {"reward_shaping.normalization": False}
ADAPTIVE = {"reward_shaping.kl_target": 0.5, "reward_shaping.kl_horizon": 50}
PENALTY, ENTROPY = {"loss.policy_objective": "kl_penalty"}, {"loss.entropy_coef": 0.5}
DECAY = dict.fromkeys(("policy_optimizer.weight_decay", "critic_optimizer.weight_decay"), 0.5)
SHAPED = {"rewards", "advantages", "returns", "policy", "critic"}
EVERYTHING = SHAPED | {
    *("responses", "loss_mask", "scores", "logprobs", "ref_logprobs", "values", "old_logprobs")
}

# options on top of BASE (or of another set), and what differs from the run without them
SWITCHES: list[tuple[str, dict[str, Any], dict[str, Any], set[str]]] = [
    ("1 KL penalty", {}, {"reward_shaping.kl_coef": 0.0}, SHAPED | {"kl_coef_after"}),
    ("1 KL estimator", {}, {"reward_shaping.kl_estimator": "k3"}, SHAPED),
    ("1 adaptive KL", {}, ADAPTIVE, {"kl_coef_after"}),
    ("4 reward scaling", UNSCALED, {"reward_shaping.scaling": True}, SHAPED),
    ("5 reward normalization", {}, UNSCALED, SHAPED),
    ("5 reward clip", {}, {"reward_shaping.clip": 0.2}, SHAPED),
    ("6 advantage normalization", {}, {"advantages.normalization": False}, {"policy"}),
    ("6 advantage clip", {}, {"advantages.clip": 0.3}, {"policy"}),
    ("8 critic from the policy", {}, {"critic_init": "policy"}, RETURNS | {"values"}),
    ("8 random critic", {}, {"critic_init": "random"}, RETURNS | {"values"}),
    ("8 critic pre-training", {}, {"critic_pretraining.iterations": 1}, {"policy"}),
    ("7 value clip", {}, {"loss.value_clip": None}, {"critic"}),
    ("10 lambda", {}, {"advantages.lam": 1.0}, RETURNS),
    ("10 lambda of the critic", {}, {"advantages.critic_lam": 1.0}, {"returns", "critic"}),
    ("length-adaptive lambda", {}, {"advantages.lam_alpha": 0.5}, RETURNS),
    ("10 gamma", {}, {"advantages.gamma": 0.5}, RETURNS),
    ("9 another policy", {}, {"model_path": "other"}, EVERYTHING),
    ("11 ratio clip", {}, {"loss.ratio_clip": 0.5}, {"policy"}),
    ("wider above", {}, {"loss.ratio_clip_high": 0.5}, {"policy"}),
    ("dual clip", {}, {"loss.dual_clip": 1.01}, {"policy"}),
    ("11 unclipped", {}, {"loss.policy_objective": "unclipped"}, {"policy"}),
    ("11 PPO-penalty", {}, PENALTY, {"policy"}),
    ("11 beta of PPO-penalty", PENALTY, {"loss.kl_penalty_coef": 5.0}, {"policy"}),
    ("ptx", {}, {"loss.ptx_coef": 0.5}, {"policy"}),
    ("12 policy's gradient clip", {}, {"policy_optimizer.grad_clip": None}, {"policy"}),
    ("12 critic's gradient clip", {}, {"critic_optimizer.grad_clip": None}, {"critic"}),
    ("2 ratio to the reference", {}, {"loss.old_policy": "reference"}, {"old_logprobs", "policy"}),
    ("3 entropy bonus", {}, ENTROPY, {"policy"}),
    ("3 entropy clip", ENTROPY, {"loss.entropy_clip": 3.0}, {"policy"}),
    ("missing-EOS penalty", {}, {"reward_shaping.missing_eos_penalty": 1.0}, SHAPED),
    ("truncation bootstraps", {}, {"advantages.truncation": "bootstrap"}, RETURNS),
    ("truncation masks", {}, {"advantages.truncation": "mask"}, {"loss_mask", "policy", "critic"}),
    ("weight decay", {}, DECAY, {"policy", "critic"}),
    ("policy's learning rate", {}, {"policy_optimizer.learning_rate": 1e-2}, {"policy"}),
    ("critic's learning rate", {}, {"critic_optimizer.learning_rate": 1e-2}, {"critic"}),
    ("temperature", {}, {"sampling.temperature": 0.7}, EVERYTHING),
    ("switches of what is off", {}, {"loss.entropy_clip": 3.0, "loss.kl_penalty_coef": 5.0}, set()),
]


class RecordedPPO(PPO):
    """Records its first iteration."""

    record: Record

    def rollout(self, *arguments: Any, **options: Any) -> RolloutBatch:
        rollouts = super().rollout(*arguments, **options)
        self.record["responses"] = rollouts.response_ids
        return rollouts

    def score(self, *arguments: Any) -> Scores:
        scores = super().score(*arguments)
        self.record["scores"] = scores.total
        return scores

    def estimate(self, rollouts: RolloutBatch) -> TokenStatistics:
        estimates = super().estimate(rollouts)
        of_policy = {"logprobs": estimates.logprobs, "ref_logprobs": estimates.ref_logprobs}
        self.record |= {**of_policy, "values": estimates.values}
        return estimates

    def shape_rewards(self, *arguments: Any) -> Tensor:
        self.record["rewards"] = super().shape_rewards(*arguments)
        return self.record["rewards"]

    def experience(self, *arguments: Any) -> Experience:
        experience = super().experience(*arguments)
        for name in ("old_logprobs", "advantages", "returns", "loss_mask"):
            self.record[name] = getattr(experience, name)
        return experience


class Recorded(PPOModule):
    """Records its first iteration; its policy is a little off its reference from the start."""

    ppo_class = RecordedPPO
    ppo: RecordedPPO

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.ppo.record = {}
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)

    def on_train_batch_end(self, *_: object) -> None:
        for name, network in (("policy", self.policy), ("critic", self.critic)):
            self.ppo.record[name] = torch.cat([w.flatten() for w in copy_state(network).values()])
        self.ppo.record["kl_coef_after"] = self.ppo.kl_coef.clone()


@pytest.fixture(scope="module")
def recorded(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    """The record of a run with the options given; equal options run once."""
    other, tokenizer = tmp_path_factory.mktemp("other") / "policy", tiny_tokenizer()
    contract = encoder_of(tokenizer).contract
    save_model_folder(causal_lm(tiny_config("llama"), 5), tokenizer, other, contract=contract)

    @cache
    def run(items: tuple[tuple[str, Any], ...]) -> Record:
        options = ppo_options(root, **dict(items))
        if options["model_path"] == "other":
            options["model_path"] = str(other)
        module = Recorded(**options)
        fit_module(module, prompts(root, ptx=True), tmp_path_factory.mktemp("run"))
        return module.ppo.record

    return lambda options: run(tuple(sorted((BASE | options).items())))


@pytest.mark.filterwarnings("ignore:reward_shaping.kl_estimator=k3")
@pytest.mark.filterwarnings("ignore:advantages.truncation. mask leaves nothing")
@pytest.mark.filterwarnings("ignore:critic_pretraining.iterations=1. the run has 1")
@pytest.mark.parametrize(
    ("before", "switch", "changed"),
    [case[1:] for case in SWITCHES],
    ids=[case[0].replace(" ", "-") for case in SWITCHES],
)
def test_a_switch_changes_what_it_should_and_nothing_else(
    recorded: Recorder, before: dict[str, Any], switch: dict[str, Any], changed: set[str]
) -> None:
    without, with_it = recorded(before), recorded(before | switch)
    assert without.keys() == with_it.keys()
    assert {name for name in without if not torch.equal(without[name], with_it[name])} == changed


def test_same_options_give_same_iteration(recorded: Recorder) -> None:
    one, again = recorded({}), recorded({"sampled_texts": 3})
    assert all(torch.equal(one[name], again[name]) for name in one)


def test_the_critic_starts_from_the_reward_model(root: Path) -> None:
    module = PPOModule(**ppo_options(root))
    for name, weight in load_scalar_model(root / "reward").named_parameters():
        assert torch.equal(module.critic.get_parameter(name), weight)
    fresh = PPOModule(**ppo_options(root, critic_init="policy"))
    for name, weight in fresh.policy.base_model.named_parameters():
        assert torch.equal(fresh.critic.base_model.get_parameter(name), weight)
