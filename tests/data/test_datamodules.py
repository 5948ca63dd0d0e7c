"""The three datamodules, from files to batches."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast as Tokenizer

from lit_rlhf.data import DataSource, PromptDataModule
from lit_rlhf.data.counts import DataCounts
from lit_rlhf.data.datamodules import DemonstrationDataModule, PreferenceDataModule
from lit_rlhf.data.examples import PreferenceBatch, PromptBatch, TokenBatch
from tests.support.tiny_models import tiny_causal_lm
from tests.support.tiny_tokenizers import CHATML, tiny_tokenizer

Writer = Callable[..., str]


def questions(n: int, start: int = 0) -> list[dict[str, str]]:
    return [{"question": f"what is {i}?", "answer": f"it is {i}"} for i in range(start, start + n)]


def pairs(n: int) -> list[dict[str, Any]]:
    rows = [{"prompt": f"p{i}", "chosen": "good " * (i + 1), "rejected": "bad"} for i in range(n)]
    return [{**row, "margin": float(i)} for i, row in enumerate(rows)]


def started(data: Any, **trainer: Any) -> Any:
    """Set up for a fit, by a trainer with these settings if there are any."""
    if trainer:
        usual = {"world_size": 1, "global_rank": 0, "overfit_batches": 0}
        data.trainer = SimpleNamespace(**usual | trainer)
    data.setup("fit")
    return data


def demonstrations(
    path: str, tokenizer: Any, weight: float = 1.0, **settings: Any
) -> DemonstrationDataModule:
    settings = {"tokenizer": tokenizer, "chat_template": "hh", **settings}
    return DemonstrationDataModule([DataSource(path, weight)], **settings)


def prompts(path: str, tokenizer: Any, **settings: Any) -> PromptDataModule:
    settings = {"batch_size": 4, **settings}
    return PromptDataModule([DataSource(path)], tokenizer=tokenizer, chat_template="hh", **settings)


def test_demonstration_batch_trains_on_the_response_alone(
    write_lines: Writer, tokenizer: Tokenizer
) -> None:
    data = started(demonstrations(write_lines(*questions(3)), tokenizer, batch_size=2))
    batch = next(iter(data.train_dataloader()))
    assert isinstance(batch, TokenBatch)
    text = str(tokenizer.decode(batch.input_ids[0][batch.attention_mask[0]]))
    trained = str(tokenizer.decode(batch.input_ids[0][batch.completion_mask[0]]))
    assert text.startswith("\n\nHuman: what is ")
    assert text.endswith(trained)
    assert trained.startswith(" it is ")
    assert trained.endswith("</s>")
    path = write_lines(*questions(20))
    data = started(demonstrations(path, tokenizer, tokens_per_batch=200))
    assert 100 < max(batch.input_ids.numel() for batch in data.train_dataloader()) <= 200
    assert sum(len(batch.input_ids) for batch in data.train_dataloader()) == 20


def test_plain_text_is_trained_on_as_a_whole(write_lines: Writer, tokenizer: Tokenizer) -> None:
    text = "iron rusts, and zinc keeps it from rusting"
    data = started(demonstrations(write_lines({"text": text}), tokenizer, max_length=8))
    blocks = data.examples["train"]
    assert max(len(block.input_ids) for block in blocks) == 8
    ids = [token for block in blocks for token in block.input_ids.tolist()]
    assert tokenizer.decode(ids) == f"{text}</s>"
    # nothing predicts the first token of a block
    assert all(block.completion_mask.tolist() == [False, *[True] * 7] for block in blocks[:-1])


def test_responses_end_with_the_named_token(write_lines: Writer) -> None:
    chatml = tiny_tokenizer("<|endoftext|>", extra=["<|im_start|>", "<|im_end|>"])
    chatml.chat_template = CHATML.replace("eos_token", "'<|im_end|>'")
    options = {"tokenizer": chatml, "eos_token": "<|endoftext|>"}
    data = started(DemonstrationDataModule([DataSource(write_lines(*questions(1)))], **options))
    (example,) = data.examples["train"]
    assert chatml.decode(example.input_ids).endswith("it is 0<|im_end|>\n<|endoftext|>")


def test_training_on_all_turns_covers_more_tokens_than_on_the_last(
    write_lines: Writer, tokenizer: Tokenizer
) -> None:
    roles = ["user", "assistant"] * 2
    chat = [{"role": role, "content": f"t{i}"} for i, role in enumerate(roles)]
    path, counts = write_lines({"messages": chat}), []
    for train_on in ("last", "all"):
        data = started(demonstrations(path, tokenizer, train_on=train_on))
        counts.append(int(next(iter(data.train_dataloader())).completion_mask.sum()))
    assert counts[0] < counts[1]


def test_preference_batch_has_margins_and_sources(
    write_lines: Writer, tokenizer: Tokenizer
) -> None:
    one, two = (write_lines(*pairs(3), name=f"{name}.jsonl") for name in ("one", "two"))
    held_out = [DataSource(two, name="held")]
    options = {"tokenizer": tokenizer, "chat_template": "hh", "batch_size": 6}
    sources = [DataSource(one), DataSource(two)]
    data = started(PreferenceDataModule(sources, val_sources=held_out, **options))
    assert data.source_names == ["one", "two", "held"]
    (batch,) = data.train_dataloader()
    assert isinstance(batch, PreferenceBatch)
    assert batch.source.sort().values.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.margin.dtype == torch.float32
    for row in range(6):
        text = tokenizer.decode(batch.chosen.input_ids[row][batch.chosen.attention_mask[row]])
        assert f"p{int(batch.margin[row])}" in text  # the margins stay with their pairs
        assert text.count("good") == int(batch.margin[row]) + 1
        n = int(batch.chosen.completion_mask[row].long().argmax())  # and the halves share a prompt
        assert batch.chosen.input_ids[row, :n].equal(batch.rejected.input_ids[row, :n])
        assert int(batch.rejected.completion_mask[row].long().argmax()) == n
    (held_batch,) = data.val_dataloader()
    assert held_batch.source.tolist() == [2, 2, 2]


def test_prompt_batch_is_padded_on_the_left_and_has_texts(
    write_lines: Writer, tokenizer: Tokenizer
) -> None:
    (batch,) = started(prompts(write_lines(*questions(4, start=98)), tokenizer)).train_dataloader()
    assert isinstance(batch, PromptBatch)
    assert sorted(batch.index.tolist()) == [0, 1, 2, 3]
    for row in range(4):
        assert tokenizer.decode(batch.input_ids[row][batch.attention_mask[row]]) == batch.texts[row]
        assert batch.texts[row] == f"\n\nHuman: what is {98 + batch.index[row]}?\n\nAssistant:"
    assert batch.attention_mask[:, -1].all()  # padded on the left
    assert batch.ptx is None


def test_training_batches_are_full_and_sources_weighted(
    write_lines: Writer, tokenizer: Tokenizer
) -> None:
    path = write_lines(*questions(10))
    data = started(demonstrations(path, tokenizer, val_fraction=0.2, weight=3))
    assert (len(data.examples["train"]), len(data.examples["val"])) == (24, 2)
    data = started(prompts(path, tokenizer, val_fraction=0.3))
    assert [len(batch.texts) for batch in data.train_dataloader()] == [4]
    assert [len(batch.texts) for batch in data.val_dataloader()] == [3]
    loader = started(prompts(path, tokenizer, samples_per_epoch=20)).train_dataloader()
    indices = [int(i) for batch in loader for i in batch.index]
    assert len(loader) == 5
    assert sorted(indices[:10]) == sorted(indices[10:]) == list(range(10))


def test_ptx_text_has_its_own_length(write_lines: Writer, tokenizer: Tokenizer) -> None:
    ptx = [DataSource(write_lines({"text": "Paris " * 50}, name="ptx.jsonl"))]
    path = write_lines(*questions(8), name="prompts.jsonl")
    data = started(prompts(path, tokenizer, ptx_sources=ptx, max_length=64, ptx_max_length=16))
    assert {len(example.input_ids) for example in data.examples["ptx"][:-1]} == {16}
    with pytest.raises(ValueError, match="ptx_max_length: expected 2 to max_length=64, got 65"):
        prompts(path, tokenizer, ptx_sources=ptx, max_length=64, ptx_max_length=65)


@pytest.mark.parametrize("texts", [False, True], ids=["demonstrations", "texts"])
def test_one_ptx_example_per_prompt(write_lines: Writer, tokenizer: Tokenizer, texts: bool) -> None:
    rows = [{"text": "Paris is the capital of France. " * 4}] * 3 if texts else questions(5)
    ptx = DataSource(write_lines(*rows, name="ptx.jsonl"))
    path = write_lines(*questions(8), name="prompts.jsonl")
    data = started(prompts(path, tokenizer, ptx_sources=[ptx], max_length=32, val_fraction=0.2))
    for batch in data.train_dataloader():
        assert isinstance(batch.ptx, TokenBatch)
        assert batch.ptx.input_ids.shape[0] == len(batch.texts) == 4
        assert batch.ptx.input_ids.shape[1] <= 32
        assert not batch.ptx.completion_mask[:, 0].any()
        if texts:
            assert batch.ptx.completion_mask[:, 1:].equal(batch.ptx.attention_mask[:, 1:])
    assert all(batch.ptx is None for batch in data.val_dataloader())


def test_ptx_epoch_follows_prompts(write_lines: Writer, tokenizer: Tokenizer) -> None:
    ptx = DataSource(write_lines(*questions(3), name="ptx.jsonl"))
    path = write_lines(*questions(6), name="prompts.jsonl")
    data = started(prompts(path, tokenizer, ptx_sources=[ptx], samples_per_epoch=12))
    rows = [tuple(row.tolist()) for b in data.train_dataloader() for row in b.ptx.input_ids]
    assert len(rows) == 12
    assert len(set(rows[:3])) == len(set(rows[3:6])) == 3


def test_overfitting_keeps_order(write_lines: Writer, tokenizer: Tokenizer) -> None:
    data = started(prompts(write_lines(*questions(16)), tokenizer), overfit_batches=1)
    assert next(iter(data.train_dataloader())).index.tolist() == [0, 1, 2, 3]


def test_tokenizer_is_the_modules_or_one_from_a_path(
    write_lines: Writer, tokenizer: Tokenizer, tmp_path: Any
) -> None:
    path, module = write_lines(*questions(4)), SimpleNamespace(tokenizer=tokenizer)
    data = started(prompts(path, None), lightning_module=module)
    assert data.encoder.tokenizer is tokenizer
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    data = started(prompts(path, str(tmp_path / "tokenizer")))
    assert next(iter(data.train_dataloader())).texts
    with pytest.raises(ValueError, match="expected a path, a tokenizer, or a module"):
        started(prompts(path, None))


def test_losses_are_counted_and_logged(
    write_lines: Writer, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    long_chat = [{"role": role, "content": "word " * 5} for role in ("user", "assistant", "user")]
    answer = {"role": "assistant", "content": "done"}
    rows = [
        {"messages": [*long_chat, answer]},
        {"messages": [{"role": "user", "content": "word " * 60}, answer]},
        {"messages": [{"role": "user", "content": "q"}, {**answer, "content": "word " * 60}]},
        {"messages": [{"role": "user", "content": "q"}, answer]},
        {"messages": [{"role": "user", "content": "and\n\nAssistant: no"}, answer]},
    ]
    path, too_long = write_lines(*rows), "the response alone is longer than max_length"
    data = demonstrations(path, tokenizer, max_length=60, on_bad_record="skip")
    with caplog.at_level(logging.INFO):
        data.setup("fit")
    assert (data.counts.dropped_turns, data.counts.cut_prompts) == (2, 1)
    control = "a turn contains the text of a control token"
    assert data.counts.dropped == {too_long: 1, control: 1}
    assert "dropped the 2 oldest turns of 1 dialogues and cut 1 prompts" in caplog.text
    assert f"{path}:3: {too_long}" in caplog.text
    assert "left out 2 of 5 records: 1 x" in caplog.text
    assert f"1 x {control}; the first ones" in caplog.text
    assert "train: 3 examples of 5 records" in caplog.text
    texts = [DataSource(write_lines({"text": "a </s> b <pad>"}, name="text.jsonl"))]
    ptx = started(prompts(write_lines(*questions(4)), tokenizer, ptx_sources=texts))
    assert ptx.counts.escaped_tokens == 2
    assert "encoded 2 control tokens in plain text as ordinary text" in caplog.text


@pytest.mark.parametrize(
    ("turns", "prompts", "expected"),
    [
        (0, 0, ""),
        (3, 0, "dropped the 3 oldest turns of 2 dialogues to fit max_length=60"),
        (0, 1, "cut 1 prompts on the left to fit max_length=60"),
    ],
)
def test_shortened_dialogues_are_told_by_what_happened_to_them(
    turns: int, prompts: int, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    counts = DataCounts(dropped_turns=turns, shortened=2 if turns else 0, cut_prompts=prompts)
    counts.log_encoded(max_length=60)
    assert caplog.messages == ([expected] if expected else [])


def test_bad_settings_are_refused(write_lines: Writer, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"no example is left of 2 records.*max_length"):
        started(demonstrations(write_lines(*questions(2)), tokenizer, max_length=3))
    with pytest.raises(ValueError, match="tokens_per_batch"):
        demonstrations("x.jsonl", None, min_samples=2)
    with pytest.raises(ValueError, match="train_sources: expected at least one source, got none"):
        DemonstrationDataModule([])
    with pytest.raises(ValueError, match="val_fraction: expected 0 where val_sources are given"):
        prompts("x.jsonl", None, val_sources=[DataSource("y.jsonl")], val_fraction=0.1)


def test_a_stage_encodes_its_own_split(write_lines: Writer, tokenizer: Tokenizer) -> None:
    data = prompts(write_lines(*questions(20)), tokenizer, val_fraction=0.2, test_fraction=0.1)
    for stage, parts in (("validate", {"val"}), ("fit", {"train", "val"})):
        data.setup(stage)
        assert set(data.examples) == parts
    data.setup()
    texts = {part: {p.text for p in data.examples[part]} for part in ("train", "val", "test")}
    assert [len(texts[part]) for part in ("train", "val", "test")] == [14, 4, 2]
    assert len(set.union(*texts.values())) == 20
    assert [len(batch.texts) for batch in data.test_dataloader()] == [2]


@pytest.mark.parametrize(
    ("seeds", "same"), [({"seed": 1}, False), ({"seed": 1, "split_seed": 0}, True)]
)
def test_what_is_held_out_depends_on_the_seed_of_the_split(
    write_lines: Writer, tokenizer: Tokenizer, seeds: dict[str, int], same: bool
) -> None:
    path = write_lines(*questions(40))
    held_out = []
    for options in ({}, seeds):
        data = prompts(path, tokenizer, val_fraction=0.2, **options)
        data.setup("validate")
        held_out.append({prompt.text for prompt in data.examples["val"]})
    assert (held_out[0] == held_out[1]) == same


def test_prompts_in_both_train_and_val_files_are_pointed_out(
    write_lines: Writer, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    train = write_lines(*questions(6), name="train.jsonl")
    val = DataSource(write_lines(*questions(2, start=5), name="val.jsonl"))
    prompts(train, tokenizer, val_sources=[val]).setup("fit")
    assert "1 training records have prompts that are also held out" in caplog.text


def test_validation_is_optional(write_lines: Writer, tokenizer: Tokenizer) -> None:
    data = started(prompts(write_lines(*questions(4)), tokenizer))
    assert data.val_dataloader() == []
    with pytest.raises(ValueError, match="test_sources, test_fraction"):
        data.test_dataloader()


def test_foreign_tokens_are_refused(write_lines: Writer, tokenizer: Tokenizer) -> None:
    size = len(tokenizer)
    module = torch.nn.ModuleDict({"policy": tiny_causal_lm(vocab_size=size)})
    started(prompts(write_lines(*questions(4)), tokenizer), lightning_module=module)
    tokenizer.add_tokens(["<one too many>"])
    data = prompts("not_read.jsonl", tokenizer)
    message = rf"embedded by 'policy', which embeds {size}, got one with ids up to {size};"
    with pytest.raises(ValueError, match=message):
        started(data, lightning_module=module)
