"""The folder of a lab world: JSON lines, a tokenizer and an untrained base model.

The folder holds ordinary Hugging Face models and JSON lines, so the commands that run on it run
on real models and data too. The same arguments write the same bytes.
"""

import dataclasses
import json
import os
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from lit_callbacks.files import read_json
from lit_rlhf.tools.lab.lexicon import chinese_words
from lit_rlhf.tools.lab.world import World, render_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EOS_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|pad|>"
_SETTINGS_FILE = "world.json"
_MARK = ".world.json.unfinished"
"""File in the folder of a world while it is written: an interrupted command may be repeated."""
_DATA = ("demonstrations", "prompts_train", "prompts_heldout", "text")
_BASE = "base"


def write_world(
    folder: str | Path,
    world: World,
    seed: int,
    chat_template: str,
    *,
    n_demonstrations: int = 4000,
    n_train_prompts: int = 4000,
    n_heldout_prompts: int = 256,
    n_texts: int = 1000,
) -> Path:
    """Write the data of a world and a base model to train on it.

    The files are `demonstrations.jsonl` (`{"messages": [...]}`), `prompts_train.jsonl` and
    `prompts_heldout.jsonl` (`{"prompt": [...]}`), `text.jsonl` (`{"text": ...}`, dialogues with
    demonstrations as plain text), `world.json` (`seed`, and the settings of the `World`), and the
    model folder `base/`. Demonstrations and texts have prompts of the training side.

    Args:
        folder: Folder to write.
        world: The world.
        seed: Seed of the data and of the base model's weights.
        chat_template: Chat template of the base model's tokenizer.
        n_demonstrations: Number of demonstrations.
        n_train_prompts: Number of prompts for training.
        n_heldout_prompts: Number of held-out prompts.
        n_texts: Number of texts.
    """
    from lit_rlhf.files import write_json_lines, write_text  # see write_base_model

    root = Path(folder)
    write_text(root / _MARK, "")
    (root / _SETTINGS_FILE).unlink(missing_ok=True)
    rng = random.Random(f"demonstrations {seed}")
    dialogues = [
        (prompt, world.sample_demonstration(prompt, rng))
        for prompt in world.sample_prompts(n_demonstrations + n_texts, seed=seed)
    ]
    records: dict[str, Iterable[dict[str, Any]]] = {
        "demonstrations": (
            {"messages": [*prompt, {"role": "assistant", "content": answer}]}
            for prompt, answer in dialogues[:n_demonstrations]
        ),
        "prompts_train": (
            {"prompt": prompt} for prompt in world.sample_prompts(n_train_prompts, seed=seed + 1)
        ),
        "prompts_heldout": (
            {"prompt": prompt}
            for prompt in world.sample_prompts(n_heldout_prompts, seed=seed, held_out=True)
        ),
        "text": (
            {"text": f"{render_prompt(prompt)} {answer}"}
            for prompt, answer in dialogues[n_demonstrations:]
        ),
    }
    for name, lines in records.items():
        write_json_lines(root / f"{name}.jsonl", lines)
    write_base_model(root / _BASE, world, seed, chat_template)
    # `read_world` takes a folder with these settings for a complete one
    write_text(root / _SETTINGS_FILE, json.dumps(_describe(world, seed), indent=2) + "\n")
    (root / _MARK).unlink()
    return root


def _describe(world: World, seed: int) -> dict[str, Any]:
    """What the settings file of a world holds."""
    return {"seed": seed, "world": dataclasses.asdict(world)}


def forget_settings(folder: str | Path) -> None:
    """Let a world of any settings replace the one in a folder, if there is one."""
    path = Path(folder) / _SETTINGS_FILE
    if path.is_file():
        path.replace(path.with_name(_MARK))


def check_no_other_world(folder: str | Path, world: World, seed: int) -> None:
    """Refuse to replace a world of other settings, from which models may have learned, and files.

    Args:
        folder: Folder to write to.
        world: The world that would be written.
        seed: Its seed.
    """
    path = Path(folder) / _SETTINGS_FILE
    if not path.is_file():
        names = [*(f"{name}.jsonl" for name in _DATA), _BASE]
        own = [name for name in names if os.path.lexists(path.with_name(name))]
        if own and not path.with_name(_MARK).exists():
            raise ValueError(
                f"output_dir: expected a new folder, or one with a world, got {folder}, whose "
                f"{own[0]} is not of a world and would be replaced"
            )
        return
    there = read_json(path, dict)
    # through JSON, which has lists for tuples
    if there != json.loads(json.dumps(_describe(world, seed))):
        raise ValueError(
            f"output_dir: expected a new folder, or one with the same world, got {folder}, which "
            "holds a world with another seed or other settings; choose another folder or delete it"
        )


def read_world(folder: str | Path) -> World:
    """Read the settings of a world that `write_world` wrote."""
    path = Path(folder) / _SETTINGS_FILE
    if not path.is_file():
        raise ValueError(f"world: expected a folder that `lit_rlhf lab world` wrote, got {folder}")
    settings = read_json(path, dict)
    try:
        return World(**settings["world"])
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"world: expected a world of this version in {folder}, got other fields: {error}; "
            "write it again with `lit_rlhf lab world`"
        ) from error


def write_base_model(folder: str | Path, world: World, seed: int, chat_template: str) -> None:
    """Write an untrained Llama model of about 0.6 million parameters with its tokenizer.

    Args:
        folder: Folder to write.
        world: The world, whose words are the tokens.
        seed: Seed of the weights.
        chat_template: Chat template of the tokenizer.
    """
    # Not at the top: naming `lit_rlhf.tools.lab.gold:gold_reward` must not load torch.
    from lit_rlhf.files import delete
    from lit_rlhf.models import build_untrained_llama

    tokenizer = build_tokenizer(world, chat_template)
    model = build_untrained_llama(
        tokenizer, seed, layers=2, heads=4, hidden=128, intermediate=512, positions=256
    )
    delete(Path(folder))  # transformers would write where links in it lead
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_tokenizer(world: World, chat_template: str) -> "PreTrainedTokenizerFast":
    """Build a byte-level BPE tokenizer with one token per word of the world's languages.

    The vocabulary holds the 256 bytes, the special tokens, and each word of the world with its
    leading space. Turn markers are words too. There are no BPE merges: with `ignore_merges` a word
    in the vocabulary becomes one token and any other text becomes bytes. No text is lost, and no
    fragments of words fill the vocabulary.
    """
    from transformers import PreTrainedTokenizerFast  # see write_base_model

    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_word_pattern(world)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    words = {word for text in _all_sentences(world) for word, _ in splitter.pre_tokenize_str(text)}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [EOS_TOKEN, PAD_TOKEN, *alphabet, *sorted(words - set(alphabet))]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
        chat_template=chat_template,
    )


def _word_pattern(world: World) -> str:
    """A regular expression of the text of one token: the words of `split_words`, with a space."""
    parts = [r"\n\n(?:Human|Assistant):", r" ?[A-Za-z]+", r" ?[0-9]+", r" ?[!-~]", r"\s"]
    if world.language != "en":
        parts[1:1] = chinese_words()
    return "|".join(parts)


def _all_sentences(world: World) -> list[str]:
    """Dialogues in which every word of the world occurs, with the spaces that it may have."""
    sentences = []
    for lexicon in world.lexicons:
        templates = [
            *lexicon.requests,
            *lexicon.follow_ups,
            *lexicon.harmful_requests,
            *lexicon.openings,
            *lexicon.refusals,
            lexicon.harmful_answer,
            lexicon.answer,
            lexicon.polite_phrase,
        ]
        values = {
            "number": lexicon.numbers,
            "category": lexicon.topics,
            "verb": lexicon.harmful_verbs,
            "object": lexicon.harmful_objects,
            "items": [lexicon.join_items(items) for items in lexicon.categories.values()],
        }
        sentences += [text for template in templates for text in _fill(template, values)]
    return [f"\n\nHuman: {text}\n\nAssistant: {text}" for text in sentences]


def _fill(template: str, values: Mapping[str, Iterable[str]]) -> list[str]:
    """Fill a template with every combination of values."""
    texts = [template]
    for name, choices in values.items():
        if "{" + name + "}" in template:
            texts = [text.replace("{" + name + "}", choice) for text in texts for choice in choices]
    return texts
