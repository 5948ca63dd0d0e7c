"""Each check fails when just its own subject is broken, and the others stay ok."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_rlhf.data import PromptBatch
from lit_rlhf.ppo import PPO, PPOOptions
from lit_rlhf.rollout import Experience, RolloutBatch, SamplingOptions, TokenStatistics
from lit_rlhf.rollout.scoring import compute_values
from lit_rlhf.tools.doctor.checks.distributions import (
    check_reference,
    check_sampling,
    measure_entropy_gap,
)
from tests.support.doctor_runs import findings, module_of, not_ok, only_finding, with_experience
from tests.support.ppo_objects import tiny_networks


def test_reference_that_is_another_model_is_a_failure(root: Path, tmp_path: Path) -> None:
    module = module_of(root)
    with torch.no_grad():
        for parameter in module.reference.parameters():
            parameter.mul_(1.01)
    finding = only_finding(findings(root, tmp_path, module), "reference", "failure")
    assert "nats per token before the first update, expected 0" in finding.observation
    assert "model.model_path" in finding.change


def test_kl_is_estimated_on_samples_of_the_policy() -> None:
    case: Any = SimpleNamespace(
        estimates=SimpleNamespace(
            logprobs=torch.tensor([[-2.0]]), ref_logprobs=torch.tensor([[-1.0]])
        ),
        rollouts=SimpleNamespace(response_mask=torch.tensor([[True]])),
        tolerance=lambda full, low: full,
    )
    # exp(-x) - 1 + x of x = -1
    assert "KL(policy, reference) is 0.72 nats" in check_reference(case).observation


def test_scores_of_generation_leave_out_the_padding_of_prompts() -> None:
    # as many tokens in the responses as in the longest prompt: masks of one shape
    ppo = PPO(tiny_networks(), PPOOptions(sampling=SamplingOptions(max_new_tokens=3)))
    prompts = PromptBatch(
        input_ids=torch.tensor([[5, 6, 7], [0, 0, 9]]),
        attention_mask=torch.tensor([[True, True, True], [False, False, True]]),
        texts=["a", "b"],
        index=torch.arange(2),
        fields=[{}, {}],
    )
    rollouts = ppo.rollout(prompts, seed=1)
    case: Any = SimpleNamespace(
        batch=prompts,
        module=SimpleNamespace(ppo=ppo, policy=ppo.networks.policy, sampling=ppo.sampling),
        rollouts=rollouts._replace(statistics=None),
        estimates=ppo.estimate(rollouts),
        rescored=None,
        tokenizer=ppo.networks.tokenizer,
        tolerance=lambda full, low: full,
    )
    assert check_sampling(case).status == "ok"


OtherLogprobs = with_experience(lambda made: {"old_logprobs": made.old_logprobs - 0.1})
"""The ratio is taken against other log-probs than the policy's."""


class OtherUpdate(PPO):
    """The same in a phase further on, which the doctor runs as it is overridden."""

    def train_policy(self, minibatch: Experience, *arguments: Any) -> dict[str, Tensor]:
        changed = replace(minibatch, old_logprobs=minibatch.old_logprobs - 0.1)
        return super().train_policy(changed, *arguments)


def noisy(made: Experience) -> dict[str, Tensor]:
    """The ratios are one only on average."""
    signs = 1.0 - 2.0 * (torch.arange(made.old_logprobs.shape[1]) % 2)
    return {"old_logprobs": made.old_logprobs + 0.01 * signs}


class CountsPadding(PPO):
    """Its critic attends to the padding of prompts."""

    def estimate(self, rollouts: RolloutBatch) -> TokenStatistics:
        everything = rollouts._replace(prompt_mask=torch.ones_like(rollouts.prompt_mask))
        values, _ = compute_values(self.networks.critic, everything)
        return super().estimate(rollouts)._replace(values=values)


class Cooler(PPO):
    """Samples at another temperature than it scores."""

    def rollout(self, batch: PromptBatch, seed: int) -> RolloutBatch:
        scored, self.sampling = self.sampling, replace(self.sampling, temperature=0.3)
        rollouts = super().rollout(batch, seed)
        self.sampling = scored
        return rollouts


class ScoresHotter(with_experience(lambda made: {"old_logprobs": made.old_logprobs - 0.01})):  # type: ignore[misc]
    """Scores at another temperature what generation samples, a little."""

    def estimate(self, rollouts: RolloutBatch) -> TokenStatistics:
        estimates, off = super().estimate(rollouts), 0.01 * rollouts.response_mask
        names = ("logprobs", "ref_logprobs")
        moved = {name: getattr(estimates, name) + off for name in names}
        return estimates._replace(**moved, entropy=estimates.entropy - off)


@pytest.mark.parametrize(
    ("kind", "check", "message", "change"),
    [
        (OtherLogprobs, "ratio", "The ratio is 1.1052 before the first update", ""),  # e^0.1
        (with_experience(noisy), "ratio", "", ""),
        (OtherUpdate, "ratio", "The ratio is 1.1052 before the first update", ""),
        (CountsPadding, "padding", "differ: critic by", ""),
        (Cooler, "sampling", "standard errors", "model.sampling.temperature"),
        (ScoresHotter, "sampling", "Generation gives its own tokens other log-probs", ""),
    ],
)
def test_fault_of_a_model_is_found_with_its_remedy(
    root: Path, tmp_path: Path, kind: Any, check: str, message: str, change: str
) -> None:
    finding = only_finding(findings(root, tmp_path, module_of(root, kind)), check, "failure")
    assert message in finding.observation
    assert change in finding.change


@pytest.mark.parametrize(
    ("option", "value"), [("top_p", 0.9), ("top_k", 20), ("repetition_penalty", 1.2)]
)
def test_off_policy_sampling_warns(root: Path, tmp_path: Path, option: str, value: float) -> None:
    with pytest.warns(UserWarning, match="never draws"):
        module = module_of(root, **{f"sampling.{option}": value})
    report = findings(root, tmp_path, module)
    assert not_ok(report) == {"sampling": "warning"}
    assert option in report.findings["sampling"].observation
    assert not report.failed


def test_log_probs_of_sampled_tokens_are_minus_the_entropy_on_average() -> None:
    probabilities = torch.tensor([0.7, 0.2, 0.1])
    logprobs = probabilities.log()
    entropy = float(-(probabilities * logprobs).sum())
    # 70, 20 and 10 of 100 tokens: the frequencies are the probabilities; greedy: the first alone
    fair = torch.tensor([0] * 70 + [1] * 20 + [2] * 10)
    for tokens, expected in ((fair, 0.0), (fair * 0, float(logprobs[0]) + entropy)):
        mask = torch.ones(1, 100, dtype=torch.bool)
        rollouts = RolloutBatch(tokens[None], mask, tokens[None], mask, mask[:, 0])
        zeros = torch.zeros(1, 100)
        estimates = TokenStatistics(
            logprobs=logprobs[tokens][None],
            ref_logprobs=zeros,
            entropy=zeros + entropy,
            values=zeros,
            next_values=zeros[:, 0],
            ref_prompt_entropy=zeros[:, 0],
        )
        gap = measure_entropy_gap(rollouts, estimates).mean
        assert gap == pytest.approx(expected, abs=1e-6)
