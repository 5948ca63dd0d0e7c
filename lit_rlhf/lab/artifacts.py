"""The lab's world on disk: JSON lines, a tokenizer and an untrained base model.

Everything is written as ordinary Hugging Face folders and JSON lines, so the commands that run on
the world run on real models and data too. The same arguments yield the same bytes.
"""

import dataclasses
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lit_rlhf.lab.lexicon import chinese_words
from lit_rlhf.lab.world import World, rendered_prompt

EOS_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|pad|>"


def write_world(
    folder: str | Path,
    world: World,
    seed: int,
    chat_template: str,
    n_demonstrations: int = 4000,
    n_train_prompts: int = 4000,
    n_heldout_prompts: int = 256,
    n_texts: int = 1000,
) -> Path:
    """Write the data of a world and a base model to train on it.

    ``demonstrations.jsonl`` (``{"messages": [...]}``), ``prompts_train.jsonl`` and
    ``prompts_heldout.jsonl`` (``{"prompt": [...]}``), ``text.jsonl`` (``{"text": ...}``, dialogues
    with demonstrators' answers as plain text), ``world.json`` (``seed``, and ``world``: the
    arguments of :class:`~lit_rlhf.lab.world.World`), and ``base/``.

    Args:
        folder: Where to; made if it is missing.
        world: The world.
        seed: Seed of the data and of the base model's weights.
        chat_template: Jinja text that the tokenizer is to carry.
        n_demonstrations: Dialogues for SFT, to prompts of the training side.
        n_train_prompts: Prompts of the training side.
        n_heldout_prompts: Prompts of the held-out side.
        n_texts: Documents for the ptx loss.

    Returns:
        The folder.
    """
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"demonstrations {seed}")
    asked = world.prompts(n_demonstrations + n_texts, seed)
    answered = [(prompt, world.demonstration(prompt, rng)) for prompt in asked]
    demonstrations, texts = answered[:n_demonstrations], answered[n_demonstrations:]
    _write_lines(
        root / "demonstrations.jsonl",
        (
            {"messages": [*prompt, {"role": "assistant", "content": answer}]}
            for prompt, answer in demonstrations
        ),
    )
    _write_lines(
        root / "prompts_train.jsonl",
        ({"prompt": list(prompt)} for prompt in world.prompts(n_train_prompts, seed + 1)),
    )
    _write_lines(
        root / "prompts_heldout.jsonl",
        ({"prompt": list(prompt)} for prompt in world.held_out_prompts(n_heldout_prompts, seed)),
    )
    _write_lines(
        root / "text.jsonl",
        ({"text": f"{rendered_prompt(prompt)} {answer}"} for prompt, answer in texts),
    )
    described = {"seed": seed, "world": dataclasses.asdict(world)}
    (root / "world.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    write_base(root / "base", world, seed, chat_template)
    return root


def write_base(folder: str | Path, world: World, seed: int, chat_template: str) -> None:
    """Write an untrained Llama of about 0.6 million parameters with its tokenizer.

    Args:
        folder: Where to; made if it is missing.
        world: The world whose words the tokenizer knows.
        seed: Seed of the weights.
        chat_template: Jinja text that the tokenizer is to carry.
    """
    tokenizer = world_tokenizer(world, chat_template)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def world_tokenizer(
    world: World, chat_template: str, extra_texts: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer whose tokens are the world's words.

    The vocabulary holds the 256 bytes, the special tokens, and every word that occurs in text of
    the world, with its leading space, as one token; the turn markers are words too. BPE with
    ``ignore_merges`` takes such a word whole and spells anything else in bytes, so no text is lost
    and no merge steps fill the vocabulary with pieces of words.

    Args:
        world: The world; its language decides on the words.
        chat_template: Jinja text that the tokenizer is to carry.
        extra_texts: Further text whose words become tokens.

    Returns:
        The tokenizer.
    """
    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_word_pattern(world)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    words = {
        piece
        for text in (*_all_sentences(world), *extra_texts)
        for piece, _ in splitter.pre_tokenize_str(text)
    }
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [EOS_TOKEN, PAD_TOKEN, *alphabet, *sorted(words - set(alphabet))]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    raw.pre_tokenizer = splitter
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=raw,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def _word_pattern(world: World) -> str:
    """What one token may span; the words of ``text_words`` with a space before them."""
    parts = [r"\n\n(?:Human|Assistant):", r" ?[A-Za-z]+", r" ?[0-9]+", r" ?[!-~]", r"\s"]
    if world.language != "en":
        parts[1:1] = chinese_words()
    return "|".join(parts)


def _all_sentences(world: World) -> list[str]:
    """Text in which every word of the world occurs as a dialogue has it."""
    sentences = []
    for lexicon in world.lexicons:
        frames = [
            *lexicon.requests,
            *lexicon.follow_ups,
            *lexicon.harmful_requests,
            *lexicon.openings,
            *lexicon.refusals,
            lexicon.recipe,
            lexicon.answers,
            lexicon.polite,
        ]
        values = {
            "number": lexicon.numbers,
            "category": lexicon.topics,
            "verb": lexicon.harmful_verbs,
            "object": lexicon.harmful_objects,
            "items": [lexicon.listing(items) for items in lexicon.categories.values()],
        }
        sentences += [text for frame in frames for text in _filled(frame, values)]
    return [f"\n\nHuman: {text}\n\nAssistant: {text}" for text in sentences]


def _filled(frame: str, values: Mapping[str, Iterable[str]]) -> list[str]:
    """A frame filled with every combination of its fields' values."""
    texts = [frame]
    for name, choices in values.items():
        if "{" + name + "}" in frame:
            texts = [text.replace("{" + name + "}", choice) for text in texts for choice in choices]
    return texts


def _write_lines(path: Path, records: Iterable[Mapping[str, object]]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
