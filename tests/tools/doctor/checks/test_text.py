import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.tools.doctor.runs import findings, module_of, not_ok, only_finding


def test_a_reward_model_of_another_template(own_root: Path, tmp_path: Path) -> None:
    path = own_root / "reward" / "text_contract.json"
    contract = json.loads(path.read_text())
    contract["chat_template"] = contract["chat_template"].replace("Human", "Person")
    path.write_text(json.dumps(contract))
    finding = only_finding(findings(own_root, tmp_path / "run"), "text contract", "failure")
    assert "Person: first question" in finding.found
    assert "data.chat_template" in finding.change


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
    path.with_name("lit_rlhf.json").unlink()  # it lists other weights
    config = own_root / "reward" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 287}))
    report = findings(own_root, tmp_path / "run", module_of(own_root, critic_init="policy"))
    assert not_ok(report) == {"vocabulary": "failure"}
    assert "ids up to 287, but the reward model" in report.findings["vocabulary"].found
    assert "embeds only 287 tokens" in report.findings["vocabulary"].found


def test_a_reward_model_with_another_eos_token(own_root: Path, tmp_path: Path) -> None:
    path = own_root / "reward" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "<s>"}))
    finding = only_finding(findings(own_root, tmp_path / "run"), "vocabulary", "failure")
    assert "eos_token is '</s>' (id 2) for the policy and '<s>' (id 1)" in finding.found
