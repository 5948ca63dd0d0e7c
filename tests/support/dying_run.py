"""One rank of a PPO run of two; rank 1 ends or stands still in the middle of an iteration.

The tests call `python -m tests.support.dying_run FOLDER STRATEGY END` for each rank, with the
environment that a launcher sets.
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy

from lit_rlhf.ppo import PPO, LossShare
from lit_rlhf.strategies import MultiEngineDeepSpeedStrategy
from tests.support.stages import fit_module, ppo_options, prompts, with_algorithm

TIMEOUT = timedelta(seconds=15)


class Dying(PPO):
    """Rank 1 ends before the last backward of its second iteration, which rank 0 waits in."""

    end: str

    def critic_loss(self, *arguments: Any) -> LossShare:
        if torch.distributed.get_rank() == 1 and int(self.iteration) == 1:
            if self.end == "dies":
                os._exit(13)
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().critic_loss(*arguments)


def main() -> None:
    """Train; the end is not reached."""
    folder, name, end = sys.argv[1:]
    torch.set_num_threads(1)
    strategy: Any = MultiEngineDeepSpeedStrategy(timeout=TIMEOUT)
    if name == "ddp":
        strategy = DDPStrategy(find_unused_parameters=True, timeout=TIMEOUT)
    root = Path(folder)
    Dying.end = end
    minibatches = {"minibatch_size": 4, "ppo_epochs": 1}
    module = with_algorithm(Dying)(**ppo_options(root, minibatches=minibatches))
    ranks: dict[str, Any] = {"devices": 2, "use_distributed_sampler": False}
    data = prompts(root, batch_size=4)
    fit_module(module, data, root / name, max_epochs=4, strategy=strategy, **ranks)


if __name__ == "__main__":
    main()
