"""What all stages share: here the state of the random generators."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from lit_rlhf.modules.stage import random_state, restore_random_state


def test_every_global_generator_goes_on_where_it_stood(tmp_path: Path) -> None:
    device = torch.device("cpu")

    def draws() -> list[float]:
        numpy = [np.random.random(), np.random.normal()]  # noqa: NPY002
        return [random.random(), random.gauss(0, 1), *numpy, float(torch.rand(()))]

    draws()
    torch.save(random_state(device), tmp_path / "state.ckpt")
    expected = draws()
    state = torch.load(tmp_path / "state.ckpt", weights_only=True)
    restore_random_state(state, device)
    assert draws() == expected
    restore_random_state({}, device)  # a checkpoint of another project has none
    assert draws() != expected
