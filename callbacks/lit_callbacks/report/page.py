"""The page: one HTML file that needs nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from itertools import count
from pathlib import Path

from lit_callbacks.monitors import Level
from lit_callbacks.output import format_number
from lit_callbacks.report.chart import (
    NumberedVerdict,
    chart,
    clustered,
    numbers_text,
    run_class,
    shaded_runs,
)
from lit_callbacks.report.panels import Panel, chosen_panels
from lit_callbacks.runs import Run, Span, name_runs, read_run

_SIGNS = {Level.HEALTHY: "●", Level.SUSPICIOUS: "▲", Level.COLLAPSED: "■"}
_NO_DETECTOR = "no detector ran"


def write_report(
    runs: Sequence[str] | Mapping[str, str],
    output: str | os.PathLike[str],
    keys: Sequence[str] | None = None,
) -> Path:
    """Write one HTML page about one or several runs: verdicts, curves, levels, actions.

    Args:
        runs: folders with TensorBoard event files (or with a single such folder below), or such
            folders by the name that each run gets.
        output: where the page goes; a file that is there is replaced once the new one is complete.
        keys: metrics to show. None: the usual ones of PPO as far as they were logged, and every
            scalar of a run that has none of them.

    Returns:
        The path of the page.

    Raises:
        ModuleNotFoundError: without tensorboard.
        ValueError: for a folder without a run or with several, a run without scalars, a key that
            no run has, or an `output` that is a folder.
    """
    path = Path(output)
    if path.is_dir():
        raise ValueError(f"output: expected a file, got the folder {path}")
    read = [read_run(name, folder) for name, folder in name_runs(runs).items()]
    text = report_html(read, keys)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)  # there only if something failed
    return path


def report_html(runs: Sequence[Run], keys: Sequence[str] | None = None) -> str:
    """The page as text.

    Args:
        runs: at least one.
        keys: as for `write_report`.

    Raises:
        ValueError: for a key that no run has.
    """
    groups = chosen_panels(runs, keys)
    steps = _step_range(runs, [panel for _, panels in groups for panel in panels])
    marks = _numbered(runs)
    names = escape(", ".join(run.name for run in runs))
    run_cards = [_run_card(run, place, marks, steps) for place, run in enumerate(runs)]
    parts = [
        f"<header><h1>Training report</h1><p>{_subtitle(runs, steps)}</p></header>",
        f'<section class="runs">{"".join(run_cards)}</section>',
        _legend(runs),
    ]
    for group, panels in groups:
        cards = "".join(_panel_card(panel, runs, marks, steps) for panel in panels)
        parts.append(
            f'<section><h2>{escape(group)}</h2><div class="grid-of-panels">{cards}</div></section>'
        )
    if any(run.spans for run in runs):
        parts.append(_verdict_section(runs, marks))
    parts.append(f"<footer>{_notes(runs)}</footer>")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{names}</title>\n<style>\n{_resource('page.css')}</style>\n</head>\n<body>\n"
        f'<main data-first="{steps[0]}" data-last="{max(steps[1], steps[0] + 1)}">\n'
        + "\n".join(parts)
        + f"\n</main>\n{_HATCH}\n<script>\n{_resource('page.js')}</script>\n</body>\n</html>\n"
    )


# Stripes over a collapse, so that it differs from a suspicion without its colour too.
_HATCH = (
    '<svg width="0" height="0" aria-hidden="true" class="definitions"><defs>'
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path class="stripe" d="M0 0V6"/></pattern></defs></svg>'
)


def _resource(name: str) -> str:
    return files("lit_callbacks.report").joinpath(name).read_text(encoding="utf-8")


def _step_range(runs: Sequence[Run], panels: Sequence[Panel]) -> tuple[int, int]:
    steps = [mark.step for run in runs for mark in run.verdicts]
    for run in runs:
        steps += [step for span in run.spans for step in (span.start, span.end)]
        for curve in (run.curves[panel.key] for panel in panels if panel.key in run.curves):
            for readings in (curve.points, *curve.undone):
                steps += [readings[0].step, readings[-1].step]
    return min(steps), max(steps)


def _numbered(runs: Sequence[Run]) -> list[NumberedVerdict]:
    """All verdicts in order of steps, as their numbers stand in the pictures."""
    found = [(place, mark) for place, run in enumerate(runs) for mark in run.verdicts]
    found.sort(key=lambda item: (item[1].step, item[1].time))
    return [
        NumberedVerdict(n, place, mark) for n, (place, mark) in zip(count(1), found, strict=False)
    ]


# --- head


def _subtitle(runs: Sequence[Run], steps: tuple[int, int]) -> str:
    newest = max(c.points[-1].time for run in runs for c in run.curves.values())
    when = datetime.fromtimestamp(newest, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"Steps {steps[0]} to {steps[1]}, last record {when}"


def _badge(level: Level) -> str:
    sign = f'<i aria-hidden="true">{_SIGNS[level]}</i>'
    return f'<span class="badge {level.word}">{sign}{level.word}</span>'


def _swatch(place: int) -> str:
    return f'<span class="swatch {run_class(place)}" aria-hidden="true"></span>'


def _run_card(
    run: Run, place: int, marks: Sequence[NumberedVerdict], steps: tuple[int, int]
) -> str:
    head, verdict = "", f'<p class="sentence faint">{_NO_DETECTOR}</p>'
    if run.level is not None:
        past = f", {run.worst.word} before" if run.worst > run.level else ""
        head = f'{_badge(run.level)} <span class="faint">at step {run.spans[-1].end}{past}</span>'
        verdict = _sentence(run) + _timeline(
            run, [mark for mark in marks if mark.run == place], steps
        )
    return (
        f'<article class="run"><h2>{_swatch(place)}{escape(run.name)} {head}</h2>{verdict}'
        f'<p class="folder faint">{escape(run.folder)}</p></article>'
    )


def _sentence(run: Run) -> str:
    """Why the level at the end is what it is; with its step, as it may be long ago."""
    if run.reason is None:
        return ""
    step = f'<span class="faint">(step {run.reason.step})</span>'
    return f'<p class="sentence">{escape(run.reason.sentence)} {step}</p>'


def _timeline(run: Run, marks: Sequence[NumberedVerdict], steps: tuple[int, int]) -> str:
    """The levels of one run from its first step to its last, as wide as the card."""

    def percent(step: int) -> float:
        return 100 * (step - steps[0]) / max(1, steps[1] - steps[0])

    def segment(span: Span) -> str:
        left, width = percent(span.start), percent(span.end) - percent(span.start)
        told = f"{span.level.word}, step {span.start} to {span.end}"
        return (
            f'<span class="segment {span.level.word}" title="{told}" '
            f'style="left:{left:.2f}%;width:{width:.2f}%"><b>{span.level.word}</b></span>'
        )

    def pin(cluster: Sequence[NumberedVerdict]) -> str:
        middle = (percent(cluster[0].verdict.step) + percent(cluster[-1].verdict.step)) / 2
        return (
            f'<a class="pin" href="#verdict-{cluster[0].number}" style="left:{middle:.2f}%">'
            f"{numbers_text(cluster)}</a>"
        )

    pins = "".join(map(pin, clustered(marks, percent, apart=4)))
    track = "".join(map(segment, run.spans))
    return (
        f'<div class="timeline"><div class="pins">{pins}</div>'
        f'<div class="track">{track}</div></div>'
    )


def _legend(runs: Sequence[Run]) -> str:
    """Names of the runs; the script adds the step under the pointer and each run's level there."""
    items = []
    for place, run in enumerate(runs):
        starts = " ".join(str(span.start) for span in run.spans)
        levels = " ".join(span.level.word for span in run.spans)
        items.append(
            f'<li data-x="{starts}" data-y="{levels}">{_swatch(place)}{escape(run.name)} '
            f'<span class="level"></span></li>'
        )
    return f'<div class="legend"><ul>{"".join(items)}</ul><span class="at">last values</span></div>'


# --- panels


def _panel_card(
    panel: Panel, runs: Sequence[Run], marks: Sequence[NumberedVerdict], steps: tuple[int, int]
) -> str:
    unit = f' <span class="unit">{escape(panel.unit)}</span>' if panel.unit else ""
    values = "".join(_last_values(panel, runs))
    return (
        f'<figure class="panel"><figcaption><h3>{escape(panel.title)}{unit}</h3></figcaption>'
        f'<p class="values">{values}<code>{escape(panel.key)}</code></p>'
        f"{chart(panel, runs, marks, steps)}</figure>"
    )


def _last_values(panel: Panel, runs: Sequence[Run]) -> Iterator[str]:
    for place, run in enumerate(runs):
        if panel.key in run.curves:
            value = format_number(run.curves[panel.key].points[-1].value)
            yield f'<span>{_swatch(place)}<b data-run="{place}">{value}</b></span>'


# --- below the panels


def _verdict_section(runs: Sequence[Run], marks: Sequence[NumberedVerdict]) -> str:
    if not marks:
        return "<section><h2>Verdicts</h2><p>The level never changed.</p></section>"
    several = len(runs) > 1
    titles = ("", *(("Run",) if several else ()), "Step", "Level", "Sentence", "Actions")
    head = "".join(f'<th scope="col">{title}</th>' for title in titles)
    rows = []
    for number, place, mark in marks:
        run = f'<td class="name">{_swatch(place)}{escape(runs[place].name)}</td>' if several else ""
        level = "" if mark.level is None else _badge(mark.level)
        actions = "".join(f"<li>{escape(action)}</li>" for action in mark.actions)
        rows.append(
            f'<tr id="verdict-{number}"><th scope="row">{number}</th>{run}'
            f'<td class="step"><span class="small">step </span>{mark.step}</td><td>{level}</td>'
            f'<td class="why">{escape(mark.sentence)}</td>'
            f"<td>{f'<ul>{actions}</ul>' if actions else ''}</td></tr>"
        )
    return (
        f'<section><h2>Verdicts</h2><table class="verdicts"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></section>"
    )


def _notes(runs: Sequence[Run]) -> str:
    notes = [
        "Thin lines are what was logged, bold ones the mean over a 25th of the run. A gap with a "
        "short stroke below is a value that was not finite.",
    ]
    if any(curve.undone for run in runs for curve in run.curves.values()):
        notes.append(
            "Dotted pieces were undone: the run went back to an earlier step, resumed from a "
            "checkpoint or rolled back."
        )
    shaded = shaded_runs(runs)
    if len(shaded) == 1:
        of = f" of {escape(runs[shaded[0]].name)}" if len(runs) > 1 else ""
        notes.append(f"Shaded: where the detector's verdict{of} was {_KEY}.")
    elif shaded:
        lanes = ", ".join(f"{_swatch(place)}{escape(runs[place].name)}" for place in shaded)
        notes.append(f"Lanes below each picture: where the verdict was {_KEY}, for {lanes}.")
    return "".join(f"<p>{note}</p>" for note in notes)


_KEY = (
    '<span class="key suspicious"></span> suspicious or '
    '<span class="key collapsed"></span> collapsed'
)
