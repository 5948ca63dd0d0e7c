"""Shards of a checkpoint: each rank's part of an engine's weights and moments, in safetensors.

ZeRO keeps a parameter group as one flat float32 tensor: its parameters one after the other, padded
with zeros, cut into one equal partition per rank. A shard file holds a rank's partition of the
weights (master weights) and of each moment. The flat order does not depend on the number of ranks,
so a run can resume with another number: each rank reads the ranges that its partitions cover.
"""

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_rlhf.files import fsync
from lit_rlhf.strategies.engine_optimizer import EngineOptimizer, group_states, is_partitioned

MASTER_WEIGHTS = "weights"
"""Name of the weights' partition in a shard; moments have the names of the optimizer's state."""


ParameterSpec = tuple[str, tuple[int, ...]]
"""Name and shape of a trained parameter."""


@dataclass(frozen=True)
class EngineLayout:
    """Content of an engine's shards, which `world_size` ranks wrote.

    `groups` are the trained parameters in flat order, and `aliases` other names of tied weights.
    """

    world_size: int
    groups: tuple[tuple[ParameterSpec, ...], ...]
    aliases: dict[str, str]

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "EngineLayout":
        """The layout that a manifest describes."""
        groups = tuple(
            tuple((name, tuple(shape)) for name, shape in group) for group in values["groups"]
        )
        return cls(values["world_size"], groups, values["aliases"])

    @property
    def names(self) -> set[str]:
        """All names of trained parameters, aliases included."""
        return {name for group in self.groups for name, _ in group} | set(self.aliases)


def trained_parameters(optimizer: Optimizer) -> list[list[Tensor]]:
    """The parameters of each group that an engine trains, in its flat order.

    Call it before the engine is built, which replaces them by flat partitions.
    """
    groups = [group["params"] for group in optimizer.param_groups if group["params"]]
    trained = [[p for p in group if p.requires_grad and p.numel() > 0] for group in groups]
    for index, group in enumerate(trained):
        if not group:
            raise ValueError(
                f"parameter group {index} of {type(optimizer).__name__}: expected parameters that "
                "require a gradient, got none. Leave frozen parameters out of the optimizer"
            )
    return trained


def engine_layout(network: nn.Module, groups: list[list[Tensor]], world_size: int) -> EngineLayout:
    """The layout of an engine that trains `groups` of `network`'s parameters."""
    names = {id(p): name for name, p in network.named_parameters()}
    return EngineLayout(
        world_size,
        tuple(tuple((names[id(p)], tuple(p.shape)) for p in group) for group in groups),
        {
            name: names[id(p)]
            for name, p in network.named_parameters(remove_duplicate=False)
            if name != names[id(p)]
        },
    )


def shard_file(folder: Path, rank: int) -> Path:
    """The shard of a rank in an engine's folder."""
    return folder / f"rank_{rank:05d}.safetensors"


def engine_partitions(optimizer: EngineOptimizer, with_moments: bool) -> dict[str, Tensor]:
    """This rank's flat partitions of an engine, by group and `weights` or a moment's name."""
    tensors = {}
    for index, (master, state) in enumerate(group_states(optimizer)):
        tensors[f"{index}.{MASTER_WEIGHTS}"] = master.detach()
        if with_moments:
            for key, value in state.items():
                if is_partitioned(value, master):
                    tensors[f"{index}.{key}"] = value
    return tensors


def save_shard(tensors: Mapping[str, Tensor], path: Path) -> int:
    """Write a rank's flat partitions to disk, and return the CRC-32 of the file.

    The checksum is of the tensors in memory, so that the 10 GB of a 7B network's shard are written
    once and not read.
    """
    tensors = {key: tensor.contiguous().cpu() for key, tensor in tensors.items()}
    save_file(tensors, path)
    with ThreadPoolExecutor(1) as pool:  # the disk and the checksum take a while each
        crc32 = pool.submit(_safetensors_crc32, path, tensors)
        fsync(path)
        return crc32.result()


def _safetensors_crc32(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """CRC-32 of a safetensors file written from flat CPU tensors; only its header is read."""
    with path.open("rb") as file:
        size = file.read(8)
        header = file.read(int.from_bytes(size, "little"))
    value = zlib.crc32(header, zlib.crc32(size))
    entries = json.loads(header)
    # data follows the header without gaps, in an order that safetensors chooses
    for name in sorted(tensors, key=lambda name: int(entries[name]["data_offsets"][0])):
        value = zlib.crc32(tensors[name].view(torch.uint8).numpy().data, value)
    return value


class ShardReader:
    """Reads an engine's flat tensors from the shards of any number of ranks. A context manager."""

    def __init__(self, folder: Path, layout: EngineLayout) -> None:
        self.layout = layout
        self.stack = ExitStack()
        self.shards = [
            self.stack.enter_context(safe_open(shard_file(folder, rank), framework="pt"))
            for rank in range(layout.world_size)
        ]
        self.keys = set(self.shards[0].keys())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def pieces(self, key: str) -> Iterator[tuple[int, Any]]:
        """What a flat tensor is made of, in order: sizes, and what gives a slice."""
        for shard in self.shards:
            flat = shard.get_slice(key)
            yield flat.get_shape()[0], flat

    def read_range(self, key: str, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` of a flat tensor, with zeros beyond its end."""
        pieces, offset = [], 0
        for size, flat in self.pieces(key):
            low, high = max(start - offset, 0), min(stop - offset, size)
            if low < high:
                pieces.append(flat[low:high])
            offset += size
        found = torch.cat(pieces) if pieces else torch.zeros(0)
        return nn.functional.pad(found, (0, stop - start - found.numel()))

    def read_parameter(self, index: int, shape: tuple[int, ...], start: int) -> Tensor:
        """The weights, float32, of a parameter that begins at `start` in group `index`."""
        stop = start + math.prod(shape)
        return self.read_range(f"{index}.{MASTER_WEIGHTS}", start, stop).view(shape)

    def parameter_offsets(self) -> list[tuple[int, ParameterSpec, int]]:
        """Group, name and shape, and first flat element of each trained parameter."""
        result = []
        for index, group in enumerate(self.layout.groups):
            start = 0
            for spec in group:
                result.append((index, spec, start))
                start += math.prod(spec[1])
        return result

    def read_weights(self) -> dict[str, Tensor]:
        """All trained weights, float32, by every name of each parameter."""
        weights = {
            name: self.read_parameter(index, shape, start)
            for index, (name, shape), start in self.parameter_offsets()
        }
        return weights | {alias: weights[name] for alias, name in self.layout.aliases.items()}

    @torch.no_grad()
    def load_weights(self, network: nn.Module) -> None:
        """Copy the trained weights into a network, one parameter at a time."""
        parameters = dict(network.named_parameters())
        for index, (name, shape), start in self.parameter_offsets():
            parameter = parameters.get(name)
            if parameter is None or tuple(parameter.shape) != shape:
                got = "none of that name" if parameter is None else list(parameter.shape)
                raise ValueError(
                    f"checkpoint: parameter {name}: expected shape {list(shape)}, got "
                    f"{got}. Resume with the model that the checkpoint was written with"
                )
            weights = self.read_parameter(index, shape, start)
            parameter.copy_(shard_like(weights, parameter))

    def moments(self, index: int) -> list[str]:
        """Names of the flat tensors of a group beside its weights."""
        names = sorted(key.partition(".")[2] for key in self.keys if key.startswith(f"{index}."))
        return [name for name in names if name != MASTER_WEIGHTS]

    def read_optimizer(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """The state dict of an ordinary optimizer; `saved` is what is not partitioned of it."""
        state: dict[int, dict[str, Any]] = {}
        groups = [{**group, "params": []} for group in saved["param_groups"]]
        for number, (index, (_, shape), start) in enumerate(self.parameter_offsets()):
            groups[index]["params"].append(number)
            stop = start + math.prod(shape)
            moments = {
                key: self.read_range(f"{index}.{key}", start, stop).view(shape)
                for key in self.moments(index)
            }
            if moments:
                state[number] = copy_counts(saved["unpartitioned"][index]) | moments
        return {"state": state, "param_groups": groups}

    def check_layout(self, layout: EngineLayout, name: str) -> None:
        """Refuse to restore the optimizer of a network that trains other parameters."""
        if layout.groups != self.layout.groups:
            raise ValueError(
                f"checkpoint: the optimizer of {name!r} has other parameters than the "
                "saved one, or the same in another order or grouping. Resume with the module and "
                "configure_optimizers that the checkpoint was written with"
            )

    @torch.no_grad()
    def load_optimizer(
        self, optimizer: EngineOptimizer, saved: Mapping[str, Any], rank: int
    ) -> None:
        """Restore this rank's partitions of weights and moments, and the settings of each group.

        The engine has just been built; `saved` is the optimizer's state dict.
        """
        state: dict[int, dict[str, Any]] = {}
        for index, (master, _) in enumerate(group_states(optimizer)):
            start = rank * master.numel()
            stop = start + master.numel()
            partitions = {
                key: self.read_range(f"{index}.{key}", start, stop) for key in self.moments(index)
            }
            master.copy_(self.read_range(f"{index}.{MASTER_WEIGHTS}", start, stop))
            state[index] = {**saved["unpartitioned"][index], **partitions}
        groups = [{**group, "params": [i]} for i, group in enumerate(saved["param_groups"])]
        optimizer.optimizer.load_state_dict(
            {"state": {i: s for i, s in state.items() if s}, "param_groups": groups}
        )
        optimizer.share_state()
        # The network's own (low-precision) weights are copies of the masters that were just
        # restored, and would otherwise stay as they were built until the first step.
        optimizer.engine.optimizer.update_lp_params()


class FileReader(ShardReader):
    """Reads the same flat tensors from the state dicts of a network and its ordinary optimizer.

    `saved` is then what a sharded optimizer's own state dict would hold.
    """

    def __init__(
        self, layout: EngineLayout, weights: Mapping[str, Tensor], state: Mapping[str, Any]
    ) -> None:
        self.layout = layout
        self.stack = ExitStack()
        groups = [group for group in state["param_groups"] if group["params"]]
        self.flat: dict[str, list[Tensor]] = {}
        self.saved: dict[str, Any] = {"param_groups": [], "unpartitioned": []}
        if [len(g["params"]) for g in groups] != [len(g) for g in layout.groups]:
            self.layout = EngineLayout(1, (), {})  # which fits no optimizer
            groups = []
        for index, (group, specs) in enumerate(zip(groups, self.layout.groups, strict=True)):
            states = [state["state"].get(number, {}) for number in group["params"]]
            self.flat[f"{index}.{MASTER_WEIGHTS}"] = [weights[name].flatten() for name, _ in specs]
            known = first_state(states)
            counts = {k: v for k, v in known.items() if not is_moment(v)}
            for key in known.keys() - counts.keys():
                self.flat[f"{index}.{key}"] = [
                    entry[key].flatten() if entry else torch.zeros(math.prod(shape))
                    for entry, (_, shape) in zip(states, specs, strict=True)
                ]
            self.saved["param_groups"].append({k: v for k, v in group.items() if k != "params"})
            self.saved["unpartitioned"].append(counts)
        self.keys = set(self.flat)

    def pieces(self, key: str) -> Iterator[tuple[int, Any]]:
        """The parameters' own tensors, one after the other."""
        return ((len(tensor), tensor) for tensor in self.flat[key])


def first_state(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The state of the first parameter that has one; others have none before their first step."""
    return next((state for state in states if state), {})


def is_moment(value: object) -> bool:
    """Whether an entry of a parameter's state has a number for each of its weights."""
    return isinstance(value, Tensor) and value.dim() > 0


def copy_counts(counts: Mapping[str, Any]) -> dict[str, Any]:
    """What is not partitioned of a parameter's state, for it alone: steps are counted in place."""
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in counts.items()}


def local_rows(shape: Sequence[int], mesh: DeviceMesh) -> slice:
    """The rows of a parameter that this rank keeps under `fully_shard`, which cuts like `chunk`."""
    size = -(-shape[0] // mesh.size())
    start = min(mesh.get_local_rank() * size, shape[0])
    return slice(start, min(start + size, shape[0]))


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """`full`, or this rank's rows of it as a DTensor where `like` is one."""
    if not isinstance(like, DTensor) or isinstance(full, DTensor):
        return full
    rows = full[local_rows(full.shape, like.device_mesh)].to(like.device)
    shape, stride = like.shape, like.stride()
    return DTensor.from_local(rows, like.device_mesh, like.placements, shape=shape, stride=stride)
