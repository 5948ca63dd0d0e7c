"""A callback that presses Ctrl-C, for configurations of tests."""

import os
import signal

from lightning.pytorch import Callback, Trainer


class Interrupting(Callback):
    """Sends SIGINT to this process when a batch (from 1) starts, the first time it gets there."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.batch:
            os.kill(os.getpid(), signal.SIGINT)
