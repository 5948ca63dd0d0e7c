"""`lit_rlhf lab`: write the built-in world, and sample labelled preferences in it."""

import dataclasses
import random
from functools import partial
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Any, Literal

from lit_rlhf.checks import check_count
from lit_rlhf.command import Command
from lit_rlhf.terminal import print_line
from lit_rlhf.tools.lab import (
    WORLDS,
    ResponsePair,
    WorldName,
    check_no_other_world,
    label_pair,
    read_world,
    write_world,
)

if TYPE_CHECKING:  # they import torch, for which --help does not wait
    from transformers import PreTrainedTokenizerBase

    from lit_rlhf.data import PromptBatch
    from lit_rlhf.rollout import RolloutBatch

_MAX_ATTEMPTS = 20  # pairs sampled per pair asked for, before the policy is given up


def world(
    output_dir: str,
    *,
    seed: int = 0,
    world: WorldName = "biased",
    language: Literal["en", "zh", "both"] = "en",
    n_demonstrations: int = 4000,
    n_train_prompts: int = 4000,
    n_heldout_prompts: int = 256,
    n_texts: int = 1000,
) -> None:
    """Write the built-in world: demonstrations, prompts, plain text, and an untrained base model.

    Args:
        output_dir: Folder to write to.
        seed: Seed of the data and of the base model's weights.
        world: How labellers err. biased: they like long and polite responses and overlook form.
            extrapolation: labels follow gold, and the reward model is wrong only outside of its
            data.
        language: English, Chinese or both.
        n_demonstrations: Number of dialogues for SFT.
        n_train_prompts: Number of prompts for PPO and for preferences.
        n_heldout_prompts: Number of prompts for evaluation, none of them a training prompt.
        n_texts: Number of documents for the ptx loss.
    """
    for name, number in (("n_demonstrations", n_demonstrations), ("n_texts", n_texts)):
        check_count(name, number, minimum=0)
    check_count("n_train_prompts", n_train_prompts)
    check_count("n_heldout_prompts", n_heldout_prompts)
    from lit_rlhf.data import CHAT_TEMPLATES

    settings = dataclasses.replace(WORLDS[world], language=language)
    check_no_other_world(output_dir, settings, seed)
    folder = write_world(
        output_dir,
        settings,
        seed,
        CHAT_TEMPLATES["hh"],
        n_demonstrations=n_demonstrations,
        n_train_prompts=n_train_prompts,
        n_heldout_prompts=n_heldout_prompts,
        n_texts=n_texts,
    )
    print_line(
        f"World {world!r} in {folder}: {n_demonstrations} demonstrations, {n_train_prompts} "
        f"training and {n_heldout_prompts} held-out prompts, {n_texts} texts, base model in "
        f"{folder / 'base'}"
    )


def sample_preferences(
    policy: str,
    world: str,
    output: str,
    *,
    pairs: int = 12000,
    seed: int = 0,
    max_new_tokens: int = 48,
    batch_size: int = 128,
    device: str = "auto",
) -> list[dict[str, str]]:
    """Sample pairs of a policy's responses, label them as the labellers do, and write HH records.

    Args:
        policy: Folder of the policy, for instance the SFT model.
        world: Folder that `lit_rlhf lab world` wrote.
        output: JSON lines file to write, with chosen and rejected dialogues. Finished batches are
            kept beside it until it is complete, and the same command continues with them.
        pairs: Number of records. The training prompts are repeated as often as necessary. Pairs of
            equal responses make no record and are replaced.
        seed: Seed of the order of the prompts, the sampling and the labels.
        max_new_tokens: Longest response in tokens, including EOS.
        batch_size: Prompts per batch, with two responses each. The samples depend on it.
        device: auto, cpu, cuda, cuda:1 and so on.
    """
    check_count("pairs", pairs)
    from lit_rlhf.data import DataSource
    from lit_rlhf.files import ProgressFile
    from lit_rlhf.models import ModelOptions
    from lit_rlhf.rollout import SamplingOptions
    from lit_rlhf.tools.evaluation.loading import choose_device, load_policy, load_shared_encoder
    from lit_rlhf.tools.evaluation.output import progress_bar
    from lit_rlhf.tools.evaluation.sampling import (
        count_shortened,
        encode_prompt_records,
        hash_models,
        hash_prompts,
        read_prompts,
        sample_batches,
    )

    settings_of_world = read_world(world)
    encoder = load_shared_encoder([policy])
    source = DataSource(f"{world}/prompts_train.jsonl")
    prompts = encode_prompt_records(read_prompts(source), encoder).examples
    # The labellers read the rendered prompt, so it has to be the one that the world asked.
    if count_shortened(prompts):
        raise ValueError(
            f"policy: expected one that takes the world's prompts whole, got {policy!r}, which "
            f"takes {encoder.max_prompt_length} tokens"
        )
    model = load_policy(policy, ModelOptions(), choose_device(device), encoder.tokenizer)
    options = SamplingOptions(max_new_tokens=max_new_tokens)
    # Three streams of random numbers: how many one of them uses does not change the others.
    prompt_rng = random.Random(f"prompts {seed}")
    # all prompts in random order, then all of them in another order, and so on
    order = chain.from_iterable(prompt_rng.sample(prompts, len(prompts)) for _ in count())
    sampling_seeds = random.Random(f"sampling {seed}")
    label_rng = random.Random(f"labels {seed}")
    settings = {
        "policy": hash_models([policy]),
        "world": dataclasses.asdict(settings_of_world),
        "prompts": hash_prompts(prompts),
        "pairs": pairs,
        "seed": seed,
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "device": str(choose_device(device)),
    }
    records: list[dict[str, str]] = []
    attempts = 0
    progress = progress_bar("preference pairs", pairs)
    with ProgressFile(output, settings) as unfinished, progress as show_progress:
        while len(records) < pairs:
            if attempts >= _MAX_ATTEMPTS * pairs:
                raise ValueError(
                    f"policy: expected one whose responses differ, got {len(records)} usable pairs "
                    f"of {attempts} from {policy!r}"
                )
            examples = list(islice(order, pairs - len(records)))
            batches = sample_batches(
                lambda: model,
                encoder,
                examples,
                sampling=options,
                batch_size=batch_size,
                seed=sampling_seeds.getrandbits(31),
                describe=partial(_describe_pairs, encoder.tokenizer),
                responses_per_prompt=2,
                unfinished=unfinished,
                name=f"pairs from {attempts} on",
            )
            sampled: dict[int, ResponsePair] = {}
            for batch in batches:
                sampled_pairs = [ResponsePair(*pair) for pair in batch["pairs"]]
                sampled |= zip(batch["positions"], sampled_pairs, strict=True)
                show_progress(sum(pair.is_usable for pair in sampled_pairs))
            attempts += len(examples)
            records += [
                label_pair(example.text, sampled[position], settings_of_world, label_rng)
                for position, example in enumerate(examples)
                if sampled[position].is_usable
            ]
        unfinished.finish(records)
    print_line(f"{len(records)} preferences in {output}")
    return records


def _describe_pairs(
    tokenizer: "PreTrainedTokenizerBase", _: "PromptBatch", rollouts: "RolloutBatch"
) -> dict[str, Any]:
    """The fields of a `ResponsePair` for each prompt of a batch, see `sample_batches`."""
    from lit_rlhf.rollout import decode_responses

    texts = decode_responses(rollouts, tokenizer)
    ended = rollouts.terminated.tolist()
    # the two responses to a prompt are consecutive rows
    return {"pairs": list(zip(texts[::2], texts[1::2], ended[::2], ended[1::2], strict=True))}


COMMANDS = {
    "world": Command(world, writes=("output_dir",), folders=("output_dir",)),
    "preferences": Command(sample_preferences, writes=("output",)),
}
