"""Judge the collapse detector on families of runs, beside simpler detectors.

python -m experiments detector run    # replays all runs, writes the results
python -m experiments detector page   # writes the tables
"""

from __future__ import annotations

import json
from typing import Any

from experiments.detector.criterion import CHOOSING, GRID
from experiments.detector.early import read_results
from experiments.detector.families import (
    Trajectory,
    describe,
    exploit_runs,
    gather,
    lab_runs,
    paper_runs,
    quickstart_runs,
    smollm2_runs,
    trl_runs,
)
from experiments.detector.judging import choose, judge_families
from experiments.detector.page import RESULT, format_tables, read_rows
from experiments.detector.replaying import find_flags, find_suspicion
from experiments.detector.rules import (
    KL_PER_RESPONSE,
    KL_PER_TOKEN,
    documented_rules,
    exceeds_kl,
)
from experiments.detector.synthetic import synthetic_runs
from experiments.frame import Documents
from lit_rlhf.files import write_text

TABLES = RESULT.with_suffix(".md")


def replay(run: Trajectory) -> dict[str, Any]:
    """The flags of every detector on one run, under each of its settings."""
    return {
        **describe(run),
        "every": run.every,
        "steps": len(run.steps),
        "ours": find_flags(run, GRID),
        "suspicious": [find_suspicion(run)],
        "KL": [
            *(exceeds_kl(run, threshold, False) for threshold in KL_PER_RESPONSE),
            *(exceeds_kl(run, threshold, True) for threshold in KL_PER_TOKEN),
        ],
        "rules": [documented_rules(run)],
    }


def run() -> None:
    """Replay all runs, and write what each detector says of each to the results."""
    groups = (lab_runs(), exploit_runs(), quickstart_runs(), smollm2_runs(), trl_runs())
    groups += (paper_runs(), synthetic_runs())
    rows = [replay(trajectory) for runs in gather(groups).values() for trajectory in runs]
    write_text(RESULT, "".join(json.dumps(row) + "\n" for row in rows))
    shipped = choose(rows, "ours", CHOOSING)
    print(f"best on all families: {GRID[shipped]}")
    for line in judge_families(rows):
        print(line)


def documents() -> Documents:
    """All tables, from the committed results."""
    return {TABLES: format_tables(read_rows(), read_results())}


COMMANDS = (run,)
