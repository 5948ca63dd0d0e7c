"""What calibration by healthy runs does: some runs of a family calibrate, the others are judged."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from experiments.detector.criterion import CALIBRATION_SEEDS, GRID, HEALTHY_RUNS
from experiments.detector.families import Trajectory, describe
from experiments.detector.judging import Row
from experiments.detector.replaying import VOTES, Flags, apply_settings, flags_by, monitors_of
from lit_callbacks import Monitor, Watch
from lit_callbacks.calibration import apply_thresholds, thresholds_of

CALIBRATION = Path(__file__).with_name("calibration.jsonl")
Thresholds = dict[str, dict[str, float]]
"""Calibrated thresholds by the key of a monitor and the name of its argument."""


def shipped_monitors(run: Trajectory) -> list[Monitor]:
    """The monitors of a run with the thresholds that ship, without trends."""
    return [apply_settings(monitor, GRID[0]) for monitor in monitors_of(run)]


def is_untroubled(run: Trajectory) -> bool:
    """Whether a run is labelled and has no trouble."""
    return bool(run.label.tells) and not run.label.troubles


def calibrate_families(runs: Sequence[Trajectory]) -> Iterator[Row]:
    """What calibrated thresholds say of the runs of each family, for each draw.

    Args:
        runs: All runs.

    Yields:
        The rows of `calibrate_family`.
    """
    families: dict[str, list[Trajectory]] = {}
    for run in runs:
        if run.label.tells:
            families.setdefault(run.family, []).append(run)
    for members in families.values():
        if sum(map(is_untroubled, members)) > HEALTHY_RUNS:
            shipped = {run.name: flags_by(shipped_monitors(run), run) for run in members}
            for seed in CALIBRATION_SEEDS:
                yield from calibrate_family(members, shipped, seed)


def calibrate_family(
    members: Sequence[Trajectory], shipped: Mapping[str, Flags], seed: int
) -> Iterator[Row]:
    """Calibrate by some healthy runs of a family, and judge its other runs.

    Args:
        members: The labelled runs of the family.
        shipped: Flags of each run under the thresholds that ship, by its name.
        seed: Seed of the draw.

    Yields:
        For each run what became of it: `drawn` says that it `calibrates` or is `refused`; the
        others have the flags under `shipped` and under `calibrated` thresholds.
    """
    order = [run for run in members if is_untroubled(run)]
    random.Random(f"{order[0].family} {seed}").shuffle(order)
    tasks = {run.task: run for run in members}
    thresholds: dict[str, Thresholds] = {}
    drawn: dict[str, str] = {}
    healthy: list[Trajectory] = []
    for candidate in order:
        if len(healthy) == HEALTHY_RUNS:
            break
        try:
            thresholds = {
                task: calibrate_monitors(shipped_monitors(run), [*healthy, candidate])
                for task, run in tasks.items()
            }
        except ValueError as error:
            print(f"{candidate.family}: {candidate.name}: {error}")
            drawn[candidate.name] = "refused"
        else:
            drawn[candidate.name] = "calibrates"
            healthy.append(candidate)
    for run in members:
        row = {**describe(run), "every": run.every, "seed": seed}
        if run.name in drawn:
            yield row | {"drawn": drawn[run.name]}
            continue
        monitors = shipped_monitors(run)
        apply_thresholds(monitors, thresholds.get(run.task, {}))
        flags = flags_by(monitors, run)
        yield row | {"drawn": "", "shipped": [shipped[run.name]], "calibrated": [flags]}


def calibrate_monitors(monitors: Sequence[Monitor], healthy: Sequence[Trajectory]) -> Thresholds:
    """Calibrate monitors, and return the thresholds that changed.

    Args:
        monitors: The monitors, which are changed.
        healthy: The healthy runs.
    """
    changes = Watch(monitors, VOTES).calibrate([run.steps for run in healthy])
    return thresholds_of(changes)
