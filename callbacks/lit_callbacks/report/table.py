"""Runs side by side in the terminal: what they ended with, and the settings that differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.core.saving import load_hparams_from_yaml

from lit_callbacks.charts import FEW_RUNS
from lit_callbacks.panels import choose_panels
from lit_callbacks.runs import Curve, Run
from lit_callbacks.words import align_columns, format_number, shorten_keys

LAST_PART = 10
"""The last of this many equal parts of a run counts as its end."""
LONGEST_SETTING = 24
"""Largest number of characters of a setting in the table of many runs."""
CONFIG_FILE = "config.yaml"
"""File that LightningCLI saves in the log folder of a run."""
PLACES = ("trainer.logger", "trainer.callbacks", "model.init_args.output_dir", "ckpt_path")
"""Prefixes of settings that the table leaves out: outputs, lists of objects, and what resumes."""
NONE = "-"
"""Cell of a metric, level or setting that a run does not have."""


def runs_table(runs: Sequence[Run], keys: Sequence[str] | None = None, width: int = 0) -> str:
    """Runs side by side: each metric's mean over the last tenth, levels, and differing settings.

    Up to `FEW_RUNS` runs are columns, more are rows. Settings come from the `config.yaml` that
    LightningCLI saves in the log folder.

    Args:
        runs: The runs.
        keys: Metrics to show, see `choose_panels`.
        width: Characters of a line, after which further columns follow below; 0 for no limit.

    Returns:
        The table as lines of text.
    """
    names = [panel.key for panel in choose_panels(runs, keys)]
    rows = [["mean of the last tenth", *(run.name for run in runs)]]
    rows += [[key, *(_ending(run.curves.get(key)) for run in runs)] for key in names]
    rows.append(["highest level", *(run.worst.word if run.spans else NONE for run in runs)])
    settings = [_settings(Path(run.folder)) for run in runs]
    differing = [
        [name, *(str(values.get(name, NONE)) for values in settings)]
        for name in dict.fromkeys(name for values in settings for name in values)
        if all(settings) and len({str(values.get(name, NONE)) for values in settings}) > 1
    ]
    if len(runs) > FEW_RUNS:
        rows += [[name.replace(".", "/"), *map(_cut, cells)] for name, *cells in differing]
        headings = shorten_keys([name for name, *_ in rows])
        columns = [[name, *cells] for name, (_, *cells) in zip(headings, rows, strict=True)]
        return align_columns(list(zip(*columns, strict=True)), width)
    if differing:
        rows += [[], ["settings that differ"], *differing]
    return align_columns(rows, width)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_SETTING else f"...{text[3 - LONGEST_SETTING :]}"


def _ending(curve: Curve | None) -> str:
    if curve is None:
        return NONE
    last = [point.value for point in curve.points[-max(1, len(curve.points) // LAST_PART) :]]
    return format_number(sum(last) / len(last))


def _settings(folder: Path) -> dict[str, Any]:
    """Settings of a run by dotted name; none if its log folder has no configuration."""
    files = sorted(folder.rglob(CONFIG_FILE))
    if len(files) != 1:
        return {}
    return dict(_leaves(load_hparams_from_yaml(files[0])))


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if name.startswith(PLACES):
            continue
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value
