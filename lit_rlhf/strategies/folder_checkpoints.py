"""Checkpoint folders of the strategies that partition weights and optimizers over ranks.

A folder has the same content whichever strategy wrote it. Each strategy therefore resumes from the
folders of the others, and from the single files of Lightning's own strategies.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_rlhf.files import delete, delete_partials, partial_path, save_durably
from lit_rlhf.stats import fail_together
from lit_rlhf.strategies.checkpoint_files import (
    LIGHTNING_FILE,
    NAME_KEY,
    PROVENANCE,
    content_problem,
    damaged_checkpoint_error,
    finish_folder,
    read_engine_layouts,
)
from lit_rlhf.strategies.engine_shards import (
    EngineLayout,
    FileReader,
    ShardReader,
    save_shard,
    shard_file,
    shard_like,
)

FOLDER_KEY = "lit_rlhf_checkpoint_folder"
"""Key that `load_checkpoint` adds to Lightning's checkpoint: the folder with the shards."""


class FolderCheckpoints(DDPStrategy):
    """Writes and reads checkpoint folders.

    Attributes:
        layouts: Layouts of the shards by name of the trained network.
    """

    layouts: dict[str, EngineLayout]

    def partitions(
        self, network: str, optimizer: Optimizer, with_moments: bool
    ) -> dict[str, Tensor]:
        """This rank's flat partitions of a network, see `engine_shards`.

        Args:
            network: Name of the network.
            optimizer: Its optimizer.
            with_moments: Whether to include moments.

        Returns:
            Partitions by group and `weights` or a moment's name, such as `0.weights`.
        """
        raise NotImplementedError

    def restore_optimizer(
        self, optimizer: Optimizer, reader: ShardReader, saved: Mapping[str, Any]
    ) -> None:
        """Restore weights, moments and settings of an optimizer.

        Args:
            optimizer: The optimizer.
            reader: Reads the network's shards.
            saved: The optimizer's state in the checkpoint, see `optimizer_state`.
        """
        raise NotImplementedError

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: object = None
    ) -> None:
        """Write a checkpoint folder. It gets its name once it is complete on all ranks.

        If a rank cannot write its part, it raises its own error and the others a RuntimeError.

        Args:
            checkpoint: Lightning's content of the checkpoint.
            filepath: Path of the folder; rank 0's is used.
            storage_options: Not supported: has to be `None`.
        """
        if storage_options is not None:
            raise TypeError(
                "storage_options: expected None, because checkpoints are local folders, got "
                f"{storage_options!r}"
            )
        path = Path(self.broadcast(str(filepath)))
        partial = partial_path(path)
        try:
            with fail_together(f"prepare checkpoint {path}"):
                if self.is_global_zero:
                    delete_partials(path.parent)
                    for name in self.layouts:
                        (partial / name).mkdir(parents=True)
            written = {}
            with fail_together(f"write its shards of checkpoint {path}"):
                for name, optimizer in zip(self.layouts, self.optimizers, strict=True):
                    shard = shard_file(partial / name, self.global_rank)
                    tensors = self.partitions(name, optimizer, "optimizer_states" in checkpoint)
                    written[str(shard.relative_to(partial))] = save_shard(tensors, shard)
            parts = [written] * self.world_size
            if self.world_size > 1:
                torch.distributed.all_gather_object(parts, written)
            checksums = {name: crc32 for part in parts for name, crc32 in part.items()}
            in_shards = keys_in_shards(self.layouts)
            state = checkpoint["state_dict"]
            unsharded = {k: full_tensor(v) for k, v in state.items() if k not in in_shards}
            with fail_together(f"complete checkpoint {path}"):
                if self.is_global_zero:
                    content = {**checkpoint, "state_dict": unsharded, NAME_KEY: path.name}
                    save_durably(content, partial / LIGHTNING_FILE)
                    provenance = {key: checkpoint.get(key) for key in PROVENANCE}
                    finish_folder(path, self.layouts, checksums, provenance)
        except BaseException:
            if self.is_global_zero:
                delete(partial)
            raise

    # Lightning calls `load_checkpoint` and `load_model_state_dict` before `setup`, and
    # `load_optimizer_state_dict` after it.

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """False: weights are restored before the engines are built, as under other strategies."""
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        """True: Lightning is to call `load_optimizer_state_dict`."""
        return True

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read Lightning's state from a checkpoint folder, or all of a single-file checkpoint.

        Args:
            checkpoint_path: Path of the folder or file.
            weights_only: Whether to read plain data only; `None` means True for a folder.
        """
        path = Path(checkpoint_path)
        if path.is_file():
            return DDPStrategy.load_checkpoint(self, path, weights_only)
        read_engine_layouts(path)  # restores an interrupted replacement, checks names and sizes
        with fail_together(f"verify its share of checkpoint {path}"):
            if problem := content_problem(path, share=self.global_rank, n_shares=self.world_size):
                raise damaged_checkpoint_error(path, problem)
        checkpoint: dict[str, Any] = torch.load(
            path / LIGHTNING_FILE, map_location="cpu", weights_only=weights_only is not False
        )
        checkpoint[FOLDER_KEY] = str(path)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Restore all weights: from shards where an engine trains them, otherwise as usual.

        Args:
            checkpoint: Content of the checkpoint, from `load_checkpoint`.
            strict: Whether missing and unexpected keys are an error.
        """
        assert self.lightning_module is not None
        folder = checkpoint.get(FOLDER_KEY)
        module_state = self.lightning_module.state_dict()
        state = {
            name: shard_like(tensor, module_state.get(name, tensor))
            for name, tensor in checkpoint["state_dict"].items()
        }
        if folder is None:  # a single file of another strategy
            self.lightning_module.load_state_dict(state, strict=strict)
            return
        layouts = read_engine_layouts(Path(folder))
        for name, layout in layouts.items():
            with ShardReader(Path(folder) / name, layout) as reader:
                reader.load_weights(self.lightning_module.get_submodule(name))
        incompatible = self.lightning_module.load_state_dict(state, strict=False)
        missing = set(incompatible.missing_keys) - keys_in_shards(layouts)
        if strict and (missing or incompatible.unexpected_keys):
            raise RuntimeError(
                f"checkpoint {folder}: missing keys {sorted(missing)}, unexpected keys "
                f"{sorted(incompatible.unexpected_keys)}. Resume with the module that the "
                "checkpoint was written with"
            )

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore master weights, moments and group settings of every engine's optimizer."""
        folder = checkpoint.get(FOLDER_KEY)
        layouts = self.layouts if folder is None else read_engine_layouts(Path(folder))
        if list(layouts) != list(self.layouts):
            raise ValueError(
                f"checkpoint {folder}: expected engines for {list(self.layouts)}, "
                f"got {list(layouts)}"
            )
        optimizers = zip(layouts, self.optimizers, checkpoint["optimizer_states"], strict=True)
        for name, optimizer, saved in optimizers:
            if folder is None:
                weights = {
                    key.removeprefix(f"{name}."): value
                    for key, value in checkpoint["state_dict"].items()
                    if key.startswith(f"{name}.")
                }
                reader: ShardReader = (file := FileReader(self.layouts[name], weights, saved))
                saved = file.saved
            else:
                reader = ShardReader(Path(folder) / name, layouts[name])
            with reader:
                reader.check_layout(self.layouts[name], name)
                self.restore_optimizer(optimizer, reader, saved)


def optimized_networks(module: nn.Module, optimizers: Sequence[Optimizer]) -> list[str]:
    """Find the network that each optimizer trains.

    Args:
        module: The module; its networks are its direct children.
        optimizers: Its optimizers.

    Returns:
        The network's name for each optimizer.

    Raises:
        ValueError: If an optimizer trains anything but one network, or two train the same.
    """
    owners: dict[int, set[str]] = {}
    for name, child in module.named_children():
        for parameter in child.parameters():
            owners.setdefault(id(parameter), set()).add(name)
    names: list[str] = []
    for index, optimizer in enumerate(optimizers):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        parameter_owners = [owners.get(id(p), set()) for p in parameters]
        networks = set[str]().union(*parameter_owners)
        if len(networks) != 1 or not all(parameter_owners):
            where = ", ".join(sorted(networks)) or "no child"
            outside = sum(not owner_names for owner_names in parameter_owners)
            raise ValueError(
                f"optimizer {index}: expected the parameters of exactly one direct child module of "
                f"{type(module).__name__}, got parameters of: {where}"
                + (f", and {outside} that are in no child" if outside else "")
            )
        (name,) = networks
        if name in names:
            raise ValueError(
                f"optimizer {index}: {name!r} already has optimizer {names.index(name)}; give one "
                "optimizer several parameter groups instead"
            )
        names.append(name)
    return names


def keys_in_shards(layouts: Mapping[str, EngineLayout]) -> set[str]:
    """Keys of the LightningModule's state dict whose values are in engines' shards."""
    return {f"{network}.{name}" for network, layout in layouts.items() for name in layout.names}


def full_tensor(value: Any) -> Any:  # noqa: ANN401  # any value of a state dict
    """Gather a DTensor from all ranks into CPU memory; return anything else unchanged."""
    if not isinstance(value, DTensor):
        return value
    with torch.no_grad():
        # a Trainer's teardown moves shares to the host, and NCCL does not gather there
        return cast(DTensor, value.to(value.device_mesh.device_type)).full_tensor().cpu()


@torch.no_grad()
def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast a module's floating-point parameters to `dtype` in place; buffers keep their type."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
