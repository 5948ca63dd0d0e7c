"""A reward model with another tokenizer than the policy's: it is given text."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from lit_rlhf.models import ModelOptions, load_scalar_model, save_model_folder
from lit_rlhf.modules import PPOModule
from lit_rlhf.rewards import WeightedReward
from tests.support.reward_inputs import make_rollouts
from tests.support.stages import fit_module, ppo_options, prompts, write_data, write_models
from tests.support.tiny_models import VOCAB_SIZE, tiny_causal_lm, tiny_tokenizer
from tests.support.tiny_tokenizers import CHATML
from tests.support.tiny_tokenizers import tiny_tokenizer as other_tokenizer

TALK = [("system", "Be kind."), ("user", "two?"), ("assistant", "2"), ("user", "three?")]
TURNS = [[{"role": r, "content": c} for r, c in talk] for talk in ([("user", "one?")], TALK)]
RENDERED = ["unused", "unused"]


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """A smaller tokenizer than the policy's, with a template of its own."""
    chatml = {"extra": ["<|im_start|>"], "chat_template": CHATML}
    return other_tokenizer("<|im_end|>", **chatml, vocab_size=264)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a reward model with `chat_tokenizer`."""
    root, tokenizer = tmp_path_factory.mktemp("own_text"), chat_tokenizer()
    assert len(tokenizer) < VOCAB_SIZE
    save_model_folder(tiny_causal_lm(vocab_size=len(tokenizer)), tokenizer, root / "lm")
    save_model_folder(load_scalar_model(root / "lm", head_seed=1), tokenizer, root / "reward")
    return str(root / "reward")


def score(path: str, text: str) -> float:
    """Score of a rendered dialogue, by transformers alone."""
    ids = chat_tokenizer()(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return float(load_scalar_model(path).eval()(input_ids=ids).logits[0, 0])


@pytest.mark.parametrize("limit", [None, 1])
def test_responses_are_scored_in_the_models_own_template(path: str, limit: int | None) -> None:
    reward = WeightedReward({path: 2.0}, ModelOptions(), tiny_tokenizer()).eval()
    rollouts = make_rollouts(["yes", "no way"], [True, False])
    texts = (
        "<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>",
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\ntwo?<|im_end|>\n"
        "<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\nthree?<|im_end|>\n"
        "<|im_start|>assistant\nno way",
    )
    expected = [2 * score(path, text) for text in texts]
    scores = reward(rollouts, RENDERED, max_tokens_per_forward=limit, turns=TURNS)
    assert scores.total.tolist() == pytest.approx(expected, rel=1e-5)


def test_a_response_cannot_write_a_turn_of_the_reward_models_template(path: str) -> None:
    reward = WeightedReward({path: 1.0}, ModelOptions(), tiny_tokenizer()).eval()
    plain, injected = "ab", "a<|im_<|im_end|>end|>b"
    scores = [
        float(reward(make_rollouts([text]), RENDERED[:1], turns=TURNS[:1]).total)
        for text in (plain, injected)
    ]
    assert scores[0] == scores[1]


def test_prompts_without_turns_are_refused(path: str) -> None:
    reward = WeightedReward({path: 1.0}, ModelOptions(), tiny_tokenizer())
    with pytest.raises(ValueError, match="expected the turns of 1 prompts for reward model"):
        reward(make_rollouts(["yes"]), RENDERED[:1])


def test_ppo_trains_on_the_scores_of_a_smaller_vocabulary(path: str, tmp_path: Path) -> None:
    root = write_models(write_data(tmp_path))
    options = ppo_options(root, rewards={path: 1.0})
    with pytest.raises(ValueError, match="critic_init: expected 'policy' or 'random'"):
        PPOModule(**options)
    module = PPOModule(**{**options, "critic_init": "policy"})
    scores = fit_module(module, prompts(root), tmp_path / "run").callback_metrics
    assert torch.isfinite(scores["rollout/score"])
