"""The contents of the built wheels and source archives."""

from __future__ import annotations

import tarfile
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

from tests.support.distributions import build

ROOT = Path(__file__).resolve().parents[2]


def packages(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    return {top for top in tops if not top.endswith(".dist-info")}


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_string(archive.read(name).decode())


@pytest.fixture(scope="module")
def root_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "wheel", tmp_path_factory.mktemp("root_wheel"))


@pytest.fixture(scope="module")
def root_sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "sdist", tmp_path_factory.mktemp("root_sdist"))


@pytest.fixture(scope="module")
def callbacks_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT / "callbacks", "wheel", tmp_path_factory.mktemp("callbacks_wheel"))


def test_wheels_hold_sources_and_license(root_wheel: Path, callbacks_wheel: Path) -> None:
    callbacks = (callbacks_wheel, ROOT / "callbacks" / "lit_callbacks")
    for wheel, package in ((root_wheel, ROOT / "lit_rlhf"), callbacks):
        assert packages(wheel) == {package.name}  # so uninstalling one keeps the other
        with zipfile.ZipFile(wheel) as archive:
            names = set(archive.namelist())
        expected = {
            file.relative_to(package.parent).as_posix()
            for file in package.rglob("*")
            if file.suffix in {".py", ".typed", ".html", ".css", ".js"}
        }
        assert f"{package.name}/py.typed" in expected
        assert expected <= names
        assert metadata(wheel)["License-Expression"] == "Apache-2.0"
        assert metadata(wheel).get_all("License-File") == ["LICENSE"]


def test_configurations_are_in_the_root_wheel(root_wheel: Path) -> None:
    with zipfile.ZipFile(root_wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("lit_rlhf/configs/")}
    files = {p.relative_to(ROOT).as_posix() for p in (ROOT / "configs").rglob("*.yaml")}
    assert names == {f"lit_rlhf/{file}" for file in files}


def test_source_archive_builds_a_wheel(root_sdist: Path, root_wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(root_sdist) as archive:
        # Python before 3.11.4 has no filters and ignores the attribute
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path)
    (source,) = tmp_path.iterdir()
    (tmp_path / "wheel").mkdir()
    wheel = build(source, "wheel", tmp_path / "wheel")

    def contents(file: Path) -> dict[str, int]:
        with zipfile.ZipFile(file) as archive:
            return {info.filename: info.CRC for info in archive.infolist()}

    assert contents(wheel) == contents(root_wheel)


def test_source_archive_holds_what_the_tests_need_and_no_data(root_sdist: Path) -> None:
    with tarfile.open(root_sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {
        "requirements/constraints.txt",
        "Makefile",
        "callbacks/pyproject.toml",
        "tests/conftest.py",
    }
    assert needed <= names
    tops = {name.partition("/")[0] for name in names}
    assert not tops & {"shared", "runs", "outputs"}
    assert [top for top in tops if top.startswith(".venv")] == []
