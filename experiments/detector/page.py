"""All tables on families of runs, and what docs/collapse.md says of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from experiments.detector.criterion import CHOOSING, GRID
from experiments.detector.early import (
    SIGNALS,
    format_penalty,
    format_warnings,
    label_runs,
    warn,
)
from experiments.detector.families import figure
from experiments.detector.judging import (
    DETECTORS,
    Row,
    Score,
    choose,
    choose_and_score,
    score,
    total,
)
from experiments.frame import fill_template
from experiments.results_file import table
from lit_callbacks import Level, RewardDistributionMonitor

RESULT = Path(__file__).with_name("results.jsonl")
TEMPLATE = Path(__file__).with_name("results.md.j2")


def read_rows() -> list[Row]:
    """The committed results."""
    return [json.loads(line) for line in RESULT.read_text("utf-8").splitlines()]


def summarize_families(rows: Sequence[Row]) -> dict[str, Any]:
    """How each detector does on the families that were left out, for the templates.

    Args:
        rows: What each detector says of each run.

    Returns:
        Scores of each detector by family as `scores`, the place of the setting that is best on
        all families as `shipped`, and numbers of runs and leads.
    """
    chosen = {detector: choose_and_score(rows, detector) for detector in DETECTORS}
    scores = {name: [s for _, s in pairs] for name, pairs in chosen.items()}
    ours = total(scores["ours"])
    kl = total(scores["KL"])
    trained = [s for s in scores["ours"] if not s.family.startswith("synthetic")]
    lab = [s for s in scores["ours"] if s.family.startswith("lab")]
    lab_kl = [s for s in scores["KL"] if s.family.startswith("lab")]
    suspicious = [score(rows, "suspicious", 0, s.family) for s in scores["ours"]]
    early = total([s for s in suspicious if s.family.startswith("lab")]).leads
    place = {s.family: i for i, s in chosen["ours"]}
    flags = [row["ours"][place[row["family"]]] for row in rows]
    return {
        "scores": scores,
        "shipped": choose(rows, "ours", CHOOSING),
        "trained": total(trained),
        "late": -round(median(total(lab).leads)),
        "trl": round(median(total([s for s in scores["ours"] if s.family == "TRL"]).leads)),
        "kl_lead": round(median(total(lab_kl).leads)),
        "early": round(median(early)),
        "early_trl": round(median(next(s.leads for s in suspicious if s.family == "TRL"))),
        "doubted": total(suspicious).false,
        "kl_false": kl.false,
        "kl_missed": kl.collapsed - kl.found,
        "healthy": ours.healthy,
        "collapsed": ours.collapsed,
        "missed": _names(
            [r for r, flag in zip(rows, flags, strict=True) if r["collapsed"] and flag is None]
        ),
        "false_alarms": _names(
            [
                row
                for row, flag in zip(rows, flags, strict=True)
                if row["collapsed"] is False and flag is not None
            ]
        ),
    }


def format_tables(rows: Sequence[Row], exploits: dict[str, dict[str, Any]]) -> str:
    """Format all families, the demands, the exploits and the disagreement of reward models.

    Args:
        rows: What each detector says of each run.
        exploits: Results of `experiments.exploits` by name.
    """
    judged = summarize_families(rows)
    shipped = judged["shipped"]
    unlabelled = [row for row in rows if row["collapsed"] is None]
    flagged = [row for row in unlabelled if row["ours"][shipped] is not None]
    return fill_template(
        TEMPLATE,
        **judged,
        early_warning=format_warnings(exploits),
        penalty=format_penalty(exploits),
        pairs=_pairs(rows, exploits, shipped),
        exploited=_exploited(rows, shipped),
        calm=sum(run.harm is None for run in label_runs(exploits)),
        lead=_lead(exploits),
        calm_kl=_final_kl(exploits, "-truth-"),
        harmed_kl=_final_kl(exploits, None),
        helped=_helped(exploits),
        families=format_families(judged["scores"]),
        demands=_demands(rows, shipped),
        setting=", ".join(f"`{key}` {value:g}" for key, value in GRID[shipped].items()),
        unlabelled="; ".join(
            f"{row['name'].replace('_', ' ')} (update {row['ours'][shipped] * row['every']})"
            for row in flagged
        ),
    )


def _pairs(rows: Sequence[Row], exploits: dict[str, dict[str, Any]], shipped: int) -> str:
    """A line for each pair and seed."""
    flags = {row["name"]: row["ours"][shipped] for row in rows if row["family"] == "lab: exploits"}
    harms = dict(zip(exploits, (run.harm for run in label_runs(exploits)), strict=True))

    def cells(name: str) -> list[str]:
        gold = exploits[name]["curves"]["rollout/gold"]
        kl = fmean(exploits[name]["curves"]["rollout/kl"][-5:])
        places = (harms[name], flags[name])
        found = ["-" if place is None else str(place + 1) for place in places]
        return [f"{fmean(gold[:5]):.1f} to {fmean(gold[-5:]):.1f}", f"{kl:.1f}", *found]

    columns = ["truth", "KL", "harm", "flag"]
    head = ["pair", "seed", *(f"{kind}: {name}" for kind in ("proxy", "truth") for name in columns)]
    names = [name.split("-proxy-seed_") for name in exploits if "-proxy-" in name]
    return table(
        head,
        [
            [pair, seed, *cells(f"{pair}-proxy-seed_{seed}"), *cells(f"{pair}-truth-seed_{seed}")]
            for pair, seed in names
        ],
    )


def _exploited(rows: Sequence[Row], shipped: int) -> str:
    """How the detector does on the exploits, in a sentence."""
    s = score(rows, "ours", shipped, "lab: exploits")
    false = [
        row["name"]
        for row in rows
        if row["family"] == s.family and not row["collapsed"] and row["ours"][shipped] is not None
    ]
    matched = sum("-truth-" in name for name in false)
    total_matched = sum("-truth-" in row["name"] for row in rows if row["family"] == s.family)
    return (
        f"The detector flags {s.found} of {s.collapsed} collapses (median lead "
        f"{median(s.leads):g}) and {s.false} of {s.healthy} runs whose truth does not fall so far "
        f"({', '.join(false) or 'none'}), {matched} of {total_matched} runs that learn the truth."
    )


def _final_kl(exploits: dict[str, dict[str, Any]], kind: str | None) -> str:
    """Range of the final KL of the runs of a kind, or of those that collapse."""
    last = [
        fmean(run.curves["rollout/kl"][-5:])
        for name, run in zip(exploits, label_runs(exploits), strict=True)
        if (run.harm is not None if kind is None else kind in name)
    ]
    return f"{min(last):.1f} to {max(last):.1f}"


def _lead(exploits: dict[str, dict[str, Any]]) -> str:
    """Whether disagreement warns early, in a sentence."""
    runs = label_runs(exploits)
    leads = [median(warn(runs, signal).leads) for signal in SIGNALS.values()]
    early = [lead > 0 and lead > leads[2] for lead in leads[:2]]
    return (
        "It does." if any(early) else "It does not, by either measure: there is no lead."
    ) + " Of these signals, the length of the responses speaks first." * (leads[3] == max(leads))


def _helped(exploits: dict[str, dict[str, Any]]) -> str:
    """Whether the penalty helped, in a sentence."""
    last = {name: fmean(row["curves"]["rollout/gold"][-5:]) for name, row in exploits.items()}
    seeds = [name.rpartition("_")[2] for name in exploits if name.startswith("ensemble-seed_")]
    better = [last[f"ensemble-penalized-seed_{s}"] > last[f"ensemble-seed_{s}"] for s in seeds]
    says = "helps by the criterion" if all(better) else "does not help by the criterion"
    return f"Gold ends higher with it on {sum(better)} of {len(seeds)} seeds, so that it {says}."


def format_families(scores: Mapping[str, Sequence[Score]], single: bool = True) -> str:
    """Format how often each detector flags healthy and collapsed runs, and how early.

    Args:
        scores: Scores of each detector by family.
        single: Whether families have a row each, above those of trained and synthetic runs.
    """
    head = ["family", "healthy: flagged by ours", "KL", "rules"]
    head += ["collapsed: flagged by ours", "KL", "rules", "median lead: ours", "KL"]
    names = [s.family for s in scores["ours"]]
    groups = [(name, [name]) for name in names] if single else []
    groups.append(("**runs**", [name for name in names if not name.startswith("synthetic")]))
    groups.append(("**synthetic**", [name for name in names if name.startswith("synthetic")]))
    lines = []
    for name, members in [*groups, ("**all**", names)]:
        row = [total([s for s in scores[d] if s.family in members]) for d in DETECTORS]
        lines.append(
            [
                name,
                *(f"{s.false} of {s.healthy}" if s.healthy else "-" for s in row),
                *(f"{s.found} of {s.collapsed}" if s.collapsed else "-" for s in row),
                *(f"{median(s.leads):g}" if s.leads else "-" for s in row[:2]),
            ]
        )
    return table(head, lines)


def _demands(rows: Sequence[Row], shipped: int) -> str:
    def flags(start: str, family: str, collapsed: bool) -> list[int | None]:
        return [
            row["ours"][shipped]
            for row in rows
            if row["family"] == family
            and row["collapsed"] is collapsed
            and row["name"].startswith(start)
        ]

    def share(found: Sequence[int | None]) -> str:
        return f"{sum(flag is not None for flag in found)} of {len(found)} flagged"

    (four,) = [row for row in rows if row["name"] == "figure4"]
    small = "synthetic: small batches"
    wide = RewardDistributionMonitor()
    widths = figure("figure13")
    levels = [wide.observe(width) for width in widths["std"]]
    first = next(i for i, level in enumerate(levels) if level > Level.HEALTHY)
    lines = [
        ["Figure 9, as it is, halved, a quarter higher", share(flags("Fig", "paper", False))],
        [
            "Figure 4, whose win rate is below one half from update "
            f"{four['harm'] * four['every']} on",
            f"flagged at update {four['ours'][shipped] * four['every']}",
        ],
        [
            f"Figure 13, whose scores are {widths['std'][-1] / widths['std'][0]:.0f} times as wide "
            "from update 800 on",
            f"the monitor of their spread is collapsed at update {widths['update'][first]:.0f}",
        ],
        ["healthy, batches of 4 and 16", share(flags("", small, False))],
        ["the quickstart's vanilla runs", share(flags("", "quickstart", True))],
        ["its PPO-max runs", share(flags("", "quickstart", False))],
    ]
    return table(["demand", "shipped thresholds"], lines)


def _names(rows: Sequence[Row]) -> str:
    """Names of runs without their seeds, with their number."""
    kinds: dict[str, int] = {}
    for row in rows:
        name = row["name"].replace("-seed_", ", seed ").rpartition(", seed ")[0] or row["name"]
        kinds[name] = kinds.get(name, 0) + 1
    return "; ".join(f"{name} ({count})" for name, count in kinds.items()) or "none"
