"""Manifests: what they keep, and weights that are other ones than they list."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from lit_rlhf.files import (
    MANIFEST,
    check_model_files,
    code_versions,
    find_changed_files,
    hash_model,
    listed_files,
    manifest,
    read_manifest,
    write_manifest,
)

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "critic").mkdir()
    for name in (WEIGHTS, "critic/model.safetensors", "config.json"):
        (tmp_path / name).write_text(name)
    write_manifest(tmp_path, {"made": {"updates": 3}})
    return tmp_path


def test_manifest_lists_size_and_hash_of_every_file_but_itself(folder: Path) -> None:
    write_manifest(folder, {"more": 1})  # what was there is kept
    manifest = json.loads((folder / MANIFEST).read_text())
    assert (manifest["made"], manifest["more"]) == ({"updates": 3}, 1)
    files = ("config.json", "critic/model.safetensors", WEIGHTS)
    expected = {n: [len(n), hashlib.sha256(n.encode()).hexdigest()] for n in files}
    assert manifest["files"] == listed_files(folder) == expected


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
@pytest.mark.parametrize("damage", ["one byte", "gone"])
def test_changed_files_of_a_model_are_refused(folder: Path, name: str, damage: str) -> None:
    check_model_files(folder)
    (folder / "critic" / WEIGHTS).write_text("another model's")
    check_model_files(folder)
    if damage == "gone":
        (folder / name).unlink()
    else:
        (folder / name).write_text(name.replace("o", "n", 1))
        os.utime(folder / name, ns=(1, 1))
    with pytest.raises(ValueError, match=r"expected the files that .*lit_rlhf\.json lists"):
        check_model_files(folder)
    (folder / MANIFEST).unlink()
    check_model_files(folder)


def test_manifest_of_another_program_is_as_good_as_none(tmp_path: Path) -> None:
    for content in ("[]", '{"files": []}', '{"files": 3, "made": 4, "versions": []}'):
        (tmp_path / MANIFEST).write_text(content)
        assert read_manifest(tmp_path) == listed_files(tmp_path) == {}
        check_model_files(tmp_path)
    assert read_manifest(tmp_path / "nowhere") == {}


def test_damaged_list_lists_nothing(folder: Path) -> None:
    (folder / MANIFEST).write_text('{"files": {"model.safetensors": 3}}')
    check_model_files(folder)
    for damaged in ("{", "[" * 200_000):
        (folder / MANIFEST).write_text(damaged)
        assert read_manifest(folder) == {}
        with pytest.raises(ValueError, match=rf"expected JSON in .*{MANIFEST}, got a damaged"):
            check_model_files(folder)


def test_hash_of_a_model_tells_models_apart(folder: Path, tmp_path: Path) -> None:
    before = hash_model(folder)
    hashes = (f"{n} {hashlib.sha256(n.encode()).hexdigest()}" for n in ("config.json", WEIGHTS))
    assert before == hashlib.sha256("\n".join(hashes).encode()).hexdigest()
    (folder / "README.md").write_text("its card")
    assert hash_model(folder) == before
    for name in (WEIGHTS, "chat_template.jinja"):
        (folder / name).write_text("others")
        assert hash_model(folder) not in (before, None)
        before = hash_model(folder)
    assert hash_model("owner/name") is None


def test_versions_name_what_numbers_depend_on() -> None:
    assert {"python", "lit-rlhf", "torch", "lightning", "transformers"} <= code_versions().keys()


def test_files_that_are_not_listed_are_found_without_reading_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(find_changed_files(folder)) == []
    (folder / WEIGHTS).write_text("other")
    (folder / "critic/link").symlink_to("nowhere")
    assert list(find_changed_files(folder)) == [WEIGHTS, "critic/link"]
    (folder / MANIFEST).unlink()
    monkeypatch.setattr(manifest, "_size_and_hash", None)
    names = ["config.json", WEIGHTS, "critic/link", "critic/model.safetensors"]
    assert list(find_changed_files(folder)) == names
