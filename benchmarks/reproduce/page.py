"""docs/reproduction.md and its figures, from the results."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.drawing import save
from benchmarks.reproduce.claims import CLAIMS, MIN_SEEDS, Verdict, judge
from benchmarks.reproduce.drawing import Results, draw
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
    words |= {Verdict.NOT_RUN: "have not been run"}
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
        shown = "<br>".join(finding.lines) or "-"
        verdict = str(finding.verdict)
        if finding.verdict is Verdict.NOT_RUN and finding.seeds:
            verdict += f" ({finding.seeds} of {MIN_SEEDS} seeds so far)"
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
