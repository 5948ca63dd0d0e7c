"""Reading a checkpoint of any strategy without the processes, or DeepSpeed, that wrote it."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_rlhf.strategies.checkpoint_files import (
    LIGHTNING_FILE,
    checkpoint_problem,
    content_problem,
    damaged_checkpoint_error,
    file_problem,
    read_engine_layouts,
)
from lit_rlhf.strategies.engine_shards import EngineLayout, ShardReader


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint on disk: a file, or a folder of the multi-engine strategy.

    `content` is Lightning's as plain data, its tensors mapped from the file. In a folder its
    `state_dict` lacks what the engines train, by network.
    """

    path: Path
    content: Mapping[str, Any]
    engines: Mapping[str, EngineLayout]

    @property
    def networks(self) -> list[str]:
        """Attributes of the LightningModule that have weights."""
        return sorted(
            {*self.engines, *(key.partition(".")[0] for key in self.content["state_dict"])}
        )

    def state_dict(self, network: str | None = None) -> dict[str, Tensor]:
        """The weights of one network, or of all, as a state dict; engines' are float32 masters."""
        if network is not None and network not in self.networks:
            raise ValueError(f"network: expected one of {self.networks}, got {network!r}")
        state = dict(self.content["state_dict"])
        for name, layout in self.engines.items():
            if network in (None, name):
                with ShardReader(self.path / name, layout) as reader:
                    weights = reader.read_weights()
                state |= {f"{name}.{key}": tensor for key, tensor in weights.items()}
        if network is None:
            return state
        prefix = f"{network}."
        return {key[len(prefix) :]: t for key, t in state.items() if key.startswith(prefix)}


def read_checkpoint(path: str | Path) -> SavedCheckpoint:
    """Verify and open a checkpoint, a file or a folder of the multi-engine strategy."""
    path = Path(path)
    engines = {} if path.is_file() else read_engine_layouts(path)
    problem = file_problem(path) if path.is_file() else content_problem(path)
    if problem is not None:
        raise damaged_checkpoint_error(path, problem)
    return SavedCheckpoint(path, read_lightning_state(path), engines)


def read_state_dict(path: str | Path, network: str | None = None) -> dict[str, Tensor]:
    """The weights in a checkpoint as an ordinary state dict, see `SavedCheckpoint.state_dict`."""
    return read_checkpoint(path).state_dict(network)


def read_lightning_state(path: str | Path) -> dict[str, Any]:
    """Lightning's part of a checkpoint as plain data, with tensors mapped from the file.

    Fast, as nothing is verified: damaged tensors are not noticed. A file with more than tensors and
    plain data, which could run code when it is loaded, is refused.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"checkpoint {path}: does not exist")
    file = path / LIGHTNING_FILE if path.is_dir() else path
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"checkpoint {path}: holds more than tensors and plain data, which could run code when "
            f"it is loaded: {error}"
        ) from error
    except (OSError, RuntimeError) as error:  # cut off, or not an archive of torch's
        problem = checkpoint_problem(path) or f"cannot be read: {error}"
        raise damaged_checkpoint_error(path, problem) from error
    if not isinstance(content, dict) or "state_dict" not in content:
        raise ValueError(
            f"checkpoint {path}: expected a checkpoint of Lightning's, got one without state_dict"
        )
    return content
