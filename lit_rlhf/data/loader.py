"""The loader the datamodules return: rank-aware, resumable, outside Lightning's reach."""

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from lit_rlhf.data.samplers import EpochBatchSampler

Batch = TypeVar("Batch")


class ResumableLoader(Generic[Batch]):
    """Loads the batches of an :class:`~lit_rlhf.data.samplers.EpochBatchSampler`.

    It wraps torch's DataLoader without being one. Lightning rebuilds a DataLoader that has a batch
    sampler of its own when it runs on several ranks (``use_distributed_sampler``) or predicts,
    which fails for samplers that divide the data themselves; an iterable of another class it takes
    as it is, calls ``set_epoch`` on ``batch_sampler.sampler``, and keeps ``state_dict()`` in its
    checkpoints. So a run that resumes within an epoch goes on with the next batch of that epoch.

    Args:
        dataset: Maps an index that the sampler yields to an example.
        batch_sampler: Yields this rank's batches as lists of indices.
        collate: Makes a batch of a list of examples.
        num_workers: Processes that load; 0 loads in the training process.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_sampler: EpochBatchSampler,
        collate: Callable[[list[Any]], Batch],
        num_workers: int = 0,
    ) -> None:
        self.batch_sampler = batch_sampler
        self._dataset = dataset
        self._collate = collate
        self._num_workers = num_workers
        self._epoch = 0
        self._position = 0
        self._resume: dict[str, int] | None = None

    def __len__(self) -> int:
        """Number of batches per rank and epoch, also while a resumed epoch yields fewer."""
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of the current epoch, or what is left of it after a resume."""
        # A generator: nothing below runs before the first batch is asked for, when Lightning has
        # set the epoch; iterators that it makes and throws away change nothing.
        epoch = self.batch_sampler.epoch
        resume, self._resume = self._resume, None
        start = resume["position"] if resume is not None and resume["epoch"] == epoch else 0
        self._epoch, self._position = epoch, start
        loader: DataLoader[Any] = DataLoader(
            self._dataset,
            batch_sampler=self.batch_sampler.batches()[start:],
            collate_fn=self._collate,
            num_workers=self._num_workers,
            # Otherwise every epoch would draw its workers' seed from the global generator.
            generator=torch.Generator().manual_seed(self.batch_sampler.seed),
        )
        for batch in loader:
            self._position += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The epoch and how many of its batches have been yielded."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Make the next iteration over that epoch begin behind the batches already yielded.

        Args:
            state: What :meth:`state_dict` returned.
        """
        self._resume = dict(state)
        self._epoch, self._position = state["epoch"], state["position"]
