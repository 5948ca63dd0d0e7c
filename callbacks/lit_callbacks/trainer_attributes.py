"""Attributes of a Trainer that Lightning sets without declaring them."""

from __future__ import annotations

from typing import TypeVar

from lightning.pytorch import Callback, Trainer

CallbackT = TypeVar("CallbackT", bound=Callback)


def find_callbacks(trainer: Trainer, kind: type[CallbackT]) -> list[CallbackT]:
    """The Trainer's callbacks of a class, in their order."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, kind)]


def log_interval(trainer: Trainer) -> int:
    """Number of batches after which the Trainer logs metrics (`log_every_n_steps`)."""
    interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return interval


def is_dry_run(trainer: Trainer) -> bool:
    """Whether the Trainer only tries the code out (`fast_dev_run`), so that nothing is kept."""
    return bool(getattr(trainer, "fast_dev_run", False))
