import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lit_rlhf.modules import updates
from lit_rlhf.ppo import PPO
from lit_rlhf.rollout import Experience, RolloutBatch, TokenStatistics
from lit_rlhf.strategies import clipped_step
from tests.support.doctor_runs import findings, module_of, not_ok, only_finding
from tests.support.stages import write_data, write_models
from tests.support.tiny_models import EOS_ID, PAD_ID, tiny_config


def test_policy_that_cannot_end_is_a_failure(tmp_path: Path) -> None:
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
    path.with_name("lit_rlhf.json").unlink()  # it lists other weights
    finding = only_finding(findings(root, tmp_path / "run"), "EOS", "failure")
    assert "None of 8 responses ended within 24 tokens" in finding.observation
    assert "'</s>'" in finding.change


def test_most_responses_cut_off_is_a_warning(root: Path, tmp_path: Path) -> None:
    module = module_of(root)
    module.ppo.sampling = replace(module.sampling, max_new_tokens=2)
    finding = only_finding(findings(root, tmp_path, module), "EOS", "warning")
    assert "Raise model.sampling.max_new_tokens (now 2)" in finding.change


def test_eos_that_the_models_folder_does_not_know_is_a_failure(
    own_root: Path, tmp_path: Path
) -> None:
    path = own_root / "policy" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [7]}))
    finding = only_finding(findings(own_root, tmp_path / "run"), "EOS", "failure")
    assert "Rollouts end at '</s>' (id 2)" in finding.observation
    assert "tokenizer_config.json" in finding.change


def test_responses_end_at_every_eos_of_the_models_folder(own_root: Path, tmp_path: Path) -> None:
    path = own_root / "policy" / "generation_config.json"
    every = [i for i in range(288) if i != PAD_ID]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": every}))
    report = findings(own_root, tmp_path / "run")
    assert report.findings["EOS"].observation.startswith("0% of")


class MasksByPadding(PPO):
    """Takes every padding id for padding, EOS too where it pads."""

    def experience(
        self, rollouts: RolloutBatch, rewards: Tensor, estimates: TokenStatistics
    ) -> Experience:
        made = super().experience(rollouts, rewards, estimates)
        real = rollouts.response_ids != self.networks.tokenizer.pad_token_id
        return replace(made, loss_mask=made.loss_mask & real)


@pytest.mark.parametrize(("kind", "expected"), [(PPO, {}), (MasksByPadding, {"EOS": "failure"})])
def test_padding_with_eos_is_judged_by_how_masks_are_built(
    pad_is_eos_root: Path, tmp_path: Path, kind: type[PPO], expected: dict[str, str]
) -> None:
    report = findings(pad_is_eos_root, tmp_path, module_of(pad_is_eos_root, kind))
    assert not_ok(report) == expected
    if expected:
        assert (
            "masks must be built from lengths, not from ids" in report.findings["EOS"].observation
        )


def test_reward_model_of_another_template_is_a_failure(own_root: Path, tmp_path: Path) -> None:
    path = own_root / "reward" / "text_contract.json"
    contract = json.loads(path.read_text())
    contract["chat_template"] = contract["chat_template"].replace("Human", "Person")
    path.write_text(json.dumps(contract))
    finding = only_finding(findings(own_root, tmp_path / "run"), "text contract", "failure")
    assert "Person: first question" in finding.observation
    assert "data.chat_template" in finding.change


def test_a_reward_model_without_a_contract_is_a_warning(own_root: Path, tmp_path: Path) -> None:
    (own_root / "reward" / "text_contract.json").unlink()
    with pytest.warns(UserWarning, match=r"has no text_contract\.json"):  # the module itself warns
        report = findings(own_root, tmp_path / "run")
    assert not_ok(report) == {"text contract": "warning"}


def test_reward_model_with_a_smaller_vocabulary_is_a_failure(
    own_root: Path, tmp_path: Path
) -> None:
    path = own_root / "reward" / "model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:287].clone()
    save_file(weights, path, {"format": "pt"})
    config = own_root / "reward" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 287}))
    report = findings(own_root, tmp_path / "run", module_of(own_root, critic_init="policy"))
    assert not_ok(report) == {"vocabulary": "failure"}
    assert "ids up to 287, but the reward model" in report.findings["vocabulary"].observation
    assert "embeds only 287 tokens" in report.findings["vocabulary"].observation


def test_reward_model_with_another_eos_token_is_a_failure(own_root: Path, tmp_path: Path) -> None:
    path = own_root / "reward" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "<s>"}))
    finding = only_finding(findings(own_root, tmp_path / "run"), "vocabulary", "failure")
    assert "eos_token is '</s>' (id 2) for the policy and '<s>' (id 1)" in finding.observation


def unclipped(optimizer: Any, max_norm: float | None) -> tuple[torch.Tensor, bool]:
    return clipped_step(optimizer, None)


def test_clip_norm_that_does_not_act_is_a_failure(root: Path, tmp_path: Path) -> None:
    with patch.object(updates, "clipped_step", unclipped):
        finding = only_finding(findings(root, tmp_path), "clipping", "failure")
    assert "clipping does not act under SingleDeviceStrategy" in finding.observation


def test_no_clip_norm_is_a_warning(root: Path, tmp_path: Path) -> None:
    report = findings(root, tmp_path, module_of(root, critic_optimizer={"grad_clip": None}))
    assert not_ok(report) == {"clipping": "warning"}
    assert "model.critic_optimizer.grad_clip is null" in report.findings["clipping"].observation


def test_optimizer_that_does_not_tell_its_gradient_is_a_warning(root: Path, tmp_path: Path) -> None:
    with patch("torch.optim.AdamW", lambda groups, lr, **_: torch.optim.SGD(groups, lr=lr)):
        report = findings(root, tmp_path)
    assert not_ok(report) == {"clipping": "warning"}
