"""What callbacks write: files, texts, the terminal, and the texts and histograms of loggers."""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

if TYPE_CHECKING:
    from rich.console import Console

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

    Example:
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

    Example:
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

    Example:
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

    Example:
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

    Example:
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

    Example:
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
        raise ModuleNotFoundError(
            f"{user} draws with rich: pip install lit-callbacks[live]"
        ) from error
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

    TensorBoard's loggers have texts of their own. All others get it among the metrics; one that
    accepts numbers only goes without.

    Args:
        trainer: The trainer that has the loggers.
        key: Name of the text, for example `monitor/verdict`.
        text: Markdown.
        step: Place on the x axis, see `logger_step`.
    """
    write_text(trainer, key, text, step)
    for logger in trainer.loggers:
        if trainer.is_global_zero and not isinstance(logger, TensorBoardLogger):
            # Lightning declares numbers, but `CSVLogger`, `WandbLogger` and others take strings.
            metrics: dict[str, Any] = {key: text}
            try:
                logger.log_metrics(metrics, step=step)
            except (TypeError, ValueError):
                _log.debug("%s takes no text", type(logger).__name__)


def write_text(trainer: Trainer, key: str, text: str, step: int) -> None:
    """Write text to every TensorBoard logger, on rank 0 only.

    Args:
        trainer: The trainer that has the loggers. Loggers other than TensorBoard's are skipped.
        key: Name of the text, for example `monitor/verdict`.
        text: Markdown.
        step: Place on the x axis, see `logger_step`.
    """
    for logger in _tensorboard_loggers(trainer):
        logger.experiment.add_text(key, text, step)


def write_histogram(trainer: Trainer, key: str, values: Tensor, step: int) -> None:
    """Write a histogram to every TensorBoard logger, on rank 0 only.

    Args:
        trainer: The trainer that has the loggers. Loggers other than TensorBoard's are skipped.
        key: Name of the histogram, for example `rollout/scores`.
        values: Numbers of any shape. NaN and the infinities are left out, and nothing is written
            if no other value remains.
        step: Place on the x axis, see `logger_step`.
    """
    finite = values.detach().float().cpu()
    finite = finite[finite.isfinite()]  # TensorBoard's writer fails on other values
    if len(finite) == 0:
        return
    for logger in _tensorboard_loggers(trainer):
        logger.experiment.add_histogram(key, finite, step)


def escape_markdown(text: str) -> str:
    r"""Escape text so that Markdown shows it literally, also in a table cell.

    Args:
        text: Any text. Line breaks become `<br>`, and surrounding whitespace is removed.

    Example:
        >>> escape_markdown("a|b *c*")
        'a\\|b \\*c\\*'
    """
    for sign, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(sign, entity)
    lines = re.sub(r"([\\`*_\[\]|#!])", r"\\\1", text.strip()).splitlines()
    return "<br>".join(lines)


def _tensorboard_loggers(trainer: Trainer) -> Iterator[TensorBoardLogger]:
    if trainer.is_global_zero:
        yield from (x for x in trainer.loggers if isinstance(x, TensorBoardLogger))
