"""Output of callbacks: the terminal, texts and histograms for loggers."""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from time import time
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger

from lit_callbacks.files import append_to, json_lines
from lit_callbacks.runs import RECORDS_FILE
from lit_callbacks.words import printable_line

# Lightning shows this branch of loggers in the terminal
_terminal = logging.getLogger("lightning.pytorch.lit_callbacks")


def say(trainer: Trainer, line: str, level: int = logging.INFO) -> None:
    """Write a line to the terminal, on rank 0 only: above the progress bar, or in Lightning's log.

    Args:
        trainer: The Trainer.
        line: The line.
        level: Level of the line in Lightning's log, from `logging`.
    """
    bar = trainer.progress_bar_callback
    if not trainer.is_global_zero:
        return
    if bar is not None and getattr(bar, "is_enabled", False):  # not declared by the base class
        bar.print(printable_line(line), file=sys.stderr)  # standard output is left to results
    else:
        _terminal.log(level, printable_line(line))


def logger_step(trainer: Trainer) -> int:
    """The x value at which loggers draw what is logged now.

    This is the last value that the module logged as `step`, or else the count of optimizer steps.
    """
    # round: the mean over validation batches may come out as 2.9999998
    return round(float(trainer.callback_metrics.get("step", trainer.global_step)))


def metrics_step(trainer: Trainer) -> int:
    """The x value at which Lightning draws the metrics that the module logs now.

    Without a logged `step` it is one less than `logger_step` after a batch.
    """
    if "step" in trainer.callback_metrics:
        return logger_step(trainer)
    # private to Lightning (2.6.6), but what it gives its loggers as the step
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def log_note(trainer: Trainer, key: str, text: str, step: int) -> None:
    """Log a short text, see `log_text`. A `CSVLogger` gets it as a cell of its `metrics.csv`.

    Args:
        trainer: The Trainer.
        key: Key of the text.
        text: The text, Markdown.
        step: Its x value, see `logger_step`.
    """
    log_text(trainer, key, text, step, as_cell=True)


def log_text(trainer: Trainer, key: str, text: str, step: int, as_cell: bool = False) -> None:
    """Log text to every logger, on rank 0 only.

    TensorBoard has texts of its own. Weights & Biases gets a table with one row, and MLflow the
    artifact `<key>/<step>.md`. For all other loggers it becomes a line of `log.jsonl` in the folder
    of their log: an object with `time`, `step`, `key` and `text`. Trackers are told apart by their
    methods, so that another project's logger with the same methods works too.

    Args:
        trainer: The Trainer.
        key: Key of the text.
        text: The text, Markdown.
        step: Its x value, see `logger_step`.
        as_cell: Whether a `CSVLogger` gets the text as a cell of its `metrics.csv`, and not as a
            line of `log.jsonl`.
    """
    folders = set()
    for logger in trainer.loggers if trainer.is_global_zero else ():
        tracker: Any = logger
        experiment: Any = getattr(logger, "experiment", None)
        if as_cell and isinstance(logger, CSVLogger):
            # Lightning declares numbers, but its writer takes strings.
            tracker.log_metrics({key: text}, step=step)
        elif _has(experiment, "add_text"):  # TensorBoard, or Lightning's dummy
            experiment.add_text(key, text, step)
        elif _has(logger, "log_text", "log_table"):  # Weights & Biases
            tracker.log_text(key, columns=["step", "text"], data=[[step, text]], step=step)
        elif hasattr(logger, "run_id") and _has(experiment, "log_text"):  # MLflow
            experiment.log_text(tracker.run_id, text, f"{key}/{step:08d}.md")
        else:
            folders.add(_log_folder(trainer, logger))  # loggers in one folder share the file
    record = {"time": time(), "step": step, "key": key, "text": text}
    for folder in folders:
        with append_to(folder / RECORDS_FILE) as file:
            file.write(json_lines([record]).encode())


def log_histogram(trainer: Trainer, key: str, values: Sequence[float], step: int) -> None:
    """Log a histogram of the finite values to TensorBoard, on rank 0 only.

    Args:
        trainer: The Trainer.
        key: Key of the histogram.
        values: Its values.
        step: Its x value, see `logger_step`.
    """
    finite = [value for value in values if math.isfinite(value)]  # its writer fails on others
    for logger in trainer.loggers if trainer.is_global_zero and finite else ():
        experiment: Any = getattr(logger, "experiment", None)
        if _has(experiment, "add_histogram"):
            experiment.add_histogram(key, torch.tensor(finite), step)


def escape_markdown(text: str) -> str:
    r"""Escape text so that Markdown shows it literally, even in a table cell.

    Line breaks become `<br>`, and surrounding whitespace is removed.
    """
    for sign, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(sign, entity)
    lines = re.sub(r"([\\`*_\[\]|#!])", r"\\\1", text.strip()).splitlines()
    return "<br>".join(lines)


def _has(owner: object, *methods: str) -> bool:
    return all(callable(getattr(owner, method, None)) for method in methods)


def _log_folder(trainer: Trainer, logger: Logger) -> Path:
    return Path(logger.log_dir) if logger.log_dir is not None else versioned_folder(trainer, logger)


def versioned_folder(trainer: Trainer, logger: Logger) -> Path:
    """The folder of a logger's version, where Lightning's `ModelCheckpoint` saves too."""
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return Path(logger.save_dir or trainer.default_root_dir) / str(logger.name) / version
