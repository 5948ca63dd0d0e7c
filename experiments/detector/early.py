"""How early one signal speaks, at few false alarms, in the runs of `exploits`; see `criterion`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, median, pstdev
from typing import Any, NamedTuple

from experiments.detector.criterion import MAX_FALSE, SMOOTH
from experiments.detector.labels import find_harm
from experiments.drawing import window_means
from experiments.exploits.study import MEMBERS, RESULT
from experiments.results_file import read_runs, table

Curves = dict[str, list[float]]


def smooth(values: Sequence[float]) -> list[float]:
    """Means of the last `SMOOTH` values, from the first place that has as many."""
    return window_means(values, SMOOTH)


def multiple(key: str) -> Callable[[Curves], list[float]]:
    """A metric as a multiple of its first `SMOOTH` values."""

    def course(curves: Curves) -> list[float]:
        smoothed = smooth(curves[key])
        return [value / smoothed[0] for value in smoothed]

    return course


def drift(curves: Curves) -> list[float]:
    """Standard deviation over the reward models of how far their mean score has moved."""
    moved = [smooth(curves[f"rollout/score/member_{member}"]) for member in range(MEMBERS)]
    return [
        pstdev(
            now - first for now, first in zip(scores, next(zip(*moved, strict=True)), strict=True)
        )
        for scores in zip(*moved, strict=True)
    ]


SIGNALS: dict[str, Callable[[Curves], list[float]]] = {
    "disagreement on a response, multiple": multiple("rollout/score_spread"),
    "disagreement on the drift, nats": drift,
    "KL per token, nats": lambda curves: smooth(curves["rollout/kl_per_token"]),
    "response length, multiple": multiple("rollout/response_length"),
}


class LabelledRun(NamedTuple):
    """A run, and whether it came to harm.

    Attributes:
        curves: Its metrics by name, a value an iteration.
        harm: Iteration of the harm, from 0; `None` for a healthy run.
    """

    curves: Curves
    harm: int | None


class EarlyWarning(NamedTuple):
    """How early a signal warns.

    Attributes:
        threshold: Its threshold, in units of the signal.
        leads: Iterations from the warning to the harm, for each collapse; minus infinity for a
            collapse without a warning.
    """

    threshold: float
    leads: list[float]

    @property
    def n_reported(self) -> int:
        """Number of the collapses that are reported at all."""
        return sum(lead > -math.inf for lead in self.leads)


def label_runs(results: dict[str, dict[str, Any]]) -> list[LabelledRun]:
    """Find the harm of each run."""
    return [
        LabelledRun(
            curves=row["curves"],
            harm=find_harm(row["curves"]["rollout/gold"], row["gold_std"]),
        )
        for row in results.values()
    ]


def warn(runs: Sequence[LabelledRun], signal: Callable[[Curves], list[float]]) -> EarlyWarning:
    """The lowest threshold that few healthy runs are ever beyond, and its leads."""
    highest = sorted((max(signal(run.curves)) for run in runs if run.harm is None), reverse=True)
    threshold = highest[math.floor(MAX_FALSE * len(highest))]
    leads = []
    for run in runs:
        if run.harm is not None:
            values = signal(run.curves)
            beyond = [i for i, value in enumerate(values, SMOOTH - 1) if value > threshold]
            leads.append(run.harm - beyond[0] if beyond else -math.inf)
    return EarlyWarning(threshold, leads)


def format_warnings(results: dict[str, dict[str, Any]]) -> str:
    """A table of the signals."""
    runs = label_runs(results)
    rows = []
    for name, signal in SIGNALS.items():
        warning = warn(runs, signal)
        lead = median(warning.leads)
        rows.append(
            [
                name,
                f"{warning.threshold:.2f}",
                f"{warning.n_reported} of {len(warning.leads)}",
                f"{lead:g}" if lead > -math.inf else "not reported",
            ]
        )
    return table(
        ["signal alone", "threshold", "collapses reported", "median lead, iterations"], rows
    )


def format_penalty(results: dict[str, dict[str, Any]]) -> str:
    """Gold of the runs that learn from an ensemble, with and without the penalty."""
    rows = []
    for name, row in results.items():
        if name.startswith("ensemble"):
            arm, _, seed = name.rpartition("-seed_")
            gold = row["curves"]["rollout/gold"]
            harm = find_harm(gold, row["gold_std"])
            cells = [
                f"{fmean(gold[:5]):.2f}",
                f"{max(smooth(gold)):.2f}",
                f"{fmean(gold[-5:]):.2f}",
            ]
            last = row["curves"]["rollout/kl"][-1]
            rows.append([seed, arm, *cells, "-" if harm is None else harm + 1, f"{last:.0f}"])
    head = [
        "seed",
        "run",
        "gold, first five",
        "best three",
        "last five",
        "harm at",
        "final KL, nats",
    ]
    return table(head, sorted(rows))


def read_results() -> dict[str, dict[str, Any]]:
    """The committed results."""
    return read_runs(RESULT)
