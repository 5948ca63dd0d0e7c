"""`lit_rlhf start`: configurations of the stages for one's own data, and a look at its records."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml

from lit_rlhf.cli.configs import find_config
from lit_rlhf.cli.init import init
from lit_rlhf.command import Command
from lit_rlhf.data import (
    DataCounts,
    DataSource,
    DialogueEncoder,
    PreferenceRecord,
    RecordError,
    RecordKind,
    TokenExample,
    encode_records,
    load_records,
    prompt_of,
    split_records,
)
from lit_rlhf.files import write_json_lines, write_text
from lit_rlhf.models import load_tokenizer

_HELD_OUT = 0.05  # share of the prompts for validation, and again for the evaluation
_SHOWN, _MEASURED = 3, 500  # records
_SHORTEST, _LONGEST = 128, 512  # tokens of a dialogue; `init` makes a model with 512 positions
_UPDATES = 20  # minimum number of updates per epoch, for small files


def start(data: str, model: str | None = None, output_dir: str | None = None) -> None:
    """Write configurations of the stages for your own data, and show how its records are read.

    Without a model it makes one from your text that is small enough for a CPU, for a trial.

    Args:
        data: A file of preferences or demonstrations, in any format of docs/data.md, or a dataset.
        model: Folder or hub id of a causal language model; default: a small one from your text.
        output_dir: Folder for the configurations and all that they write: a free name. Default:
            runs/ and the name of the data.
    """
    source = DataSource(data)
    root = Path(output_dir or f"runs/{Path(source.label).name}")
    if root.exists():
        raise ValueError(f"output_dir: expected a free name, got {root}, which exists")
    counts = DataCounts()
    kind: RecordKind = "preference"  # the most that data can serve as
    try:
        records = load_records(kind, [source], "skip", counts=counts)
    except RecordError:
        kind = "demonstration"
        records = load_records(kind, [source], "skip", counts=counts)
    test = split_records(records, val_fraction=_HELD_OUT, test_fraction=_HELD_OUT, seed=0).test
    equal = counts.duplicates.total()
    print(f"{data}: {len(records):,} records that serve as {kind}s, {equal} equal an earlier one")
    counts.log_read()
    if model is None:
        init([data], f"{root}/base")
    tokenizer = load_tokenizer(model or f"{root}/base")
    template = "tokenizer" if tokenizer.chat_template else "hh"
    encoder = DialogueEncoder(tokenizer, template, max_length=1_000_000)
    examples = encode_records(records[:_MEASURED], partial(_encode, encoder), counts, "skip")
    print("Examples; what is trained on is between [[ and ]]:")
    labels = ["chosen", "rejected"] if kind == "preference" else ["response"]
    for number, example in enumerate(examples[: _SHOWN * len(labels)]):
        text = "".join(_mark(example, encoder)).strip()
        print(f"\n{labels[number % len(labels)]}:", *text.splitlines(), sep="\n  | ")
    lengths = sorted(example.n_tokens for example in examples)
    longest = lengths[int(0.99 * (len(examples) - 1))]
    tokens = int(fmean(lengths) * len(records) / _UPDATES)
    length = min(max(-(-longest // 64) * 64, _SHORTEST), _LONGEST)
    print(f"\n99 % of them have at most {longest} tokens, of {length} that the stages take")
    prompts = list(dict.fromkeys(map(prompt_of, test)))
    write_json_lines(root / "heldout.jsonl", [{"prompt": list(map(vars, p))} for p in prompts])
    shown = [prompt[0].content for prompt in prompts if len(prompt) == 1][:4]  # in the report
    stages = ["sft", "reward", "ppo"] if kind == "preference" else ["sft"]
    for stage in stages:
        config = _configure(stage, root, data, model, length, template)
        for callback in config["trainer"]["callbacks"]:
            if "prompts" in (given := callback.get("init_args", {})):
                given["prompts"] = shown or given["prompts"]
        if "tokens_per_batch" in (read := config["data"]["init_args"]):
            read["tokens_per_batch"] = min(read["tokens_per_batch"], max(tokens, length))
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        write_text(root / f"{stage}.yaml", f"# {stage} on {data}, by `lit_rlhf start`.\n{text}")
    commands = [f"lit_rlhf fit --config {root}/{stage}.yaml" for stage in stages]
    rewards = f" --rewards '{{{root}/reward: 1.0}}'" if kind == "preference" else ""
    commands.append(
        f"lit_rlhf evaluate --policies {root}/sft{f' {root}/ppo' * bool(rewards)} "
        f"--prompts {root}/heldout.jsonl{rewards} --output {root}/evaluation.json"
    )
    print(f"Written to {root}: {', '.join(f'{stage}.yaml' for stage in stages)} and heldout.jsonl")
    if kind == "demonstration":
        print("Missing: a reward model needs preferences, the fields prompt, chosen and rejected")
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
        text = encoder.tokenizer.decode([token for _, token in group])
        yield f"[[{text}]]" if trained else str(text)


def _configure(
    stage: str, root: Path, data: str, model: str | None, length: int, template: str
) -> dict[str, Any]:
    """The configuration of a stage: the packaged one for such a model, on these data."""
    family = "{}/hh_single_gpu" if torch.cuda.is_available() else "smollm2/{}"
    name = ("{}/hh_cpu" if model is None else family).format(stage)
    config: dict[str, Any] = yaml.safe_load(find_config(name).read_text("utf-8"))
    options, read = config["model"]["init_args"], config["data"]["init_args"]
    config["trainer"]["logger"]["init_args"]["save_dir"] = f"{root}/logs"
    options["model_path"] = (model or f"{root}/base") if stage == "sft" else f"{root}/sft"
    options["output_dir"] = f"{root}/{stage}"
    read |= {"train_sources": [{"path": data}], "max_length": length}
    read |= {"val_fraction": _HELD_OUT, "test_fraction": _HELD_OUT}
    if stage == "sft":
        read["chat_template"] = template
    if stage == "ppo":
        options["rewards"] = {f"{root}/reward": 1.0}
        new_tokens = min(options["sampling"]["max_new_tokens"], length // 2)
        options["sampling"]["max_new_tokens"] = new_tokens
        read["max_prompt_length"] = length - new_tokens
        if model is None:
            options["critic_pretraining"]["iterations"] = 2
            read["samples_per_epoch"] = 10 * read["batch_size"]  # ten iterations
    return config


COMMAND = Command(start, words=("data", "model"))
