"""Run a function in several processes that form one gloo process group."""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn


def run_on_ranks(fn: Callable[..., Any], world_size: int, tmp_path: Path, *args: Any) -> list[Any]:
    """Call `fn(rank, *args)` on every rank of a gloo group, and wait for all.

    A spawn costs seconds (each process imports torch), so do several checks in one.

    Args:
        fn: A function at the top level of a module; it is imported by name on the ranks.
        world_size: Number of processes.
        tmp_path: Folder for the meeting point and the results.
        args: Passed on, pickled.

    Returns:
        What `fn` returned, by rank.

    Raises:
        torch.multiprocessing.ProcessRaisedException: With the traceback, if `fn` raised on a rank.
    """
    # a folder of its own: a meeting point cannot be used twice
    folder = Path(mkdtemp(prefix="ranks_", dir=tmp_path))
    # torch ships `spawn` without types
    spawn(_rank_main, (fn, world_size, folder, args), nprocs=world_size)  # type: ignore[no-untyped-call]
    return [
        pickle.loads((folder / f"result_{rank}.pkl").read_bytes()) for rank in range(world_size)
    ]


def _rank_main(
    rank: int, fn: Callable[..., Any], world_size: int, folder: Path, args: tuple[Any, ...]
) -> None:
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
