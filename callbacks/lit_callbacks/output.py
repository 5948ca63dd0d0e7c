"""What callbacks write: files, texts, the terminal, and the texts and histograms of loggers."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger
from torch import Tensor

if TYPE_CHECKING:
    from rich.console import Console

RECORDS_FILE = "log.jsonl"
"""File beside a log with the texts and histograms that its logger does not take."""
HISTOGRAM_BINS = 32

# Lightning shows this branch of loggers in the terminal.
_log = logging.getLogger("lightning.pytorch.lit_callbacks")

# --- files


@contextmanager
def name_file(path: str | Path) -> Iterator[None]:
    """Name a file in the errors of writing it. That of a full disk has no name by itself.

    Args:
        path: What is written in the context.

    Raises:
        OSError: If writing fails.
    """
    try:
        yield
    except OSError as error:
        # an error without a number is not one of the operating system
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


# --- numbers and names on one line


def format_duration(seconds: float) -> str:
    """A duration as `mm:ss`, or `h:mm:ss` from one hour on.

    Args:
        seconds: Duration in seconds, at least 0; fractions are cut off.

    Examples:
        >>> format_duration(125.9), format_duration(3609)
        ('02:05', '1:00:09')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


def format_number(value: float) -> str:
    """A number in three significant digits, without an exponent below a million.

    Args:
        value: Any float, including NaN and the infinities.

    Examples:
        >>> [format_number(value) for value in (0.51234, 1234.4, 5e-7, float("nan"))]
        ['0.512', '1234', '5e-07', 'nan']
    """
    if math.isfinite(value) and 1000 <= abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.3g}"


def format_bar(fraction: float, width: int) -> str:
    """A progress bar filled from the left.

    Args:
        fraction: The filled part, from 0 to 1.
        width: Number of characters including the brackets, at least 3.

    Examples:
        >>> format_bar(0.5, width=10)
        '[####....]'
    """
    filled = int(fraction * (width - 2))
    return f"[{'#' * filled}{'.' * (width - 2 - filled)}]"


def sparkline(values: Sequence[float], width: int) -> str:
    """A series in block characters, from the lowest value shown to the highest.

    Args:
        values: Any floats, the newest last. A value that is not finite leaves a gap.
        width: Largest number of characters, at least 1. Only the newest values are shown.

    Returns:
        One character for each value shown. If all of them are equal, the line is at half height.

    Examples:
        >>> sparkline([1, 2, float("nan"), 4], width=10)
        '▁▃ █'
    """
    shown = list(values)[-width:]
    finite = [value for value in shown if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)

    def block(value: float) -> str:
        if not math.isfinite(value):
            return " "
        if low == high:
            return "▄"
        share = (value / 2 - low / 2) / (high / 2 - low / 2)  # halves, as the range may overflow
        return "▁▂▃▄▅▆▇█"[min(7, int(share * 8))]

    return "".join(map(block, shown))


def shorten_keys(keys: Sequence[str]) -> list[str]:
    """The part of each key after its last slash, or the whole key where two would look the same.

    Args:
        keys: Metric keys such as `rollout/kl`.

    Returns:
        One name for each key, in the same order.

    Examples:
        >>> shorten_keys(["rollout/kl", "rollout/score", "val/score"])
        ['kl', 'rollout/score', 'val/score']
    """
    tails = [key.rsplit("/", 1)[-1] for key in keys]
    return [tail if tails.count(tail) == 1 else key for key, tail in zip(keys, tails, strict=True)]


def shorten_sentence(sentence: str, words: int) -> str:
    """A sentence in at most so many words; its conclusion, after the last colon, is kept.

    Args:
        sentence: Words, usually `reasons: conclusion`.
        words: Largest number of words, at least 1.

    Examples:
        >>> shorten_sentence("KL 41 nats is 12x its baseline, length 40: the policy exploits", 9)
        'KL 41 nats is 12x ...: the policy exploits'
    """
    if len(sentence.split()) <= words:
        return sentence
    reasons, _, conclusion = sentence.rpartition(": ")
    room = words - len(conclusion.split())
    if not reasons or room < 2:
        return " ".join([*sentence.split()[: words - 1], "..."])
    return f"{' '.join([*reasons.split()[: room - 1], '...'])}: {conclusion}"


# --- terminal


def say(trainer: Trainer, line: str, level: int = logging.INFO) -> None:
    """Say a line in the terminal, on rank 0 only: above the progress bar, or in Lightning's log.

    Args:
        trainer: The trainer.
        line: One line.
        level: Level of the line in the log.
    """
    bar = trainer.progress_bar_callback
    if not trainer.is_global_zero:
        return
    if bar is not None and getattr(bar, "is_enabled", False):  # the base class declares it not
        bar.print(line, file=sys.stderr)  # standard output is left to results
    else:
        _log.log(level, line)


def stderr_console(user: str) -> Console:
    """A `rich` console on standard error; standard output is left to results.

    Args:
        user: Name of the callback that needs the console, for the error message.

    Raises:
        ModuleNotFoundError: If `rich` is not installed.
    """
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{user} draws with rich: pip install rich") from error
    return Console(stderr=True)


# --- loggers


def logger_step(trainer: Trainer) -> int:
    """The x value at which loggers draw what is logged now.

    This is the last value that the module logged as `step`, or else the trainer's count of
    optimizer steps. A fit that is resumed has no logged `step` before its first batch; a callback
    that needs one earlier must keep it in its own state.

    Args:
        trainer: The trainer, during or after a fit.
    """
    # Rounded, as the mean over validation batches may come out as 2.9999998.
    return round(float(trainer.callback_metrics.get("step", trainer.global_step)))


def metrics_step(trainer: Trainer) -> int:
    """The x value at which Lightning draws the metrics that the module logs now.

    It is `logger_step` if the module logs `step`. Otherwise it is one less after a batch, and
    another number under several optimizers.

    Args:
        trainer: The trainer, during a fit.
    """
    if "step" in trainer.callback_metrics:
        return logger_step(trainer)
    # private to Lightning (2.6.6), but what it gives its loggers as the step
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def write_note(trainer: Trainer, key: str, text: str, step: int) -> None:
    """Write a short text to every logger, on rank 0 only.

    As `write_text`, except that a `CSVLogger` gets it as a cell of its `metrics.csv`.

    Args:
        trainer: The trainer that has the loggers.
        key: Name of the text, for example `monitor/verdict`.
        text: Markdown.
        step: Place on the x axis, see `logger_step`.
    """
    others = []
    for logger in _loggers(trainer):
        if isinstance(logger, CSVLogger):
            # Lightning declares numbers, but its writer takes strings.
            note: dict[str, Any] = {key: text}
            logger.log_metrics(note, step=step)
        elif not _log_text(logger, key, text, step):
            others.append(logger)
    _write_record(trainer, others, key, step, {"text": text})


def write_text(trainer: Trainer, key: str, text: str, step: int) -> None:
    """Write text to every logger, on rank 0 only.

    TensorBoard has texts of its own. Weights & Biases gets a table with one row, and MLflow the
    artifact `<key>/<step>.md`. For all other loggers it becomes a line of `log.jsonl` in the folder
    of their log: an object with `time`, `step`, `key` and `text`.

    Args:
        trainer: The trainer that has the loggers.
        key: Name of the text, for example `samples/0`.
        text: Markdown.
        step: Place on the x axis, see `logger_step`.
    """
    others = [x for x in _loggers(trainer) if not _log_text(x, key, text, step)]
    _write_record(trainer, others, key, step, {"text": text})


def write_histogram(trainer: Trainer, key: str, values: Tensor, step: int) -> None:
    """Write a histogram to every logger, on rank 0 only.

    TensorBoard and Weights & Biases have histograms of their own. MLflow gets the artifact
    `<key>/<step>.json` with `counts` and `edges`, and all other loggers a line of `log.jsonl` with
    the same, see `write_text`.

    Args:
        trainer: The trainer that has the loggers.
        key: Name of the histogram, for example `rollout/scores`.
        values: Numbers of any shape. NaN and the infinities are left out, and nothing is written
            if no other value remains.
        step: Place on the x axis, see `logger_step`.
    """
    finite = values.detach().float().cpu()
    finite = finite[finite.isfinite()]  # TensorBoard's writer fails on other values
    if len(finite) == 0:
        return
    others = [x for x in _loggers(trainer) if not _log_histogram(x, key, finite, step)]
    _write_record(trainer, others, key, step, _count_bins(finite))


def escape_markdown(text: str) -> str:
    r"""Escape text so that Markdown shows it literally, also in a table cell.

    Args:
        text: Any text. Line breaks become `<br>`, and surrounding whitespace is removed.

    Examples:
        >>> escape_markdown("a|b *c*")
        'a\\|b \\*c\\*'
    """
    for sign, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(sign, entity)
    lines = re.sub(r"([\\`*_\[\]|#!])", r"\\\1", text.strip()).splitlines()
    return "<br>".join(lines)


def _loggers(trainer: Trainer) -> list[Logger]:
    return list(trainer.loggers) if trainer.is_global_zero else []


# Trackers are told apart by their methods, so that none of them has to be installed, and a subclass
# or another project's logger with the same methods is served alike.


def _has(owner: object, *methods: str) -> bool:
    return all(callable(getattr(owner, method, None)) for method in methods)


def _is_mlflow(logger: Logger) -> bool:
    experiment: Any = getattr(logger, "experiment", None)
    return hasattr(logger, "run_id") and _has(experiment, "log_text", "log_dict")


def _log_text(logger: Logger, key: str, text: str, step: int) -> bool:
    """Write text to a logger's own kind of text; false if it has none."""
    tracker: Any = logger
    experiment: Any = getattr(logger, "experiment", None)
    if _has(experiment, "add_text"):  # TensorBoard; also Lightning's dummy, which drops it
        experiment.add_text(key, text, step)
    elif _has(logger, "log_text", "log_table"):  # Weights & Biases
        tracker.log_text(key, columns=["step", "text"], data=[[step, text]], step=step)
    elif _is_mlflow(logger):
        experiment.log_text(tracker.run_id, text, f"{key}/{step:08d}.md")
    else:
        return False
    return True


def _log_histogram(logger: Logger, key: str, values: Tensor, step: int) -> bool:
    """Write a histogram to a logger's own kind of histogram; false if it has none."""
    tracker: Any = logger
    experiment: Any = getattr(logger, "experiment", None)
    if _has(experiment, "add_histogram"):
        experiment.add_histogram(key, values, step)
    elif _has(logger, "log_text", "log_table"):
        # imported by now, as the logger needs it
        wandb = import_module("wandb")
        bins = _count_bins(values)
        histogram = wandb.Histogram(np_histogram=(bins["counts"], bins["edges"]))
        tracker.log_metrics({key: histogram}, step=step)
    elif _is_mlflow(logger):
        experiment.log_dict(tracker.run_id, _count_bins(values), f"{key}/{step:08d}.json")
    else:
        return False
    return True


def _count_bins(values: Tensor) -> dict[str, Any]:
    counts, edges = torch.histogram(values.flatten(), bins=HISTOGRAM_BINS)
    return {"counts": [int(count) for count in counts], "edges": edges.tolist()}


def _write_record(
    trainer: Trainer, loggers: Sequence[Logger], key: str, step: int, content: dict[str, Any]
) -> None:
    """Append a line to the `log.jsonl` of each logger; loggers in one folder share it."""
    record = {"time": time(), "step": step, "key": key, **content}
    for folder in {_log_folder(trainer, logger) for logger in loggers}:
        path = folder / RECORDS_FILE
        with name_file(path):
            folder.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _log_folder(trainer: Trainer, logger: Logger) -> Path:
    if logger.log_dir is not None:
        return Path(logger.log_dir)
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return Path(logger.save_dir or trainer.default_root_dir) / str(logger.name) / version
