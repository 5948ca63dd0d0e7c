"""The weights in a checkpoint of any strategy, without the processes that wrote it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_rlhf.strategies.checkpoint_folder import contents_problem
from lit_rlhf.strategies.checkpoint_search import checkpoint_engines, file_problem, refusal
from lit_rlhf.strategies.engine_shards import STATE_FILE, ShardReader


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint on disk.

    Attributes:
        path: The file, or the folder of the multi-engine strategy.
        content: What Lightning keeps, as plain data; its weights are mapped from the file.
        engines: Of a folder, what its manifest says of each engine.
    """

    path: Path
    content: Mapping[str, Any]
    engines: Mapping[str, Any]

    @property
    def networks(self) -> list[str]:
        """Attributes of the LightningModule that have weights."""
        return sorted(
            {*self.engines, *(key.partition(".")[0] for key in self.content["state_dict"])}
        )

    def weights(self, network: str | None = None) -> dict[str, Tensor]:
        """Weights as in an ordinary state dict; those that an engine trained are fp32 masters.

        Args:
            network: Attribute name of one network, whose keys then lack that prefix; `None`: the
                whole LightningModule.

        Raises:
            ValueError: If there is no such network.
        """
        if network is not None and network not in self.networks:
            raise ValueError(f"network: expected one of {self.networks}, got {network!r}")
        state = dict(self.content["state_dict"])
        for name, layout in self.engines.items():
            if network not in (None, name):
                continue
            with ShardReader(self.path / name, layout) as reader:
                trained = reader.weights()
            for alias, original in layout["aliases"].items():
                trained[alias] = trained[original]
            state |= {f"{name}.{key}": tensor for key, tensor in trained.items()}
        if network is None:
            return state
        prefix = f"{network}."
        return {key[len(prefix) :]: t for key, t in state.items() if key.startswith(prefix)}


def read_checkpoint(path: str | Path) -> SavedCheckpoint:
    """A checkpoint whose contents have been verified.

    Args:
        path: A checkpoint file, or a folder that the multi-engine strategy wrote.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is damaged, of another kind, or holds more than tensors and plain data.
    """
    path = Path(path)
    engines = {} if path.is_file() else checkpoint_engines(path)
    problem = file_problem(path) if path.is_file() else contents_problem(path)
    if problem is not None:
        raise refusal(path, problem)
    try:
        content = torch.load(
            path if path.is_file() else path / STATE_FILE,
            map_location="cpu",
            weights_only=True,
            mmap=True,
        )
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"checkpoint {path}: holds more than tensors and plain data, which could run code when "
            f"it is read: {error}"
        ) from error
    except RuntimeError as error:  # a zip archive that is none of torch's
        raise refusal(path, f"is none of torch's: {error}") from error
    if not isinstance(content, dict) or "state_dict" not in content:
        raise ValueError(f"checkpoint {path}: expected one of Lightning's, got no state_dict in it")
    return SavedCheckpoint(path, content, engines)


def plain_state_dict(path: str | Path, network: str | None = None) -> dict[str, Tensor]:
    """The weights in a checkpoint, as an ordinary state dict, see `SavedCheckpoint.weights`.

    Needs neither DeepSpeed nor the processes that wrote it, and reads files of other strategies
    too.

    Args:
        path: The checkpoint file or folder.
        network: Attribute name of one network, whose keys then lack that prefix; `None`: the whole
            LightningModule.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        ValueError: If it is damaged, or has no such network.
    """
    return read_checkpoint(path).weights(network)
