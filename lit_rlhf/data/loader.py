"""The loader of the datamodules: it shares batches among ranks and resumes within an epoch."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset

from lit_rlhf.data.samplers import EpochBatchSampler

Batch = TypeVar("Batch")


class ResumableLoader(Generic[Batch]):
    """Loads the batches of an `EpochBatchSampler`.

    The class wraps a DataLoader and is not a subclass of it. Lightning rebuilds a DataLoader with a
    custom batch sampler on several ranks (`use_distributed_sampler`) and in predict, which fails
    for samplers that share the data among ranks themselves. It uses any other iterable as it is,
    calls `set_epoch` on `batch_sampler.sampler`, and saves `state_dict()` in its checkpoints. A run
    that resumes within an epoch therefore continues with the next batch of that epoch.

    Args:
        dataset: The examples.
        batch_sampler: Says which examples make up the batches of this rank.
        collate: Makes a batch of a list of examples.
        num_workers: Worker processes that collate; 0 collates in this process.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        batch_sampler: EpochBatchSampler,
        collate: Callable[[list[Any]], Batch],
        num_workers: int = 0,
    ) -> None:
        self.batch_sampler = batch_sampler
        self._dataset = cast(Dataset[Any], dataset)  # torch takes a sequence too
        self._collate = collate
        self._num_workers = num_workers
        self._epoch = 0
        self._position = 0
        self._resume: dict[str, int] | None = None

    def __len__(self) -> int:
        """Number of batches per rank and epoch, even if a resumed epoch yields fewer."""
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of the current epoch, or the rest of it after a resume."""
        # This is a generator, so nothing below runs until the first batch is requested. By then
        # Lightning has set the epoch, and iterators that it creates and discards have no effect.
        epoch = self.batch_sampler.epoch
        # A restored position counts once, and only for its own epoch: Lightning may have moved on.
        resume = self._resume
        self._resume = None
        start = resume["position"] if resume is not None and resume["epoch"] == epoch else 0
        self._epoch = epoch
        self._position = start
        loader: DataLoader[Any] = DataLoader(
            self._dataset,
            batch_sampler=self.batch_sampler.batches()[start:],
            collate_fn=self._collate,
            num_workers=self._num_workers,
            # Without it, every epoch would draw a seed for its workers from the global generator.
            generator=torch.Generator().manual_seed(self.batch_sampler.seed),
        )
        for batch in loader:
            self._position += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The epoch, and the number of its batches that were yielded."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the state: the next pass over that epoch skips the batches already yielded."""
        self._resume = dict(state)
        self._epoch = state["epoch"]
        self._position = state["position"]
