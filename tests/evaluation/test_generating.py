from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lit_rlhf.data import DataSource, Message, load_records, parse_prompts
from lit_rlhf.evaluation import Generation, generate_from_models, load_encoder, write_json_lines
from lit_rlhf.models import save_model_folder
from lit_rlhf.rollout import RolloutBatch, SamplingOptions
from tests.evaluation.conftest import Folders
from tests.evaluation.folders import QUESTIONS, write_policy
from tests.support.tiny_models import EOS_ID, PAD_ID, tiny_causal_lm, tiny_tokenizer

FEW = SamplingOptions(max_new_tokens=6, temperature=0.8, top_p=0.9, repetition_penalty=1.1)


def echoed(
    model: object, prompt_ids: Tensor, prompt_mask: Tensor, options: SamplingOptions, **_: Any
) -> RolloutBatch:
    """In place of sampling: the question, and the row's number; ended if that is even."""
    tokenizer = tiny_tokenizer()
    rows = []
    for row, (ids, mask) in enumerate(zip(prompt_ids, prompt_mask, strict=True)):
        (question,) = re.findall(r"Human: (.*)\n\nAssistant:$", tokenizer.decode(ids[mask]))
        said = tokenizer(f" {question} {row}", add_special_tokens=False)["input_ids"]
        rows.append([*said, EOS_ID] if row % 2 == 0 else said)
    width = max(map(len, rows))
    response_ids = torch.tensor([row + [PAD_ID] * (width - len(row)) for row in rows])
    mask = torch.tensor([[place < len(row) for place in range(width)] for row in rows])
    ended = torch.tensor([row % 2 == 0 for row in range(len(rows))])
    return RolloutBatch(prompt_ids, prompt_mask, response_ids, mask, ended)


def generated(folders: Folders, *models: str, **options: Any) -> Generation:
    return generate_from_models(models, parse_prompts(QUESTIONS), FEW, **options)


def test_each_response_stands_with_its_prompt_in_the_order_of_the_prompts(
    folders: Folders,
) -> None:
    with patch("lit_rlhf.evaluation.sampling.generate_responses", echoed):
        result = generated(folders, folders.sft, folders.ppo, batch_size=3, responses_per_prompt=2)

    tokenizer = tiny_tokenizer()
    by_model = 2 * len(QUESTIONS)
    assert len(result.responses) == 2 * by_model
    for number, response in enumerate(result.responses):
        question = QUESTIONS[number % by_model // 2]
        assert response.model == (folders.sft if number < by_model else folders.ppo)
        assert response.prompt == (Message("user", question),)
        assert response.prompt_text == f"\n\nHuman: {question}\n\nAssistant:"
        assert response.sample == number % 2
        said, _, row = response.response.rpartition(" ")
        assert said == question
        assert int(row) % 2 == response.sample
        assert response.ended == (response.sample == 0)
        tokens = tokenizer(f" {response.response}", add_special_tokens=False)["input_ids"]
        assert response.length == len(tokens) + response.ended


def test_records_name_model_seed_and_settings(folders: Folders) -> None:
    result = generated(folders, folders.sft, seed=7, batch_size=4)

    record = result.records()[3]

    assert record["model"] == folders.sft
    assert record["prompt"] == ({"role": "user", "content": QUESTIONS[3]},)
    assert record["seed"] == 7
    assert record["length"] <= 6
    assert record["settings"] == {
        "max_new_tokens": 6,
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 0,
        "repetition_penalty": 1.1,
        "do_sample": True,
        "min_new_tokens": 0,
        "responses_per_prompt": 1,
        "batch_size": 4,
        "chat_template": "tokenizer",
        "dtype": "float32",
        "device": "cpu",
    }


def test_the_seed_repeats_responses_and_is_the_same_for_every_model(folders: Folders) -> None:
    def texts(seed: int) -> list[str]:
        return [
            r.response for r in generated(folders, folders.sft, folders.copy, seed=seed).responses
        ]

    first = texts(0)

    assert first[: len(QUESTIONS)] == first[len(QUESTIONS) :]
    assert texts(0) == first
    assert texts(1) != first


def test_the_file_is_one_of_demonstrations_and_of_prompts(folders: Folders, tmp_path: Path) -> None:
    with patch("lit_rlhf.evaluation.sampling.generate_responses", echoed):
        result = generated(folders, folders.sft, batch_size=1)
    path = write_json_lines(tmp_path / "responses.jsonl", result.records())

    demonstrations = load_records("demonstration", [DataSource(str(path))]).records
    prompts = load_records("prompt", [DataSource(str(path))]).records

    assert [record.messages for record in demonstrations] == [  # type: ignore[union-attr]
        (Message("user", question), Message("assistant", f"{question} 0")) for question in QUESTIONS
    ]
    assert [record.prompt for record in prompts] == [  # type: ignore[union-attr]
        (Message("user", question),) for question in QUESTIONS
    ]


def test_a_shortened_prompt_is_counted_and_kept_whole_beside_what_was_fed(
    folders: Folders,
) -> None:
    turns = "\n\nHuman: one\n\nAssistant: two\n\nHuman: three"
    prompts = parse_prompts([turns, "hi"])

    result = generate_from_models([folders.sft], prompts, FEW, max_prompt_length=20)

    assert result.shortened == {"sft": 1}
    assert [message.content for message in result.responses[0].prompt] == ["one", "two", "three"]
    assert result.responses[0].prompt_text == "\n\nHuman: three\n\nAssistant:"


@pytest.mark.parametrize(
    ("max_new_tokens", "max_prompt_length", "expected"),
    [
        (8, None, 64),  # what it was trained on
        (100, None, 28),  # what 128 positions leave
        (8, 40, 40),
    ],
)
def test_a_prompt_leaves_room_for_the_response(
    folders: Folders, max_new_tokens: int, max_prompt_length: int | None, expected: int
) -> None:
    sampling = SamplingOptions(max_new_tokens)

    encoder = load_encoder(folders.sft, sampling, max_prompt_length=max_prompt_length)

    assert encoder.max_prompt_length == expected


def test_a_model_from_elsewhere_takes_prompts_as_long_as_its_positions(tmp_path: Path) -> None:
    save_model_folder(tiny_causal_lm(), tiny_tokenizer(), tmp_path / "foreign")

    encoder = load_encoder(str(tmp_path / "foreign"), SamplingOptions(8), "hh")

    assert encoder.max_prompt_length == 120


@pytest.mark.parametrize(("max_new_tokens", "max_prompt_length"), [(127, None), (100, 29)])
def test_what_cannot_fit_is_refused(
    folders: Folders, max_new_tokens: int, max_prompt_length: int | None
) -> None:
    with pytest.raises(ValueError, match="within its 128 positions, got max_new_tokens="):
        load_encoder(
            folders.sft, SamplingOptions(max_new_tokens), max_prompt_length=max_prompt_length
        )


def test_a_model_without_a_template_is_named_with_the_templates_there_are(tmp_path: Path) -> None:
    save_model_folder(tiny_causal_lm(), tiny_tokenizer(), tmp_path / "foreign")

    with pytest.raises(
        ValueError, match=r"foreign': chat_template: .*'hh', 'paper-en', 'paper-zh'"
    ):
        load_encoder(str(tmp_path / "foreign"), FEW)


def test_a_model_is_not_shown_text_in_another_way_than_in_its_training(folders: Folders) -> None:
    with pytest.raises(ValueError, match="the chat templates differ"):
        load_encoder(folders.sft, FEW, "paper-en")


def test_models_may_have_templates_of_their_own(folders: Folders, tmp_path: Path) -> None:
    other = write_policy(tmp_path / "other", template="paper-en")

    result = generate_from_models([folders.sft, other], parse_prompts(["hi"]), FEW)

    assert [response.prompt_text for response in result.responses] == [
        "\n\nHuman: hi\n\nAssistant:",
        "Human:hi</s>Assistant:",
    ]


def test_what_is_wrong_with_the_last_model_is_told_before_the_first_is_loaded(
    folders: Folders,
) -> None:
    with (
        patch("lit_rlhf.evaluation.sampling.load_policy", side_effect=AssertionError),
        pytest.raises(ValueError, match="expected a causal language model, got a reward model"),
    ):
        generated(folders, folders.sft, folders.reward)


def test_bad_numbers_are_refused(folders: Folders) -> None:
    with pytest.raises(ValueError, match="responses_per_prompt: expected >= 1, got 0"):
        generated(folders, folders.sft, responses_per_prompt=0)
    with pytest.raises(ValueError, match="prompts: expected at least one, got none"):
        generate_from_models([folders.sft], [], FEW)
    with pytest.raises(ValueError, match="models: expected one or more, each once"):
        generated(folders, folders.sft, folders.sft)
