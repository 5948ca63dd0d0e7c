"""The cache of encoded examples: the same data, from an entry that is complete or not there."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import PreTrainedTokenizerFast as Tokenizer

from lit_rlhf.data import DataSource, DialogueEncoder, PromptDataModule, RecordError, cache
from lit_rlhf.data.cache import StoredExamples, cache_folder
from lit_rlhf.data.datamodules import DemonstrationDataModule, PreferenceDataModule
from tests.support.tiny_tokenizers import CHATML, tiny_tokenizer

Writer = Callable[..., str]
WORDS = ["iron", "zinc", "oak", "elm"]


def pairs(n_rows: int = 12) -> list[dict[str, Any]]:
    """Pairs of which one is equal, one has EOS in a turn, and one has a response that is too long.

    Two more lose turns and tokens.
    """
    rows: list[dict[str, Any]] = [
        {"prompt": f"{WORDS[i % 4]} {i}?", "chosen": f"yes {i}", "rejected": "no", "margin": i / 4}
        for i in range(n_rows)
    ]
    roles = ["user", "assistant", "user"]
    chat = [{"role": role, "content": f"{role} says " + "word " * 8} for role in roles]
    rows[1] |= {"chosen": "no"}
    rows[2] |= {"prompt": "what is </s>?"}
    rows[3] |= {"chosen": "word " * 90}
    rows[4] |= {"prompt": chat}
    rows[5] |= {"prompt": "word " * 90}
    return rows


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, for data of any size."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(cache, "MIN_CACHED_RECORDS", 1)
    return cache_folder()


def make(kind: type[Any], sources: list[DataSource], **options: Any) -> Any:
    defaults = {"tokenizer": tiny_tokenizer(), "chat_template": "hh", "max_length": 64}
    defaults |= {"on_bad_record": "skip", "val_fraction": 0.3}
    return kind(sources, **{**defaults, **options})


def started(kind: type[Any], sources: list[DataSource], **options: Any) -> Any:
    data = make(kind, sources, **options)
    data.setup("fit")
    return data


def facts(data: Any) -> dict[str, Any]:
    """Everything that a datamodule tells about its data, and all examples."""
    return {
        "counts": data.counts,
        "examples": {part: list(map(plain, examples)) for part, examples in data.examples.items()},
    }


def plain(example: Any) -> Any:
    """An example in types that can be compared."""
    if isinstance(example, torch.Tensor):
        return example.dtype, example.tolist()
    if isinstance(example, tuple):
        return type(example), [plain(value) for value in example]
    return example


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (DemonstrationDataModule, {"train_on": "all"}),
        (PreferenceDataModule, {"tokens_per_batch": 200}),
        (PromptDataModule, {"batch_size": 2}),
    ],
)
def test_cached_start_is_the_same(
    *, kind: Any, options: Any, write_lines: Writer, folder: Path, monkeypatch: Any, caplog: Any
) -> None:
    if kind is PromptDataModule:
        ptx = write_lines({"text": "Iron rusts. </s> " * 20}, name="ptx.jsonl")
        options = {**options, "ptx_sources": [DataSource(ptx)]}
    sources = [DataSource(write_lines(*pairs(), "{"), weight=1.5)]

    def start() -> tuple[Any, str]:
        caplog.clear()
        with caplog.at_level(logging.INFO, "lit_rlhf"):
            data = started(kind, sources, **options)
        return data, caplog.text

    first, first_log = start()
    assert entries(folder)
    assert set(map(type, first.examples.values())) == {StoredExamples}
    with monkeypatch.context() as patch:
        patch.setattr(DialogueEncoder, "_tokenize", None)  # nothing is tokenized again
        patch.setattr(DialogueEncoder, "_make_contract", lambda _: first.encoder.contract)
        second, second_log = start()
    monkeypatch.setattr(datasets, "is_caching_enabled", lambda: False)
    uncached, uncached_log = start()
    assert type(uncached.examples["train"]) is list
    assert facts(first) == facts(second) == facts(uncached)
    assert first_log == second_log == uncached_log
    assert "left out" in first_log
    assert "skipped" in first_log
    stored = first.examples["train"]
    assert plain(tuple(stored.__getitems__([2, 0, 2]))) == plain((stored[2], stored[0], stored[2]))
    assert plain(tuple(stored[-2:])) == plain((stored[len(stored) - 2], stored[-1]))
    batches = [[plain(batch) for batch in data.train_dataloader()] for data in (second, uncached)]
    assert batches[0] == batches[1]


def test_small_data_are_not_cached(
    write_lines: Writer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "MIN_CACHED_RECORDS", 13)
    started(PreferenceDataModule, [DataSource(write_lines(*pairs()))])
    assert not entries(folder)
    data = started(PreferenceDataModule, [DataSource(write_lines(*pairs(24)))])
    # or else all would be read for the few of validation
    assert len(data.examples["val"]) < 13
    assert len(entries(folder)) == 2


def test_workers_keep_the_order_of_the_records(
    write_lines: Writer, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    sources = [DataSource(write_lines(*pairs(40)))]
    monkeypatch.setattr(datasets, "is_caching_enabled", lambda: False)
    expected = facts(started(PreferenceDataModule, sources))
    monkeypatch.undo()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder.parent)
    monkeypatch.setattr(cache, "MIN_CACHED_RECORDS", 20)
    monkeypatch.setattr(cache, "_RECORDS_PER_WORKER", 10)
    monkeypatch.setattr(cache, "_count_processors", lambda: 2)
    data = started(PreferenceDataModule, sources)
    assert type(data.examples["train"]) is StoredExamples
    assert facts(data) == expected


def test_prepared_once_and_opened_by_all_ranks(
    write_lines: Writer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sources = [DataSource(write_lines(*pairs()))]
    first = make(PreferenceDataModule, sources)
    with caplog.at_level(logging.INFO):
        first.prepare_data()
    assert "train:" not in caplog.text  # setup logs it
    first.setup("fit")
    contract = first.encoder.contract
    monkeypatch.setattr(DialogueEncoder, "_tokenize", None)
    monkeypatch.setattr(DialogueEncoder, "_make_contract", lambda _: contract)
    assert facts(started(PreferenceDataModule, sources)) == facts(first)


def chatml(extra: str = "<|a|>") -> Tokenizer:
    tokenizer = tiny_tokenizer(eos="<|im_end|>", extra=["<|im_start|>", "<|end|>", extra])
    tokenizer.chat_template = CHATML
    return tokenizer


def test_entry_depends_on_all_that_examples_depend_on(
    write_lines: Writer, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = write_lines(*pairs()[6:])
    usual = {"sources": [DataSource(path)], "tokenizer": chatml(), "chat_template": "tokenizer"}

    def new_entries(**changes: Any) -> int:
        before = entries(folder)
        started(DemonstrationDataModule, **{**usual, **changes})
        return len(entries(folder) - before)

    assert (new_entries(), new_entries()) == (2, 0)
    chatml().save_pretrained(tmp_path / "saved")
    assert new_entries(tokenizer=str(tmp_path / "saved")) == 0
    changes: dict[str, dict[str, Any]] = {
        "tokenizer": {"tokenizer": chatml("<|b|>")},
        "template": {"chat_template": "hh"},
        "eos_token": {"eos_token": "<|end|>"},
        "max_length": {"max_length": 63},
        "max_prompt_length": {"max_prompt_length": 50},
        "train_on": {"train_on": "all"},
        "on_bad_record": {"on_bad_record": "error"},
        "seed": {"seed": 1},
        "val_fraction": {"val_fraction": 0.5},
        "weight": {"sources": [DataSource(path, weight=2)]},
        "name": {"sources": [DataSource(path, name="other")]},
        "format": {"sources": [DataSource(path, format="pairs")]},
        "columns": {"sources": [DataSource(path, columns={"prompt": "prompt"})]},
    }
    assert {name: new_entries(**c) for name, c in changes.items()} == dict.fromkeys(changes, 2)
    text, stat = Path(path).read_text("utf-8"), os.stat(path)
    Path(path).write_text(text.replace("yes 7", "yes 8"), "utf-8")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert new_entries() == 2
    monkeypatch.setattr(cache, "_hash_code", lambda: "another version")
    assert new_entries() == 2


@pytest.mark.parametrize("rows", [list, tuple, datasets.Dataset.from_list])
def test_rows_in_memory_are_cached(rows: Callable[[Any], Any], folder: Path) -> None:
    data = pairs()[6:]

    def start(given: Any) -> Any:
        return started(PreferenceDataModule, [DataSource(given)], val_fraction=0)

    assert facts(start(rows(data))) == facts(start(rows(data)))
    assert len(entries(folder)) == 1
    start(rows([{**data[0], "chosen": "changed"}, *data[1:]]))
    assert len(entries(folder)) == 2


def test_renamed_columns_are_other_rows(folder: Path) -> None:
    rows = datasets.Dataset.from_list(pairs()[6:])
    first = started(PreferenceDataModule, [DataSource(rows)], val_fraction=0)
    renamed = DataSource(rows.rename_columns({"chosen": "rejected", "rejected": "chosen"}))
    swapped = started(PreferenceDataModule, [renamed], val_fraction=0)
    pair = first.examples["train"][0]
    expected = pair._replace(chosen=pair.rejected, rejected=pair.chosen)
    assert plain(swapped.examples["train"][0]) == plain(expected)


def test_rows_that_are_read_once_only_are_not_cached(folder: Path) -> None:
    data = started(PreferenceDataModule, [DataSource(row for row in pairs())], val_fraction=0)
    assert len(data.examples["train"]) == 9
    assert not entries(folder)


def test_fields_that_are_not_json_reach_rewards_unchanged(folder: Path) -> None:
    rows = [{"prompt": f"{i}?", "spans": (i, i + 1)} for i in range(4)]
    data = started(PromptDataModule, [DataSource(rows)], val_fraction=0)
    assert [example.fields for example in data.examples["train"]] == rows
    assert not entries(folder)


def test_mapped_rows_follow_their_function(
    write_lines: Writer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(*pairs()[6:])
    monkeypatch.syspath_prepend(tmp_path)
    for number, answer in enumerate(("first", "first", "second")):
        # the function itself stays as it is; what it calls does not
        (tmp_path / "cache_map.py").write_text(
            f"def answer(): return {answer!r}\n"
            "def change(row): return {**row, 'chosen': answer()}\n"
        )
        monkeypatch.delitem(sys.modules, "cache_map", raising=False)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        started(PreferenceDataModule, [DataSource(path, map="cache_map:change")], val_fraction=0)
        assert len(entries(folder)) == (1, 1, 2)[number]


def test_bad_record_raises_and_leaves_nothing(write_lines: Writer, folder: Path) -> None:
    path = write_lines(*pairs()[2:])
    with pytest.raises(RecordError, match=r"data\.jsonl:1: a turn contains the text of the EOS"):
        started(PreferenceDataModule, [DataSource(path)], on_bad_record="error")
    assert not entries(folder)
    with pytest.raises(ValueError, match="no example is left of"):
        started(PreferenceDataModule, [DataSource(path)], max_length=3)
    assert not entries(folder)


def test_bad_record_of_a_worker_is_reported(
    write_lines: Writer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_RECORDS_PER_WORKER", 10)
    monkeypatch.setattr(cache, "_count_processors", lambda: 2)
    path = write_lines(*pairs(40)[6:], pairs()[2])
    with pytest.raises(RecordError, match=r"data\.jsonl:35: a turn contains the text of the EOS"):
        started(PreferenceDataModule, [DataSource(path)], on_bad_record="error", val_fraction=0)
    assert not entries(folder)


def test_folder_that_cannot_be_written_costs_the_cache_only(
    write_lines: Writer, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file")
    data = started(PreferenceDataModule, [DataSource(write_lines(*pairs()))], val_fraction=0)
    assert len(data.examples["train"]) == 9
    assert caplog.text.count("cannot be cached there") == 1
    assert "set HF_DATASETS_CACHE" in caplog.text


def flip_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: flip_bit(entry / "rows_0.arrow"),
        lambda entry: flip_bit(entry / "report.json"),
        lambda entry: os.truncate(entry / "rows_0.arrow", 2000),
        lambda entry: os.truncate(entry / "report.json", 10),
        lambda entry: (entry / "rows_0.arrow").unlink(),
        lambda entry: (entry / "report.json").write_text("[1]"),
    ],
    ids=["rows", "report", "cut rows", "cut report", "no rows", "other report"],
)
def test_damaged_entry_is_named_and_encoded_again(
    write_lines: Writer, folder: Path, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sources = [DataSource(write_lines(*pairs()))]
    expected = facts(started(PreferenceDataModule, sources, val_fraction=0))
    (entry,) = folder.iterdir()
    damage(entry)
    caplog.clear()
    assert facts(started(PreferenceDataModule, sources, val_fraction=0)) == expected
    assert caplog.text.count(f"{entry}: the encoded data are damaged (") == 1
    caplog.clear()
    assert facts(started(PreferenceDataModule, sources, val_fraction=0)) == expected
    assert "are damaged" not in caplog.text


def test_leftovers_of_a_day_ago_are_deleted(write_lines: Writer, folder: Path) -> None:
    old, new = (folder / f".train-abc.{name}.partial" for name in ("old", "new"))
    for path in (old, new):
        path.mkdir(parents=True)
        (path / "rows_0.arrow").write_text("half")
    os.utime(old, (0, 0))
    started(PreferenceDataModule, [DataSource(write_lines(*pairs()))], val_fraction=0)
    assert new.name in entries(folder)
    assert len(entries(folder)) == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_killed_worker_ends_the_start_and_an_interrupt_does_not(
    number: int, write_lines: Writer, monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    parent, encode = os.getpid(), cache.encode_records

    def struck(*share: Any) -> Any:
        with suppress(FileExistsError):  # one worker only
            if os.getpid() != parent:
                (tmp_path / "struck").touch(exist_ok=False)
                os.kill(os.getpid(), number)
        return encode(*share)

    monkeypatch.setattr(cache, "_RECORDS_PER_WORKER", 10)
    monkeypatch.setattr(cache, "_count_processors", lambda: 2)
    monkeypatch.setattr(cache, "encode_records", struck)
    sources = [DataSource(write_lines(*pairs(40)))]
    if number == signal.SIGINT:
        started(PreferenceDataModule, sources, val_fraction=0)
        assert len(entries(folder)) == 1
        return
    with pytest.raises(ValueError, match="train: a process that encodes the data was killed"):
        started(PreferenceDataModule, sources, val_fraction=0)
    assert entries(folder) == set()


RUN = """
import sys
from lit_rlhf.data import DataSource, cache
from lit_rlhf.data.datamodules import PreferenceDataModule
from tests.support.tiny_tokenizers import tiny_tokenizer
cache.MIN_CACHED_RECORDS = 1
cache._RECORDS_PER_WORKER = 10
cache._count_processors = lambda: 2
data = PreferenceDataModule(
    [DataSource(sys.argv[1])],
    tokenizer=tiny_tokenizer(),
    chat_template="hh",
    max_length=64,
    on_bad_record="skip",
    val_fraction=0.3,
)
data.setup("fit")
print(type(data.examples["train"]).__name__, len(data.examples["train"]))
"""


@pytest.mark.slow
def test_kill_while_encoding_leaves_partial_entries_only(
    write_lines: Writer, folder: Path, tmp_path: Path
) -> None:
    path = write_lines(*pairs(3000))
    environment = {**os.environ, "HF_DATASETS_CACHE": str(folder.parent)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)  # for the tests' own modules
    command = [sys.executable, "-c", RUN, path]
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    while not any(folder.glob(".*/rows*")):  # the workers write
        assert process.poll() is None
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    with suppress(ProcessLookupError):
        while True:  # a worker or their manager lives
            os.killpg(process.pid, 0)
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert all(name.endswith(".partial") for name in entries(folder))
    outputs = []
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        written = {name for name in entries(folder) if not name.startswith(".")}
        assert sorted(name.split("-")[0] for name in written) == ["train", "val"]
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("StoredExamples 2")
