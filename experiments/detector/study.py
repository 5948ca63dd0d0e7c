"""Judge the collapse detector on families of runs, beside simpler detectors.

python -m experiments detector run         # replays all runs, writes the results
python -m experiments detector calibrate   # replays them with calibrated thresholds
python -m experiments detector page        # writes the tables
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.detector.calibrating import CALIBRATION, calibrate_families
from experiments.detector.criterion import CHOOSING, GRID
from experiments.detector.early import read_results
from experiments.detector.families import (
    Trajectory,
    alignment_tax_runs,
    describe,
    exploit_runs,
    known_truth_runs,
    lab_runs,
    paper_runs,
    preference_runs,
    quickstart_runs,
    smollm2_runs,
    sums_runs,
    trl_runs,
)
from experiments.detector.foreign import DATA_VARIABLE, FOLDER, foreign_folder, foreign_runs
from experiments.detector.judging import choose, describe_scores
from experiments.detector.kinds import synthetic_runs
from experiments.detector.page import BEFORE_RESULT, RESULT, format_tables
from experiments.detector.replaying import find_all_flags, find_levels
from experiments.detector.rules import (
    KL_PER_RESPONSE,
    KL_PER_TOKEN,
    documented_rules,
    exceeds_kl,
)
from experiments.frame import Documents
from experiments.results_file import read_lines
from lit_rlhf.files import write_text

TABLES = RESULT.with_suffix(".md")


def replay(run: Trajectory) -> dict[str, Any]:
    """The flags of every detector on one run, under each of its settings."""
    levels = find_levels(run)
    return {
        **describe(run),
        "every": run.every,
        "steps": len(run.steps),
        "ours": find_all_flags(run, GRID),
        "suspicious": levels.suspicious,
        "changes": levels.changes,
        "changes_at_once": levels.changes_at_once,
        "KL": [
            *(exceeds_kl(run, threshold, False) for threshold in KL_PER_RESPONSE),
            *(exceeds_kl(run, threshold, True) for threshold in KL_PER_TOKEN),
        ],
        "rules": [documented_rules(run)],
    }


def gather_runs() -> list[Trajectory]:
    """All runs of all families."""
    groups = [
        lab_runs(),
        quickstart_runs(),
        exploit_runs(),
        trl_runs(),
        smollm2_runs(),
        known_truth_runs(),
        preference_runs(),
        alignment_tax_runs(),
        sums_runs(),
        paper_runs(),
        synthetic_runs(),
    ]
    if folder := foreign_folder():
        groups.append(foreign_runs(folder))
    else:
        print(f"other people's logs are left out: {DATA_VARIABLE} names no folder with {FOLDER}")
    runs = [run for group in groups for run in group]
    families = dict.fromkeys(run.family for run in runs)
    return [run for family in families for run in runs if run.family == family]


def run(result: str = str(RESULT)) -> None:
    """Replay all runs, and write what each detector says of each to the results.

    Args:
        result: File of the results.
    """
    rows = [replay(trajectory) for trajectory in gather_runs()]
    write_text(Path(result), "".join(json.dumps(row) + "\n" for row in rows))
    print(f"best on all families: {GRID[choose(rows, 'ours', CHOOSING)]}")
    for line in describe_scores(rows):
        print(line)


def calibrate(result: str = str(CALIBRATION)) -> None:
    """Calibrate each family by some of its healthy runs and judge the others, see `criterion`.

    Args:
        result: File of the results.
    """
    rows = list(calibrate_families(gather_runs()))
    write_text(Path(result), "".join(json.dumps(row) + "\n" for row in rows))


def documents() -> Documents:
    """All tables, from the committed results."""
    tables = format_tables(
        before=read_lines(BEFORE_RESULT),
        rows=read_lines(RESULT),
        calibrated=read_lines(CALIBRATION),
        exploits=read_results(),
    )
    return {TABLES: tables}


COMMANDS = (run, calibrate)
