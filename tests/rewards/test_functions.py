"""Rewards: reward models, Python callables, weighted sums, and what goes wrong with them."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from lit_rlhf.data import DialogueEncoder, TextContract
from lit_rlhf.models import ModelOptions, load_scalar_model, save_model_folder
from lit_rlhf.rewards import FunctionReward, ModelReward, WeightedReward
from lit_rlhf.rewards.functions import call_with_timeout, import_function
from lit_rlhf.rollout import RolloutBatch
from tests.rewards import reward_functions
from tests.support.tiny_models import EOS_ID, PAD_ID, tiny_causal_lm, tiny_tokenizer

FUNCTIONS = "tests.rewards.reward_functions"
PROMPTS = ["first prompt", "second", "third one"]
TEXTS = ["yes", "no way", ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rewards")
    save_model_folder(tiny_causal_lm(), tiny_tokenizer(), root / "lm")
    for seed in (1, 2):
        model = load_scalar_model(root / "lm", head_seed=seed)
        save_model_folder(model, tiny_tokenizer(), root / f"reward_{seed}")
    return root


@pytest.fixture(scope="module")
def rollouts() -> RolloutBatch:
    """Responses that say TEXTS; the second is cut off, the others end with EOS."""
    tokenizer = tiny_tokenizer()
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    ids = [[*ids[0], EOS_ID], ids[1], [*ids[2], EOS_ID]]
    lengths = torch.tensor([len(row) for row in ids])
    width = int(lengths.max())
    padded = [row + [PAD_ID] * (width - len(row)) for row in ids]
    prompt_mask = torch.tensor([[True] * 4, [False, True, True, True], [False, False, True, True]])
    prompt_ids = torch.randint(4, 280, (3, 4)).masked_fill(~prompt_mask, PAD_ID)
    return RolloutBatch(
        prompt_ids,
        prompt_mask,
        torch.tensor(padded),
        torch.arange(width) < lengths[:, None],
        torch.tensor([True, False, True]),
    )


def scores(name: str, rollouts: RolloutBatch) -> list[float]:
    reward = FunctionReward(f"{FUNCTIONS}:{name}", tiny_tokenizer())
    result = reward(rollouts, PROMPTS, None)
    assert result.dtype == torch.float32
    return result.tolist()  # type: ignore[no-any-return]


def test_a_function_sees_prompts_and_decoded_responses(rollouts: RolloutBatch) -> None:
    assert scores("length", rollouts) == [3.0, 6.0, 0.0]
    assert scores("prompt_length", rollouts) == [12.0, 6.0, 9.0]


def test_a_function_that_asks_is_told_which_responses_ended(rollouts: RolloutBatch) -> None:
    assert scores("ended", rollouts) == [1.0, -1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "one_too_few",
            r"one_too_few': expected 3 scores, one for each response, got shape \(2,\); called "
            "with 3 responses, the first: prompt 'first prompt' and response 'yes'",
        ),
        ("a_column", r"a_column': expected 3 scores, one for each response, got shape \(3, 1\)"),
        ("nothing", "nothing': expected 3 scores, one for each response, got None"),
        ("words", r"words': expected 3 scores, one for each response, got \['good', 'bad'"),
    ],
)
def test_a_function_with_a_wrong_answer_is_named(
    rollouts: RolloutBatch, name: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        scores(name, rollouts)


@pytest.mark.parametrize(
    ("name", "number", "row"), [("not_a_number", "nan", 1), ("infinite", "-inf", 0)]
)
def test_scores_that_are_not_finite_are_shown_and_left_to_the_caller(
    rollouts: RolloutBatch, name: str, number: str, row: int
) -> None:
    sample = f"prompt {PROMPTS[row]!r} and response {TEXTS[row]!r}"
    with pytest.warns(
        UserWarning, match=f"{name}': expected finite scores, got {number} for {sample}"
    ):
        result = scores(name, rollouts)
    assert str(result[row]) == number


def test_a_functions_own_error_comes_with_the_sample_that_it_fails_on(
    rollouts: RolloutBatch,
) -> None:
    with pytest.raises(RuntimeError) as error:
        scores("fails_on_no_way", rollouts)
    assert str(error.value) == (
        f"reward function '{FUNCTIONS}:fails_on_no_way' raised KeyError: 'way'. Called with prompt "
        "'second' and response 'no way'"
    )
    assert isinstance(error.value.__cause__, KeyError)


def test_an_error_that_no_sample_gives_alone_is_shown_with_the_first(
    rollouts: RolloutBatch,
) -> None:
    with pytest.raises(
        RuntimeError, match=r"KeyError: 'several'\. Called with 3 responses, the fi"
    ):
        scores("fails_on_several", rollouts)


def test_a_long_prompt_is_shortened(rollouts: RolloutBatch) -> None:
    reward = FunctionReward(f"{FUNCTIONS}:fails", tiny_tokenizer())
    with pytest.raises(RuntimeError, match=r"scorer's own error.* prompt 'x{200}\.\.\.' and resp"):
        reward(rollouts, ["x" * 1000, "y", "z"], None)


@pytest.mark.parametrize("name", ["length", "fails_on_no_way"])
def test_a_time_limit_changes_nothing_for_a_function_that_keeps_it(
    rollouts: RolloutBatch, name: str
) -> None:
    reward = FunctionReward(f"{FUNCTIONS}:{name}", tiny_tokenizer(), timeout=60.0)
    if name == "length":
        assert reward(rollouts, PROMPTS, None).tolist() == [3.0, 6.0, 0.0]
    else:
        with pytest.raises(RuntimeError, match="Called with prompt 'second'"):
            reward(rollouts, PROMPTS, None)


def test_a_function_that_takes_too_long_is_named(rollouts: RolloutBatch) -> None:
    weighted = WeightedReward(
        {f"{FUNCTIONS}:waits": 1.0}, ModelOptions(), tiny_tokenizer(), timeout=0.01
    )
    message = (
        "waits': no scores after 0.01 seconds .reward_timeout. for 3 responses, the first: prompt "
        "'first prompt' and response 'yes'"
    )
    try:
        reward_functions.released.clear()
        with pytest.raises(TimeoutError, match=message):
            weighted(rollouts, PROMPTS, None)
    finally:
        reward_functions.released.set()


def test_a_function_that_never_ends_does_not_keep_the_process_from_ending() -> None:
    assert (
        call_with_timeout(lambda: threading.current_thread().daemon, timeout=60.0).result() is True
    )


def test_a_reward_models_scores_that_are_not_finite_are_shown(
    folder: Path, rollouts: RolloutBatch
) -> None:
    path = str(folder / "reward_1")
    weighted = WeightedReward({path: 1.0}, ModelOptions(), tiny_tokenizer())
    (model,) = weighted.models
    with torch.no_grad():
        model.model.score.weight.fill_(torch.inf)  # type: ignore[union-attr, operator]
    with pytest.warns(UserWarning, match=f"reward model '{path}': expected finite .* prompt 'fir"):
        assert not bool(torch.isfinite(weighted(rollouts, PROMPTS, None)).any())


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:score", "expected 'package.module:function'; No module named 'no_such"),
        (f"{FUNCTIONS}:no_such_name", "expected 'package.module:function'; .*'no_such_name'"),
        (f"{FUNCTIONS}:not_callable", "expected a callable, got int"),
        (":score", "expected 'package.module:function'"),
        (f"{FUNCTIONS}:", "expected 'package.module:function'"),
    ],
)
def test_a_function_that_is_not_there_is_named(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"reward function '{path}': {message}"):
        import_function(path)


def test_a_model_scores_the_last_token_of_each_response(
    folder: Path, rollouts: RolloutBatch
) -> None:
    reward = ModelReward(str(folder / "reward_1"), ModelOptions())
    model = load_scalar_model(folder / "reward_1").eval()
    expected = []
    for row in range(3):
        ids = rollouts.sequence_ids[row][rollouts.sequence_mask[row]].unsqueeze(0)
        expected.append(float(model(input_ids=ids).logits[0, 0].detach()))
    for batch_size in (None, 2):
        assert reward(rollouts, PROMPTS, batch_size).tolist() == pytest.approx(expected, rel=1e-4)


def test_a_reward_model_is_frozen_and_never_gets_the_policys_adapters(folder: Path) -> None:
    options = ModelOptions(lora_rank=2, gradient_checkpointing=True)
    reward = ModelReward(str(folder / "reward_1"), options)
    assert not any(p.requires_grad for p in reward.parameters())
    assert not any(module.training for module in reward.model.modules())
    assert not any("lora" in name for name, _ in reward.named_parameters())


def contract(
    template: str = "hh", tokenizer: PreTrainedTokenizerFast | None = None
) -> TextContract:
    return DialogueEncoder(tokenizer or tiny_tokenizer(), template, max_length=64).contract


def test_a_reward_model_without_a_contract_is_compared_by_its_tokenizer(folder: Path) -> None:
    path = str(folder / "reward_1")
    reward = ModelReward(path, ModelOptions())
    with pytest.warns(UserWarning, match="whether it was trained with the policy's chat") as shown:
        reward.check_contract(contract())
    assert f"reward model {path!r} has no text_contract.json" in str(shown[0].message)
    assert r"Human: first question\n\nAssistant: first answer" in str(shown[0].message)


def test_a_reward_model_with_another_tokenizer_and_no_contract_is_refused(folder: Path) -> None:
    reward = ModelReward(str(folder / "reward_1"), ModelOptions())
    # as many tokens, one of them written otherwise
    other = contract(tokenizer=tiny_tokenizer("</s>", special_pad=False))
    assert other.vocab_size == contract().vocab_size
    with pytest.raises(ValueError, match=r"reward_1' does not read what .* another tokenizer"):
        reward.check_contract(other)


def test_a_reward_model_without_tokenizer_and_contract_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    ModelReward(str(folder / "reward_1"), ModelOptions()).model.save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match=f"expected a tokenizer at {re.escape(str(tmp_path))}"):
        ModelReward(str(tmp_path), ModelOptions()).check_contract(contract())


def test_a_contract_says_more_than_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    model = load_scalar_model(folder / "reward_1")
    save_model_folder(model, tiny_tokenizer(), tmp_path / "reward", contract=contract("hh"))
    reward = ModelReward(str(tmp_path / "reward"), ModelOptions())
    reward.check_contract(contract("hh"))  # and no warning
    with pytest.raises(ValueError, match="the chat templates differ"):
        reward.check_contract(contract("paper-en"))


def test_several_rewards_add_up_by_their_weights(folder: Path, rollouts: RolloutBatch) -> None:
    sources = [str(folder / "reward_1"), str(folder / "reward_2")]
    first, second = (
        ModelReward(source, ModelOptions())(rollouts, PROMPTS, None) for source in sources
    )
    length = torch.tensor([3.0, 6.0, 0.0])
    weighted = WeightedReward(
        {sources[0]: 2.0, f"{FUNCTIONS}:length": -0.1, sources[1]: 0.5},
        ModelOptions(),
        tiny_tokenizer(),
    )
    expected = 2.0 * first - 0.1 * length + 0.5 * second
    torch.testing.assert_close(weighted(rollouts, PROMPTS, None), expected)
    assert [source.path for source in weighted.models] == sources


def test_a_reward_needs_a_source() -> None:
    with pytest.raises(ValueError, match=r"rewards: expected at least one entry.* got none"):
        WeightedReward({}, ModelOptions(), tiny_tokenizer())
