"""docs/reproduction.md and its figures, from the results."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from experiments.frame import DOCS, Documents, fill_template
from experiments.reproduce.claims import CLAIMS, RULES
from experiments.reproduce.drawing import Results, draw
from experiments.reproduce.history import VERSIONS, Version, judge_by
from experiments.reproduce.judging import (
    DATE,
    MIN_SEEDS,
    MOST_SEEDS,
    VERSION,
    Check,
    Claim,
    Finding,
    Projection,
    Runs,
    Value,
    Verdict,
    judge,
    project,
)
from experiments.reproduce.table import (
    CORES,
    EXPERIMENTS,
    Arm,
    Experiment,
    Foundation,
    arms_by_name,
    foundations_by_name,
    total_seconds,
)
from experiments.results_file import read_runs, table
from lit_rlhf.files import write_text

PAGE = DOCS / "reproduction.md"
FIGURES = "images/reproduction"
"""Folder of the figures, below the folder of the documentation."""
VERDICTS = Path(__file__).with_name("verdicts.json")
TODAY = (
    "as version 3, but what contradicts a claim, or makes it hold partly, takes intervals with "
    "Bonferroni's correction for its comparisons; 33 and 34 without the end of gold, which made "
    "both impossible to confirm. After all results"
)
GIVE_UP = 40
"""A claim that needs more seeds than this gets no more: it has to be measured in another way."""
TEMPLATE = Path(__file__).with_name("page.md.j2")
CLAIMS_TEMPLATE = Path(__file__).with_name("results.md.j2")


def read_results(path: Path) -> dict[int, dict[str, Mapping[str, Any]]]:
    """Read the results by seed and by the name of arm or foundation, without trials."""
    known_names = arms_by_name().keys() | foundations_by_name().keys()
    results: dict[int, dict[str, Mapping[str, Any]]] = {}
    for run in read_runs(path).values():
        if run["name"] in known_names and not run["trial"]:
            results.setdefault(run["seed"], {})[run["name"]] = run
    return dict(sorted(results.items()))


def planned(claim: Claim) -> tuple[int, ...]:
    """The seeds that are planned for a claim."""
    return EXPERIMENTS[claim.figure].seeds


def has_seeds(experiment: Experiment, results: Results) -> bool:
    """Whether each curve of a figure has `MIN_SEEDS` runs."""
    seeds = [results.get(seed, {}) for seed in experiment.seeds]
    curves: list[Arm | Foundation] = [*experiment.arms, *experiment.foundations]
    return all(sum(curve.name in runs for runs in seeds) >= MIN_SEEDS for curve in curves)


def judge_by_all(results: Results) -> dict[str, Any]:
    """The verdicts of every version of the rules, with the hash of today's."""
    verdicts = {str(v.number): judge_by(v, results) for v in VERSIONS}
    verdicts[str(VERSION)] = [str(judge(claim, results).verdict) for claim in CLAIMS]
    return {"rules": RULES, "verdicts": verdicts}


def write_verdicts(results_file: Path) -> Path:
    """Write the verdicts of all versions of the rules, and return the path of the file."""
    judged = judge_by_all(read_results(results_file))
    return write_text(VERDICTS, json.dumps(judged, indent=1) + "\n")


def make_documents(results_file: Path) -> Documents:
    """The page, the list of claims, and every figure whose curves all have `MIN_SEEDS` runs.

    Args:
        results_file: File of the results; the list of claims is beside it.

    Raises:
        ValueError: If the verdicts do not follow from the results.
    """
    results = read_results(results_file)
    judged = json.loads(VERDICTS.read_text("utf-8"))
    verdicts = [str(judge(claim, results).verdict) for claim in CLAIMS]
    if judged["rules"] != RULES or judged["verdicts"][str(VERSION)] != verdicts:
        raise ValueError(f"{VERDICTS}: expected the verdicts of {results_file}, got others")
    figures = [experiment for experiment in EXPERIMENTS.values() if has_seeds(experiment, results)]
    names = [experiment.name for experiment in figures]
    return {
        PAGE: format_page(results, judged),
        results_file.with_suffix(".md"): format_claims(results, judged, names),
        **{
            DOCS / FIGURES / f"{experiment.name}.svg": partial(draw, experiment, results)
            for experiment in figures
        },
    }


def format_page(results: Results, judged: Mapping[str, Any]) -> str:
    """Format the page: how many claims hold, and those that do not.

    Args:
        results: Results by seed.
        judged: What `judge_by_all` says of them.
    """
    by_version = judged["verdicts"]
    verdicts = [Verdict(verdict) for verdict in by_version[str(VERSION)]]

    def list_claims(*kinds: Verdict) -> str:
        lines = [
            f"- {number}: {claim.text}{f' *{claim.note}.*' if claim.note else ''}"
            for number, (claim, verdict) in enumerate(zip(CLAIMS, verdicts, strict=True), start=1)
            if verdict in kinds
        ]
        return "\n".join(lines) or "- none so far"

    runs = [run for of_seed in results.values() for run in of_seed.values()]
    return fill_template(
        TEMPLATE,
        claims=len(CLAIMS),
        summary=count_verdicts(verdicts),
        contradicted=list_claims(Verdict.CONTRADICTED),
        not_here=list_claims(Verdict.NOT_AT_THIS_SCALE, Verdict.PARTLY),
        verdicts=format_numbers(verdicts),
        changed=format_changed(by_version[str(VERSIONS[-1].number)], verdicts),
        decided_by=list_projections(results, given_up=False),
        given_up=list_projections(results, given_up=True),
        runs=len(runs),
        cpu_hours=f"{sum(run['cpu_seconds'] for run in runs) / 3600:.1f}",
        hours=f"{total_seconds() / 3600 / CORES:.1f}",
    )


def format_numbers(verdicts: Sequence[Verdict]) -> str:
    """Format the numbers of the claims by their verdict.

    Args:
        verdicts: The verdict on each claim, in the order of `CLAIMS`.
    """
    rows = []
    for verdict in Verdict:
        numbers = [str(n) for n, judged_as in enumerate(verdicts, start=1) if judged_as is verdict]
        if numbers:
            rows.append([verdict, len(numbers), ", ".join(numbers)])
    return table(["verdict", "number", "claims"], rows)


def format_changed(before: Sequence[str], verdicts: Sequence[Verdict]) -> str:
    """Format how verdicts have changed since the last version of the rules, in words.

    Args:
        before: The verdict on each claim by that version.
        verdicts: The verdicts of today.
    """
    changes = [
        f"claim {number} ({old}, now {new})"
        for number, (old, new) in enumerate(zip(before, verdicts, strict=True), start=1)
        if old != new
    ]
    return ", ".join(changes) or "none"


def project_undecided(results: Results) -> dict[int, Projection | None]:
    """How many seeds would decide each undecided claim, by the number of the claim.

    Args:
        results: Results by seed.
    """
    projections = {}
    for number, claim in enumerate(CLAIMS, start=1):
        finding = judge(claim, results)
        if finding.verdict is Verdict.UNDECIDED:
            projections[number] = project(claim, finding.seeds)
    return projections


def is_given_up(projection: Projection | None) -> bool:
    """Whether a claim needs more seeds than are worth it."""
    return projection is None or projection.n_seeds > GIVE_UP


def format_needed(projection: Projection | None) -> str:
    """Format the number of seeds that would decide a claim."""
    return f"more than {MOST_SEEDS}" if projection is None else str(projection.n_seeds)


def list_projections(results: Results, *, given_up: bool) -> str:
    """List undecided claims with the number of seeds that would decide them, in words.

    Args:
        results: Results by seed.
        given_up: Whether to list the claims that are given up, or the others.
    """
    claims = [
        f"{number} ({format_needed(projection)})"
        for number, projection in project_undecided(results).items()
        if is_given_up(projection) == given_up
    ]
    return ", ".join(claims) or "none"


def format_projections(results: Results) -> str:
    """Format the seeds that would decide each undecided claim, and the verdict with as many.

    Args:
        results: Results by seed.
    """
    rows = []
    for number, projection in project_undecided(results).items():
        seeds = len(judge(CLAIMS[number - 1], results).seeds)
        verdict = "-" if projection is None else str(projection.verdict)
        verdict += "; given up" if is_given_up(projection) else ""
        rows.append([number, seeds, format_needed(projection), verdict])
    return table(["claim", "seeds", "seeds that would decide", "verdict with as many"], rows)


def format_versions(by_version: Mapping[str, Sequence[str]]) -> str:
    """Format what each version of the rules was, and how many claims got each verdict by it.

    Args:
        by_version: The verdict on each claim by the number of the version.
    """
    today = Version(VERSION, DATE, f"rules {RULES}", TODAY)
    rows = [
        [
            version.number,
            version.date,
            version.commit,
            version.text,
            count_verdicts(by_version[str(version.number)]),
        ]
        for version in (*VERSIONS, today)
    ]
    return table(["version", "date (UTC)", "commit", "rule", "verdicts"], rows)


def format_changes(by_version: Mapping[str, Sequence[str]]) -> str:
    """Format the claims on which versions of the rules differ.

    Args:
        by_version: The verdict on each claim by the number of the version.
    """
    each = enumerate(zip(*by_version.values(), strict=True), start=1)
    rows = [[number, *verdicts] for number, verdicts in each if len(set(verdicts)) > 1]
    return table(["claim", *(f"version {name}" for name in by_version)], rows)


def count_verdicts(verdicts: Sequence[str]) -> str:
    """How many claims got each verdict, in words."""
    counts = Counter(verdicts)
    return ", ".join(f"{counts[v]} {v}" for v in Verdict if counts[v])


# --- a comparison in words


def describe_check(check: Check, seeds: Sequence[Runs], comparisons: int) -> str:
    """A comparison with the means over seeds, and the interval of its effect.

    Args:
        check: The comparison.
        seeds: Results of each seed.
        comparisons: Number of comparisons that it is judged together with, itself included; 1 where
            Bonferroni's correction does not count.
    """
    left = check.left
    right = check.right
    of_one = not isinstance(right, Value) or right.measure == left.measure

    def describe(value: Value) -> str:
        measure = "" if of_one else f"{measure_name(value)} of "
        return f"{measure}{describe_value(value, seeds)}"

    bound = describe(right) if isinstance(right, Value) else f"{right:g}"
    factor = "" if check.factor == 1 else f"{check.factor:g} x "
    sign = {"<": "below", ">": "above", "~": "near"}[check.sign]
    if check.sign == "~":
        margin = f", within {check.margin:g}"
    else:
        margin = "" if check.margin == 0 else f" {'+' if check.margin > 0 else '-'} "
        margin += "" if check.margin == 0 else f"{abs(check.margin):g}"
    measure = f"{measure_name(left)}: " if of_one else ""
    compared = f"{measure}{describe(left)} {sign} {factor}{bound}{margin}"
    words = {True: "holds", False: "fails", None: "undecided"}
    alone = check.holds(seeds)
    low, _, high = check.interval(seeds)
    if math.isnan(low):
        return f"{compared}: {words[alone]}"
    log = "log ratio " if check.is_ratio else ""
    described = f"{compared}: {words[alone]}, {log}{low:+.2f} to {high:+.2f}"
    if check.holds(seeds, comparisons=comparisons) is alone:
        return described
    low, _, high = check.interval(seeds, comparisons=comparisons)
    return f"{described}; undecided as one of {comparisons}, {low:+.2f} to {high:+.2f}"


def describe_checks(claim: Claim, finding: Finding) -> list[str]:
    """The comparisons of a claim in words, the premise's first.

    Args:
        claim: The claim.
        finding: Its verdict.
    """
    seeds = finding.seeds
    if len(seeds) < 2:  # no interval
        return []
    is_confirmed = finding.verdict is Verdict.CONFIRMED
    premises = 1 if is_confirmed else len(claim.premise)
    others = 1 if is_confirmed else claim.n_comparisons
    return [
        *(describe_check(check, seeds, premises) for check in claim.premise),
        *(describe_check(check, seeds, others) for check in (*claim.checks, *claim.then)),
    ]


def measure_name(value: Value) -> str:
    """The measure in words."""
    return re.sub(r"\bkl\b", "KL", value.measure.replace("_", " ").replace(".", ", "))


def describe_value(value: Value, seeds: Sequence[Runs]) -> str:
    """The run in words, with the place in its course unless that is the end, and the number."""
    words = {"end": "", "start": " at the start", "early": " in the first quarter"}
    numbers = [value.of(runs) for runs in seeds]
    number = f"{_shown(fmean(numbers), 3)} ± {_shown(stdev(numbers), 2)}"
    return f"{value.part.label}{words.get(value.at, f' at its {value.at}')} ({number})"


def _shown(number: float, digits: int) -> str:
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.{digits}g}"


def format_claims(results: Results, judged: Mapping[str, Any], drawn: Sequence[str]) -> str:
    """Format the claims with their numbers, the history of the rules, and the figures.

    Args:
        results: Results by seed.
        judged: What `judge_by_all` says of them.
        drawn: Names of the figures that are drawn.
    """
    docs = "../../docs"  # from the folder of the list
    versions = sorted(
        {
            ", ".join(f"{name} {number}" for name, number in run["versions"].items())
            for runs in results.values()
            for run in runs.values()
        }
    )
    rows = []
    for number, claim in enumerate(CLAIMS, start=1):
        finding = judge(claim, results)
        seeds = finding.seeds
        checks = "<br>".join(describe_checks(claim, finding)) or "-"
        n_planned = len(planned(claim))
        n_seeds = f"{len(seeds)} of {n_planned}" if len(seeds) <= n_planned else str(len(seeds))
        verdict = f"{finding.verdict}<br>{n_seeds} seeds"
        verdict += f"<br>*{claim.note}*" if claim.note else ""
        figure = claim.figure
        link = f" ([figure]({docs}/{FIGURES}/{figure}.svg))" if figure in drawn else ""
        statement = f"{claim.text}<br>*{claim.source}*{link}"
        rows.append(f"| {number} | {statement} | {checks} | {verdict} |")
    figures = []
    for name in drawn:
        title = EXPERIMENTS[name].title
        figures.append(f"### {title}\n\n![{title}]({docs}/{FIGURES}/{name}.svg)\n")
    return fill_template(
        CLAIMS_TEMPLATE,
        docs=docs,
        versions_of_rules=format_versions(judged["verdicts"]),
        changed=format_changes(judged["verdicts"]),
        projections=format_projections(results),
        give_up=GIVE_UP,
        measured=sum(len(runs) for runs in results.values()),
        fresh=sum("rules" in run for runs in results.values() for run in runs.values()),
        versions=f" with {'; '.join(versions)}" if versions else "",
        rows="\n".join(rows),
        figures="\n".join(figures) or "No figure has all its runs yet.\n",
        min_seeds=MIN_SEEDS,
        version=VERSION,
        date=DATE,
        rules=RULES,
    )
