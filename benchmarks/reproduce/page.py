"""docs/reproduction.md and its figures, from the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.reproduce.claims import CLAIMS, MIN_SEEDS, Verdict, judge
from benchmarks.reproduce.drawing import Results, draw, save
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
TEMPLATE = Path(__file__).with_name("page.md")


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
    """Draw every figure whose curves all have `MIN_SEEDS` runs, and write the page.

    Args:
        results_file: File of the results.
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
    yield write_text(docs / PAGE, format_page(results, drawn))


def format_page(results: Results, drawn: list[str]) -> str:
    """The page as Markdown.

    Args:
        results: Results by seed.
        drawn: Names of the figures that are drawn.
    """
    findings = [judge(claim, results) for claim in CLAIMS]
    counts = Counter(finding.verdict for finding in findings)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])
    versions = sorted(
        {
            ", ".join(f"{name} {number}" for name, number in run["versions"].items())
            for runs in results.values()
            for run in runs.values()
        }
    )
    measured = sum(len(runs) for runs in results.values())
    rows = []
    for number, (claim, finding) in enumerate(zip(CLAIMS, findings, strict=True), start=1):
        seeds = f"{finding.seeds} of {MIN_SEEDS} seeds so far"
        shown = "<br>".join(finding.lines) or "-"
        verdict = f"{finding.verdict}" + (
            f" ({seeds})" if finding.verdict is Verdict.NOT_RUN and finding.seeds else ""
        )
        figure = claim.figure
        link = f" ([figure]({IMAGES}/{figure}.svg))" if figure in drawn else ""
        stated = f"{claim.text}<br>*{claim.source}*{link}"
        rows.append(f"| {number} | {stated} | {shown} | {verdict} |")
    figures = [
        f"### {EXPERIMENTS[name].title}\n\n![{EXPERIMENTS[name].title}]({IMAGES}/{name}.svg)\n"
        for name in drawn
    ]
    return TEMPLATE.read_text("utf-8").format(
        summary=summary,
        measured=measured,
        versions=f" with {'; '.join(versions)}" if versions else "",
        rows="\n".join(rows),
        figures="\n".join(figures) or "No figure has all its runs yet.\n",
        hours=f"{total_seconds() / 3600 / CORES:.1f}",
        min_seeds=MIN_SEEDS,
    )
