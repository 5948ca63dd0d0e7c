"""One update without a critic, recomputed in float64: each paper's equations as plain loops."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lit_rlhf.modules import PPOModule
from lit_rlhf.strategies import MultiEngineDeepSpeedStrategy
from tests.support.reference_iteration import (
    AdamW,
    Sample,
    distance,
    load,
    read_policy,
    read_values,
)
from tests.support.stages import (
    ADAM_EPS,
    StepRecorder,
    copy_state,
    fit_module,
    nested,
    ppo_options,
    prompts,
)
from tests.support.trajectories import ScriptedPPO

GROUP, LONGEST, TEMPERATURE, NO_EOS = 3, 6, 0.7, 0.3
POLICY = {"learning_rate": 2e-3, "weight_decay": 0.5, "grad_clip": 0.5, "eps": ADAM_EPS}

# Ten times what the loops themselves move, rounded up to one digit, when they run in float32, as in
# `reference_iteration`. The most: norms 3.6e-6, gradients 6.9e-6, and weights 2.9e-5 of the way
# that they go.
NORM_TOLERANCE = 4e-5
GRADIENT_TOLERANCE = 7e-5
WEIGHT_TOLERANCE = 3e-4

RECIPES: dict[str, dict[str, Any]] = {
    "rloo": {"reward_shaping.kl_coef": 0.2, "loss.aggregation": "sequence_sum"},
    "grpo": {"loss.ref_kl_coef": 0.3, "loss.aggregation": "sequence_mean"},
    "dr_grpo": {"loss.aggregation": "sequence_sum"},
    "reinforce_plus_plus": {"reward_shaping.kl_coef": 0.2, "advantages.gamma": 0.9},
}


class Step(NamedTuple):
    """One update on one rank.

    Attributes:
        samples: The rank's samples, the responses to a prompt in adjacent places.
        start: Weights of the policy before the update.
        end: Its weights after it.
        gradients: Gradients of the update after clipping; empty under engines.
        logged: Logged metrics.
        networks: Names of the networks that the module has.
    """

    samples: list[Sample]
    start: dict[str, Tensor]
    end: dict[str, Tensor]
    gradients: list[dict[str, Tensor]]
    logged: dict[str, float]
    networks: set[str]


class GroupedPPO(ScriptedPPO):
    """Different responses to a prompt, of 1 to 6 tokens; one or two of each three end."""

    def rollout(self, batch: Any, seed: int) -> Any:
        copies = torch.arange(len(batch.index)) % GROUP
        rollouts = super().rollout(batch._replace(index=GROUP * batch.index + copies), seed)
        self.samples = [
            Sample(
                tuple(ids[prompt_mask].tolist()),
                tuple(response_ids[mask].tolist()),
                bool(ended),
                (),
                (),
            )
            for ids, prompt_mask, response_ids, mask, ended in zip(*rollouts[:5], strict=True)
        ]
        return rollouts


class Grouped(PPOModule):
    """A run of `GroupedPPO`."""

    ppo_class = GroupedPPO
    ppo: GroupedPPO


def run_step(
    root: Path, folder: Path, estimator: str, truncation: str, n_ranks: int = 1, **trainer: Any
) -> Step:
    """Make one update on three responses to each of eight prompts."""
    usual = {
        "responses_per_prompt": GROUP,
        "sampling.temperature": TEMPERATURE,
        "sampling.max_new_tokens": LONGEST,
        "reward_shaping": {"normalization": False, "clip": None, "kl_coef": 0.0},
        "reward_shaping.missing_eos_penalty": NO_EOS,
        "advantages": {"normalization": False, "estimator": estimator, "truncation": truncation},
        "policy_optimizer": POLICY,
        "minibatches": {"ppo_epochs": 1, "minibatch_size": 8 * GROUP // n_ranks},
        "minibatches.micro_batch_size": 5,
    }
    module = Grouped(**ppo_options(root, **nested(usual, RECIPES[estimator])))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():  # away from the reference
        for parameter in module.policy.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    start, recorder = copy_state(module.policy), StepRecorder()
    engines = isinstance(trainer.get("strategy"), MultiEngineDeepSpeedStrategy)
    data = prompts(root, batch_size=8 // n_ranks)
    run = fit_module(module, data, folder, callbacks=[] if engines else [recorder], **trainer)
    return Step(
        samples=module.ppo.samples,
        start=start,
        end=copy_state(module.policy),
        gradients=recorder.steps.get("policy", []),
        logged={key: float(value) for key, value in run.callback_metrics.items()},
        networks={name for name, _ in module.named_children()},
    )


def mean_of(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def token_advantages(
    estimator: str, rewards: list[list[float]], learned: list[bool]
) -> list[list[float]]:
    """Advantages of the tokens of all responses to learn from, by the equations of the papers."""
    recipe = RECIPES[estimator]
    if estimator == "reinforce_plus_plus":
        gamma = recipe["advantages.gamma"]
        returns = [
            [sum(gamma ** (s - t) * row[s] for s in range(t, len(row))) for t in range(len(row))]
            for row in rewards
        ]
        learned_returns = [
            x for row, keep in zip(returns, learned, strict=True) for x in row if keep
        ]
        std = math.sqrt(mean_of([(x - mean_of(learned_returns)) ** 2 for x in learned_returns]))
        return [[(x - mean_of(learned_returns)) / std for x in row] for row in returns]
    advantages = []
    for row in range(len(rewards)):
        first = row - row % GROUP
        group = [i for i in range(first, first + GROUP) if learned[i]]
        totals = {i: sum(rewards[i]) for i in group}
        others = [totals[i] for i in group if i != row]
        advantage = 0.0
        if learned[row] and others:
            if estimator == "rloo":
                advantage = totals[row] - mean_of(others)
            else:
                mean = mean_of([*totals.values()])
                advantage = totals[row] - mean
                if estimator == "grpo":
                    squares = sum((x - mean) ** 2 for x in totals.values())
                    advantage /= math.sqrt(squares / (len(group) - 1))
        advantages.append([advantage] * len(rewards[row]))
    return advantages


def recompute_step(root: Path, estimator: str, truncation: str, ranks: list[Step]) -> AdamW:
    """The update of these ranks in one process: its gradient, and the policy after it."""
    recipe, samples = RECIPES[estimator], [sample for rank in ranks for sample in rank.samples]
    policy = load(AutoModelForCausalLM, root / "policy", ranks[0].start)
    reference = load(AutoModelForCausalLM, root / "policy")
    reward_model = load(AutoModelForSequenceClassification, root / "reward")
    rewards, ref_logprobs = [], []
    with torch.no_grad():
        for sample in samples:
            old = [float(logprob) for logprob, _ in read_policy(policy, sample)]
            ref = [float(logprob) for logprob, _ in read_policy(reference, sample)]
            coef = recipe.get("reward_shaping.kl_coef", 0.0)
            row = [-coef * (a - b) for a, b in zip(old, ref, strict=True)]
            row[-1] += float(read_values(reward_model, sample)[-1]) - NO_EOS * (not sample.ended)
            rewards.append(row)
            ref_logprobs.append(ref)
    learned = [truncation == "terminal" or sample.ended for sample in samples]
    advantages = token_advantages(estimator, rewards, learned)
    losses = []  # token losses of each response
    for i, sample in enumerate(samples):
        if not learned[i]:
            continue
        row = []
        for t, (logprob, _) in enumerate(read_policy(policy, sample)):
            log_ratio = ref_logprobs[i][t] - logprob
            kl = log_ratio.exp() - log_ratio - 1  # GRPO, Eq. 4
            ratio = (logprob - logprob.detach()).exp()
            row.append(-advantages[i][t] * ratio + recipe.get("loss.ref_kl_coef", 0.0) * kl)
        losses.append(torch.stack(row))
    match recipe.get("loss.aggregation", "token_mean"):
        case "token_mean":
            loss = torch.cat(losses).mean()
        case "sequence_mean":
            loss = torch.stack([row.mean() for row in losses]).mean()
        case _:
            loss = torch.stack([row.sum() / LONGEST for row in losses]).mean()
    optimizer = AdamW(policy, POLICY)
    optimizer.step(loss)
    return optimizer


def assert_follows(step: Step, expected: AdamW) -> None:
    """Gradients and weights agree up to the rounding of float32."""
    norm = pytest.approx(expected.norms[0], rel=NORM_TOLERANCE)
    assert step.logged["ppo/policy_grad_norm"] == norm
    for actual, target in zip(step.gradients, expected.gradients, strict=False):
        named = {name.removeprefix("policy."): gradient for name, gradient in actual.items()}
        assert distance(named, target) < GRADIENT_TOLERANCE * distance(target, {})
    end = {name: parameter.detach() for name, parameter in expected.parameters.items()}
    assert distance(step.end, end) < WEIGHT_TOLERANCE * distance(step.start, end)
    assert "critic" not in step.networks
