"""Runs side by side in the terminal: what they ended with, and the settings that differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_callbacks.charts import FEW_RUNS
from lit_callbacks.panels import choose_panels
from lit_callbacks.runs import Curve, Run
from lit_callbacks.words import align_columns, format_number, shorten_keys
from lit_callbacks.yaml_reading import read_yaml

LAST_PART = 10
"""The last of this many equal parts of a run counts as its end."""
LONGEST_SETTING = 24
"""Largest number of characters of a setting in the table of many runs."""
CONFIG_FILE = "config.yaml"
"""File that LightningCLI saves in the log folder of a run."""
PLACES = ("trainer.logger", "trainer.callbacks", "model.init_args.output_dir", "ckpt_path")
"""Prefixes of settings that the table leaves out: outputs, lists of objects, and what resumes."""
CLASS = "model.class_path"
"""Setting that says which stage a run is of."""
NONE = "-"
"""Cell of a metric, level or setting that a run does not have."""


def runs_table(
    runs: Sequence[Run],
    keys: Sequence[str] | None = None,
    width: int = 0,
    groups: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """Runs side by side: each metric's mean over the last tenth, levels, and differing settings.

    Up to `FEW_RUNS` runs are columns, more are rows. Settings come from the `config.yaml` that
    LightningCLI saves in the log folder.

    Args:
        runs: The runs.
        keys: Metrics to show, see `choose_panels`.
        width: Characters of a line, after which further columns follow below; 0 for no limit.
        groups: Names of runs that differ in their seeds alone, by the name of their common column,
            which has the mean and the range over them. Default: each run has a column.

    Returns:
        The table as lines of text.
    """
    columns = _group_runs(runs, groups or {})
    rows = ending_rows(runs, keys, groups)
    differing = _differing_settings([_common_settings(column) for column in columns.values()])
    if len(columns) > FEW_RUNS:
        rows += [[name.replace(".", "/"), *map(_cut, cells)] for name, *cells in differing]
        headings = shorten_keys([name for name, *_ in rows])
        by_run = [[name, *cells] for name, (_, *cells) in zip(headings, rows, strict=True)]
        return align_columns(list(zip(*by_run, strict=True)), width)
    if differing:
        rows += [[], ["settings that differ"], *differing]
    return align_columns(rows, width)


def ending_rows(
    runs: Sequence[Run],
    keys: Sequence[str] | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
) -> list[list[str]]:
    """Rows of a table: names of the columns, each metric's mean over the last tenth, levels.

    Args:
        runs: The runs.
        keys: Metrics to show, see `choose_panels`.
        groups: Names of runs that differ in their seeds alone, see `runs_table`.
    """
    columns = _group_runs(runs, groups or {})
    return [
        ["mean of the last tenth", *columns],
        *(
            [panel.key, *(_endings(column, panel.key) for column in columns.values())]
            for panel in choose_panels(runs, keys)
        ),
        ["highest level", *map(_worst_levels, columns.values())],
    ]


def _group_runs(
    runs: Sequence[Run], groups: Mapping[str, Sequence[str]]
) -> Mapping[str, Sequence[Run]]:
    """The runs of each column by its name."""
    group_of = {name: group for group, names in groups.items() for name in names}
    columns: dict[str, list[Run]] = {}
    for run in runs:
        columns.setdefault(group_of.get(run.name, run.name), []).append(run)
    return columns


def _worst_levels(runs: Sequence[Run]) -> str:
    """The highest level of some runs, and of how many it is."""
    levels = [run.worst for run in runs if run.spans]
    if not levels:
        return NONE
    worst = max(levels)
    return worst.word if len(runs) == 1 else f"{worst.word} {levels.count(worst)}/{len(runs)}"


def _endings(runs: Sequence[Run], key: str) -> str:
    """The end of a metric: of one run its value, of several the mean and the range."""
    values = [ending(run.curves[key]) for run in runs if key in run.curves]
    if not values:
        return NONE
    mean = format_number(sum(values) / len(values))
    if len(runs) == 1:
        return mean
    return f"{mean} [{format_number(min(values))}, {format_number(max(values))}]"


def _differing_settings(settings: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Rows of the settings that differ: the name, and the value in each column.

    Runs of different stages have many settings that the others do not: these are left out.

    Args:
        settings: The settings of each column; if one has none, nothing is compared.
    """
    if not all(settings):
        return []
    names = dict.fromkeys(name for values in settings for name in values)
    if len({str(values.get(CLASS)) for values in settings}) > 1:
        names = dict.fromkeys(name for name in names if all(name in values for values in settings))
    rows = [[name, *(str(values.get(name, NONE)) for values in settings)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def _common_settings(runs: Sequence[Run]) -> dict[str, Any]:
    """Settings that are the same in all of some runs, by dotted name."""
    first, *others = (_settings(Path(run.folder)) for run in runs)
    return {
        name: value
        for name, value in first.items()
        if all(other.get(name) == value for other in others)
    }


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_SETTING else f"...{text[3 - LONGEST_SETTING :]}"


def ending(curve: Curve) -> float:
    """The mean of a metric over the last part of a run."""
    last = [point.value for point in curve.points[-max(1, len(curve.points) // LAST_PART) :]]
    return sum(last) / len(last)


def _settings(folder: Path) -> dict[str, Any]:
    """Settings of a run by dotted name; none if its log folder has no configuration."""
    files = sorted(folder.rglob(CONFIG_FILE))
    if len(files) != 1:
        return {}
    settings = read_yaml(files[0])
    return dict(_leaves(settings)) if isinstance(settings, Mapping) else {}


def _leaves(settings: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if name.startswith(PLACES):
            continue
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value
