"""A Lightning strategy that shards every network over ranks with torch's `fully_shard` (FSDP2)."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.optim import Optimizer

from lit_rlhf.checks import check_choice
from lit_rlhf.forward import CALL, call, decoder_layers, is_language_model, trunk_of
from lit_rlhf.stats import local_part
from lit_rlhf.strategies.engine_shards import (
    MASTER_WEIGHTS,
    ShardReader,
    copy_counts,
    engine_layout,
    first_nonempty_state,
    is_moment,
    local_rows,
    trained_parameters,
)
from lit_rlhf.strategies.folder_checkpoints import (
    FolderCheckpoints,
    cast_parameters,
    full_tensor,
    optimized_networks,
)

PRECISIONS = {"32-true": None, "bf16-mixed": torch.bfloat16}
"""Type that weights are gathered in, by the Trainer's precision; `None` keeps their type."""


class ShardedStrategy(FolderCheckpoints):
    """FSDP2 for modules with several networks: each rank keeps a share of every weight.

    Each trained network, and each frozen language model, is sharded layer by layer. A backward
    gathers a layer at a time and averages gradients over ranks; sampling and scoring gather a
    network once, see `lit_rlhf.forward.gathered`. The module optimizes manually, computes its
    losses in `lit_rlhf.forward.call`, and uses `backward` and `clipped_step`.

    Trained networks have float32 weights and moments. Under bf16-mixed they are gathered in
    bfloat16, frozen ones are cast to it, and gradients are averaged in float32.

    Checkpoints are folders in the format of `MultiEngineDeepSpeedStrategy`. That strategy, DDP and
    this one resume from each other's checkpoints with any number of processes.
    """

    strategy_name = "fsdp2"

    def setup(self, trainer: Trainer) -> None:
        """Shard the networks and, when fitting, build the optimizers over the shares."""
        module = self.lightning_module
        assert self.accelerator is not None
        assert module is not None
        self.accelerator.setup(trainer)
        precision = str(self.precision_plugin.precision)
        check_choice("trainer.precision", precision, tuple(PRECISIONS))
        mesh = init_device_mesh(self.root_device.type, (self.world_size,))
        for network in find_networks(module):
            if not isinstance(network, FSDPModule):
                shard(network, mesh, PRECISIONS[precision])
        self.model_to_device()
        self.layouts = {}
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            names = optimized_networks(module, self.optimizers)
            for name, optimizer in zip(names, self.optimizers, strict=True):
                groups = trained_parameters(optimizer)
                network = module.get_submodule(name)
                self.layouts[name] = engine_layout(network, groups, self.world_size)
        self.setup_precision_plugin()
        self.barrier()

    # Checkpoints

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The settings of each group and the step counts. Moments are saved in shards."""
        groups = [group for group in optimizer.param_groups if group["params"]]
        return {
            "param_groups": [{k: v for k, v in g.items() if k != "params"} for g in groups],
            "unpartitioned": [
                {
                    key: entry
                    for key, entry in _known_state(optimizer, group).items()
                    if not is_moment(entry)
                }
                for group in groups
            ],
        }

    @torch.no_grad()
    def partitions(
        self, network: str, optimizer: Optimizer, with_moments: bool
    ) -> dict[str, Tensor]:
        """This rank's flat partitions. Parameters are gathered for them one at a time.

        Args:
            network: Name of the network.
            optimizer: Its optimizer.
            with_moments: Whether to include moments.
        """
        result = {}
        groups = [group for group in optimizer.param_groups if group["params"]]
        for index, group in enumerate(groups):
            tensors_by_key = {MASTER_WEIGHTS: [*group["params"]]}
            if with_moments:
                for key, value in _known_state(optimizer, group).items():
                    if is_moment(value):
                        # `None` for a parameter that has not been stepped yet
                        tensors_by_key[key] = [optimizer.state[p].get(key) for p in group["params"]]
            # ranks have partitions of equal size, the last one padded with zeros
            size = math.ceil(sum(p.numel() for p in group["params"]) / self.world_size)
            first = self.global_rank * size
            for key, tensors in tensors_by_key.items():
                flat = torch.zeros(size)
                offset = 0
                for parameter, tensor in zip(group["params"], tensors, strict=True):
                    low = max(first, offset)
                    high = min(first + size, offset + parameter.numel())
                    # gathering is a collective: every rank takes part, even if it needs nothing
                    full = torch.zeros(parameter.shape) if tensor is None else full_tensor(tensor)
                    if low < high:
                        part = full.flatten()[low - offset : high - offset]
                        flat[low - first : high - first].copy_(part)
                    offset += parameter.numel()
                result[f"{index}.{key}"] = flat
        return result

    @torch.no_grad()
    def restore_optimizer(
        self, optimizer: Optimizer, reader: ShardReader, saved: Mapping[str, Any]
    ) -> None:
        """Restore this rank's rows of weights and moments, and the settings of each group.

        Args:
            optimizer: The optimizer.
            reader: Reads the network's shards.
            saved: The optimizer's state in the checkpoint, see `optimizer_state`.
        """
        state: dict[int, dict[str, Any]] = {}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        groups: list[dict[str, Any]] = [{**g, "params": []} for g in saved["param_groups"]]
        for number, saved_range in enumerate(reader.parameter_ranges()):
            parameter = parameters[number]
            shape = saved_range.spec.shape
            group = saved_range.group
            rows = local_rows(shape, parameter.device_mesh)
            width = math.prod(shape[1:])
            moments = {}
            for key in (MASTER_WEIGHTS, *reader.moments(group)):
                target = parameter if key == MASTER_WEIGHTS else torch.zeros_like(parameter)
                local = local_part(target)
                elements = reader.read_range(
                    f"{group}.{key}",
                    start=saved_range.start + rows.start * width,
                    stop=saved_range.start + rows.stop * width,
                )
                local.copy_(elements.view(local.shape))
                if key != MASTER_WEIGHTS:
                    moments[key] = target
            if moments:
                state[number] = copy_counts(saved["unpartitioned"][group]) | moments
            groups[group]["params"].append(number)
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def find_networks(module: nn.Module) -> Iterator[nn.Module]:
    """Find the networks in a module: language models, and other children with trained weights."""
    for child in module.children():
        trained = any(p.requires_grad for p in child.parameters())
        container = isinstance(child, nn.ModuleList | nn.ModuleDict)
        if is_language_model(child) or (trained and not container):
            yield child
        else:
            yield from find_networks(child)


def shard(network: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
    """Let each rank keep a share of a network.

    Args:
        network: The network; its modules change in place.
        mesh: The ranks.
        dtype: Type that weights are gathered in; `None` keeps their type.
    """
    if not all(p.is_floating_point() for p in network.parameters()):
        raise ValueError("network.load_in_4bit: expected false under fsdp2, got true")
    trained = any(p.requires_grad for p in network.parameters())
    if trained:
        cast_parameters(network, torch.float32)
    elif dtype is not None:
        cast_parameters(network, dtype)
    # inputs of losses, such as advantages, keep their type
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    layers = decoder_layers(trunk_of(network)) if is_language_model(network) else ()
    for part in (*layers, network):
        fully_shard(part, mesh=mesh, mp_policy=policy)
        # gloo has no average, and up to torch 2.8 gave the sum for it
        cast(FSDPModule, part).set_force_sum_reduction_for_comms(mesh.device_type == "cpu")
    assert isinstance(network, FSDPModule)
    network.set_reshard_after_forward(True)
    setattr(network, CALL, _apply)
    register_fsdp_forward_method(network, CALL)
    with torch.no_grad():
        # FSDP makes the module that is called first the root, so the network has to be called
        # before any of its layers. `int()` stands in for a loss, and computes nothing.
        call(network, int)


def _apply(function: Any, *args: Any) -> Any:  # noqa: ANN401  # whatever the function takes
    return function(*args)


def _known_state(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """The state of the first parameter of a group that has one."""
    return first_nonempty_state(optimizer.state.get(p, {}) for p in group["params"])
