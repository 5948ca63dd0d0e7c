"""A module and a callback for fits that receive a signal."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor

BATCHES = 4  # an epoch


class Module(LightningModule):
    """Two optimizer steps in each batch; `seen` are the batches that it trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.automatic_optimization = False
        self.seen: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(int(batch))
        self.log("toy/batch", batch.sum())
        optimizer: Any = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward((self.weight * batch).sum())
            optimizer.step()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Numbers:
    """A loader of the numbers 0 to 3 that resumes at a checkpoint's position."""

    def __init__(self) -> None:
        self.done = self.start = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Tensor]:
        start, self.start = self.start, 0
        for number in range(start % BATCHES, BATCHES):
            self.done = number + 1
            yield torch.tensor([float(number)])

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = self.done = state["done"]


class SignalInHook(Callback):
    """Sends the process a signal the `nth` time that a hook is called."""

    def __init__(self, hook: str, nth: int, received: signal.Signals = signal.SIGTERM) -> None:
        self.calls: list[str] = []
        self.received = received
        setattr(self, hook, lambda *_: self.count(hook, nth))

    def count(self, hook: str, nth: int) -> None:
        self.calls.append(hook)
        if len(self.calls) == nth:
            os.kill(os.getpid(), self.received)
