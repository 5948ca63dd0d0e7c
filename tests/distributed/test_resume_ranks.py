"""A run of one process goes on with two, if the batch over all of them stays the same."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_rlhf.modules import ChangedRunError, SFTModule
from tests.support.ranks import run_on_ranks
from tests.support.saved_runs import SaveOnce
from tests.support.stages import (
    ADAM_EPS,
    copy_state,
    demonstrations,
    distance,
    fit_module,
    write_data,
    write_models,
)

EPOCHS = 3  # two batches of four each; the checkpoint is in the middle of the second


def resume(root: Path, folder: Path, batch_size: int, **arguments: Any) -> dict[str, Tensor]:
    """Weights at the end of a run."""
    optimizer = {"learning_rate": 1e-3, "eps": ADAM_EPS}
    module = SFTModule(str(root / "policy"), optimizer=optimizer)
    data = demonstrations(root, batch_size=batch_size)
    fit_module(module, data, folder, max_epochs=EPOCHS, **arguments)
    return copy_state(module)


def on_a_rank(rank: int, root: Path, folder: Path) -> dict[str, Any]:
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    arguments = {"devices": 2, "strategy": "ddp", "ckpt_path": folder / "stopped.ckpt"}
    with pytest.raises(ChangedRunError) as error:
        resume(root, folder, 4, **arguments)
    return {"refused": str(error.value), "weights": resume(root, folder, 2, **arguments)}


@pytest.mark.slow
def test_two_ranks_go_on_where_one_stopped(tmp_path: Path) -> None:
    root = write_models(write_data(tmp_path))
    whole = resume(root, tmp_path, 4, callbacks=[SaveOnce(tmp_path)])
    saved = torch.load(tmp_path / "stopped.ckpt", weights_only=True)["state_dict"]
    for seen in run_on_ranks(on_a_rank, 2, tmp_path, root, tmp_path):
        assert "batch size on all ranks: 4 -> 8" in seen["refused"]
        assert distance(seen["weights"], whole) < 1e-6
    assert distance(saved, whole) > 1e-4
