"""Two ranks that train the top layer, or a shared trunk, follow one process."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.support.rank_runs import RANKS, strategy
from tests.support.ranks import run_on_ranks
from tests.support.stages import copy_state, distance, fit_module, write_data, write_models
from tests.support.trajectories import SAMPLES, stage_run

ITERATIONS = 3
LAST: dict[str, Any] = {"network.trained_layers": 1, "critic_pretraining.iterations": 0}
CASES: dict[str, dict[str, Any]] = {
    "separate": LAST,
    "shared": LAST | {"critic_init": "shared"},
    "lora": LAST | {"network.lora_rank": 2},
}


def run(root: Path, folder: Path, case: str, n: int, **arguments: Any) -> dict[str, Tensor]:
    """Weights after a run with `n` rollouts per iteration and rank, in micro-batches of one."""
    module, data = stage_run("ppo", root, n, micro_batch_size=1, **CASES[case])
    fit_module(module, data, folder, max_epochs=ITERATIONS, **arguments)
    return copy_state(module)


def on_a_rank(rank: int, root: Path, folder: Path) -> dict[tuple[str, str], dict[str, Tensor]]:
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    runs = {}
    for case, name in product(CASES, ("ddp", "deepspeed")):
        ranks = {"devices": RANKS, "use_distributed_sampler": False, "strategy": strategy(name)}
        runs[case, name] = run(root, folder / case / name, case, SAMPLES // RANKS, **ranks)
    return runs


@pytest.mark.slow
def test_ranks_follow_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    root = write_models(write_data(tmp_path))
    ranks = run_on_ranks(on_a_rank, RANKS, tmp_path, root, tmp_path / "ranks")
    for case in CASES:
        alone = run(root, tmp_path / case, case, SAMPLES)
        for rank in ranks:
            for name in ("ddp", "deepspeed"):
                assert distance(rank[case, name], alone) < 1e-4, (case, name)
