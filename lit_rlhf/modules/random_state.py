"""The states of the global random generators, as a checkpoint keeps them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """States of torch's generators (the CPU's and that of `device`), NumPy's and Python's.

    The stages draw from torch's (dropout); reward functions may draw from any.
    """
    legacy: Any = np.random.get_state()  # noqa: NPY002
    name, keys, *rest = legacy
    state = {
        "cpu": torch.get_rng_state(),
        "python": random.getstate(),
        # a plain tensor: reading an array would need more than `weights_only` allows
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Set the generators that `state`, a result of `random_state`, has."""
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state:
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
