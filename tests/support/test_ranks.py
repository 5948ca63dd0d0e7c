from __future__ import annotations

from pathlib import Path

import pytest
from torch.multiprocessing.spawn import ProcessRaisedException

from tests.support.ranks import run_on_ranks


def fails(rank: int, reason: str) -> None:
    raise RuntimeError(f"{reason} on rank {rank}")


def test_exception_on_a_rank_is_raised(tmp_path: Path) -> None:
    with pytest.raises(ProcessRaisedException, match="RuntimeError: no more paper on rank 0"):
        run_on_ranks(fails, 1, tmp_path, "no more paper")
