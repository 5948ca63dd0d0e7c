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
from typing import Any, NamedTuple, Self

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
"""Name of the weights' partition in a shard; moments have their names in the optimizer's state."""


class ParameterSpec(NamedTuple):
    """A trained parameter.

    Attributes:
        name: Its name in the network.
        shape: Its shape.
    """

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)


class ParameterRange(NamedTuple):
    """Position of a trained parameter in the flat tensors of its group.

    Attributes:
        group: Index of the parameter group.
        spec: The parameter.
        start: Its first element in the flat tensors.
    """

    group: int
    spec: ParameterSpec
    start: int

    @property
    def stop(self) -> int:
        """The element after its last one."""
        return self.start + self.spec.numel


class Piece(NamedTuple):
    """A part of a flat tensor.

    Attributes:
        size: Number of its elements.
        elements: A flat tensor, or a slice of a file, that gives a range of them by indexing.
    """

    size: int
    elements: Any


@dataclass(frozen=True)
class EngineLayout:
    """Content of an engine's shards.

    Attributes:
        world_size: Number of ranks that wrote them.
        groups: Trained parameters of each group in flat order.
        aliases: Names of trained parameters by their other names, for tied weights.
    """

    world_size: int
    groups: tuple[tuple[ParameterSpec, ...], ...]
    aliases: dict[str, str]

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "EngineLayout":
        """The layout that a manifest describes, from its content as JSON."""
        groups = tuple(
            tuple(ParameterSpec(name, tuple(shape)) for name, shape in group)
            for group in values["groups"]
        )
        return cls(values["world_size"], groups, values["aliases"])

    @property
    def names(self) -> set[str]:
        """All names of trained parameters, aliases included."""
        return {spec.name for group in self.groups for spec in group} | set(self.aliases)


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
    """The layout of an engine.

    Args:
        network: The network that it trains.
        groups: The trained parameters of each group, see `trained_parameters`.
        world_size: Number of ranks that the engine partitions its state over.
    """
    names = {id(p): name for name, p in network.named_parameters()}
    return EngineLayout(
        world_size=world_size,
        groups=tuple(
            tuple(ParameterSpec(names[id(p)], tuple(p.shape)) for p in group) for group in groups
        ),
        aliases={
            name: names[id(parameter)]
            for name, parameter in network.named_parameters(remove_duplicate=False)
            if name != names[id(parameter)]
        },
    )


def shard_file(folder: Path, rank: int) -> Path:
    """The shard of a rank in an engine's folder."""
    return folder / f"rank_{rank:05d}.safetensors"


def engine_partitions(optimizer: EngineOptimizer, with_moments: bool) -> dict[str, Tensor]:
    """This rank's flat partitions of an engine, by group and `weights` or a moment's name.

    Args:
        optimizer: The engine's optimizer.
        with_moments: Whether to include moments.
    """
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

    The checksum is computed from the tensors in memory, so that the 10 GB of a 7B network's shard
    are written once and not read.

    Args:
        tensors: The partitions by name.
        path: Path of the file.
    """
    tensors = {key: tensor.contiguous().cpu() for key, tensor in tensors.items()}
    save_file(tensors, path)
    with ThreadPoolExecutor(1) as pool:  # compute the checksum while the disk writes
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
    """Reads an engine's flat tensors from the shards of any number of ranks. A context manager.

    Args:
        folder: Folder of the engine's shards.
        layout: What the shards hold.
    """

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

    def pieces(self, key: str) -> Iterator[Piece]:
        """The parts of a flat tensor, in order: one for each shard."""
        for shard in self.shards:
            elements = shard.get_slice(key)
            yield Piece(elements.get_shape()[0], elements)

    def read_range(self, key: str, *, start: int, stop: int) -> Tensor:
        """Read a range of a flat tensor.

        Args:
            key: Group and name of the flat tensor, for instance `0.weights`.
            start: First element.
            stop: The element after the last one.

        Returns:
            The elements, `[stop - start]`, with zeros beyond the end of the flat tensor.
        """
        parts = []
        offset = 0
        for piece in self.pieces(key):
            low = max(start - offset, 0)
            high = min(stop - offset, piece.size)
            if low < high:
                parts.append(piece.elements[low:high])
            offset += piece.size
        elements = torch.cat(parts) if parts else torch.zeros(0)
        return nn.functional.pad(elements, (0, stop - start - elements.numel()))

    def read_parameter(self, key: str, place: ParameterRange) -> Tensor:
        """Read what a group has for a parameter, in the parameter's shape.

        Args:
            key: `weights`, or the name of a moment.
            place: The parameter.
        """
        flat = self.read_range(f"{place.group}.{key}", start=place.start, stop=place.stop)
        return flat.view(place.spec.shape)

    def parameter_ranges(self) -> list[ParameterRange]:
        """Position of each trained parameter, in flat order."""
        ranges = []
        for index, group in enumerate(self.layout.groups):
            start = 0
            for spec in group:
                ranges.append(ParameterRange(index, spec, start))
                start += spec.numel
        return ranges

    def read_weights(self) -> dict[str, Tensor]:
        """All trained weights, float32, by every name of each parameter."""
        weights = {
            place.spec.name: self.read_parameter(MASTER_WEIGHTS, place)
            for place in self.parameter_ranges()
        }
        return weights | {alias: weights[name] for alias, name in self.layout.aliases.items()}

    @torch.no_grad()
    def load_weights(self, network: nn.Module) -> None:
        """Copy the trained weights into a network, one parameter at a time."""
        parameters = dict(network.named_parameters())
        for place in self.parameter_ranges():
            name = place.spec.name
            shape = place.spec.shape
            parameter = parameters.get(name)
            if parameter is None or tuple(parameter.shape) != shape:
                actual = "none of that name" if parameter is None else list(parameter.shape)
                raise ValueError(
                    f"checkpoint: parameter {name}: expected shape {list(shape)}, got "
                    f"{actual}. Resume with the model that the checkpoint was written with"
                )
            weights = self.read_parameter(MASTER_WEIGHTS, place)
            parameter.copy_(shard_like(weights, parameter))

    def moments(self, index: int) -> list[str]:
        """Names of the flat tensors of a group besides its weights."""
        names = sorted(key.partition(".")[2] for key in self.keys if key.startswith(f"{index}."))
        return [name for name in names if name != MASTER_WEIGHTS]

    def read_optimizer(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Read the state dict of an ordinary optimizer.

        Args:
            saved: State dict of the sharded optimizer: settings of groups and step counts.
        """
        state: dict[int, dict[str, Any]] = {}
        groups = [{**group, "params": []} for group in saved["param_groups"]]
        for number, place in enumerate(self.parameter_ranges()):
            groups[place.group]["params"].append(number)
            moments = {key: self.read_parameter(key, place) for key in self.moments(place.group)}
            if moments:
                state[number] = copy_counts(saved["unpartitioned"][place.group]) | moments
        return {"state": state, "param_groups": groups}

    def check_layout(self, layout: EngineLayout, name: str) -> None:
        """Refuse to restore the optimizer of a network that trains other parameters.

        Args:
            layout: Layout of the network that trains now.
            name: Its name, for the error.
        """
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

        Args:
            optimizer: Optimizer of an engine that has just been built.
            saved: Its state dict in the checkpoint.
            rank: This rank.
        """
        state: dict[int, dict[str, Any]] = {}
        for index, group in enumerate(group_states(optimizer)):
            start = rank * group.master.numel()
            stop = start + group.master.numel()
            partitions = {
                key: self.read_range(f"{index}.{key}", start=start, stop=stop)
                for key in self.moments(index)
            }
            group.master.copy_(self.read_range(f"{index}.{MASTER_WEIGHTS}", start=start, stop=stop))
            state[index] = {**saved["unpartitioned"][index], **partitions}
        groups = [{**group, "params": [i]} for i, group in enumerate(saved["param_groups"])]
        optimizer.optimizer.load_state_dict(
            {"state": {i: s for i, s in state.items() if s}, "param_groups": groups}
        )
        optimizer.share_state()
        # The network's own (low-precision) weights are copies of the masters. Without this they
        # would keep their values from before the restore until the first step.
        optimizer.engine.optimizer.update_lp_params()


class FileReader(ShardReader):
    """Reads the same flat tensors from the state dicts of a network and its ordinary optimizer.

    Args:
        layout: What the shards of the network would hold.
        weights: State dict of the network.
        state: State dict of the optimizer.

    Attributes:
        saved: What the state dict of a sharded optimizer would hold.
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
            self.layout = EngineLayout(1, (), {})  # `check_layout` will refuse it
            groups = []
        for index, (group, specs) in enumerate(zip(groups, self.layout.groups, strict=True)):
            states = [state["state"].get(number, {}) for number in group["params"]]
            self.flat[f"{index}.{MASTER_WEIGHTS}"] = [
                weights[spec.name].flatten() for spec in specs
            ]
            state_of_one = first_nonempty_state(states)
            counts = {k: v for k, v in state_of_one.items() if not is_moment(v)}
            for key in state_of_one.keys() - counts.keys():
                self.flat[f"{index}.{key}"] = [
                    entry[key].flatten() if entry else torch.zeros(spec.numel)
                    for entry, spec in zip(states, specs, strict=True)
                ]
            self.saved["param_groups"].append({k: v for k, v in group.items() if k != "params"})
            self.saved["unpartitioned"].append(counts)
        self.keys = set(self.flat)

    def pieces(self, key: str) -> Iterator[Piece]:
        """The parameters' own tensors, one after the other."""
        return (Piece(len(tensor), tensor) for tensor in self.flat[key])


def first_nonempty_state(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The first state that is not empty: a parameter has none before its first step."""
    return next((state for state in states if state), {})


def is_moment(value: object) -> bool:
    """Whether an entry of a parameter's state has a number for each of its weights."""
    return isinstance(value, Tensor) and value.dim() > 0


def copy_counts(counts: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the part of a state that is not partitioned: optimizers count steps in place."""
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in counts.items()}


def local_rows(shape: Sequence[int], mesh: DeviceMesh) -> slice:
    """The rows of a parameter that this rank keeps under `fully_shard`.

    Args:
        shape: Shape of the whole parameter.
        mesh: The ranks that share it.
    """
    # `fully_shard` cuts like `torch.chunk`
    size = -(-shape[0] // mesh.size())
    start = min(mesh.get_local_rank() * size, shape[0])
    return slice(start, min(start + size, shape[0]))


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """Shard a tensor over ranks if another one is sharded.

    Args:
        full: The whole tensor.
        like: A tensor of the same shape.

    Returns:
        This rank's rows of `full` as a DTensor if `like` is one, and `full` otherwise.
    """
    if not isinstance(like, DTensor) or isinstance(full, DTensor):
        return full
    rows = full[local_rows(full.shape, like.device_mesh)].to(like.device)
    return DTensor.from_local(
        rows, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )
