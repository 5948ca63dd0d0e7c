"""Distance beyond what best of n needs for the same gain of score, tried as a signal.

Best of n is a cheap way to buy a gain: with normal scores, its mean lies E[max of n] standard
deviations higher, at log n - (n - 1) / n nats. A policy that pays more for its gain may have moved
in ways that its reward does not ask for. The gain is the mean score over `SMOOTH` steps less the
one of the start, in standard deviations of single responses at the start.

A signal speaks for a run by its largest value. It separates harmed from harmless runs by the chance
that a harmed run has the larger one of two (the area under the ROC curve). It helps if that is
higher than for KL per token and for KL per response, in the lab and on real models alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from statistics import NormalDist, fmean, pstdev
from typing import NamedTuple

from experiments.detector.criterion import SMOOTH
from experiments.detector.families import (
    EXPERIMENTS,
    Trajectory,
    alignment_tax_runs,
    exploit_runs,
    known_truth_runs,
    lab_runs,
    preference_runs,
    smollm2_runs,
    sums_runs,
    trl_runs,
)
from experiments.detector.labels import JUDGED, Question
from experiments.detector.rules import kl_of
from experiments.drawing import window_means
from experiments.results_file import read_runs, table

LARGEST_N = 1e12
CELLS = 1000
"""Number of cells of the integral over normal scores."""
SIGNALS = ("KL per token", "KL per response", "KL beyond best of n", "KL as a multiple of it")
LEAST_NATS = 0.1
"""Nats that a gain of nothing is taken to need, where KL is a multiple of what the gain needs."""


class Bought(NamedTuple):
    """What best of n gains and pays.

    Attributes:
        gain: Its mean, in standard deviations of a single score.
        nats: Its KL, in nats per response.
    """

    gain: float
    nats: float


@cache
def best_of_n() -> list[Bought]:
    """Gain and KL of the best of n, from n = 1 to `LARGEST_N`."""
    normal = NormalDist()
    edges = [-9.0 + 18.0 * place / CELLS for place in range(CELLS + 1)]
    below = [normal.cdf(edge) for edge in edges]
    middles = [fmean(pair) for pair in pairwise(edges)]
    curve = []
    for place in range(100):
        n = LARGEST_N ** (place / 99)
        shares = [after - before for before, after in pairwise(share**n for share in below)]
        gain = sum(middle * share for middle, share in zip(middles, shares, strict=True))
        curve.append(Bought(gain, math.log(n) - (n - 1) / n))
    return curve


def needed_nats(gain: float) -> float:
    """KL of the best of n with a gain, in nats per response; 0 without a gain.

    Args:
        gain: The gain, in standard deviations of a single score.
    """
    if gain <= 0:
        return 0.0
    for low, high in pairwise(best_of_n()):
        if gain < high.gain:
            share = (gain - low.gain) / (high.gain - low.gain)
            return low.nats + share * (high.nats - low.nats)
    # beyond the curve the tilted distribution, which needs least
    return gain**2 / 2


def score_spreads() -> dict[str, float]:
    """Standard deviation of single scores at the start, by family and name of a run."""
    spreads = {}
    for name, row in read_runs(EXPERIMENTS / "reproduce" / "results.jsonl").items():
        if row.get("samples"):
            spreads[name] = histogram_std(
                row["samples"]["histogram_edges"], row["samples"]["histograms"][0]
            )
    sft = read_runs(EXPERIMENTS / "pretrained" / "results.jsonl")["policies_0"]["result"]
    std = sft["policies"]["sft"]["rewards"]["reward"]["std"]
    spreads |= {run.name: std for run in smollm2_runs()}
    known = read_runs(EXPERIMENTS / "known_truth" / "results.jsonl")
    for run in known_truth_runs():
        policies = known[run.name.partition("-")[2]]["steps"]["policies"]["result"]
        spreads[run.name] = pstdev(policies["sft"]["proxy"])
    std = pstdev(known["seed_12"]["steps"]["policies"]["result"]["sft"]["proxy"])
    spreads |= {run.name: std for run in alignment_tax_runs()}
    preferences = read_runs(EXPERIMENTS / "preferences" / "results.jsonl")
    for run in preference_runs():
        seed = run.name.partition("-seed_")[2]
        policies = preferences[f"seed_{seed}"][f"policies_{seed}"]["result"]
        spreads[f"preferences {run.name}"] = pstdev(policies["sft"]["proxy"])
    return spreads


def histogram_std(edges: Sequence[float], counts: Sequence[int]) -> float:
    """Standard deviation of numbers of which only a histogram is known.

    Args:
        edges: Edges of its cells.
        counts: Numbers in each cell.
    """
    middles = [fmean(pair) for pair in pairwise(edges)]
    mean = fmean(middles, counts)
    return math.sqrt(fmean([(middle - mean) ** 2 for middle in middles], counts))


def spread_of(run: Trajectory, spreads: Mapping[str, float]) -> float:
    """Standard deviation of single scores at the start of a run; NaN if it is not known.

    Args:
        run: The run.
        spreads: What `score_spreads` knows.
    """
    first = run.steps[:3]
    if run.family == "SmolLM2: sums":
        right = fmean(step["rollout/score"] for step in first)
        return math.sqrt(right * (1 - right))
    if all("monitor/scores_std" in step for step in first):
        return fmean(step["monitor/scores_std"] for step in first)
    key = f"preferences {run.name}" if run.family == "SmolLM2: preferences" else run.name
    return spreads.get(key, math.nan)


def largest_signals(run: Trajectory, spread: float) -> list[float]:
    """The largest value of each of `SIGNALS`, on means of `SMOOTH` steps.

    Args:
        run: The run, with KL and score.
        spread: Standard deviation of single scores at its start.
    """
    scores = window_means([step["rollout/score"] for step in run.steps], SMOOTH)
    nats = window_means([kl_of(step, per_token=False) for step in run.steps], SMOOTH)
    per_token = window_means([kl_of(step, per_token=True) for step in run.steps], SMOOTH)
    needed = [needed_nats((score - scores[0]) / spread) for score in scores]
    pairs = list(zip(nats, needed, strict=True))
    return [
        max(per_token),
        max(nats),
        max(paid - need for paid, need in pairs),
        max(paid / max(need, LEAST_NATS) for paid, need in pairs),
    ]


def area(harmed: Sequence[float], harmless: Sequence[float]) -> float:
    """Chance that a harmed run has a larger value than a harmless one.

    Args:
        harmed: Values of the harmed runs.
        harmless: Values of the harmless runs.

    Examples:
        >>> area([2.0, 3.0], [1.0, 2.0])
        0.875
    """
    return fmean((h > c) + (h == c) / 2 for h in harmed for c in harmless)


def format_distances() -> str:
    """Format how well each signal alone separates harmed from harmless runs."""
    spreads = score_spreads()
    runs = lab_runs() + exploit_runs() + trl_runs() + smollm2_runs()
    runs += known_truth_runs() + preference_runs() + alignment_tax_runs() + sums_runs()
    groups: dict[str, list[tuple[bool, list[float]]]] = {"lab": [], "real models": []}
    for run in runs:
        spread = spread_of(run, spreads)
        if not spread > 0 or Question.HARM not in run.label.tells:
            continue
        group = "lab" if run.family.startswith("lab") else "real models"
        is_harmed = bool(JUDGED[Question.HARM] & run.label.troubles)
        groups[group].append((is_harmed, largest_signals(run, spread)))
    groups["both"] = [run for members in groups.values() for run in members]
    head = ["runs", "harmed", "harmless", *SIGNALS]
    lines = []
    for group, members in groups.items():
        harmed = [values for is_harmed, values in members if is_harmed]
        harmless = [values for is_harmed, values in members if not is_harmed]
        areas = [
            area([values[place] for values in harmed], [values[place] for values in harmless])
            for place in range(len(SIGNALS))
        ]
        lines.append([group, len(harmed), len(harmless), *(f"{value:.2f}" for value in areas)])
    return table(head, lines)


if __name__ == "__main__":
    print(format_distances())
