"""The steps of `lit_rlhf start`: reads records, shows some, and writes what trains on them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import yaml

from lit_rlhf.cli.configs import find_config
from lit_rlhf.cli.init import init
from lit_rlhf.data import (
    DataCounts,
    DataSource,
    DialogueEncoder,
    PreferenceRecord,
    RecordError,
    RecordKind,
    TokenExample,
    decode_tokens,
    encode_records,
    load_records,
    prompt_of,
    split_records,
)
from lit_rlhf.files import write_json_lines, write_text
from lit_rlhf.models import load_tokenizer

_HELD_OUT = 0.05  # share of the prompts for validation, and as many for the evaluation
_SHOWN = 3  # records
_MEASURED = 500  # records
_SHORTEST = 128  # tokens of a dialogue
_LONGEST = 512  # tokens of a dialogue; `init` makes a model with 512 positions
_UPDATES = 20  # least number in an epoch, for small files


class _Lengths(NamedTuple):
    """Sizes that fit the data, in tokens.

    Attributes:
        dialogue: Longest dialogue that the stages take.
        batch: Tokens of a batch, with which an epoch has `_UPDATES` updates.
    """

    dialogue: int
    batch: int


@dataclass(frozen=True)
class _OwnData:
    """The user's data, and where everything about it goes.

    Attributes:
        data: File or dataset.
        kind: What its records serve as.
        model: Folder or hub id of the model to train; `None` for one that `init` makes.
        root: Folder for the configurations and all that they write.
        template: Chat template of the first stage.
    """

    data: str
    kind: RecordKind
    model: str | None
    root: Path
    template: str

    @property
    def stages(self) -> list[str]:
        """The stages that the records serve."""
        return ["sft", "reward", "ppo"] if self.kind == "preference" else ["sft"]


def start_with(data: str, model: str | None, output_dir: str | None) -> None:
    """Show how records are read, and write the configurations of the stages for them.

    Args:
        data: File or dataset.
        model: Folder or hub id of a language model; `None` for a small one from the data's text.
        output_dir: Folder for all that is written; `None` for one in runs/ named after the data.
    """
    source = DataSource(data)
    root = Path(output_dir or f"runs/{Path(source.label).name}")
    if root.exists():
        raise ValueError(f"output_dir: expected a free name, got {root}, which exists")
    counts = DataCounts()
    kind, records = _read(source, counts)  # the most that data can serve as
    splits = split_records(records, val_fraction=_HELD_OUT, test_fraction=_HELD_OUT, seed=0)
    equal = counts.duplicates.total()
    print(f"{data}: {len(records):,} records that serve as {kind}s, {equal} equal an earlier one")
    counts.log_read()
    if model is None:
        init([data], f"{root}/base")
    tokenizer = load_tokenizer(model or f"{root}/base")
    template = "tokenizer" if tokenizer.chat_template else "hh"
    encoder = DialogueEncoder(tokenizer, template, max_length=1_000_000)
    examples = encode_records(records[:_MEASURED], partial(_encode, encoder), counts, "skip")
    own = _OwnData(data, kind, model, root, template)
    _show_examples(own, examples, encoder)
    lengths = _measure(examples, len(records))
    prompts = list(dict.fromkeys(map(prompt_of, splits.test)))
    write_json_lines(root / "heldout.jsonl", [{"prompt": list(map(vars, p))} for p in prompts])
    # the report shows how responses to these change
    shown = [prompt[0].content for prompt in prompts if len(prompt) == 1][:4]
    for stage in own.stages:
        _write_stage(stage, own, lengths, shown)
    _tell_next(own)


class _Records(NamedTuple):
    """Records of the user.

    Attributes:
        kind: What they serve as.
        records: The records.
    """

    kind: RecordKind
    records: list[Any]


def _read(source: DataSource, counts: DataCounts) -> _Records:
    """Read records as preferences, or as demonstrations if they are none."""
    try:
        preferences = load_records("preference", [source], "skip", counts=counts)
    except RecordError:
        demonstrations = load_records("demonstration", [source], "skip", counts=counts)
        return _Records("demonstration", demonstrations)
    return _Records("preference", preferences)


def _show_examples(
    own: _OwnData, examples: Sequence[TokenExample], encoder: DialogueEncoder
) -> None:
    """Print the first examples, with marks around what is trained on."""
    print("Examples; what is trained on is between [[ and ]]:")
    labels = ["chosen", "rejected"] if own.kind == "preference" else ["response"]
    for number, example in enumerate(examples[: _SHOWN * len(labels)]):
        text = "".join(_mark(example, encoder)).strip()
        print(f"\n{labels[number % len(labels)]}:", *text.splitlines(), sep="\n  | ")


def _measure(examples: Sequence[TokenExample], n_records: int) -> _Lengths:
    """Choose sizes by the lengths of some examples, and print the longest."""
    lengths = sorted(example.n_tokens for example in examples)
    longest = lengths[int(0.99 * (len(examples) - 1))]
    dialogue = min(max(-(-longest // 64) * 64, _SHORTEST), _LONGEST)
    print(f"\n99 % of them have at most {longest} tokens, of {dialogue} that the stages take")
    return _Lengths(dialogue, batch=int(fmean(lengths) * n_records / _UPDATES))


def _write_stage(stage: str, own: _OwnData, lengths: _Lengths, shown: Sequence[str]) -> None:
    """Write the configuration of a stage.

    Args:
        stage: sft, reward or ppo.
        own: The data, and where everything goes.
        lengths: Sizes that fit the data.
        shown: Prompts whose responses are shown during the run.
    """
    config = _configure(stage, own, lengths.dialogue)
    for callback in config["trainer"]["callbacks"]:
        if "prompts" in (given := callback.get("init_args", {})):
            given["prompts"] = shown or given["prompts"]
    if "tokens_per_batch" in (read := config["data"]["init_args"]):
        tokens = max(lengths.batch, lengths.dialogue)
        read["tokens_per_batch"] = min(read["tokens_per_batch"], tokens)
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    comment = f"# {stage} on {own.data}, by `lit_rlhf start`.\n"
    write_text(own.root / f"{stage}.yaml", f"{comment}{text}")


def _tell_next(own: _OwnData) -> None:
    """Print what was written, and the commands that use it."""
    root = own.root
    names = ", ".join(f"{stage}.yaml" for stage in own.stages)
    is_preference = own.kind == "preference"
    rewards = f" --rewards '{{{root}/reward: 1.0}}'" if is_preference else ""
    policies = f"{root}/sft {root}/ppo" if is_preference else f"{root}/sft"
    print(f"Written to {root}: {names} and heldout.jsonl")
    if not is_preference:
        print("Missing: a reward model needs preferences, the fields prompt, chosen and rejected")
    commands = [f"lit_rlhf fit --config {root}/{stage}.yaml" for stage in own.stages]
    commands.append(
        f"lit_rlhf evaluate --policies {policies} --prompts {root}/heldout.jsonl{rewards} "
        f"--output {root}/evaluation.json"
    )
    print("\n  ".join(["Next, in this order:", *commands]))


def _encode(encoder: DialogueEncoder, record: Any) -> Sequence[TokenExample]:  # noqa: ANN401
    """The dialogues of a record: of a preference two."""
    if isinstance(record, PreferenceRecord):
        return encoder.encode_pair(record.prompt, chosen=record.chosen, rejected=record.rejected)[
            :2
        ]
    return [encoder.encode_dialogue(record.messages)]


def _mark(example: TokenExample, encoder: DialogueEncoder) -> Iterator[str]:
    """The text of an example, with marks around the tokens that are trained on."""
    pairs = zip(example.completion_mask.tolist(), example.input_ids.tolist(), strict=True)
    for trained, group in groupby(pairs, key=lambda pair: pair[0]):
        text = decode_tokens(encoder.tokenizer, [token for _, token in group])
        yield f"[[{text}]]" if trained else text


def _configure(stage: str, own: _OwnData, length: int) -> dict[str, Any]:
    """The configuration of a stage: the packaged one for such a model, on these data.

    Args:
        stage: sft, reward or ppo.
        own: The data, and where everything goes.
        length: Longest dialogue, in tokens.
    """
    root = own.root
    model = own.model
    family = "{}/hh_single_gpu" if torch.cuda.is_available() else "smollm2/{}"
    name = ("{}/hh_cpu" if model is None else family).format(stage)
    config: dict[str, Any] = yaml.safe_load(find_config(name).read_text("utf-8"))
    options = config["model"]["init_args"]
    read = config["data"]["init_args"]
    config["trainer"]["logger"]["init_args"]["save_dir"] = f"{root}/logs"
    options["model_path"] = (model or f"{root}/base") if stage == "sft" else f"{root}/sft"
    options["output_dir"] = f"{root}/{stage}"
    read |= {"train_sources": [{"path": own.data}], "max_length": length}
    read |= {"val_fraction": _HELD_OUT, "test_fraction": _HELD_OUT}
    if stage == "sft":
        read["chat_template"] = own.template
    if stage == "ppo":
        options["rewards"] = {f"{root}/reward": 1.0}
        new_tokens = min(options["sampling"]["max_new_tokens"], length // 2)
        options["sampling"]["max_new_tokens"] = new_tokens
        read["max_prompt_length"] = length - new_tokens
        if model is None:
            options["critic_pretraining"]["iterations"] = 2
            read["samples_per_epoch"] = 10 * read["batch_size"]  # ten iterations
    return config
