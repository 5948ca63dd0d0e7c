"""Run a function in several processes that form one gloo process group."""

import datetime
import multiprocessing
import os
import pickle
from collections.abc import Callable
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import distributed
from torch.multiprocessing.spawn import start_processes

# Imported once by the server that ranks are forked from: it takes many times longer than their work
PRELOADED = ("deepspeed", "lit_rlhf.modules", "lit_rlhf.strategies", "tests.modules.stages")


def run_on_ranks(
    fn: Callable[..., Any], world_size: int, tmp_path: Path, *args: Any, fresh: bool = False
) -> list[Any]:
    """What `fn(rank, *args)` returns on every rank of a gloo group, by rank.

    `fn` is imported by name on the ranks, which have this process's environment and none of its
    other state. `fresh` ones are new interpreters, which know nothing of a device yet.
    """
    # a new folder: a meeting point cannot be used twice
    folder = Path(mkdtemp(prefix="ranks_", dir=tmp_path))
    environment = dict(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")  # which DeepSpeed reads when the server imports it
        multiprocessing.set_forkserver_preload([*PRELOADED])
        ensure_running()
    # torch ships it without types
    start_processes(  # type: ignore[no-untyped-call]
        _rank_main,
        (environment, fn, world_size, folder, args),
        nprocs=world_size,
        start_method="spawn" if fresh else "forkserver",
    )
    return [pickle.loads((folder / f"result_{r}.pkl").read_bytes()) for r in range(world_size)]


def _rank_main(
    rank: int, environment: Any, fn: Any, world_size: int, folder: Path, args: Any
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    distributed.init_process_group(
        "gloo",
        init_method=(folder / "meeting_point").as_uri(),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
    )
    try:
        result = fn(rank, *args)
        (folder / f"result_{rank}.pkl").write_bytes(pickle.dumps(result))
    finally:
        distributed.destroy_process_group()
