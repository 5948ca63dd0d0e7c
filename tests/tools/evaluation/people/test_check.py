import hashlib
from pathlib import Path

import pytest

from lit_rlhf.files import hash_model
from lit_rlhf.tools.evaluation.people import check_labelled_policies
from tests.support.evaluation_folders import Folders, write_lines
from tests.support.labels import make_label


def test_labels_fit_the_policies_that_they_are_about(folders: Folders) -> None:
    hashes = {"sft": hash_model(folders.sft), "ppo": None}
    labels = [make_label("hi", "a", policies=hashes)]
    assert check_labelled_policies(labels, [folders.sft, folders.ppo]) == "sft"


def test_labels_of_a_policy_that_has_changed_are_refused_with_both_hashes(
    folders: Folders,
) -> None:
    labels = [make_label("hi", "a", policies={"sft": "0" * 64})]
    with pytest.raises(ValueError, match=f"{hash_model(folders.sft)}.*{'0' * 64}"):
        check_labelled_policies(labels, [folders.sft, folders.ppo])


def test_labels_of_other_policies_are_refused(folders: Folders) -> None:
    with pytest.raises(ValueError, match="of the labels, ppo, sft, got ppo"):
        check_labelled_policies([make_label("hi", "a")], [folders.ppo])


def test_labels_of_changed_responses_are_refused_with_both_hashes(tmp_path: Path) -> None:
    files = [
        write_lines(tmp_path / f"{name}.jsonl", [{"prompt": "hi", "response": text}])
        for name, text in (("sft", "short"), ("ppo", "another"))
    ]
    theirs, now = (hashlib.sha256(t.encode()).hexdigest() for t in ("a longer one", "another"))
    with pytest.raises(ValueError, match=f"of 'ppo'.*{theirs}.*{now}"):
        check_labelled_policies([make_label("hi", "a")], files)
    fitting = [make_label("hi", "a", response_b="another")]
    assert check_labelled_policies(fitting, files) == "sft"
