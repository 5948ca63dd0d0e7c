from pathlib import Path

import pytest
import torch

from lit_rlhf.models import save_model_folder
from lit_rlhf.rollout import SamplingOptions
from lit_rlhf.tools.evaluation import loading
from tests.support.evaluation_folders import Folders, write_policy
from tests.support.tiny_models import VOCAB_SIZE, tiny_causal_lm, tiny_tokenizer


def test_a_device_is_one_of_the_machine() -> None:
    assert loading.choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="device: expected 'auto' or a device of this machine"):
        loading.choose_device("abacus")


def test_names_are_short_where_they_differ() -> None:
    sources = ["runs/a/model", "runs/b/model", "runs/sft/", "package.module:gold", "owner/name"]
    assert loading.short_names(sources, "sources") == [*sources[:2], "sft", "gold", "name"]


FEW = SamplingOptions(max_new_tokens=6, temperature=0.8, top_p=0.9, repetition_penalty=1.1)


@pytest.mark.parametrize(
    # what it was trained on, and what 128 positions leave
    ("max_new_tokens", "max_prompt_length", "expected"),
    [(8, None, 64), (100, None, 28), (8, 40, 40)],
)
def test_a_prompt_leaves_room_for_the_response(
    folders: Folders, max_new_tokens: int, max_prompt_length: int | None, expected: int
) -> None:
    sampling = SamplingOptions(max_new_tokens)
    encoder = loading.load_encoder(folders.sft, sampling, max_prompt_length=max_prompt_length)
    assert encoder.max_prompt_length == expected


def test_foreign_model_takes_template_and_prompts_of_its_positions(tmp_path: Path) -> None:
    save_model_folder(tiny_causal_lm(), tiny_tokenizer(), tmp_path / "foreign")
    foreign = str(tmp_path / "foreign")
    assert (
        loading.load_encoder(foreign, SamplingOptions(8), chat_template="hh").max_prompt_length
        == 120
    )
    with pytest.raises(ValueError, match=r"foreign': chat_template: .*'hh', 'paper-en', 'paper-zh"):
        loading.load_encoder(foreign, FEW)


@pytest.mark.parametrize(("max_new_tokens", "max_prompt_length"), [(127, None), (100, 29)])
def test_response_longer_than_the_positions_is_refused(
    folders: Folders, max_new_tokens: int, max_prompt_length: int | None
) -> None:
    sampling = SamplingOptions(max_new_tokens)
    with pytest.raises(ValueError, match="within its 128 positions, got max_new_tokens="):
        loading.load_encoder(folders.sft, sampling, max_prompt_length=max_prompt_length)


def test_a_model_is_not_shown_text_in_another_way_than_in_its_training(folders: Folders) -> None:
    both = r"(?s)training \(here\).*here:  '\\n\\nHuman: .*there: 'Human:"
    with pytest.raises(ValueError, match=both):
        loading.load_encoder(folders.sft, FEW, chat_template="paper-en")


def test_text_of_the_second_policy_is_shown_as_here(folders: Folders, tmp_path: Path) -> None:
    other = write_policy(tmp_path / "other", template="paper-en")
    both = r"(?s)other' \(here\).*here:  'Human:.*there: '\\n\\nHuman: "
    with pytest.raises(ValueError, match=both):
        loading.load_shared_encoder([folders.sft, other])


def test_a_tokenizer_with_tokens_that_the_model_does_not_embed_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<new {i}>" for i in range(VOCAB_SIZE)])
    save_model_folder(tiny_causal_lm(), tokenizer, tmp_path / "model")
    with pytest.raises(ValueError, match=r"model'.*largest id is 5.*, got 288; resize the embed"):
        loading.load_encoder(str(tmp_path / "model"), FEW, chat_template="hh")
