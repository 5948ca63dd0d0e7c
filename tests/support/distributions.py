"""Builds the project's distributions, and reads what they require."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def build(project: Path, target: str, out: Path) -> Path:
    """Build without the network, since hatchling is installed, and without touching the tree."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    (built,) = out.iterdir()
    return built


ROOT = Path(__file__).resolve().parents[2]


PROJECTS = {"root": ROOT / "pyproject.toml", "callbacks": ROOT / "callbacks" / "pyproject.toml"}


def project(name: str) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads(PROJECTS[name].read_text(encoding="utf-8"))["project"]
    return table


OWN = {"lit-rlhf", "lit-callbacks"}  # an extra that names others


def requirements(name: str, without: frozenset[str] = frozenset()) -> list[Requirement]:
    table = project(name)
    lines = list(table["dependencies"])
    for extra, needs in table.get("optional-dependencies", {}).items():
        lines += [] if extra in without else needs
    return [Requirement(line) for line in lines]


def core_requirements(name: str) -> list[Requirement]:
    return requirements(name, frozenset(project(name).get("optional-dependencies", {})))


def reachable(seeds: list[Requirement]) -> Iterator[str]:
    """Names of the installed distributions that `seeds` bring in, themselves included."""
    waiting = [(seed, "") for seed in seeds]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        yield name
        for wanted in {"", *requirement.extras}:
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                waiting += [(Requirement(line), wanted) for line in needs]
