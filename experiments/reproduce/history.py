"""The verdicts of earlier rules on today's results, by the code that stood then.

`git show` gives the claims of a version as they were committed, so this needs the repository's
history. What comes out is kept beside the results, for the page.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from experiments.reproduce.judging import Runs
from experiments.reproduce.table import VANILLA


class Version(NamedTuple):
    """Earlier rules.

    Attributes:
        number: Number of the version.
        date: When it was committed.
        commit: The commit.
        text: What it was, and what was known by then.
        modules: Its modules by the names that they had, each behind those that it imports.
        judge: The one of them that has the function `judge`.
    """

    number: int
    date: str
    commit: str
    text: str
    modules: tuple[str, ...] = ("benchmarks.reproduce.table", "benchmarks.reproduce.claims")
    judge: str = "benchmarks.reproduce.claims"


VERSIONS = (
    Version(
        1,
        "2026-11-22 19:17",
        "49af958",
        "a comparison holds if it does in two thirds of the seeds, by any amount; a claim is "
        "confirmed by all of its comparisons, and holds partly by any. Before any run",
    ),
    Version(
        2,
        "2026-11-22 22:22",
        "956d38a",
        "looser in four claims: 12 with a KL weight of 0.6 for the paper's 0.05, 30 by whether all "
        "collapse, 33 and 34 by the peak of gold instead of its end. Before the first result of "
        "these seeds, and after trials with seeds 0 to 2 and 20 to 23",
    ),
    Version(
        3,
        "2026-11-24",
        "299b894b",
        "a 95 % t interval of the paired effect against the claim's margin, or undecided; premises "
        "first; 33 and 34 by the end of gold, too. After seeds 40 to 44 had been seen; runs of "
        "later seeds carry its hash, d9ad7dc8c932",
        modules=(
            "experiments.judging",
            "experiments.reproduce.table",
            "experiments.reproduce.judging",
            "experiments.reproduce.claims",
        ),
        judge="experiments.reproduce.judging",
    ),
)


def judge_by(version: Version, results: Mapping[int, Runs]) -> list[str]:
    """The verdict of each claim under earlier rules.

    Args:
        version: The version.
        results: Results by seed.

    Raises:
        subprocess.CalledProcessError: If the commit is not there.
    """
    modules: dict[str, ModuleType] = {}
    for name in version.modules:
        modules[name] = _load(version, name, [*modules])
    claims = modules[version.modules[-1]].CLAIMS
    # a lambda of 0.9 had an arm of its own before it became the quickstart's
    renamed = {
        seed: {**runs, "vanilla-gae_lambda_0.9": runs.get(VANILLA.name, {})}
        for seed, runs in results.items()
    }
    judge = modules[version.judge].judge
    return [str(judge(claim, renamed).verdict) for claim in claims]


def _load(version: Version, name: str, imported: Sequence[str]) -> ModuleType:
    """Load a module of a version, with the modules of that version that it imports.

    Args:
        version: The version.
        name: The name that the module had.
        imported: Names of the modules of the version that are loaded.
    """
    shown = ["git", "show", f"{version.commit}:{name.replace('.', '/')}.py"]
    folder = Path(__file__).parent
    source = subprocess.run(shown, cwd=folder, check=True, capture_output=True, text=True).stdout
    source = source.replace("lit_rlhf.lab", "lit_rlhf.tools.lab")  # it has moved since
    for other in imported:
        package, _, last = other.rpartition(".")
        source = source.replace(
            f"from {package} import {last}", f"import {_rename(version, other)} as {last}"
        )
        source = source.replace(other, _rename(version, other))
    module = ModuleType(_rename(version, name))
    sys.modules[module.__name__] = module
    exec(compile(source, f"{version.commit}:{name}", "exec"), module.__dict__)
    return module


def _rename(version: Version, name: str) -> str:
    return f"{name.replace('.', '_')}_{version.number}"
