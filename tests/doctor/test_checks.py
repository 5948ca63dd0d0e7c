"""Each check of the doctor fails when just its own thing is broken, and the others stay ok."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lit_rlhf.data import PromptBatch
from lit_rlhf.doctor import RunPlan, Status
from lit_rlhf.modules import PPOModule, stage
from lit_rlhf.rollout import (
    Experience,
    RolloutBatch,
    TokenStatistics,
    compute_values,
)
from lit_rlhf.strategies import OptimizerStep, clipped_step
from tests.doctor.runs import findings, module_of, not_ok


def test_a_sound_run_passes_all_checks(root: Path, tmp_path: Path) -> None:
    report = findings(root, tmp_path)

    assert not_ok(report) == {}
    assert not report.failed


def test_a_sound_run_is_left_untouched(root: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    module = module_of(root, output_dir=str(tmp_path / "model"))

    findings(root, tmp_path / "run", module)

    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        {"network.lora_rank": 2},
        {"memory.frozen_dtype": "bfloat16"},
        {"network.dtype": "bfloat16"},
        {"memory.offload_frozen": True, "network.gradient_checkpointing": True},
        {"critic_pretraining.iterations": 3, "loss.policy_objective": "kl_penalty"},
        {
            "minibatches.micro_batch_size": 2,
            "memory.rollout_batch_size": 3,
            "advantages.truncation": "mask",
        },
        {"loss.old_policy": "reference", "critic_init": "policy", "sampling.temperature": 0.7},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_sound_runs_pass_too(root: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    assert not_ok(findings(root, tmp_path, module_of(root, **options))) == {}


def test_a_reference_that_is_another_model(root: Path, tmp_path: Path) -> None:
    module = module_of(root)
    with torch.no_grad():
        for parameter in module.reference.parameters():
            parameter.mul_(1.01)

    report = findings(root, tmp_path, module)

    assert not_ok(report) == {"reference": "failure"}
    found = report.findings["reference"]
    assert "nats per token before the first step, expected 0" in found.found
    assert "model.model_path" in found.change


class OtherLogprobs(PPOModule):
    """The ratio is taken against other log-probs than those of the policy."""

    def experience(
        self, rollouts: RolloutBatch, rewards: Tensor, estimates: TokenStatistics
    ) -> Experience:
        made = super().experience(rollouts, rewards, estimates)
        return replace(made, old_logprobs=made.old_logprobs - 0.1)


def test_a_ratio_other_than_one(root: Path, tmp_path: Path) -> None:
    report = findings(root, tmp_path, module_of(root, OtherLogprobs))

    assert not_ok(report) == {"ratio": "failure"}
    assert "The ratio is 1.1052 before the first step" in report.findings["ratio"].found  # e^0.1


class Noise(PPOModule):
    """The mean ratio is 1, those of the tokens are not."""

    def experience(
        self, rollouts: RolloutBatch, rewards: Tensor, estimates: TokenStatistics
    ) -> Experience:
        made = super().experience(rollouts, rewards, estimates)
        signs = 1.0 - 2.0 * (torch.arange(made.old_logprobs.shape[1]) % 2)
        return replace(made, old_logprobs=made.old_logprobs + 0.01 * signs)


def test_ratios_that_are_one_only_on_average(root: Path, tmp_path: Path) -> None:
    assert not_ok(findings(root, tmp_path, module_of(root, Noise))) == {"ratio": "failure"}


class CountsPadding(PPOModule):
    """Its critic attends to the padding of prompts."""

    def estimate(self, rollouts: RolloutBatch) -> TokenStatistics:
        everything = rollouts._replace(prompt_mask=torch.ones_like(rollouts.prompt_mask))
        values = compute_values(self.critic, everything)
        return super().estimate(rollouts)._replace(values=values.values)


def test_a_critic_that_reads_padding(root: Path, tmp_path: Path) -> None:
    report = findings(root, tmp_path, module_of(root, CountsPadding))

    assert not_ok(report) == {"padding": "failure"}
    assert "differ: critic by" in report.findings["padding"].found


class Cooler(PPOModule):
    """Samples at another temperature than it scores."""

    def rollout(self, batch: PromptBatch, seed: int) -> RolloutBatch:
        scored, self.sampling = self.sampling, replace(self.sampling, temperature=0.3)
        rollouts = super().rollout(batch, seed)
        self.sampling = scored
        return rollouts


def test_samples_of_another_distribution(root: Path, tmp_path: Path) -> None:
    report = findings(root, tmp_path, module_of(root, Cooler))

    assert not_ok(report) == {"sampling": "failure"}
    assert "standard errors" in report.findings["sampling"].found
    assert "model.sampling.temperature" in report.findings["sampling"].change


class ScoresHotter(PPOModule):
    """Scores at another temperature what generation samples, a little."""

    def estimate(self, rollouts: RolloutBatch) -> TokenStatistics:
        made = super().estimate(rollouts)
        mask = rollouts.response_mask
        off = 0.01 * mask
        return made._replace(
            logprobs=made.logprobs + off,
            ref_logprobs=made.ref_logprobs + off,
            entropy=made.entropy - off,
        )

    def experience(
        self, rollouts: RolloutBatch, rewards: Tensor, estimates: TokenStatistics
    ) -> Experience:
        made = super().experience(rollouts, rewards, estimates)
        return replace(made, old_logprobs=made.old_logprobs - 0.01)


def test_generations_own_logprobs_that_are_not_the_scored_ones(root: Path, tmp_path: Path) -> None:
    report = findings(root, tmp_path, module_of(root, ScoresHotter))

    assert not_ok(report) == {"sampling": "failure"}
    assert "Generation gives its own tokens other log-probs" in report.findings["sampling"].found


@pytest.mark.parametrize(
    "option",
    [{"sampling.top_p": 0.9}, {"sampling.top_k": 20}, {"sampling.repetition_penalty": 1.2}],
    ids=lambda o: next(iter(o)),
)
def test_off_policy_sampling_is_a_warning(
    root: Path, tmp_path: Path, option: dict[str, Any]
) -> None:
    with pytest.warns(UserWarning, match="off-policy samples"):
        module = module_of(root, **option)

    report = findings(root, tmp_path, module)

    assert not_ok(report) == {"sampling": "warning"}
    assert next(iter(option)).rpartition(".")[2] in report.findings["sampling"].found
    assert not report.failed


def test_too_little_memory(root: Path, tmp_path: Path) -> None:
    with patch("lit_rlhf.doctor.examination.free_memory", lambda device: 2**20):
        report = findings(root, tmp_path)

    assert not_ok(report) == {"memory": "failure"}
    assert "What helps" in report.findings["memory"].change


def unclipped(optimizer: Any, max_norm: float | None) -> OptimizerStep:
    return clipped_step(optimizer, None)


def test_a_clip_norm_that_does_not_act(root: Path, tmp_path: Path) -> None:
    with patch.object(stage, "clipped_step", unclipped):
        report = findings(root, tmp_path)

    assert not_ok(report) == {"clipping": "failure"}
    assert "clipping does not act under SingleDeviceStrategy" in report.findings["clipping"].found


def test_no_clip_norm_is_a_warning(root: Path, tmp_path: Path) -> None:
    report = findings(root, tmp_path, module_of(root, critic_optimizer={"grad_clip": None}))

    assert not_ok(report) == {"clipping": "warning"}
    assert "model.critic_optimizer.grad_clip is null" in report.findings["clipping"].found


def test_an_optimizer_that_does_not_tell_its_gradient(root: Path, tmp_path: Path) -> None:
    with patch("torch.optim.AdamW", torch.optim.SGD):
        report = findings(root, tmp_path)

    assert not_ok(report) == {"clipping": "warning"}


def test_a_run_without_an_iteration(root: Path, tmp_path: Path) -> None:
    report = findings(root, tmp_path, plan=RunPlan(ranks=2))

    assert not_ok(report) == {"time": "failure"}
    assert "(2 ranks)" in report.findings["time"].found


def test_a_run_without_an_end_is_a_warning(root: Path, tmp_path: Path) -> None:
    report = findings(root, tmp_path, max_epochs=-1)

    assert not_ok(report) == {"time": "warning"}
    assert "trainer.max_epochs" in report.findings["time"].change


def test_a_time_limit_before_the_end_is_a_warning(root: Path, tmp_path: Path) -> None:
    report = findings(root, tmp_path, plan=RunPlan(max_time={"seconds": 1}), max_epochs=10_000_000)

    assert not_ok(report) == {"time": "warning"}
    assert "trainer.max_time ends it after 1 s" in report.findings["time"].found


def test_an_exception_inside_a_check_is_its_finding(root: Path, tmp_path: Path) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("something odd")

    with patch("lit_rlhf.doctor.memory.ppo_memory", broken):
        report = findings(root, tmp_path)

    assert not_ok(report) == {"memory": "failure"}
    assert report.findings["memory"].found == "RuntimeError: something odd"


def test_scores_that_are_not_finite(root: Path, tmp_path: Path) -> None:
    options = {"rewards": {"tests.doctor.rewards:nothing": 1.0}, "critic_init": "policy"}
    with pytest.warns(UserWarning, match="expected finite scores"):
        report = findings(root, tmp_path, module_of(root, **options))

    assert report.findings["iteration"].status is Status.FAILURE
    assert "rewards" in report.findings["iteration"].found
    for name in ("ratio", "clipping", "time"):
        assert report.findings[name].status is Status.NOT_CHECKED
    for name in ("reference", "padding", "sampling", "EOS"):
        assert report.findings[name].status is Status.OK


def test_a_minibatch_that_does_not_divide_the_batch(root: Path, tmp_path: Path) -> None:
    report = findings(root, tmp_path, module_of(root, minibatches={"minibatch_size": 3}))

    assert "minibatch_size: expected a divisor of the 8 rollouts" in (
        report.findings["iteration"].found
    )


def test_data_that_cannot_be_read(root: Path, tmp_path: Path) -> None:
    report = findings(root, tmp_path, data={"batch_size": 9})

    assert report.findings["start"].status is Status.FAILURE
    assert "batch" in report.findings["start"].found
    assert report.findings["time"].status is Status.NOT_CHECKED
    assert report.failed
