"""The page about training runs: one HTML file that needs nothing else."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from lit_callbacks.charts import FEW_RUNS, choose_looks_over_seeds, metric_chart
from lit_callbacks.files import check_output_path, write_text
from lit_callbacks.monitors import Level
from lit_callbacks.panels import Panel, choose_panels
from lit_callbacks.report.reading import (
    read_any_run,
    read_phases,
    read_responses,
    split_verdict,
)
from lit_callbacks.report.table import ending, ending_rows, runs_table
from lit_callbacks.runs import Run, name_runs
from lit_callbacks.verdict import advise
from lit_callbacks.words import check_seconds, end_with_error, format_number, printable_line

_PAGE_BEGIN = b"<!doctype html>"
_SIGNS = {Level.DATA_CHANGED: "◆", Level.HEALTHY: "●", Level.SUSPICIOUS: "▲", Level.COLLAPSED: "■"}

_SHOWN_SIGNS = 2  # in the terminal; the page has them all


def write_report(
    runs: Sequence[str] | Mapping[str, str],
    output: str | os.PathLike[str],
    keys: Sequence[str] | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
) -> Path:
    """Write one HTML page about one or several runs: verdicts, curves, levels, actions.

    Args:
        runs: Logs, see `read_any_run`, or logs by the name that each run gets.
        output: Path of the page. An existing file is replaced once the new page is complete.
        keys: Metrics to show, see `choose_panels`.
        groups: Names of runs that differ in their seeds alone, by the name of the group. The page
            then has a table with the mean and the range over each.
    """
    loaded = [read_any_run(name, folder) for name, folder in name_runs(runs).items()]
    return _write_page(loaded, Path(output), keys=keys, groups=groups)


def _write_page(
    runs: Sequence[Run],
    path: Path,
    *,
    keys: Sequence[str] | None,
    groups: Mapping[str, Sequence[str]] | None,
    refresh: float = 0,
) -> Path:
    if path.is_dir():
        raise ValueError(f"output: expected a file, got the folder {path}")
    if path.is_file() and not _is_page(path):  # for instance the log itself
        raise ValueError(
            f"output: expected a new file or an earlier page, got {path}, which is something else"
        )
    return write_text(path, _render_runs(runs, keys=keys, groups=groups, refresh=refresh))


def _is_page(path: Path) -> bool:
    """Whether a file is an HTML page, or empty."""
    with path.open("rb") as file:
        return file.read(len(_PAGE_BEGIN)) in (_PAGE_BEGIN, b"")


def _render_runs(
    runs: Sequence[Run],
    *,
    keys: Sequence[str] | None,
    groups: Mapping[str, Sequence[str]] | None,
    refresh: float,
) -> str:
    panels = choose_panels(runs, keys)
    steps = _step_range(runs, panels)
    verdicts = [(run, verdict) for run in runs for verdict in run.verdicts]
    verdicts.sort(key=lambda item: (item[1].step, item[1].time))
    phases = [read_phases(run) for run in runs]
    looks = choose_looks_over_seeds((run.name for run in runs), groups or {})
    newest = max(curve.points[-1].time for run in runs for curve in run.curves.values())
    return render_page(
        "lit_callbacks.report",
        "training.html",
        refresh=refresh,
        runs=runs,
        # with more runs the page would be mostly text
        responses=[read_responses(run) for run in runs] if len(runs) <= FEW_RUNS else [],
        phases=phases,
        phase_names=list(dict.fromkeys(name for row in phases for name in row)),
        groups=[(name, list(group)) for name, group in groupby(panels, key=attrgetter("group"))],
        verdicts=verdicts,
        has_actions=any(verdict.actions for _, verdict in verdicts),
        unhealthy=any(span.level > Level.HEALTHY for run in runs for span in run.spans),
        has_undone=any(curve.undone for run in runs for curve in run.curves.values()),
        first=steps.first,
        last=steps.last,
        newest=datetime.fromtimestamp(newest, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        chart=partial(
            metric_chart,
            runs=runs,
            verdicts=[v for _, v in verdicts],
            steps=steps,
            looks=looks,
        ),
        percent=lambda step: 100 * (step - steps.first) / max(1, steps.last - steps.first),
        signs=_SIGNS,
        over_seeds=ending_rows(runs, keys, groups) if groups else [],
        looks=looks,
        split_verdict=split_verdict,
        ending=ending,
        advise=advise,
        format_number=format_number,
    )


def render_page(package: str, template: str, **context: object) -> str:
    """Render a template, in the folder `templates` of a package, that extends our `base.html`.

    Everything that it inserts is escaped, except for charts. Halves of surrogate pairs, which UTF-8
    cannot encode, are shown as in JSON.
    """
    packages = dict.fromkeys((package, "lit_callbacks.report"))
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name) for name in packages]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template(template).render(context)
    return page.encode(errors="backslashreplace").decode()


class StepRange(NamedTuple):
    """Range of the x axis.

    Attributes:
        first: First step of any run.
        last: Last step of any run.
    """

    first: int
    last: int


def _step_range(runs: Sequence[Run], panels: Sequence[Panel]) -> StepRange:
    steps = [verdict.step for run in runs for verdict in run.verdicts]
    for run in runs:
        steps += [step for span in run.spans for step in (span.start, span.end)]
        for curve in (run.curves[panel.key] for panel in panels if panel.key in run.curves):
            for points in (curve.points, *curve.undone):
                steps += [points[0].step, points[-1].step]
    return StepRange(min(steps), max(steps))


def main(argv: Sequence[str] | None = None, prog: str = "python -m lit_callbacks.report") -> None:
    """Run the command: print the runs side by side, write the page and print its path."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="One HTML page about one or several runs, and a table of what they ended with.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a log: folder of a TensorBoardLogger or CSVLogger, or a file or folder of another "
        "trainer (.jsonl, .json, .csv, .tsv, .log, .wandb); a folder of several runs; "
        "NAME=LOG names the run, and NAME=LOG,LOG is one run with several seeds",
    )
    parser.add_argument("--output", default="report.html", help="the page (report.html)")
    parser.add_argument("--keys", nargs="+", metavar="KEY", help="metrics to show")
    parser.add_argument(
        *("--watch", "-w"),
        type=float,
        nargs="?",
        const=30.0,
        default=0.0,
        metavar="SECONDS",
        help="write the page anew every SECONDS (default 30), until Ctrl-C; browsers reload it",
    )
    options = parser.parse_args(argv)
    is_over = not options.watch
    try:
        check_seconds("watch", options.watch)
        path = Path(check_output_path("output", options.output))
        while True:
            parsed = _parse_runs(options.runs)
            named = name_runs(parsed.runs)
            runs = [read_any_run(name, folder) for name, folder in named.items()]
            _write_page(
                runs,
                path,
                keys=options.keys,
                groups=parsed.groups,
                refresh=0 if is_over else options.watch,
            )
            if is_over or getattr(sys.stdout, "is_dropped", False):  # its reader has gone
                break
            try:
                print(printable_line(f"{datetime.now():%H:%M:%S} {path}"), flush=True)
                time.sleep(options.watch)
            except KeyboardInterrupt:
                is_over = True
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        table = runs_table(runs, options.keys, width, parsed.groups)
        troubles = [line for run in runs for line in _describe_trouble(run)]
        held_out = [f"{run.name}, held out: {run.held_out}" for run in runs if run.held_out]
    except (ValueError, OSError, ModuleNotFoundError) as error:
        end_with_error(parser, error)
    print(table, "", sep="\n")
    for line in (*troubles, *held_out, f"Report: {path}"):
        print(printable_line(line))


def _describe_trouble(run: Run) -> list[str]:
    """Lines about a run that ended in trouble: what it is, its gravest signs, what to do next."""
    reason = run.reason
    if reason is None or reason.level is None or reason.level is Level.HEALTHY:
        return []
    verdict = split_verdict(reason.sentence)
    lines = [f"{run.name}: {reason.level.word} at step {reason.step}: {verdict.meaning}"]
    lines += [f"  {sign}" for sign in verdict.reasons[:_SHOWN_SIGNS]]
    advice = advise(reason.sentence)
    return [*lines, f"  what to do next: {advice}"] if advice else lines


class ParsedRuns(NamedTuple):
    """The runs that the arguments name.

    Attributes:
        runs: Folders, or folders by name.
        groups: Names of runs by the name of their group.
    """

    runs: list[str] | dict[str, str]
    groups: dict[str, list[str]]


def _parse_runs(words: list[str]) -> ParsedRuns:
    """Folders, or folders by name if every word has one; a folder may itself contain a `=`.

    `NAME=FOLDER,FOLDER` is a group of runs, which are numbered.
    """
    is_named = [not Path(word).exists() and "=" in word for word in words]
    if not any(is_named):
        return ParsedRuns(words, {})
    folders_of: dict[str, list[str]] = {}
    for word in words:
        name, _, place = word.partition("=")
        folders_of[name] = [place] if Path(place).exists() else place.split(",")
    if not all(is_named) or len(folders_of) < len(words):
        raise ValueError(
            f"runs: expected folders, or NAME=FOLDER with different names, got {words}"
        )
    runs: dict[str, str] = {}
    groups: dict[str, list[str]] = {}
    for name, folders in folders_of.items():
        named_folders = {f"{name} {number}": folder for number, folder in enumerate(folders, 1)}
        if len(folders) == 1:
            named_folders = {name: folders[0]}
        else:
            groups[name] = [*named_folders]
        runs |= named_folders
    return ParsedRuns(runs, groups)
