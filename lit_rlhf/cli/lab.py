"""`lit_rlhf lab`: write the built-in world, and label preferences in it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lit_rlhf.cli.command import run_command
from lit_rlhf.data import CHAT_TEMPLATES, DataSource, DialogueEncoder
from lit_rlhf.data.examples import PromptExample
from lit_rlhf.evaluation import (
    choose_device,
    load_policy,
    load_prompts,
    load_shared_encoder,
    progress_bar,
    sample_batches,
    write_json_lines,
)
from lit_rlhf.forward import LanguageModel
from lit_rlhf.lab.artifacts import write_world
from lit_rlhf.lab.preferences import is_usable, labelled_pair
from lit_rlhf.lab.world import World
from lit_rlhf.models import ModelOptions
from lit_rlhf.rollout import SamplingOptions, decode_responses

MAX_ATTEMPTS = 20  # sampled pairs per pair asked for


def world(
    output_dir: str,
    seed: int = 0,
    language: Literal["en", "zh", "both"] = "en",
    n_demonstrations: int = 4000,
    n_train_prompts: int = 4000,
    n_heldout_prompts: int = 256,
    n_texts: int = 1000,
) -> None:
    """Write the built-in world: demonstrations, prompts, plain text, and an untrained base model.

    Args:
        output_dir: Folder to write to.
        seed: Of the data and of the base model's weights.
        language: English, Chinese or both.
        n_demonstrations: Dialogues for SFT.
        n_train_prompts: Prompts for PPO and for preferences.
        n_heldout_prompts: Prompts for evaluation, none of them a training prompt.
        n_texts: Documents for the ptx loss.
    """
    folder = write_world(
        output_dir,
        World(language=language),
        seed,
        CHAT_TEMPLATES["hh"],
        n_demonstrations=n_demonstrations,
        n_train_prompts=n_train_prompts,
        n_heldout_prompts=n_heldout_prompts,
        n_texts=n_texts,
    )
    print(
        f"World in {folder}: {n_demonstrations} demonstrations, {n_train_prompts} training and "
        f"{n_heldout_prompts} held-out prompts, {n_texts} texts, base model in {folder / 'base'}"
    )


def preferences(
    policy: str,
    world: str,
    output: str,
    pairs: int = 12000,
    seed: int = 0,
    max_new_tokens: int = 48,
    batch_size: int = 128,
    device: str = "auto",
) -> None:
    """Label pairs of a policy's responses as the world's labellers do, and write HH records.

    Args:
        policy: Folder of the policy, for instance the SFT model.
        world: Folder that `lit_rlhf lab world` wrote.
        output: JSON lines file for the records, chosen and rejected dialogues.
        pairs: How many; the training prompts are gone through as often as it takes. Pairs that make
            no record, as both responses are equal, are replaced by others.
        seed: Of the order of the prompts, the sampling and the labels.
        max_new_tokens: Longest response in tokens, EOS counted.
        batch_size: Prompts that generate together, two responses each. The draws depend on it.
        device: auto, cpu, cuda, cuda:1 and so on.
    """
    if pairs < 1:
        raise ValueError(f"pairs: expected an integer >= 1, got {pairs}")
    with progress_bar("preference pairs", pairs) as progress:
        records = preference_records(
            policy, Path(world), pairs, seed, max_new_tokens, batch_size, device, progress
        )
    print(f"{len(records)} preferences in {write_json_lines(output, records)}")


class ResponsePair(NamedTuple):
    """Two responses to one prompt, and whether each ended by itself."""

    a: str
    b: str
    a_ended: bool
    b_ended: bool


def preference_records(
    policy: str,
    world_folder: Path,
    pairs: int,
    seed: int = 0,
    max_new_tokens: int = 48,
    batch_size: int = 128,
    device: str = "auto",
    progress: Callable[[int], None] | None = None,
) -> list[dict[str, str]]:
    """Sample and label exactly `pairs` pairs; arguments as for `preferences`.

    Raises:
        ValueError: If the folder holds no world, policy and world do not fit together, or too few
            pairs of responses differ.
    """
    rules = read_world(world_folder)
    encoder = load_shared_encoder([policy])
    prompts = load_prompts(DataSource(str(world_folder / "prompts_train.jsonl")), encoder)
    if prompts.counts.shortened or prompts.counts.cut_prompts:
        raise ValueError(
            f"policy: expected one that takes the world's prompts whole, got {policy!r}, which "
            f"takes {encoder.max_prompt_length} tokens"
        )
    model = load_policy(policy, ModelOptions(), choose_device(device))
    options = SamplingOptions(max_new_tokens=max_new_tokens)
    order = shuffled_passes(prompts.examples, seed)
    seeds, labels = random.Random(f"sampling {seed}"), random.Random(f"labels {seed}")
    records: list[dict[str, str]] = []
    attempts = 0
    while len(records) < pairs:
        if attempts >= MAX_ATTEMPTS * pairs:
            raise ValueError(
                f"policy: expected one whose responses differ, got {len(records)} usable pairs of "
                f"{attempts} from {policy!r}"
            )
        examples = list(islice(order, pairs - len(records)))
        attempts += len(examples)
        found = response_pairs(
            model, encoder, examples, options, batch_size, seeds.getrandbits(31), progress
        )
        records += [
            labelled_pair(example.text, *pair, rules, labels)
            for example, pair in zip(examples, found, strict=True)
            if is_usable(pair.a, pair.b)
        ]
    return records


def response_pairs(
    model: LanguageModel,
    encoder: DialogueEncoder,
    examples: Sequence[PromptExample],
    options: SamplingOptions,
    batch_size: int,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> list[ResponsePair]:
    """Two responses to each prompt, in the order of the prompts.

    `progress` is told how many pairs of a batch make a record.
    """
    pairs: dict[int, ResponsePair] = {}
    for batch in sample_batches(model, encoder, examples, options, batch_size, seed, 2):
        texts = decode_responses(batch.rollouts, encoder.tokenizer)
        ended = batch.rollouts.terminated.tolist()
        found = [
            ResponsePair(texts[row], texts[row + 1], ended[row], ended[row + 1])
            for row in range(0, len(texts), 2)
        ]
        pairs.update(zip(batch.positions, found, strict=True))
        if progress is not None:
            progress(sum(is_usable(pair.a, pair.b) for pair in found))
    return [pairs[position] for position in range(len(examples))]


def shuffled_passes(examples: Sequence[PromptExample], seed: int) -> Iterator[PromptExample]:
    """All prompts in random order, then again in another one, without end."""
    rng = random.Random(f"prompts {seed}")
    while True:
        yield from rng.sample(examples, len(examples))


def read_world(folder: Path) -> World:
    """The rules of a world that `write_world` wrote.

    Raises:
        ValueError: If there is none in `folder`, or its file is not as this version writes it.
    """
    path = folder / "world.json"
    if not path.is_file():
        raise ValueError(f"world: expected a folder that `lit_rlhf lab world` wrote, got {folder}")
    described: dict[str, Any] = json.loads(path.read_text("utf-8"))
    try:
        return World(**described["world"])
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"world: expected a world of this version in {folder}, got other fields: {error}"
        ) from error


COMMANDS: dict[str, Callable[..., None]] = {"world": world, "preferences": preferences}


def main(argv: Sequence[str]) -> None:
    """Entry point of `lit_rlhf lab`."""
    if argv and argv[0] in COMMANDS:
        return run_command(COMMANDS[argv[0]], argv[1:], f"lit_rlhf lab {argv[0]}")
    lines = [
        f"  {name:<12} {str(command.__doc__).splitlines()[0]}" for name, command in COMMANDS.items()
    ]
    usage = "\n".join(["usage: lit_rlhf lab COMMAND [OPTIONS]", "", *lines])
    if argv and argv[0] not in ("-h", "--help"):
        raise SystemExit(f"{usage}\n\nlit_rlhf lab: no command {argv[0]!r}")
    print(usage)
    return None
