import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_rlhf.data import CHAT_TEMPLATES
from lit_rlhf.tools.lab.lexicon import split_words
from lit_rlhf.tools.lab.world import World, render_prompt
from lit_rlhf.tools.lab.world_folder import build_tokenizer, write_world
from tests.support.evaluation_folders import read_lines
from tests.support.stages import content

SIZES = {"n_demonstrations": 60, "n_train_prompts": 30, "n_heldout_prompts": 20, "n_texts": 10}
DATA = ("demonstrations.jsonl", "prompts_train.jsonl", "prompts_heldout.jsonl", "text.jsonl")
FILES = {*DATA, "world.json"}


def written(folder: Path, seed: int = 0) -> Path:
    return write_world(folder, World(), seed, CHAT_TEMPLATES["hh"], **SIZES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("world"))


def test_seed_decides_data_and_weights_but_not_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)
    random.seed(99)
    before, python_before = torch.get_rng_state(), random.getstate()
    first = content(folder)
    assert content(written(tmp_path / "again")) == first
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == python_before
    second = content(written(tmp_path / "other", seed=1))
    changed = {name for name, data in first.items() if data != second[name]}
    assert changed >= {*FILES, "base/model.safetensors"}
    assert first.keys() - changed >= {"base/tokenizer.json"}


def test_files_hold_what_was_asked_for(folder: Path) -> None:
    demonstrations = read_lines(folder / "demonstrations.jsonl")
    assert len(demonstrations) == 60
    assert all(record["messages"][-1]["role"] == "assistant" for record in demonstrations)
    train = {render_prompt(r["prompt"]) for r in read_lines(folder / "prompts_train.jsonl")}
    held_out = {render_prompt(r["prompt"]) for r in read_lines(folder / "prompts_heldout.jsonl")}
    asked = {render_prompt(record["messages"][:-1]) for record in demonstrations}
    assert not (train | asked) & held_out
    texts = [record["text"] for record in read_lines(folder / "text.jsonl")]
    assert len(texts) == 10
    assert all(text.startswith("\n\nHuman: ") and "\n\nAssistant: " in text for text in texts)


def test_base_loads_in_plain_transformers(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    assert tokenizer.is_fast
    assert tokenizer.eos_token_id == model.config.eos_token_id
    assert tokenizer.pad_token_id == model.config.pad_token_id != tokenizer.eos_token_id
    assert len(tokenizer) == model.config.vocab_size
    assert 500_000 < sum(p.numel() for p in model.parameters()) < 700_000
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_tokenizer_carries_the_template(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    for record in read_lines(folder / "prompts_heldout.jsonl"):
        prompt = record["prompt"]
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        assert text == render_prompt(record["prompt"])


@pytest.mark.parametrize(("language", "largest"), [("en", 400), ("zh", 400), ("both", 500)])
def test_one_token_for_each_word(language: Any, largest: int) -> None:
    world = World(language=language)
    tokenizer = build_tokenizer(world, CHAT_TEMPLATES["hh"])
    assert 300 < len(tokenizer) < largest  # bytes and words
    rng = random.Random(0)
    for prompt in world.sample_prompts(200, seed=0):
        said = world.sample_demonstration(prompt, rng)
        dialogue = [*prompt, {"role": "assistant", "content": said}]
        expected = 0
        for turn in dialogue:
            words = split_words(turn["content"])
            # the marker, the words, and the space before a Chinese word
            expected += 1 + len(words) + (not words[0].isascii())
        text = tokenizer.apply_chat_template(dialogue, tokenize=False)
        ids = tokenizer(text)["input_ids"]
        assert ids[-1] == tokenizer.eos_token_id
        assert len(ids) - 1 == expected


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize(
    "text",
    [
        "\n\nHuman: name two metals.\n\nAssistant: iron and zinc.",
        "iron at the start,  two  spaces\tand a tab\r\n",
        "Capitals, digits 1984 and marks (?!) -- _x_ don't",
        " 说出三种金属。你好，世界",
        "naïve café \u00a0 \U0001f600 \x00\x7f",
        "\n\nHuman:\n\nAssistant:\n\n\nHuman :",
    ],
)
def test_any_text_survives_the_tokenizer(language: Any, text: str) -> None:
    tokenizer = build_tokenizer(World(language=language), CHAT_TEMPLATES["hh"])
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
