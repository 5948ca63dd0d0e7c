from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lit_rlhf.data import DataSource, DialogueEncoder, PromptExample, RecordError
from lit_rlhf.evaluation import (
    batch_by_length,
    choose_device,
    load_prompts,
    sample_batches,
)
from lit_rlhf.rollout import SamplingOptions
from tests.evaluation.conftest import Folders
from tests.evaluation.folders import QUESTIONS, write_prompts
from tests.support.tiny_models import tiny_causal_lm, tiny_tokenizer


@pytest.fixture
def encoder() -> DialogueEncoder:
    return DialogueEncoder(tiny_tokenizer(), "hh", max_length=64)


@pytest.fixture
def examples(encoder: DialogueEncoder, folders: Folders) -> list[PromptExample]:
    return load_prompts(DataSource(folders.prompts), encoder).examples


def test_batches_go_from_long_to_short_and_hold_each_prompt_once() -> None:
    assert batch_by_length([3, 9, 5, 9, 1], batch_size=2) == [[1, 3], [2, 0], [4]]


def test_a_batch_size_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size: expected an integer >= 1, got 0"):
        batch_by_length([1], batch_size=0)


def test_prompts_are_rendered_in_the_order_of_the_file(examples: list[PromptExample]) -> None:
    assert [example.text for example in examples] == [
        f"\n\nHuman: {question}\n\nAssistant:" for question in QUESTIONS
    ]
    assert [example.index for example in examples] == list(range(len(QUESTIONS)))


def test_a_limit_takes_the_first_prompts(encoder: DialogueEncoder, folders: Folders) -> None:
    prompts = load_prompts(DataSource(folders.prompts), encoder, limit=2)

    assert [example.index for example in prompts.examples] == [0, 1]


def test_a_limit_of_zero_is_refused(encoder: DialogueEncoder, folders: Folders) -> None:
    with pytest.raises(ValueError, match="max_prompts: expected an integer >= 1, got 0"):
        load_prompts(DataSource(folders.prompts), encoder, limit=0)


def test_a_missing_column_is_named_with_its_line(encoder: DialogueEncoder, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": [{"role": "user", "content": "hi"}]}\n{"query": "hi"}\n', encoding="utf-8"
    )

    with pytest.raises(RecordError, match=r"prompts\.jsonl:2: field 'prompt'"):
        load_prompts(DataSource(str(path)), encoder)


def test_an_empty_file_is_refused(encoder: DialogueEncoder, tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "prompts.jsonl", [])

    with pytest.raises(RecordError, match=r"prompts\.jsonl: empty file"):
        load_prompts(DataSource(path), encoder)


def test_prompts_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    encoder = DialogueEncoder(tiny_tokenizer(), "hh", max_length=16)
    path = write_prompts(tmp_path / "prompts.jsonl", ["a", "name three metals, please, and more"])

    prompts = load_prompts(DataSource(path), encoder)

    assert prompts.counts.cut_prompts == 1
    assert len(prompts.examples[1].input_ids) == 16


def test_responses_to_one_prompt_lie_side_by_side(
    encoder: DialogueEncoder, examples: list[PromptExample]
) -> None:
    model = tiny_causal_lm()
    options = SamplingOptions(max_new_tokens=3)

    batches = list(sample_batches(model, encoder, examples, options, 3, 0, 2))

    for batch in batches:
        rows = batch.rollouts.prompt_ids
        assert torch.equal(rows[0::2], batch.prompts.input_ids)
        assert torch.equal(rows[1::2], batch.prompts.input_ids)
        texts = [examples[position].text for position in batch.positions]
        assert batch.prompts.texts == texts
        assert not torch.equal(batch.rollouts.response_ids[0::2], batch.rollouts.response_ids[1::2])
    assert sorted(p for batch in batches for p in batch.positions) == list(range(len(examples)))


def test_batches_draw_from_seeds_of_their_own(encoder: DialogueEncoder, folders: Folders) -> None:
    prompt = load_prompts(DataSource(folders.prompts), encoder, limit=1).examples[0]
    options = SamplingOptions(max_new_tokens=8)

    first, second = sample_batches(tiny_causal_lm(), encoder, [prompt, prompt], options, 1, seed=0)

    assert not torch.equal(first.rollouts.response_ids, second.rollouts.response_ids)


def test_progress_counts_prompts(encoder: DialogueEncoder, examples: list[PromptExample]) -> None:
    done: list[int] = []

    for _ in sample_batches(
        tiny_causal_lm(), encoder, examples, SamplingOptions(2), 3, 0, progress=done.append
    ):
        pass

    assert done == [3, 3, 1]


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="device: expected 'auto' or a device of this machine"):
        choose_device("abacus")


def test_the_cpu_can_be_chosen() -> None:
    assert choose_device("cpu") == torch.device("cpu")
