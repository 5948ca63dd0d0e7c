"""Each engine's fp32 weights and moments as plain tensors in safetensors files, one per rank.

ZeRO keeps a parameter group as one flat tensor (its parameters one after the other, zeros at the
end) that is cut into equal partitions, one per rank. A shard file holds a rank's partition of the
weights and of every moment. As the flat order does not depend on the number of ranks, a run may
resume with another number: it reads the ranges that its own partitions cover.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_rlhf.strategies.engine_optimizer import EngineOptimizer, group_states, is_partitioned

WEIGHTS = "weights"
STATE_FILE = "state.ckpt"


def trained_parameters(optimizer: Optimizer) -> list[list[Tensor]]:
    """The parameters of each group that an engine trains, in its flat order.

    Must be called before the engine is built, which replaces them by flat partitions.

    Raises:
        ValueError: If a group trains nothing.
    """
    groups = [group["params"] for group in optimizer.param_groups if group["params"]]
    trained = [[p for p in group if p.requires_grad and p.numel() > 0] for group in groups]
    for index, group in enumerate(trained):
        if not group:
            raise ValueError(
                f"parameter group {index} of {type(optimizer).__name__}: expected parameters that "
                "require a gradient, got none"
            )
    return trained


def engine_layout(network: nn.Module, groups: list[list[Tensor]]) -> dict[str, Any]:
    """Names and shapes in flat order, and other names of the same tensors (tied weights)."""
    names = {id(p): name for name, p in network.named_parameters()}
    return {
        "groups": [[[names[id(p)], list(p.shape)] for p in group] for group in groups],
        "aliases": {
            name: names[id(p)]
            for name, p in network.named_parameters(remove_duplicate=False)
            if name != names[id(p)]
        },
    }


def shard_file(folder: Path, rank: int) -> Path:
    """The file of a rank's partitions."""
    return folder / f"rank_{rank:05d}.safetensors"


def save_shard(optimizer: EngineOptimizer, folder: Path, rank: int, with_moments: bool) -> None:
    """Write this rank's partitions of an engine."""
    tensors = {}
    for index, (master, state) in enumerate(group_states(optimizer)):
        tensors[f"{index}.{WEIGHTS}"] = master.detach()
        if with_moments:
            for key, value in state.items():
                if is_partitioned(value, master):
                    tensors[f"{index}.{key}"] = value
    save_file(
        {key: tensor.contiguous().cpu() for key, tensor in tensors.items()},
        shard_file(folder, rank),
    )


class ShardReader:
    """Reads ranges of an engine's flat tensors, whatever number of ranks wrote them.

    Args:
        folder: The engine's folder.
        layout: What the manifest says of the engine.
    """

    def __init__(self, folder: Path, layout: dict[str, Any]) -> None:
        self.layout = layout
        self.groups: list[list[tuple[str, list[int]]]] = layout["groups"]
        self.stack = ExitStack()
        self.shards = [
            self.stack.enter_context(safe_open(shard_file(folder, rank), framework="pt"))
            for rank in range(layout["world_size"])
        ]
        self.keys = set(self.shards[0].keys())

    def __enter__(self) -> Self:
        """Use as a context: the files are open inside it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self.stack.close()

    def elements(self, key: str, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` of a flat tensor; zeros past its end."""
        pieces, offset = [], 0
        for shard in self.shards:
            flat = shard.get_slice(key)
            size = flat.get_shape()[0]
            low, high = max(start - offset, 0), min(stop - offset, size)
            if low < high:
                pieces.append(flat[low:high])
            offset += size
        found = torch.cat(pieces) if pieces else torch.zeros(0)
        return nn.functional.pad(found, (0, stop - start - found.numel()))

    def weights(self) -> dict[str, Tensor]:
        """All trained weights, fp32, by parameter name."""
        return {
            name: self.elements(f"{index}.{WEIGHTS}", start, stop).view(shape)
            for index in range(len(self.groups))
            for name, shape, start, stop in self.positions(index)
        }

    def positions(self, index: int) -> list[tuple[str, list[int], int, int]]:
        """Name, shape and range of each parameter of a group."""
        result, start = [], 0
        for name, shape in self.groups[index]:
            stop = start + torch.Size(shape).numel()
            result.append((name, shape, start, stop))
            start = stop
        return result

    @torch.no_grad()
    def load_weights(self, network: nn.Module) -> None:
        """Copy the trained weights into a network, one parameter at a time.

        Raises:
            ValueError: If the network has other parameters.
        """
        parameters = dict(network.named_parameters())
        for index in range(len(self.groups)):
            for name, shape, start, stop in self.positions(index):
                parameter = parameters.get(name)
                if parameter is None or list(parameter.shape) != shape:
                    got = "none of that name" if parameter is None else list(parameter.shape)
                    raise ValueError(f"checkpoint: parameter {name}: expected {shape}, got {got}")
                parameter.copy_(self.elements(f"{index}.{WEIGHTS}", start, stop).view(shape))

    @torch.no_grad()
    def load_optimizer(
        self, optimizer: EngineOptimizer, saved: dict[str, Any], layout: dict[str, Any], rank: int
    ) -> None:
        """Restore this rank's partitions of weights and moments and the groups' settings.

        Args:
            optimizer: Of an engine that has just been built.
            saved: The optimizer's `state_dict()` when the shards were written.
            layout: Of the engine now.
            rank: This process'.

        Raises:
            ValueError: If the engine has other parameters, or in another order.
        """
        if layout["groups"] != self.groups:
            raise ValueError(
                f"checkpoint: the optimizer of {optimizer.name!r} has other parameters than those "
                "saved, or the same in another order or grouping"
            )
        state: dict[int, dict[str, Any]] = {}
        for index, (master, _) in enumerate(group_states(optimizer)):
            start = rank * master.numel()
            ranges = {
                key.partition(".")[2]: self.elements(key, start, start + master.numel())
                for key in self.keys
                if key.partition(".")[0] == str(index)
            }
            master.copy_(ranges.pop(WEIGHTS))
            state[index] = {**saved["unpartitioned"][index], **ranges}
        groups = [{**group, "params": [i]} for i, group in enumerate(saved["param_groups"])]
        optimizer.optimizer.load_state_dict(
            {"state": {i: s for i, s in state.items() if s}, "param_groups": groups}
        )
        optimizer.share_state()
        optimizer.engine.optimizer.update_lp_params()
