"""B7: rewards, logs and evaluation read the text that was generated, blanks included."""

import re
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from lit_rlhf.cli.own_data import _mark
from lit_rlhf.data import DialogueEncoder, Message, TokenExample, decode_tokens
from lit_rlhf.models import ModelOptions
from lit_rlhf.rewards import WeightedReward
from lit_rlhf.rollout import decode_responses
from tests.support.reward_inputs import make_rollouts
from tests.support.tiny_models import tiny_tokenizer

# a clean-up removes the blanks before punctuation and within contractions
TEXTS = ["x = 3 .", "is it ? do n't !", " two  blanks , "]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose own settings say to clean up."""
    tokenizer = tiny_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    assert tokenizer.decode(tokenizer(TEXTS[0])["input_ids"]) == "x = 3."
    return tokenizer


def test_reward_function_and_logs_get_the_generated_text(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    seen: list[str] = []

    def blanks(prompts: list[str], responses: list[str]) -> list[float]:
        seen.extend(responses)
        return [float(response.count(" ")) for response in responses]

    rollouts = make_rollouts(TEXTS)
    scores = WeightedReward([blanks], ModelOptions(), tokenizer)(rollouts, ["p"] * len(TEXTS))
    assert seen == TEXTS
    assert scores.total.tolist() == [3.0, 5.0, 5.0]
    assert decode_responses(rollouts, tokenizer) == TEXTS


def test_encoder_decodes_responses_and_cut_prompts_exactly(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    encoder = DialogueEncoder(tokenizer, "none", max_length=64, max_prompt_length=4)
    for text in TEXTS:
        assert encoder.decode_response(tokenizer(text)["input_ids"]) == text.strip()
    prompt = encoder.encode_prompt([Message("user", "is it 3 , ?")])
    assert prompt.cut_tokens > 0
    assert prompt.text.endswith(" , ?")
    assert tokenizer(prompt.text)["input_ids"] == prompt.input_ids.tolist()


def test_preview_of_own_data_shows_the_exact_text(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = torch.tensor(tokenizer(TEXTS[0])["input_ids"])
    example = TokenExample(input_ids=ids, completion_mask=torch.ones_like(ids, dtype=torch.bool))
    encoder = DialogueEncoder(tokenizer, "none", max_length=64)
    assert list(_mark(example, encoder)) == [f"[[{TEXTS[0]}]]"]


def test_special_tokens_are_kept_or_left_out(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("x = 3 .</s>")["input_ids"]
    assert decode_tokens(tokenizer, ids) == "x = 3 .</s>"
    assert decode_tokens(tokenizer, torch.tensor(ids), skip_special_tokens=True) == "x = 3 ."


def test_tokenizers_decode_in_one_place_only() -> None:
    places = [
        str(file.relative_to(ROOT))
        for file in sorted((ROOT / "lit_rlhf").rglob("*.py"))
        if re.search(r"tokenizer\.(batch_)?decode\(", file.read_text("utf-8"))
    ]
    assert places == ["lit_rlhf/data/encoding.py"]
