"""Where callbacks write and at which x: text and histograms go to TensorBoard only."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor


def x_axis(trainer: Trainer) -> int:
    """Where the loggers draw what is logged now, in steps of the module.

    That is the value that the module logged last as ``step``, or else the trainer's count of
    optimizer steps. A fit that goes on from a checkpoint has logged no ``step`` before its first
    batch: whoever needs one there keeps it in its own state.

    Args:
        trainer: the trainer, during or after a fit.
    """
    # Rounded, as the mean over validation batches may come out as 2.9999998.
    return round(float(trainer.callback_metrics.get("step", trainer.global_step)))


def write_text(trainer: Trainer, key: str, text: str, step: int) -> None:
    """Write text to every TensorBoard logger, in the process of rank 0.

    Args:
        trainer: whose loggers; other loggers than TensorBoard's get nothing.
        key: the text's name, for example ``monitor/verdict``.
        text: Markdown.
        step: place on the x axis, see `x_axis`.
    """
    for logger in _tensorboards(trainer):
        logger.experiment.add_text(key, text, step)


def write_histogram(trainer: Trainer, key: str, values: Tensor, step: int) -> None:
    """Write a histogram to every TensorBoard logger, in the process of rank 0.

    TensorBoard cannot draw nan and the infinities: they are left out, and nothing is written
    where no other value is left.

    Args:
        trainer: whose loggers; other loggers than TensorBoard's get nothing.
        key: the histogram's name, for example ``rollout/scores``.
        values: numbers of any shape.
        step: place on the x axis, see `x_axis`.
    """
    finite = values.detach().float().cpu()
    finite = finite[finite.isfinite()]
    if len(finite) == 0:
        return
    for logger in _tensorboards(trainer):
        logger.experiment.add_histogram(key, finite, step)


def markdown_text(text: str) -> str:
    """`text` so that Markdown shows it as it is, on one line of a table too.

    Args:
        text: any text; line ends become ``<br>``, outer whitespace is cut off.
    """
    for sign, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(sign, entity)
    lines = re.sub(r"([\\`*_\[\]|#!])", r"\\\1", text.strip()).splitlines()
    return "<br>".join(lines)


def _tensorboards(trainer: Trainer) -> Iterator[TensorBoardLogger]:
    if trainer.is_global_zero:
        yield from (x for x in trainer.loggers if isinstance(x, TensorBoardLogger))
