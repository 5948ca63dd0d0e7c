import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lit_rlhf.errors import UserError
from lit_rlhf.tools.evaluation.labels import Comparison, Label, read_labels
from lit_rlhf.tools.labelling import LabelStore
from lit_rlhf.tools.labelling.store import Task
from tests.support.labelling import make_comparisons

COMPARISONS = make_comparisons(4)


def make_label(comparison: Comparison, annotator: str = "ann", **values: Any) -> Label:
    return Label(
        comparison=comparison.key,
        prompt=comparison.prompt,
        response_a=comparison.response_a,
        response_b=comparison.response_b,
        policy_a=comparison.policy_a,
        policy_b=comparison.policy_b,
        text_hash=comparison.text_hash,
        annotator=annotator,
        policies={},
        **{"choice": "b", **values},
    )


def test_label_is_forced_to_disk_before_add_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "labels.jsonl"
    store = LabelStore(path, COMPARISONS)
    contents = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        contents.append(path.read_bytes())
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    label = make_label(COMPARISONS[0])
    assert store.add(label)
    assert contents == [label.as_line()]
    store.close()


def test_label_of_a_text_that_was_edited_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    label = make_label(COMPARISONS[0])
    path.write_bytes(label.as_line().replace(b"good 0", b"good 1"))
    with pytest.raises(
        ValueError, match=r"labels.jsonl:1: field 'text_hash': the prompt or a resp"
    ):
        read_labels(str(path))
    path.write_bytes(replace(label, response_b="good 1", text_hash="").as_line())
    assert len(read_labels(str(path))) == 1


def test_label_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    lines = [make_label(COMPARISONS[0]), make_label(COMPARISONS[1]), make_label(COMPARISONS[0])]
    a.write_bytes(lines[0].as_line() + replace(lines[0], repeat=True).as_line())
    b.write_bytes(lines[1].as_line() + lines[2].as_line())
    assert len(read_labels(str(a))) == 2
    with pytest.raises(ValueError, match=r"b.jsonl:2: a label of 'ann' that an earlier line has"):
        read_labels(str(a), str(b))


def test_labels_are_read_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    odd = Comparison(
        prompt=COMPARISONS[0].prompt,
        response_a="half of a pair \ud800 and \u202e",
        response_b="<b>\x00\r\n",
        policy_a="sft",
        policy_b="ppo",
    )
    store = LabelStore(path, [odd])
    label = make_label(odd, remark="schön 好", seconds=1.5, left="b", strength="clearly")
    store.add(label)
    store.close()
    assert read_labels(str(path)) == [label]
    again = LabelStore(path, [odd])
    assert again.labels == [label]
    assert again.find(Task("ann", odd.key)) == label
    assert not again.add(label)
    again.close()


def test_label_of_the_same_task_is_stored_once(tmp_path: Path) -> None:
    store = LabelStore(tmp_path / "labels.jsonl", COMPARISONS)
    assert store.add(make_label(COMPARISONS[0]))
    assert not store.add(make_label(COMPARISONS[0], choice="a"))
    assert store.add(make_label(COMPARISONS[0], repeat=True))
    assert store.add(make_label(COMPARISONS[0], "bob"))
    assert store.add(make_label(COMPARISONS[1], None, choice="tie"))  # type: ignore[arg-type]
    assert not store.add(make_label(COMPARISONS[1], None, choice="tie"))  # type: ignore[arg-type]
    assert len(store.path.read_bytes().splitlines()) == 4
    store.close()


def test_incomplete_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    whole = make_label(COMPARISONS[0]).as_line()
    path.write_bytes(whole + make_label(COMPARISONS[1]).as_line()[:-20])
    store = LabelStore(path, COMPARISONS)
    assert [label.comparison for label in store.labels] == [COMPARISONS[0].key]
    assert path.read_bytes() == whole
    store.add(make_label(COMPARISONS[2]))
    assert len(read_labels(str(path))) == 2
    store.close()


@pytest.mark.parametrize("content", [b'{"prompt": "mine"}', b"my notes\nwithout a last line end"])
def test_file_that_has_no_labels_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"mine\.jsonl: expected a file of labels, got one"):
        LabelStore(path, COMPARISONS)
    assert path.read_bytes() == content
    (tmp_path / "link.jsonl").symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        LabelStore(tmp_path / "link.jsonl", COMPARISONS)
    assert path.read_bytes() == content


def test_labels_of_changed_responses_are_refused_with_both_hashes(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    store = LabelStore(path, COMPARISONS)
    store.add(make_label(COMPARISONS[1]))
    store.close()
    changed = Comparison(**{**vars_of(COMPARISONS[1]), "response_b": "another"})
    with pytest.raises(ValueError, match=f"{changed.text_hash}.*{COMPARISONS[1].text_hash}"):
        LabelStore(path, [COMPARISONS[0], changed])
    LabelStore(path, [COMPARISONS[0]]).close()


def vars_of(comparison: Comparison) -> dict[str, Any]:
    names = ("prompt", "response_a", "response_b", "policy_a", "policy_b")
    return {name: getattr(comparison, name) for name in names}


def test_removed_label_leaves_the_others_and_the_file_open(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    store = LabelStore(path, COMPARISONS)
    labels = [make_label(comparison) for comparison in COMPARISONS]
    for label in labels[:3]:
        store.add(label)
    task = Task("ann", COMPARISONS[1].key)
    assert store.remove(task) == labels[1]
    assert store.remove(task) is None
    assert path.read_bytes() == labels[0].as_line() + labels[2].as_line()
    store.add(labels[3])
    store.add(labels[1])
    assert read_labels(str(path)) == [labels[0], labels[2], labels[3], labels[1]]
    store.close()
    assert {file.name for file in tmp_path.iterdir()} == {"labels.jsonl"}


def test_full_disk_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "labels.jsonl"
    store = LabelStore(path, COMPARISONS)
    store.add(make_label(COMPARISONS[0]))
    before = path.read_bytes()
    real = os.write
    calls = []

    def write(descriptor: int, data: bytes) -> int:
        if calls:
            raise OSError(errno.ENOSPC, "No space left on device")
        calls.append(data)
        return real(descriptor, data[:10])

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(UserError, match=r"could not be saved: .*No space left"):
        store.add(make_label(COMPARISONS[1]))
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert store.add(make_label(COMPARISONS[1]))
    assert [json.loads(line)["comparison"] for line in path.read_bytes().splitlines()] == [
        COMPARISONS[0].key,
        COMPARISONS[1].key,
    ]
    store.close()
