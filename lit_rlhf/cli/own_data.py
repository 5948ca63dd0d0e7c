"""The steps of `lit_rlhf start`: reads records, shows some, and writes what trains on them."""

import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import yaml

from lit_rlhf.cli.configs import find_config
from lit_rlhf.cli.init import BaseSizes, make_base, read_texts
from lit_rlhf.cli.time_estimate import Work, describe_time
from lit_rlhf.data import (
    DataCounts,
    DataSource,
    DialogueEncoder,
    EncodedRecord,
    PreferenceRecord,
    RecordError,
    RecordKind,
    Row,
    TextRecord,
    TokenExample,
    decode_tokens,
    encode_each,
    load_records,
    prompt_of,
    split_records,
    turns_as_dicts,
)
from lit_rlhf.data.formats import detect_format, find_used_fields
from lit_rlhf.files import delete, write_json_lines, write_text
from lit_rlhf.models import load_tokenizer, max_positions
from lit_rlhf.terminal import print_line, printable, printable_line

_HELD_OUT = 0.05  # share of the prompts for validation, and as many for the evaluation
_FEWEST_PROMPTS = 3  # different ones from which some are held out
_SHOWN_RECORDS = 3
_SHOWN_LINES = 6  # lines of a shown text
_MEASURED = 500  # records
_SHORTEST = 128  # tokens of a dialogue
_OWN_POSITIONS = 512  # tokens that a model trained from scratch takes, by default
_FEWEST_TOKENS = 16  # tokens of a dialogue: a few for the prompt, a few for the response
_NEW_TOKENS = 128  # longest response, where no stage of the data samples any
_UPDATES = 20  # least number in an epoch, for small files
_CHINESE = re.compile("[\u4e00-\u9fff]")
_PPO_FORWARDS = 4  # policy, reference, critic and reward model score each response
_PPO_UPDATED = 2  # policy and critic learn from it
_EXAMPLE_LABELS = {
    "preference": ["chosen", "rejected"],
    "demonstration": ["response"],
    "text": ["text"],
}
_KIND_NAMES = {
    "preference": "preferences",
    "demonstration": "demonstrations",
    "text": "plain text, for SFT alone",
}


@dataclass(frozen=True)
class _Lengths:
    """Lengths of the measured records, and the sizes that follow from them, in tokens.

    Attributes:
        by_record: Tokens of each measured record: of a pair, of its longer dialogue.
        dialogue: Mean tokens of a dialogue.
        prompt: Mean tokens of a prompt.
        max_length: Longest dialogue that the stages take.
        max_new_tokens: Longest response that is sampled.
    """

    by_record: Sequence[int]
    dialogue: float
    prompt: float
    max_length: int
    max_new_tokens: int

    @property
    def max_prompt_length(self) -> int:
        """Longest prompt to which a response is sampled."""
        return self.max_length - self.max_new_tokens


@dataclass(frozen=True)
class _OwnData:
    """The user's data, and where everything about it goes.

    Attributes:
        source: File or dataset, with the names of its columns.
        kind: What its records serve as: preferences, demonstrations or plain text.
        records: The records.
        encodable: The measured records that can be encoded, and all that are not measured.
        model: Folder or hub id of the model to train; `None` for one that is made from the text.
        root: Folder for the configurations and all that they write.
        template: Chat template of the first stage.
    """

    source: DataSource
    kind: RecordKind
    records: Sequence[Any]
    encodable: Sequence[Any]
    model: str | None
    root: Path
    template: str

    @property
    def stages(self) -> list[str]:
        """The stages that the records serve."""
        return ["sft", "reward", "ppo"] if self.kind == "preference" else ["sft"]

    @property
    def base(self) -> str:
        """Folder or hub id of the model that the first stage starts from."""
        return self.model or f"{self.root}/base"

    @property
    def held_out_share(self) -> float:
        """Share of the prompts for validation, and for the evaluation; 0 if there are too few."""
        return _HELD_OUT if len(set(map(prompt_of, self.encodable))) >= _FEWEST_PROMPTS else 0.0


def write_configs_for(
    source: DataSource,
    model: str | None,
    root: Path,
    *,
    max_length: int | None = None,
) -> None:
    """Show how records are read, and write the configurations of the stages for them.

    Args:
        source: File or dataset.
        model: Folder or hub id of a language model; `None` for a small one from the data's text.
        root: Folder for all that is written: a free name.
        max_length: Longest dialogue of the stages in tokens; `None`: what 99 % of the data need.
    """
    if root.exists():
        raise ValueError(f"output_dir: expected a free name, got {root}, which exists")
    try:
        _fill_folder(source, model, root, max_length=max_length)
    except BaseException:  # so that the same command finds a free name again
        delete(root)
        raise


def _fill_folder(
    source: DataSource, model: str | None, root: Path, *, max_length: int | None
) -> None:
    """Show how records are read, and write the configurations into a new folder.

    Args:
        source: File or dataset.
        model: Folder or hub id of a language model; `None` for a small one from the data's text.
        root: The folder.
        max_length: Longest dialogue of the stages in tokens; `None`: what 99 % of the data need.
    """
    positions = _find_positions(model, max_length)
    counts = DataCounts()
    kind, records = _read(source, counts)  # the most that data can serve as
    n_records = f"{len(records):,} records that serve as {_KIND_NAMES[kind]}"
    print_line(f"{source.place}: {n_records}{_count_equal(counts)}")
    print_line(_describe_columns(source, kind))
    counts.log_read()
    template = "paper-zh" if _is_chinese(records) else "hh"
    if model is None:
        longest = max_length or _OWN_POSITIONS
        texts = read_texts([source], DataCounts())  # what it leaves out is logged above
        make_base(texts, f"{root}/base", BaseSizes(max_positions=longest), template=template)
    tokenizer = load_tokenizer(model or f"{root}/base")
    if tokenizer.chat_template:
        template = "tokenizer"
    encoder = DialogueEncoder(tokenizer, template, max_length=1_000_000)
    encoded = _encode_first(encoder, records, source, counts)
    data = _OwnData(
        source=source,
        kind=kind,
        records=records,
        encodable=[*(kept.record for kept in encoded), *records[_MEASURED:]],
        model=model,
        root=root,
        template=template,
    )
    examples = [example for kept in encoded for example in kept.examples]
    _show_examples(data, examples, encoder)
    lengths = _measure(data, examples, positions=positions, max_length=max_length)
    print(_describe_fit(data, lengths, positions))
    has_pairs = kind != "text" and _write_held_out(
        data, DialogueEncoder(tokenizer, template, max_length=lengths.max_length)
    )
    configs = _write_stages(data, lengths)
    time = describe_time(data.base, _count_work(configs, lengths, len(data.encodable)))
    print(f"{time} (by samples_per_epoch in ppo.yaml)" if "ppo" in configs else time)
    _tell_next(data, lengths, has_pairs)


def _encode_first(
    encoder: DialogueEncoder, records: Sequence[Any], source: DataSource, counts: DataCounts
) -> list[EncodedRecord[Any, TokenExample]]:
    """Encode the first records, which are measured, and tell what is left out of them.

    Args:
        encoder: The encoder; what it refuses is left out.
        records: All records.
        source: Where they are from, for the error.
        counts: Takes the counts of what is left out.
    """
    encoded = [*encode_each(records[:_MEASURED], partial(_encode, encoder), counts, "skip")]
    if not any(kept.examples for kept in encoded):
        raise ValueError(f"{source.place}: no record can be encoded: {counts.dropped_examples[0]}")
    counts.log_encoded(encoder.max_length)
    if any("control token" in reason for reason in counts.dropped):
        print(
            "A dialogue of several turns is a list of messages, or stands whole in chosen and "
            "rejected (docs/data.md)"
        )
    return encoded


def _find_positions(model: str | None, max_length: int | None) -> int | None:
    """The most tokens that a dialogue may have in the model; `None` for no limit.

    Args:
        model: Folder or hub id of the model; `None` for one that is made for it.
        max_length: Longest dialogue that the user wants, in tokens, if any.
    """
    if max_length is not None and max_length < _FEWEST_TOKENS:
        raise ValueError(f"max_length: expected at least {_FEWEST_TOKENS} tokens, got {max_length}")
    if model is None:
        return max_length or _OWN_POSITIONS
    positions = max_positions(model)
    if positions is not None and max_length is not None and max_length > positions:
        raise ValueError(
            f"max_length: expected at most the {positions:,} positions of {model}, got {max_length}"
        )
    return positions


class _Records(NamedTuple):
    """Records of the user.

    Attributes:
        kind: What they serve as.
        records: The records.
    """

    kind: RecordKind
    records: list[Any]


def _read(source: DataSource, counts: DataCounts) -> _Records:
    """Read records as preferences, or else as demonstrations, or else as plain text."""
    try:
        preferences = load_records("preference", [source], "skip", counts=counts)
    except RecordError:
        try:
            # plain text where the rows have the field `text` alone
            others = load_records("ptx", [source], "skip", counts=counts)
        except RecordError as error:
            if source.columns or source.map or not _has_rows(source):
                raise
            raise ValueError(
                f"{error}; columns of other names are given by --columns '{{prompt: COLUMN, "
                "chosen: COLUMN, rejected: COLUMN}', or prompt and answer, and other rows are "
                "turned into such by --map package.module:function"
            ) from error
        return _Records("text" if isinstance(others[0], TextRecord) else "demonstration", others)
    return _Records("preference", preferences)


def _has_rows(source: DataSource) -> bool:
    """Whether there is a row at all, so that other names of columns could help."""
    try:
        return any(isinstance(row, Row) for row in source.read_rows())
    except RecordError:  # a data set that cannot be loaded
        return False


def _count_equal(counts: DataCounts) -> str:
    """How many records equal an earlier one, for the end of a line, with what leaves them out."""
    equal = counts.duplicates.total()
    option = " (drop_duplicates: true in train_sources leaves them out)" if equal else ""
    return f", {equal} equal an earlier one{option}"


def _describe_columns(source: DataSource, kind: RecordKind) -> str:
    """Which fields the first good row's records are made of, and which others have text."""
    own_names = source.columns or {}
    for row in source.read_rows():
        try:
            if isinstance(row, RecordError):
                continue
            format = source.format
            if format == "auto":
                format = detect_format(row, kind, own_names)
            columns_read = find_used_fields(row, format, kind)
        except RecordError:
            continue
        unused = [
            name
            for name, value in row.fields.items()
            if name not in columns_read and isinstance(value, str) and value.strip()
        ]
        named = [
            f"{name} ({own_names[name]})" if name in own_names else name for name in columns_read
        ]
        unused_note = f"; not read: {', '.join(unused)}" if unused else ""
        return f"Columns that are read: {', '.join(named)}{unused_note}"
    return "Columns: no row could be read"


def _is_chinese(records: Sequence[Any]) -> bool:
    """Whether most letters of the prompts are Chinese."""
    text = "".join(turn.content for r in records[:_MEASURED] for turn in prompt_of(r))
    n_letters = sum(map(str.isalpha, text))
    return len(_CHINESE.findall(text)) > n_letters / 2


def _show_examples(
    data: _OwnData, examples: Sequence[TokenExample], encoder: DialogueEncoder
) -> None:
    """Print the first examples, with marks around what is trained on."""
    print("Examples; what is trained on is between [[ and ]]:")
    labels = _EXAMPLE_LABELS[data.kind]
    for number, example in enumerate(examples[: _SHOWN_RECORDS * len(labels)]):
        text = printable("".join(_mark(example, encoder)).strip())
        print(f"\n{labels[number % len(labels)]}:", *_shorten(text), sep="\n  | ")
    print()


def _shorten(text: str) -> list[str]:
    """The lines of a text in the terminal's width, at most `_SHOWN_LINES` of them.

    The first, the one where the trained part begins, and the last two are always shown.
    """
    width = max(shutil.get_terminal_size().columns - len("  | "), 40)
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, width) or [""]]
    if len(lines) <= _SHOWN_LINES:
        return lines
    last = len(lines) - 2
    trained = next((place for place, line in enumerate(lines) if "[[" in line), 0)
    if 1 < trained < last:
        return [
            lines[0],
            *_leave_out(lines[1:trained]),
            lines[trained],
            *_leave_out(lines[trained + 1 : last]),
            *lines[last:],
        ]
    n_first = _SHOWN_LINES - 3
    return [*lines[:n_first], *_leave_out(lines[n_first:last]), *lines[last:]]


def _leave_out(lines: Sequence[str]) -> Sequence[str]:
    """A line that stands for several; a single one as it is."""
    return lines if len(lines) < 2 else [f"... {len(lines)} more lines ..."]


def _measure(
    data: _OwnData,
    examples: Sequence[TokenExample],
    *,
    positions: int | None,
    max_length: int | None,
) -> _Lengths:
    """Choose sizes by the lengths of some examples.

    Args:
        data: The data.
        examples: Examples of the first records, whole; of a pair two in a row.
        positions: The most tokens of a dialogue in the model; `None` for no limit.
        max_length: Longest dialogue that the user wants, in tokens, if any.
    """
    tokens = [example.n_tokens for example in examples]
    step = 2 if data.kind == "preference" else 1
    by_record = [max(tokens[place : place + step]) for place in range(0, len(tokens), step)]
    longest = sorted(by_record)[int(0.99 * (len(by_record) - 1))]
    chosen = max_length or max(_round_up(longest), _SHORTEST)
    if positions is not None:
        chosen = min(chosen, positions)
    new_tokens = _NEW_TOKENS
    if "ppo" in data.stages:
        ppo = _read_packaged("ppo", data)["model"]["init_args"]
        new_tokens = ppo["sampling"]["max_new_tokens"]
    return _Lengths(
        by_record=by_record,
        dialogue=fmean(tokens),
        prompt=fmean(int((~example.completion_mask).sum()) for example in examples),
        max_length=chosen,
        max_new_tokens=min(new_tokens, chosen // 2),
    )


def _round_up(tokens: int) -> int:
    """The next multiple of 64."""
    return -(-tokens // 64) * 64


def _describe_fit(data: _OwnData, lengths: _Lengths, positions: int | None) -> str:
    """How many records fit the stages' lengths, and what takes the others."""
    if data.kind == "text":
        return f"Texts are cut into blocks of {lengths.max_length:,} tokens; nothing is left out"
    n_fit = sum(tokens <= lengths.max_length for tokens in lengths.by_record)
    n_measured = len(lengths.by_record)
    first = "the first " if len(data.records) > _MEASURED else ""
    line = f"fits {lengths.max_length:,} tokens: {n_fit} of {first}{n_measured}"
    line += f" ({round(100 * n_fit / n_measured)} %)"
    if n_fit == n_measured:
        return line
    needed = _round_up(max(lengths.by_record))
    line += "; the others lose their oldest turns, or are left out"
    if data.model is not None and positions is not None and needed > positions:
        room = f"the {positions:,} positions of the model are too few"
        return f"{line}; {needed:,} would take all, for which {room}"
    return f"{line}; {needed:,} would take all: --max_length {needed}"


def _write_held_out(data: _OwnData, encoder: DialogueEncoder) -> bool:
    """Write prompts and pairs that no stage trains on; return whether there are pairs.

    Args:
        data: The data. With too few prompts, the ones that are trained on are written.
        encoder: The stages' encoder; what it refuses is left out.
    """
    share = data.held_out_share
    test = data.records
    if share:
        test = split_records(data.records, val_fraction=share, test_fraction=share, seed=0).test
    else:
        print("Too few prompts to hold some out: the evaluation uses those that are trained on")
    encoded = encode_each(test, partial(_encode, encoder), DataCounts(), "skip")
    good = [kept.record for kept in encoded]
    prompts = dict.fromkeys(map(prompt_of, good or test))
    rows = [{"prompt": turns_as_dicts(prompt)} for prompt in prompts]
    write_json_lines(data.root / "heldout.jsonl", rows)
    pairs = [
        {
            "prompt": turns_as_dicts(record.prompt),
            "chosen": record.chosen,
            "rejected": record.rejected,
        }
        for record in good
        if isinstance(record, PreferenceRecord)
    ]
    if pairs:
        write_json_lines(data.root / "heldout_pairs.jsonl", pairs)
    return bool(pairs)


def _read_packaged(stage: str, data: _OwnData) -> dict[str, Any]:
    """Read the packaged configuration of a stage for such a model."""
    family = "{}/hh_single_gpu" if torch.cuda.is_available() else "smollm2/{}"
    name = ("{}/hh_cpu" if data.model is None else family).format(stage)
    config: dict[str, Any] = yaml.safe_load(find_config(name).read_text("utf-8"))
    return config


def _write_stages(data: _OwnData, lengths: _Lengths) -> dict[str, dict[str, Any]]:
    """Write the configuration of each stage that the data serve; return them by stage."""
    configs = {stage: _configure(stage, data, lengths) for stage in data.stages}
    for stage, config in configs.items():
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        comment = f"# {stage} on {printable_line(data.source.place)}, by `lit_rlhf start`.\n"
        write_text(data.root / f"{stage}.yaml", f"{comment}{text}")
    return configs


def _configure(stage: str, data: _OwnData, lengths: _Lengths) -> dict[str, Any]:
    """The configuration of a stage: the packaged one for such a model, on these data.

    Args:
        stage: sft, reward or ppo.
        data: The data, and where everything goes.
        lengths: Sizes that fit the data.
    """
    root = data.root
    share = data.held_out_share
    config = _read_packaged(stage, data)
    trainer = config["trainer"]
    options = config["model"]["init_args"]
    read = config["data"]["init_args"]
    trainer["logger"]["init_args"]["save_dir"] = f"{root}/logs"
    options["model_path"] = data.base if stage == "sft" else f"{root}/sft"
    options["output_dir"] = f"{root}/{stage}"
    read |= {"train_sources": [_describe_source(data.source)], "max_length": lengths.max_length}
    # plain text has no prompts on which the model could be evaluated
    read |= {"val_fraction": share, "test_fraction": 0.0 if data.kind == "text" else share}
    read.pop("max_prompt_length", None)
    if "tokens_per_batch" in read:
        tokens = int(lengths.dialogue * len(data.encodable) / _UPDATES)
        read["tokens_per_batch"] = min(read["tokens_per_batch"], max(tokens, lengths.max_length))
    if stage == "sft":
        read["chat_template"] = data.template
    if stage == "ppo":
        options["rewards"] = {f"{root}/reward": 1.0}
        options["sampling"]["max_new_tokens"] = lengths.max_new_tokens
        read["max_prompt_length"] = lengths.max_prompt_length
        # in the middle and at the end, however many iterations there are
        trainer |= {"check_val_every_n_epoch": 1, "val_check_interval": 0.5}
        if data.model is None:
            options["critic_pretraining"]["iterations"] = 2
            read["samples_per_epoch"] = 10 * read["batch_size"]  # ten iterations
    if not share:  # no validation by which the best could be chosen
        trainer["callbacks"] = [
            callback
            for callback in trainer["callbacks"]
            if "HealthyCheckpoint" not in callback["class_path"]
        ]
    for callback in trainer["callbacks"]:
        if "prompts" in (init_args := callback.get("init_args", {})):
            init_args["prompts"] = _choose_shown_prompts(data)
    return config


def _describe_source(source: DataSource) -> dict[str, Any]:
    """The path of a source, with the names of its columns or its function, if it has them."""
    settings: dict[str, Any] = {"path": source.path}
    if source.columns:
        settings["columns"] = dict(source.columns)
    if source.map:
        settings["map"] = source.map
    return settings


def _choose_shown_prompts(data: _OwnData) -> list[str]:
    """Held-out prompts whose responses the report shows during the run, of one turn if there are.

    The configuration has them as text, so only the last turn of a dialogue is taken.
    """
    prompts = [record.prompt for record in load_records("prompt", [_held_out_prompts(data)])]
    single = [prompt for prompt in prompts if len(prompt) == 1]
    return [prompt[-1].content for prompt in single or prompts][:4]


def _held_out_prompts(data: _OwnData) -> DataSource:
    return DataSource(str(data.root / "heldout.jsonl"))


def _count_work(
    configs: Mapping[str, dict[str, Any]], lengths: _Lengths, n_records: int
) -> dict[str, Work]:
    """Tokens that the networks of each stage read, by the stage's name in a sentence.

    Args:
        configs: Configurations by stage.
        lengths: Sizes of the data.
        n_records: Number of records.
    """
    work = {}
    for stage, config in configs.items():
        epochs = config["trainer"]["max_epochs"]
        has_adapters = config["model"]["init_args"].get("network", {}).get("lora_rank", 0) > 0
        if stage == "ppo":
            prompt = min(lengths.prompt, lengths.max_prompt_length)
            tokens = config["data"]["init_args"]["samples_per_epoch"] * epochs
            tokens *= prompt + lengths.max_new_tokens
            work["PPO"] = Work(
                learned=_PPO_UPDATED * tokens,
                scored=_PPO_FORWARDS * tokens,
                sampled=tokens,
                has_adapters=has_adapters,
            )
        else:
            name = "SFT" if stage == "sft" else "the reward model"
            n_dialogues = n_records if stage == "sft" else 2 * n_records
            work[name] = Work(
                learned=n_dialogues * lengths.dialogue * epochs, has_adapters=has_adapters
            )
    return work


def _tell_next(data: _OwnData, lengths: _Lengths, has_pairs: bool) -> None:
    """Print what was written, and the commands that use it.

    Args:
        data: The data, and where everything is.
        lengths: The sizes in the configurations.
        has_pairs: Whether there are pairs on which the reward model is judged.
    """
    root = data.root
    files = [f"{stage}.yaml" for stage in data.stages]
    if data.kind != "text":
        files.append("heldout.jsonl")
    if has_pairs:
        files.append("heldout_pairs.jsonl")
    listed = f"{', '.join(files[:-1])} and {files[-1]}" if len(files) > 1 else files[0]
    print_line(f"Written to {root}: {listed}")
    if data.kind != "preference":
        print_line(
            "Missing: a reward model needs preferences, the fields prompt, chosen and rejected: "
            f"lit_rlhf start PAIRS {root}/sft"
        )
    commands = [["fit", "--config", f"{root}/{stage}.yaml"] for stage in data.stages]
    if has_pairs:
        report = ["report", "reward", "--model", f"{root}/reward"]
        report += ["--preferences", f"{root}/heldout_pairs.jsonl"]
        report += ["--output", f"{root}/reward_report"]
        commands.insert(2, report)  # before PPO
    if data.kind != "text":
        commands.append(_evaluation(data, lengths))
    lines = [shlex.join(["lit_rlhf", *words]) for words in commands]
    print("\n  ".join(["Next, in this order:", *map(printable_line, lines)]))


def _evaluation(data: _OwnData, lengths: _Lengths) -> list[str]:
    """The words of the command that evaluates the last stage's model, behind the program's name.

    Args:
        data: The data, and where everything is.
        lengths: The sizes in the configurations.
    """
    root = data.root
    words = ["evaluate", "--policies", f"{root}/sft"]
    if data.kind == "preference":
        words.append(f"{root}/ppo")
    words += ["--prompts", f"{root}/heldout.jsonl"]
    words += ["--max_prompt_length", str(lengths.max_prompt_length)]
    words += ["--max_new_tokens", str(lengths.max_new_tokens)]
    if data.kind == "preference":
        rewards = yaml.safe_dump(
            {f"{root}/reward": 1.0},  # quoted if the name of the data needs it
            default_flow_style=True,
            allow_unicode=True,
            width=sys.maxsize,
        )
        words += ["--rewards", rewards.strip()]
    return [*words, "--output", f"{root}/evaluation.json"]


def _encode(encoder: DialogueEncoder, record: Any) -> Sequence[TokenExample]:  # noqa: ANN401
    """The dialogues of a record: of a preference two; of plain text its one block."""
    if isinstance(record, TextRecord):
        return encoder.encode_text(record.text)
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
