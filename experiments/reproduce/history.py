"""The verdicts of earlier rules on today's results, by the code that stood then.

`git show` gives the claims of a version as they were committed, so this needs the repository's
history. What comes out is kept beside the results, for the page.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
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
    """

    number: int
    date: str
    commit: str
    text: str


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
)


def judge_by(version: Version, results: Mapping[int, Runs]) -> list[str]:
    """The verdict of each claim under earlier rules.

    Args:
        version: The version.
        results: Results by seed.

    Raises:
        subprocess.CalledProcessError: If the commit is not there.
    """
    _load(version, "table")
    claims = _load(version, "claims")
    # a lambda of 0.9 had an arm of its own before it became the quickstart's
    renamed = {
        seed: {**runs, "vanilla-gae_lambda_0.9": runs.get(VANILLA.name, {})}
        for seed, runs in results.items()
    }
    return [str(claims.judge(claim, renamed).verdict) for claim in claims.CLAIMS]


def _load(version: Version, name: str) -> ModuleType:
    shown = ["git", "show", f"{version.commit}:benchmarks/reproduce/{name}.py"]
    folder = Path(__file__).parent
    source = subprocess.run(shown, cwd=folder, check=True, capture_output=True, text=True).stdout
    table = f"reproduce_table_{version.number}"  # its own; the lab has moved since
    for old, new in (
        ("lit_rlhf.lab", "lit_rlhf.tools.lab"),
        ("from benchmarks.reproduce import table", f"import {table} as table"),
        ("benchmarks.reproduce.table", table),
    ):
        source = source.replace(old, new)
    module = ModuleType(f"reproduce_{name}_{version.number}")
    sys.modules[module.__name__] = module
    exec(compile(source, f"{version.commit}:{name}.py", "exec"), module.__dict__)
    return module
