"""Run a function in several processes that form one gloo process group."""

import multiprocessing
import os
import pickle
from datetime import timedelta
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import distributed
from torch.multiprocessing.spawn import start_processes

# Imported once by the server that ranks are forked from: it takes many times longer than their work
PRELOADED = ("deepspeed", "lit_rlhf.modules", "lit_rlhf.strategies", "tests.support.stages")


def run_on_ranks(fn: Any, world_size: int, tmp_path: Path, *args: Any, fresh: bool = False) -> Any:
    """Run `fn(rank, *args)` on every rank of a gloo group, and return the results by rank.

    `fn` is imported by name on the ranks, which have this process's environment and none of its
    other state. With `fresh`, ranks are new interpreters, in which no device was chosen yet.
    """
    # a new folder: a meeting point cannot be used twice
    folder, environment = Path(mkdtemp(prefix="ranks_", dir=tmp_path)), dict(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")  # which DeepSpeed reads when the server imports it
        multiprocessing.set_forkserver_preload([*PRELOADED])
        ensure_running()
    method, arguments = "spawn" if fresh else "forkserver", (environment, fn, folder, args)
    start_processes(_rank_main, (world_size, *arguments), nprocs=world_size, start_method=method)
    return [pickle.loads((folder / f"result_{r}.pkl").read_bytes()) for r in range(world_size)]


def _rank_main(rank: int, size: int, environment: Any, fn: Any, folder: Path, args: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    group = {"rank": rank, "world_size": size, "timeout": timedelta(seconds=60)}
    distributed.init_process_group("gloo", (folder / "meeting_point").as_uri(), **group)
    try:
        (folder / f"result_{rank}.pkl").write_bytes(pickle.dumps(fn(rank, *args)))
    finally:
        distributed.destroy_process_group()
