"""Reward models: their scores, and the check of the text that they were trained on."""

import re
from pathlib import Path

import pytest

from lit_rlhf.data import DialogueEncoder, TextContract
from lit_rlhf.models import ModelOptions, load_scalar_model, save_model_folder
from lit_rlhf.rewards import ModelReward, WeightedReward
from lit_rlhf.rollout import RolloutBatch
from tests.support.reward_inputs import PROMPTS
from tests.support.tiny_models import tiny_tokenizer


def test_model_scores_the_last_token_of_each_response(folder: Path, rollouts: RolloutBatch) -> None:
    reward = ModelReward(str(folder / "reward_1"), ModelOptions())
    model, expected = load_scalar_model(folder / "reward_1").eval(), []
    for row in range(3):
        ids = rollouts.sequence_ids[row][rollouts.sequence_mask[row]].unsqueeze(0)
        expected.append(float(model(input_ids=ids).logits[0, 0].detach()))
    for batch_size in (None, 2):
        assert reward(rollouts, PROMPTS, batch_size).tolist() == pytest.approx(expected, rel=1e-4)


def test_reward_model_is_frozen_and_never_gets_the_policys_adapters(folder: Path) -> None:
    options = ModelOptions(lora_rank=2, gradient_checkpointing=True)
    reward = ModelReward(str(folder / "reward_1"), options)
    assert not any(p.requires_grad for p in reward.parameters())
    assert not any(module.training for module in reward.model.modules())
    assert not any("lora" in name for name, _ in reward.named_parameters())


def test_base_is_shared_only_with_networks_of_the_same_type(folder: Path) -> None:
    path, options = str(folder / "reward_1"), ModelOptions()
    reward = ModelReward(path, options)
    assert reward.find_base(options) is reward.model
    assert reward.find_base(ModelOptions(dtype="bfloat16")) is None
    assert reward.find_base(ModelOptions(lora_rank=2, load_in_4bit=True)) is None
    assert ModelReward(path, options, offload=True).find_base(options) is None
    loaded = load_scalar_model(folder / "reward_1")
    assert ModelReward(path, options, loaded=loaded).find_base(options) is None


@pytest.mark.parametrize("place", ["offload", "shard"])
def test_reward_model_rests_where_it_is_told_to(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    places: dict[str, bool] = {}
    monkeypatch.setattr(
        "lit_rlhf.rewards.model.Offloaded", lambda network, **given: places.update(given)
    )
    rewards = {str(folder / "reward_1"): 1.0}
    WeightedReward(rewards, ModelOptions(), tiny_tokenizer(), **{place: True})  # type: ignore[arg-type]
    assert places == {"to_cpu": place == "offload", "shard": place == "shard"}


def contract(template: str = "hh", tokenizer: object = None) -> TextContract:
    return DialogueEncoder(tokenizer or tiny_tokenizer(), template, max_length=64).contract


def test_reward_model_without_a_contract_is_compared_by_its_tokenizer(folder: Path) -> None:
    path = str(folder / "reward_1")
    reward = ModelReward(path, ModelOptions())
    with pytest.warns(UserWarning, match="whether it was trained with the policy's chat") as shown:
        reward.check_contract(contract())
    assert f"reward model {path!r} has no text_contract.json" in str(shown[0].message)
    assert r"Human: first question\n\nAssistant: first answer" in str(shown[0].message)
    # as many tokens, one of them written otherwise
    other = contract(tokenizer=tiny_tokenizer("</s>", special_pad=False))
    assert other.vocab_size == contract().vocab_size
    with pytest.raises(ValueError, match=r"reward_1' does not read what .* another tokenizer"):
        reward.check_contract(other)


def test_reward_model_without_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    ModelReward(str(folder / "reward_1"), ModelOptions()).model.save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match=f"expected a tokenizer at {re.escape(str(tmp_path))}"):
        ModelReward(str(tmp_path), ModelOptions()).check_contract(contract())


def test_contract_is_compared_beside_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    model = load_scalar_model(folder / "reward_1")
    save_model_folder(model, tiny_tokenizer(), tmp_path / "reward", contract=contract("hh"))
    reward = ModelReward(str(tmp_path / "reward"), ModelOptions())
    reward.check_contract(contract("hh"))  # and no warning
    with pytest.raises(ValueError, match="the chat templates differ"):
        reward.check_contract(contract("paper-en"))
