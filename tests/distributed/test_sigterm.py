"""A signal to one of two ranks ends both, with one checkpoint that both resume from."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_callbacks import ResumeCheckpoint
from tests.support.ranks import run_on_ranks
from tests.support.signals_in_training import Module, Numbers, SignalInHook


def fit(folder: Path, *callbacks: Any, ckpt_path: Path | None = None) -> Module:
    module = Module()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options: Any = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "max_epochs": 2, **quiet}
    keep = [*callbacks, ResumeCheckpoint()]
    trainer = Trainer(default_root_dir=folder, callbacks=keep, **options)
    trainer.fit(module, Numbers(), ckpt_path=ckpt_path)
    return module


def on_a_rank(rank: int, folder: Path) -> dict[str, Any]:
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    whole = fit(folder / "whole")
    callback = [SignalInHook("on_train_batch_start", 3)] if rank == 1 else []
    with pytest.raises(SIGTERMException) as ended:
        fit(folder, *callback)
    (path,) = (folder / "checkpoints").iterdir()
    resumed = fit(folder, ckpt_path=path)
    callback = [SignalInHook("on_train_batch_start", 3, signal.SIGINT)] if rank == 1 else []
    with pytest.raises(SystemExit) as interrupted:
        fit(folder / "interrupted", *callback)
    return {
        "interrupted": interrupted.value.code,
        "saved": [path.name for path in (folder / "interrupted/checkpoints").iterdir()],
        "status": ended.value.code,
        "checkpoint": path.name,
        "seen": resumed.seen,
        "same": torch.equal(resumed.weight, whole.weight),
        "left": [path.name for path in (folder / "whole").glob("checkpoints/*")],
    }


def test_one_rank_that_is_told_to_end_ends_all(tmp_path: Path) -> None:
    expected = {"interrupted": 130, "saved": ["batch=3.ckpt"], "status": 143, "left": []}
    expected |= {"checkpoint": "batch=3.ckpt", "seen": [3, 0, 1, 2, 3], "same": True}
    assert run_on_ranks(on_a_rank, 2, tmp_path, tmp_path) == [expected] * 2
