from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.multiprocessing.spawn import ProcessRaisedException

from tests.support.ranks import run_on_ranks


def fails_on_rank_one(rank: int, reason: str) -> None:
    if rank == 1:
        raise RuntimeError(reason)
    torch.distributed.barrier()


def test_an_exception_on_one_rank_ends_all_and_is_raised(tmp_path: Path) -> None:
    with pytest.raises(ProcessRaisedException, match="RuntimeError: no more paper"):
        run_on_ranks(fails_on_rank_one, 2, tmp_path, "no more paper")
