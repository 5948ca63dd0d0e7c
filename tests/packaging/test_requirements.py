"""pyproject.toml, callbacks/pyproject.toml and the files of requirements/ agree."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.support.distributions import (
    OWN,
    PROJECTS,
    ROOT,
    core_requirements,
    project,
    reachable,
    requirements,
)

# extras that serve the work on the project; no package imports what only they bring in
DEVELOPMENT = {"test", "dev"}


def pins() -> dict[str, Version]:
    lines = (ROOT / "requirements/constraints.txt").read_text(encoding="utf-8").splitlines()
    parts = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in parts}


pinned_environment = pytest.mark.skipif(
    any(Version(importlib.metadata.version(n)) != pins()[n] for n in ("transformers", "datasets")),
    reason="the installed packages are not the pinned ones",
)


def imported_packages(folder: Path) -> set[str]:
    names: set[str] = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names)


def test_callbacks_accept_whatever_the_root_accepts() -> None:
    root_specifiers = {
        requirement.name: requirement.specifier for requirement in requirements("root")
    }
    for requirement in requirements("callbacks"):
        if requirement.name == "lit-callbacks":
            continue
        lowest = max(
            Version(part.version)
            for part in root_specifiers[requirement.name]
            if part.operator == ">="
        )
        assert requirement.specifier.contains(lowest), str(requirement)
        others = {part for part in requirement.specifier if part.operator != ">="}
        assert others <= set(root_specifiers[requirement.name]), str(requirement)


def test_callbacks_need_nothing_that_the_root_lacks() -> None:
    root_names = {requirement.name for requirement in core_requirements("root")}
    callbacks_names = {
        requirement.name for requirement in requirements("callbacks", frozenset({"test"}))
    }
    assert callbacks_names <= root_names


def test_distributions_and_packages_have_one_version() -> None:
    for key in ("version", "requires-python"):
        assert project("callbacks")[key] == project("root")[key]
    version = project("root")["version"]
    (callbacks_requirement,) = (r for r in core_requirements("root") if r.name == "lit-callbacks")
    assert str(callbacks_requirement.specifier) == f"=={version}"
    for package in ("lit_rlhf", "callbacks/lit_callbacks"):
        text = (ROOT / package / "__init__.py").read_text(encoding="utf-8")
        assert f'__version__ = "{version}"' in text


@pytest.mark.parametrize("name", PROJECTS)
def test_requirements_have_bounds_and_these_have_reasons(name: str) -> None:
    unbound = [r.name for r in requirements(name) if not r.specifier and r.name not in OWN]
    assert unbound == []
    lines = PROJECTS[name].read_text(encoding="utf-8").splitlines()
    bounds = [line for line in lines if re.match(r'\s*(requires-python = )?"[^"]*[<>=]=?\d', line)]
    assert len(bounds) >= len([r for r in requirements(name) if r.specifier])
    assert [line for line in bounds if not re.search(r'",? # \S.{10,}', line)] == []


def test_constraints_are_exact_pins_that_fit_every_requirement() -> None:
    lines = (ROOT / "requirements/constraints.txt").read_text(encoding="utf-8").splitlines()
    pin = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][0-9a-z.]*")
    assert [line for line in lines if not line.startswith("#") and not pin.fullmatch(line)] == []
    pinned, everything = pins(), requirements("root") + requirements("callbacks")
    # vLLM asks for older libraries than the pins, and so for an environment of its own
    others = [requirement for requirement in everything if requirement.name not in {*OWN, "vllm"}]
    versions = [pinned.get(canonicalize_name(r.name), Version("0")) for r in others]
    pairs = zip(others, versions, strict=True)
    assert [str(r) for r, version in pairs if not r.specifier.contains(version)] == []


FROM_TORCH = ("nvidia-", "cuda-", "triton")  # torch pins them, see constraints.txt


@pinned_environment
def test_constraints_pin_what_the_requirements_bring_in() -> None:
    names = {name for name in reachable(requirements("root")) if not name.startswith(FROM_TORCH)}
    assert len(names) > 50
    assert names - pins().keys() <= OWN


def hashed(file: str) -> set[str]:
    """The pins that a file has hashes of."""
    text = (ROOT / file).read_text(encoding="utf-8").partition("\n")[2]
    entry = re.compile(r"(\S+==\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n")
    assert entry.sub("", text) == ""
    return {match[1] for match in entry.finditer(text)}


@pinned_environment
def test_hashes_are_of_the_pins_that_the_core_brings_in() -> None:
    needs = {n for n in reachable(core_requirements("root")) if not n.startswith(FROM_TORCH)}
    pinned = {f"{name}=={pins()[name]}" for name in needs - {*OWN, "torch"}}
    assert hashed("requirements/hashes.txt") == pinned
    assert {"pip-audit", "uv"} <= {
        tool.partition("==")[0] for tool in hashed("requirements/tool_hashes.txt")
    }
    tools = hashed("requirements/build_hashes.txt")
    assert tools <= {f"{name}=={version}" for name, version in pins().items()}
    assert {"build", "hatchling", "setuptools", "wheel"} <= {
        tool.partition("==")[0] for tool in tools
    }


@pytest.mark.skipif(sys.platform != "linux", reason="the lists of hashes are of Linux's archives")
def test_what_builds_the_packages_is_not_fetched_at_their_installation() -> None:
    command = ["make", "--dry-run", "--always-make", "install", "VENV=none"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (editable,) = [line for line in done.stdout.splitlines() if "-e ./callbacks" in line]
    assert "--no-build-isolation" in editable
    for file in ("pyproject.toml", "callbacks/pyproject.toml"):
        # else hatchling asks for a further package
        build = tomllib.loads(Path(ROOT, file).read_text("utf-8"))["tool"]["hatch"]["build"]
        assert build["dev-mode-dirs"] == ["."]


@pytest.mark.parametrize("name", ["hashes.txt", "build_hashes.txt"])
def test_installation_is_out_of_date_once_a_hash_changes(tmp_path: Path, name: str) -> None:
    for file in ("Makefile", "pyproject.toml"):
        shutil.copy(Path(ROOT, file), tmp_path)
    shutil.copytree(Path(ROOT, "requirements"), tmp_path / "requirements")
    (tmp_path / "callbacks").mkdir()
    shutil.copy(Path(ROOT, "callbacks/pyproject.toml"), tmp_path / "callbacks")
    stamps = [tmp_path / f".venv/.installed-{extra}" for extra in ("test", "user", "dev")]
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for path in (tmp_path / ".venv/bin/python", *stamps):
        path.touch()

    def is_current(stamp: Path) -> bool:
        # make itself may run the tests, with another folder
        words = ["make", "--question", str(stamp.relative_to(tmp_path)), "VENV=.venv"]
        return subprocess.run(words, cwd=tmp_path, check=False).returncode == 0

    assert all(map(is_current, stamps))
    later = stamps[0].stat().st_mtime + 10
    os.utime(tmp_path / "requirements" / name, (later, later))
    assert not any(map(is_current, stamps))


def test_what_is_installed_without_hashes_comes_by_the_pins() -> None:
    """A version by itself names an archive, but does not tell whether it is the one of then."""
    workflows = (ROOT / ".github/workflows").glob("*.yml")
    for file in (*workflows, ROOT / "Dockerfile"):
        for line in file.read_text("utf-8").splitlines():
            if re.search(r"\bpip install\b", line) and "uv pip" not in line:
                hashes = "--require-hashes" in line
                assert hashes or "constraints.txt" in line or "--no-deps" in line, (file, line)


@pytest.mark.parametrize(
    ("name", "folder", "own_packages"),
    [
        ("root", ROOT / "lit_rlhf", {"lit_rlhf", "lit_callbacks"}),
        ("callbacks", ROOT / "callbacks" / "lit_callbacks", {"lit_callbacks"}),
    ],
)
def test_imports_of_a_package_are_declared(name: str, folder: Path, own_packages: set[str]) -> None:
    distributions = importlib.metadata.packages_distributions()
    # what only an extra brings in is imported where it is used
    required = requirements(name, frozenset(DEVELOPMENT))
    declared = {canonicalize_name(requirement.name) for requirement in required}
    undeclared = [
        package
        for package in sorted(imported_packages(folder) - own_packages)
        if not declared & {canonicalize_name(d) for d in distributions.get(package, [package])}
    ]
    assert undeclared == []


def test_training_page_lists_the_extras() -> None:
    section = (ROOT / "docs/training.md").read_text("utf-8").split("## Extras")[1].split("\n## ")[0]
    table = "".join(line for line in section.splitlines() if line.startswith("| `"))
    extras = set(project("root")["optional-dependencies"])
    assert set(re.findall(r"`([a-z]+)`", table)) == extras - DEVELOPMENT - {"docs"}
