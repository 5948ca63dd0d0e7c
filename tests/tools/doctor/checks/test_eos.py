import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from lit_rlhf.modules import PPOModule
from lit_rlhf.rollout import Experience, RolloutBatch, TokenStatistics
from tests.modules.stages import write_data, write_models
from tests.support.tiny_models import EOS_ID, PAD_ID, tiny_config
from tests.tools.doctor.runs import findings, module_of, not_ok, only_finding


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
    path.with_name("lit_rlhf.json").unlink()  # it lists other weights
    finding = only_finding(findings(root, tmp_path / "run"), "EOS", "failure")
    assert "None of 8 responses ended within 24 tokens" in finding.found
    assert "'</s>'" in finding.change


def test_most_responses_cut_off_is_a_warning(root: Path, tmp_path: Path) -> None:
    module = module_of(root)
    module.sampling = replace(module.sampling, max_new_tokens=2)
    finding = only_finding(findings(root, tmp_path, module), "EOS", "warning")
    assert "Raise model.sampling.max_new_tokens (now 2)" in finding.change


def test_an_eos_that_the_models_folder_does_not_know(own_root: Path, tmp_path: Path) -> None:
    path = own_root / "policy" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [7]}))
    finding = only_finding(findings(own_root, tmp_path / "run"), "EOS", "failure")
    assert "Rollouts end at '</s>' (id 2)" in finding.found
    assert "tokenizer_config.json" in finding.change


def test_responses_end_at_every_eos_of_the_models_folder(own_root: Path, tmp_path: Path) -> None:
    path = own_root / "policy" / "generation_config.json"
    every = [i for i in range(288) if i != PAD_ID]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": every}))
    report = findings(own_root, tmp_path / "run")
    assert report.findings["EOS"].found.startswith("0% of")


class MasksByPadding(PPOModule):
    """Takes every padding id for padding, EOS too where it pads."""

    def experience(
        self, rollouts: RolloutBatch, rewards: Tensor, estimates: TokenStatistics
    ) -> Experience:
        made = super().experience(rollouts, rewards, estimates)
        real = rollouts.response_ids != self.tokenizer.pad_token_id
        return replace(made, loss_mask=made.loss_mask & real)


@pytest.mark.parametrize(
    ("kind", "expected"), [(PPOModule, {}), (MasksByPadding, {"EOS": "failure"})]
)
def test_padding_with_eos(
    pad_is_eos_root: Path, tmp_path: Path, kind: type[PPOModule], expected: dict[str, str]
) -> None:
    report = findings(pad_is_eos_root, tmp_path, module_of(pad_is_eos_root, kind))
    assert not_ok(report) == expected
    if expected:
        assert "masks must be built from lengths, not from ids" in report.findings["EOS"].found
