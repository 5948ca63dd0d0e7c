"""Each check of the doctor fails when just its own thing is broken, and the others stay ok."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lit_rlhf.data import PromptBatch
from lit_rlhf.doctor import RunPlan, Status
from lit_rlhf.modules import PPOModule, base
from lit_rlhf.rollout import (
    Estimates,
    Experience,
    RolloutBatch,
    response_value_estimates,
)
from lit_rlhf.strategies import OptimizerStep, clipped_step
from tests.doctor.runs import findings, module_of, not_ok
from tests.modules.stages import write_data, write_models
from tests.support.tiny_models import EOS_ID, PAD_ID, tiny_config


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
        {"lora_rank": 2},
        {"frozen_dtype": "bfloat16"},
        {"dtype": "bfloat16"},
        {"offload_frozen": True, "gradient_checkpointing": True},
        {"critic_pretrain_iterations": 3, "policy_objective": "kl_penalty"},
        {"micro_batch_size": 2, "rollout_batch_size": 3, "truncation": "mask"},
        {"old_policy": "reference", "critic_init": "policy", "temperature": 0.7},
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
        self, rollouts: RolloutBatch, rewards: Tensor, estimates: Estimates
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
        self, rollouts: RolloutBatch, rewards: Tensor, estimates: Estimates
    ) -> Experience:
        made = super().experience(rollouts, rewards, estimates)
        signs = 1.0 - 2.0 * (torch.arange(made.old_logprobs.shape[1]) % 2)
        return replace(made, old_logprobs=made.old_logprobs + 0.01 * signs)


def test_ratios_that_are_one_only_on_average(root: Path, tmp_path: Path) -> None:
    assert not_ok(findings(root, tmp_path, module_of(root, Noise))) == {"ratio": "failure"}


class CountsPadding(PPOModule):
    """Its critic attends to the padding of prompts."""

    def estimate(self, rollouts: RolloutBatch) -> Estimates:
        everything = rollouts._replace(prompt_mask=torch.ones_like(rollouts.prompt_mask))
        values = response_value_estimates(self.critic, everything)
        return super().estimate(rollouts)._replace(values=values.values)


def test_a_critic_that_reads_padding(root: Path, tmp_path: Path) -> None:
    report = findings(root, tmp_path, module_of(root, CountsPadding))

    assert not_ok(report) == {"padding": "failure"}
    assert "differ: critic by" in report.findings["padding"].found


class Cooler(PPOModule):
    """Samples at another temperature than it scores."""

    def rollout(self, batch: PromptBatch, seed: int) -> RolloutBatch:
        scored, self.sampling = self.sampling, replace(self.sampling, temperature=0.5)
        rollouts = super().rollout(batch, seed)
        self.sampling = scored
        return rollouts


def test_samples_of_another_distribution(root: Path, tmp_path: Path) -> None:
    report = findings(root, tmp_path, module_of(root, Cooler))

    assert not_ok(report) == {"sampling": "failure"}
    assert "standard errors" in report.findings["sampling"].found
    assert "model.temperature" in report.findings["sampling"].change


class ScoresHotter(PPOModule):
    """Scores at another temperature what generation samples, a little."""

    def estimate(self, rollouts: RolloutBatch) -> Estimates:
        made = super().estimate(rollouts)
        mask = rollouts.response_mask
        off = 0.01 * mask
        return made._replace(
            logprobs=made.logprobs + off,
            ref_logprobs=made.ref_logprobs + off,
            entropy=made.entropy - off,
        )

    def experience(
        self, rollouts: RolloutBatch, rewards: Tensor, estimates: Estimates
    ) -> Experience:
        made = super().experience(rollouts, rewards, estimates)
        return replace(made, old_logprobs=made.old_logprobs - 0.01)


def test_generations_own_logprobs_that_are_not_the_scored_ones(root: Path, tmp_path: Path) -> None:
    report = findings(root, tmp_path, module_of(root, ScoresHotter))

    assert not_ok(report) == {"sampling": "failure"}
    assert "Generation gives its own tokens other log-probs" in report.findings["sampling"].found


@pytest.mark.parametrize(
    "option",
    [{"top_p": 0.9}, {"top_k": 20}, {"repetition_penalty": 1.2}],
    ids=lambda o: next(iter(o)),
)
def test_off_policy_sampling_is_a_warning(
    root: Path, tmp_path: Path, option: dict[str, Any]
) -> None:
    with pytest.warns(UserWarning, match="off-policy samples"):
        module = module_of(root, **option)

    report = findings(root, tmp_path, module)

    assert not_ok(report) == {"sampling": "warning"}
    assert next(iter(option)) in report.findings["sampling"].found
    assert not report.failed


def test_a_policy_that_cannot_end(tmp_path: Path) -> None:
    folder = tmp_path / "no_eos"
    folder.mkdir()
    root = write_models(write_data(folder), tiny_config("gpt_neox"))
    path = root / "policy" / "model.safetensors"
    weights = load_file(path)
    # the first of the last hidden states is 10 everywhere, and counts for EOS alone
    weights["gpt_neox.final_layer_norm.weight"][0] = 0.0
    weights["gpt_neox.final_layer_norm.bias"][0] = 10.0
    weights["embed_out.weight"][:, 0] = 0.0
    weights["embed_out.weight"][EOS_ID, 0] = -10.0
    save_file(weights, path, {"format": "pt"})

    report = findings(root, tmp_path / "run")

    assert not_ok(report) == {"EOS": "failure"}
    assert "No response of 8 ended within 24 tokens" in report.findings["EOS"].found
    assert "'</s>'" in report.findings["EOS"].change


def test_most_responses_cut_off_is_a_warning(root: Path, tmp_path: Path) -> None:
    report = findings(root, tmp_path, _short(root))

    assert not_ok(report) == {"EOS": "warning"}
    assert "Raise model.max_new_tokens (now 2)" in report.findings["EOS"].change


def _short(root: Path) -> PPOModule:
    module = module_of(root)
    module.sampling = replace(module.sampling, max_new_tokens=2)
    return module


def test_an_eos_that_the_models_folder_does_not_know(own_root: Path, tmp_path: Path) -> None:
    path = own_root / "policy" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [7]}))

    report = findings(own_root, tmp_path / "run")

    assert not_ok(report) == {"EOS": "failure"}
    assert "Rollouts end at '</s>' (id 2)" in report.findings["EOS"].found
    assert "tokenizer_config.json" in report.findings["EOS"].change


def test_responses_that_go_on_behind_another_eos(own_root: Path, tmp_path: Path) -> None:
    path = own_root / "policy" / "generation_config.json"
    every = [i for i in range(288) if i != PAD_ID]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": every}))

    report = findings(own_root, tmp_path / "run")

    assert not_ok(report) == {"EOS": "warning"}
    assert "responses go on behind" in report.findings["EOS"].found


class MasksByPadding(PPOModule):
    """Takes every padding id for padding, EOS too where it pads."""

    def experience(
        self, rollouts: RolloutBatch, rewards: Tensor, estimates: Estimates
    ) -> Experience:
        made = super().experience(rollouts, rewards, estimates)
        real = rollouts.response_ids != self.tokenizer.pad_token_id
        return replace(made, loss_mask=made.loss_mask & real)


@pytest.mark.parametrize(
    ("kind", "expected"), [(PPOModule, {}), (MasksByPadding, {"EOS": "failure"})]
)
def test_a_padding_token_that_is_eos(
    tmp_path: Path, kind: type[PPOModule], expected: dict[str, str]
) -> None:
    folder = tmp_path / "pad_is_eos"
    folder.mkdir()
    root = write_models(write_data(folder), pad_is_eos=True)

    report = findings(root, tmp_path / "run", module_of(root, kind))

    assert not_ok(report) == expected
    if expected:
        assert "masks must come from lengths, not from ids" in report.findings["EOS"].found


def test_a_reward_model_of_another_template(own_root: Path, tmp_path: Path) -> None:
    path = own_root / "reward" / "text_contract.json"
    contract = json.loads(path.read_text())
    contract["chat_template"] = contract["chat_template"].replace("Human", "Person")
    path.write_text(json.dumps(contract))

    report = findings(own_root, tmp_path / "run")

    assert not_ok(report) == {"text contract": "failure"}
    assert "Person: first question" in report.findings["text contract"].found
    assert "data.chat_template" in report.findings["text contract"].change


def test_a_reward_model_without_a_contract_is_a_warning(own_root: Path, tmp_path: Path) -> None:
    (own_root / "reward" / "text_contract.json").unlink()
    with pytest.warns(UserWarning, match=r"has no text_contract\.json"):  # of the module itself
        report = findings(own_root, tmp_path / "run")

    assert not_ok(report) == {"text contract": "warning"}


def test_a_reward_model_with_a_smaller_vocabulary(own_root: Path, tmp_path: Path) -> None:
    path = own_root / "reward" / "model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:287].clone()
    save_file(weights, path, {"format": "pt"})
    config = own_root / "reward" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 287}))

    report = findings(own_root, tmp_path / "run", module_of(own_root, critic_init="policy"))

    assert not_ok(report) == {"vocabulary": "failure"}
    assert "ids up to 287, the reward model" in report.findings["vocabulary"].found
    assert "embeds 287 tokens only" in report.findings["vocabulary"].found


def test_a_reward_model_with_another_eos_token(own_root: Path, tmp_path: Path) -> None:
    path = own_root / "reward" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "<s>"}))

    report = findings(own_root, tmp_path / "run")

    assert not_ok(report) == {"vocabulary": "failure"}
    assert "eos_token is '</s>' (id 2) for the policy and '<s>' (id 1)" in (
        report.findings["vocabulary"].found
    )


def test_too_little_memory(root: Path, tmp_path: Path) -> None:
    with patch("lit_rlhf.doctor.examination.free_memory", lambda device: 2**20):
        report = findings(root, tmp_path)

    assert not_ok(report) == {"memory": "failure"}
    assert "What helps" in report.findings["memory"].change


def unclipped(optimizer: Any, max_norm: float | None) -> OptimizerStep:
    return clipped_step(optimizer, None)


def test_a_clip_norm_that_does_not_act(root: Path, tmp_path: Path) -> None:
    with patch.object(base, "clipped_step", unclipped):
        report = findings(root, tmp_path)

    assert not_ok(report) == {"clipping": "failure"}
    assert "clipping does not act under SingleDeviceStrategy" in report.findings["clipping"].found


def test_no_clip_norm_is_a_warning(root: Path, tmp_path: Path) -> None:
    report = findings(root, tmp_path, module_of(root, critic_grad_clip=None))

    assert not_ok(report) == {"clipping": "warning"}
    assert "model.critic_grad_clip is null" in report.findings["clipping"].found


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
    report = findings(root, tmp_path, module_of(root, minibatch_size=3))

    assert "minibatch_size: expected a divisor of the 8 rollouts" in (
        report.findings["iteration"].found
    )


def test_data_that_cannot_be_read(root: Path, tmp_path: Path) -> None:
    report = findings(root, tmp_path, data={"batch_size": 9})

    assert report.findings["start"].status is Status.FAILURE
    assert "batch" in report.findings["start"].found
    assert report.findings["time"].status is Status.NOT_CHECKED
    assert report.failed
