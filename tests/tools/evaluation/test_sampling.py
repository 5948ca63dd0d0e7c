import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lit_rlhf.data import (
    DataSource,
    DialogueEncoder,
    Message,
    PromptBatch,
    PromptExample,
    PromptRecord,
    RecordError,
    load_records,
    parse_prompts,
)
from lit_rlhf.files import write_json_lines
from lit_rlhf.rollout import RolloutBatch, SamplingOptions
from lit_rlhf.tools.evaluation import Generation, generate_from_models, read_prompts
from lit_rlhf.tools.evaluation.loading import load_policy
from lit_rlhf.tools.evaluation.sampling import (
    batch_by_length,
    count_shortened,
    encode_prompt_records,
    sample_batches,
)
from tests.support.evaluation_folders import (
    QUESTIONS,
    Folders,
    Sampling,
    assert_continued,
    write_policy,
)
from tests.support.tiny_models import EOS_ID, PAD_ID, tiny_causal_lm, tiny_tokenizer


@pytest.fixture
def examples(encoder: DialogueEncoder, folders: Folders) -> list[PromptExample]:
    return encode_prompt_records(read_prompts(DataSource(folders.prompts)), encoder).examples


def test_batches_go_from_long_to_short_and_hold_each_prompt_once() -> None:
    assert batch_by_length([3, 9, 5, 9, 1], batch_size=2) == [[1, 3], [2, 0], [4]]


def test_numbers_out_of_range_are_refused(folders: Folders) -> None:
    with pytest.raises(ValueError, match="batch_size: expected an integer >= 1, got 0"):
        batch_by_length([1], batch_size=0)
    with pytest.raises(ValueError, match="max_prompts: expected an integer >= 1, got 0"):
        read_prompts(DataSource(folders.prompts), limit=0)
    with pytest.raises(ValueError, match="responses_per_prompt: expected an integer >= 1, got 0"):
        generated(folders, folders.sft, responses_per_prompt=0)
    with pytest.raises(ValueError, match="prompts: expected at least one, got none"):
        generate_from_models([folders.sft], [], FEW)
    with pytest.raises(ValueError, match="models: expected one or more, each once"):
        generated(folders, folders.sft, folders.sft)


ANSWERS: list[tuple[str, Any, Any]] = [("a", "", "x"), ("b", [], [])]
ANSWERS += [("c", [{"role": "assistant", "content": None}], "x"), (" ", "x", "y"), ("d", "x", "x")]
ANSWERS += [("say </s>", "x", "y")]
PREFERENCES = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in ANSWERS]


@pytest.fixture
def preferences(tmp_path: Path) -> DataSource:
    path = tmp_path / "preferences.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PREFERENCES) + "{broken")
    return DataSource(str(path))


def contents(records: Sequence[PromptRecord]) -> list[str]:
    return [record.prompt[-1].content for record in records]


def test_prompts_need_no_answer_and_nothing_behind_limit_is_read(preferences: DataSource) -> None:
    assert contents(read_prompts(preferences, limit=3)) == ["a", "b", "c"]
    with pytest.raises(RecordError, match=r"jsonl:4: field 'prompt'"):
        read_prompts(preferences, limit=4)
    # four good ones, beyond a bad one
    assert contents(read_prompts(preferences, 4, on_bad_record="skip")) == ["a", "b", "c", "d"]


def test_bad_prompts_are_counted(preferences: DataSource, encoder: Any, caplog: Any) -> None:
    records = read_prompts(preferences, on_bad_record="skip")
    assert len(records) == 5
    assert "skipped 2 of 7 records as bad: 1 x empty, 1 x broken JSON" in caplog.text
    with pytest.raises(RecordError, match=r"jsonl:6: .* the text of the EOS token"):
        encode_prompt_records(records, encoder)
    good_records, examples = encode_prompt_records(records, encoder, on_bad_record="skip")
    assert contents(good_records) == ["a", "b", "c", "d"]
    assert [example.index for example in examples] == [0, 1, 2, 3]
    assert "left out prompts: 1 x " in caplog.text


def test_prompts_that_do_not_fit_are_counted() -> None:
    encoder = DialogueEncoder(tiny_tokenizer(), "hh", max_length=16)
    long = "name three metals, please, and more"
    texts = ["a", long, f"\n\nHuman: hi\n\nAssistant: ho\n\nHuman: {long}"]
    prompts = encode_prompt_records(parse_prompts(texts), encoder).examples
    assert [len(example.input_ids) < 16 for example in prompts] == [True, False, False]
    doubly_shortened = prompts[2]
    assert doubly_shortened.dropped_turns > 0
    assert doubly_shortened.cut_tokens > 0
    assert count_shortened(prompts) == 2  # a prompt that lost turns and its beginning counts once


class SampledBatch(NamedTuple):
    positions: list[int]
    prompts: PromptBatch
    rollouts: RolloutBatch


def sample_all(
    encoder: DialogueEncoder, examples: list[PromptExample], batch_size: int, n_responses: int = 1
) -> list[SampledBatch]:
    model = tiny_causal_lm()
    records = sample_batches(
        lambda: model,
        encoder,
        examples,
        sampling=SamplingOptions(max_new_tokens=8),
        batch_size=batch_size,
        seed=0,
        describe=lambda prompts, rollouts: {"prompts": prompts, "rollouts": rollouts},
        responses_per_prompt=n_responses,
    )
    return [SampledBatch(**record) for record in records]


def test_responses_are_shown_side_by_side(
    encoder: DialogueEncoder, examples: list[PromptExample]
) -> None:
    batches = sample_all(encoder, examples, batch_size=3, n_responses=2)
    assert {len(batch.positions) for batch in batches[:-1]} == {3}
    for positions, prompts, rollouts in batches:
        rows = rollouts.prompt_ids
        assert torch.equal(rows[0::2], prompts.input_ids)
        assert torch.equal(rows[1::2], prompts.input_ids)
        assert prompts.texts == [examples[position].text for position in positions]
        assert not torch.equal(rollouts.response_ids[0::2], rollouts.response_ids[1::2])
    assert sorted(p for positions, *_ in batches for p in positions) == list(range(len(examples)))
    # batches draw from seeds of their own
    first, second = sample_all(encoder, [examples[0]] * 2, batch_size=1)
    assert not torch.equal(first.rollouts.response_ids, second.rollouts.response_ids)


FEW = SamplingOptions(max_new_tokens=6, temperature=0.8, top_p=0.9, repetition_penalty=1.1)


def echoed(
    model: object, prompt_ids: Tensor, prompt_mask: Tensor, options: SamplingOptions, **_: Any
) -> RolloutBatch:
    """In place of sampling: the question, and the row's number; ended if that is even."""
    tokenizer = tiny_tokenizer()
    rows = []
    for row, (ids, mask) in enumerate(zip(prompt_ids, prompt_mask, strict=True)):
        (question,) = re.findall(r"Human: (.*)\n\nAssistant:$", tokenizer.decode(ids[mask]))
        token_ids = tokenizer(f" {question} {row}", add_special_tokens=False)["input_ids"]
        rows.append([*token_ids, EOS_ID] if row % 2 == 0 else token_ids)
    width = max(map(len, rows))
    response_ids = torch.tensor([row + [PAD_ID] * (width - len(row)) for row in rows])
    mask = torch.tensor([[place < len(row) for place in range(width)] for row in rows])
    ended = torch.tensor([row % 2 == 0 for row in range(len(rows))])
    return RolloutBatch(prompt_ids, prompt_mask, response_ids, mask, ended)


def generated(folders: Folders, *models: str, **options: Any) -> Generation:
    return generate_from_models(models, parse_prompts(QUESTIONS), FEW, **options)


def test_each_response_stands_with_its_prompt_in_the_order_of_the_prompts(folders: Folders) -> None:
    with patch("lit_rlhf.tools.evaluation.sampling.generate_responses", echoed):
        generation = generated(
            folders, folders.sft, folders.ppo, batch_size=3, responses_per_prompt=2
        )
    tokenizer, by_model = tiny_tokenizer(), 2 * len(QUESTIONS)
    models = [record["model"] for record in generation.records()]
    assert models == [folders.sft] * by_model + [folders.ppo] * by_model
    responses = [*generation.responses["sft"], *generation.responses["ppo"]]
    assert len(responses) == 2 * by_model
    for number, response in enumerate(responses):
        question = QUESTIONS[number % by_model // 2]
        assert response.prompt == (Message("user", question),)
        assert response.prompt_text == f"\n\nHuman: {question}\n\nAssistant:"
        assert response.sample == number % 2
        echoed_question, _, row = response.response.rpartition(" ")
        assert echoed_question == question
        assert int(row) % 2 == response.sample
        assert response.ended == (response.sample == 0)
        tokens = tokenizer(f" {response.response}", add_special_tokens=False)["input_ids"]
        assert response.length == len(tokens) + response.ended


def test_records_name_model_seed_and_settings(folders: Folders) -> None:
    record = generated(folders, folders.sft, seed=7, batch_size=4).records()[3]
    assert record["model"] == folders.sft
    assert record["prompt"] == ({"role": "user", "content": QUESTIONS[3]},)
    assert record["seed"] == 7
    assert record["length"] <= 6
    models = {"chat_template": "tokenizer", "dtype": "float32", "device": "cpu"}
    sizes = {"responses_per_prompt": 1, "batch_size": 4}
    assert record["settings"] == asdict(FEW) | sizes | models


def test_the_seed_repeats_responses_and_is_the_same_for_every_model(folders: Folders) -> None:
    def texts(seed: int) -> list[list[str]]:
        generation = generated(folders, folders.sft, folders.copy, seed=seed)
        return [[r.response for r in generation.responses[name]] for name in ("sft", "copy")]

    first = texts(0)
    assert first[0] == first[1]
    assert texts(0) == first
    assert texts(1) != first


def test_interrupted_generation_samples_what_is_missing(folders: Folders, tmp_path: Path) -> None:
    def run(output: str, sampling: Sampling, **options: Any) -> Generation:
        with patch("lit_rlhf.tools.evaluation.sampling.generate_responses", sampling):
            options |= {"batch_size": 2, "responses_per_prompt": 2, "output": tmp_path / output}
            return generated(folders, folders.sft, folders.ppo, **options)

    whole = run("whole.jsonl", Sampling())
    with pytest.raises(KeyboardInterrupt):
        run("out.jsonl", Sampling(last=5))
    assert not (tmp_path / "out.jsonl").exists()
    with pytest.raises(ValueError, match=r"out\.jsonl\.partial: .* another value of seed;"):
        run("out.jsonl", Sampling(), seed=1)
    sampling = Sampling()
    with patch("lit_rlhf.tools.evaluation.sampling.load_policy", side_effect=load_policy) as load:
        generation = run("out.jsonl", sampling)
    assert sampling.n_batches == 3  # four for each model, less those that were done
    assert [call.args[0] for call in load.call_args_list] == [folders.ppo]
    assert generation == whole
    assert_continued(tmp_path)


def test_batch_that_is_kept_twice_is_refused(folders: Folders, tmp_path: Path) -> None:
    partial = tmp_path / "out.jsonl.partial"
    options: dict[str, Any] = {"batch_size": 1, "output": tmp_path / "out.jsonl"}
    stops = patch("lit_rlhf.tools.evaluation.sampling.generate_responses", Sampling(last=1))
    with stops, pytest.raises(KeyboardInterrupt):
        generated(folders, folders.sft, **options)
    settings, batch = partial.read_text().splitlines()
    partial.write_text(f"{settings}\n{batch}\n{batch}\n")
    with pytest.raises(ValueError, match=r"partial: expected each batch of this command once, got"):
        generated(folders, folders.sft, **options)


def test_the_batches_of_a_model_that_was_trained_since_are_refused(tmp_path: Path) -> None:
    policy = write_policy(tmp_path / "sft")
    options: dict[str, Any] = {"batch_size": 1, "output": tmp_path / "out.jsonl"}
    prompts = parse_prompts(["a", "b"])
    stops = patch("lit_rlhf.tools.evaluation.sampling.generate_responses", Sampling(last=1))
    with stops, pytest.raises(KeyboardInterrupt):
        generate_from_models([policy], prompts, FEW, **options)
    write_policy(tmp_path / "sft", seed=1)
    with pytest.raises(ValueError, match="another value of models;"):
        generate_from_models([policy], prompts, FEW, **options)


def test_the_file_is_one_of_demonstrations_and_of_prompts(folders: Folders, tmp_path: Path) -> None:
    with patch("lit_rlhf.tools.evaluation.sampling.generate_responses", echoed):
        generation = generated(folders, folders.sft, batch_size=1)
    source = DataSource(str(write_json_lines(tmp_path / "responses.jsonl", generation.records())))
    demonstrations, prompts = (load_records(kind, [source]) for kind in ("demonstration", "prompt"))
    questions = [Message("user", question) for question in QUESTIONS]
    assert [record.messages for record in demonstrations] == [  # type: ignore[union-attr]
        (question, Message("assistant", f"{question.content} 0")) for question in questions
    ]
    assert [record.prompt for record in prompts] == [(question,) for question in questions]  # type: ignore[union-attr]


def test_a_shortened_prompt_is_counted_and_kept_whole_beside_what_was_fed(folders: Folders) -> None:
    prompts = parse_prompts(["\n\nHuman: one\n\nAssistant: two\n\nHuman: three", "hi"])
    generation = generate_from_models([folders.sft], prompts, FEW, max_prompt_length=20)
    assert generation.shortened == {"sft": 1}
    first = generation.responses["sft"][0]
    assert [message.content for message in first.prompt] == ["one", "two", "three"]
    assert first.prompt_text == "\n\nHuman: three\n\nAssistant:"


def test_models_may_have_templates_of_their_own(folders: Folders, tmp_path: Path) -> None:
    other = write_policy(tmp_path / "other", template="paper-en")
    generation = generate_from_models([folders.sft, other], parse_prompts(["hi"]), FEW)
    texts = [responses[0].prompt_text for responses in generation.responses.values()]
    assert texts == ["\n\nHuman: hi\n\nAssistant:", "Human:hi</s>Assistant:"]


def test_an_error_in_the_last_model_comes_before_the_first_is_loaded(folders: Folders) -> None:
    with (
        patch("lit_rlhf.tools.evaluation.sampling.load_policy", side_effect=AssertionError),
        pytest.raises(ValueError, match="expected a causal language model, got a reward model"),
    ):
        generated(folders, folders.sft, folders.reward)
