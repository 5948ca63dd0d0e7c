"""docs/reproduction.md and its figures, from the results."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.drawing import save
from benchmarks.reproduce.claims import CLAIMS
from benchmarks.reproduce.drawing import Results, draw
from benchmarks.reproduce.judging import MIN_SEEDS, Check, Claim, Runs, Value, Verdict, judge
from benchmarks.reproduce.table import (
    CORES,
    EXPERIMENTS,
    Arm,
    Experiment,
    Foundation,
    arms_by_name,
    foundations_by_name,
    total_seconds,
)
from benchmarks.results_file import read_runs
from lit_rlhf.files import write_text

PAGE = "reproduction.md"
IMAGES = "images/reproduction"
TEMPLATE, CLAIMS_TEMPLATE = (Path(__file__).with_name(name) for name in ("page.md", "claims.md"))


def read_results(path: Path) -> dict[int, dict[str, Mapping[str, Any]]]:
    """Read the results by seed and by the name of arm or foundation, without trials."""
    known = arms_by_name().keys() | foundations_by_name().keys()
    results: dict[int, dict[str, Mapping[str, Any]]] = {}
    for result in read_runs(path).values():
        if result["name"] in known and not result["trial"]:
            results.setdefault(result["seed"], {})[result["name"]] = result
    return dict(sorted(results.items()))


def planned(claim: Claim) -> tuple[int, ...]:
    """The seeds that are planned for a claim."""
    return EXPERIMENTS[claim.figure].seeds


def has_seeds(experiment: Experiment, results: Results) -> bool:
    """Whether each curve of a figure has `MIN_SEEDS` runs."""
    seeds = [results.get(seed, {}) for seed in experiment.seeds]
    parts: list[Arm | Foundation] = [*experiment.arms, *experiment.foundations]
    return all(sum(part.name in runs for runs in seeds) >= MIN_SEEDS for part in parts)


def write_page(results_file: Path, docs: Path) -> Iterator[Path]:
    """Draw every figure whose curves all have `MIN_SEEDS` runs, and write the page and the claims.

    Args:
        results_file: File of the results; the claims with their numbers are written beside it.
        docs: Folder of the page.

    Yields:
        The paths that were written.
    """
    results = read_results(results_file)
    drawn = []
    for experiment in EXPERIMENTS.values():
        path = docs / IMAGES / f"{experiment.name}.svg"
        if not has_seeds(experiment, results):
            path.unlink(missing_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            save(draw(experiment, results), path)
            drawn.append(experiment.name)
            yield path
    yield write_text(docs / PAGE, format_page(results))
    to_docs = os.path.relpath(docs, results_file.parent)
    yield write_text(results_file.with_suffix(".md"), format_claims(results, drawn, to_docs))


def format_page(results: Results) -> str:
    """Format the page: how many claims hold, and those that do not."""
    verdicts = [judge(claim, results).verdict for claim in CLAIMS]
    counts = Counter(verdicts)
    words = {Verdict.CONFIRMED: "are confirmed", Verdict.CONTRADICTED: "are contradicted"}
    words |= {Verdict.PARTLY: "hold partly", Verdict.NOT_AT_THIS_SCALE: "do not show at this scale"}
    words |= {Verdict.UNDECIDED: "are undecided", Verdict.NOT_RUN: "have not been run"}
    summary = ", ".join(f"{counts[v]} {words[v]}" for v in Verdict if counts[v])
    contradicted = [
        f"- {claim.text} *({claim.source})*"
        for claim, verdict in zip(CLAIMS, verdicts, strict=True)
        if verdict is Verdict.CONTRADICTED
    ]
    return TEMPLATE.read_text("utf-8").format(
        claims=len(CLAIMS),
        summary=summary,
        contradicted="\n".join(contradicted) or "- none so far",
        hours=f"{total_seconds() / 3600 / CORES:.1f}",
    )


# --- a comparison in words


def describe_check(check: Check, seeds: Sequence[Runs]) -> str:
    """A comparison with the means over seeds, and the interval of its effect."""
    left, right = check.left, check.right
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
    held = {True: "holds", False: "fails", None: "undecided"}[check.holds(seeds)]
    low, _, high = check.interval(seeds)
    if math.isnan(low):
        return f"{compared}: {held}"
    log = "log ratio " if check.is_ratio else ""
    return f"{compared}: {held}, {log}{low:+.2f} to {high:+.2f}"


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


def format_claims(results: Results, drawn: list[str], docs: str) -> str:
    """Format the claims with their numbers, and the figures, as Markdown.

    Args:
        results: Results by seed.
        drawn: Names of the figures that are drawn.
        docs: The folder of the documentation, relative to the file.
    """
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
        lines = [describe_check(c, seeds) for c in claim.all_checks()] if len(seeds) > 1 else []
        shown = "<br>".join(lines) or "-"
        verdict = f"{finding.verdict}<br>{len(seeds)} of {len(planned(claim))} seeds"
        verdict += f"<br>*{claim.note}*" if claim.note else ""
        figure = claim.figure
        link = f" ([figure]({docs}/{IMAGES}/{figure}.svg))" if figure in drawn else ""
        stated = f"{claim.text}<br>*{claim.source}*{link}"
        rows.append(f"| {number} | {stated} | {shown} | {verdict} |")
    figures = []
    for name in drawn:
        title = EXPERIMENTS[name].title
        figures.append(f"### {title}\n\n![{title}]({docs}/{IMAGES}/{name}.svg)\n")
    return CLAIMS_TEMPLATE.read_text("utf-8").format(
        docs=docs,
        measured=sum(len(runs) for runs in results.values()),
        versions=f" with {'; '.join(versions)}" if versions else "",
        rows="\n".join(rows),
        figures="\n".join(figures) or "No figure has all its runs yet.\n",
        min_seeds=MIN_SEEDS,
    )
