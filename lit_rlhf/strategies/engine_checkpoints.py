"""Saving and restoring a run that has one DeepSpeed engine per optimizer."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import Tensor
from torch.optim import Optimizer

from lit_rlhf.strategies.checkpoint_folder import contents_problem, publish
from lit_rlhf.strategies.checkpoint_search import checkpoint_engines, refusal
from lit_rlhf.strategies.engine_optimizer import EngineOptimizer
from lit_rlhf.strategies.engine_shards import STATE_FILE, ShardReader, save_shard, shard_file
from lit_rlhf.strategies.placement import (
    checksum,
    partial_path,
    remove,
    remove_partials,
    sync,
    write,
)

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

FOLDER_KEY = "lit_rlhf_checkpoint_folder"


class EngineCheckpoints(DeepSpeedStrategy):
    """Checkpoint folders: Lightning's own state, and the shards of each engine."""

    engines: dict[str, DeepSpeedEngine]
    """Engine by network."""
    layouts: dict[str, dict[str, Any]]
    """Names and shapes of what each engine trains."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are restored before the engines are built, as under other strategies."""
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Lightning is to call `load_optimizer_state_dict`."""
        return True

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What of an optimizer's state is not partitioned."""
        return optimizer.state_dict()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: object = None
    ) -> None:
        """Write a checkpoint folder; it takes its name when it is complete on all ranks.

        Raises:
            TypeError: If `storage_options` is given.
            RuntimeError: If another rank could not write its part; on that rank, its own error.
        """
        if storage_options is not None:
            raise TypeError("storage_options: not supported, checkpoints are local folders")
        path = Path(self.broadcast(str(filepath)))
        partial = partial_path(path)
        try:
            with self.all_ranks_succeed("prepare", path):
                if self.is_global_zero:
                    remove_partials(path.parent)
                    for name in self.engines:
                        (partial / name).mkdir(parents=True)
            written = {}
            with self.all_ranks_succeed("write its shards of", path):
                for optimizer in self.optimizers:
                    assert isinstance(optimizer, EngineOptimizer)
                    save_shard(
                        optimizer,
                        partial / optimizer.name,
                        self.global_rank,
                        with_moments="optimizer_states" in checkpoint,
                    )
                    shard = shard_file(partial / optimizer.name, self.global_rank)
                    sync(shard)
                    written[str(shard.relative_to(partial))] = checksum(shard)
            checksums = self.from_all_ranks(written)
            with self.all_ranks_succeed("complete", path):
                if self.is_global_zero:
                    rest = self.without_trained(checkpoint["state_dict"])
                    write({**checkpoint, "state_dict": rest}, partial / STATE_FILE)
                    publish(path, self.manifest_engines(), checksums)
        except BaseException:
            if self.is_global_zero:
                remove(partial)
            raise

    def from_all_ranks(self, values: dict[str, int]) -> dict[str, int]:
        """The entries of every rank's `values` together."""
        parts = [values] * self.world_size
        if self.world_size > 1:
            torch.distributed.all_gather_object(parts, values)
        return {key: value for part in parts for key, value in part.items()}

    @contextmanager
    def all_ranks_succeed(self, action: str, path: Path) -> Generator[None, None, None]:
        """Wait for all ranks and fail on all if one does, so that none waits for it for ever."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        everyone = self.reduce_boolean_decision(error is None)
        if error is not None:
            raise error
        if not everyone:
            raise RuntimeError(f"another rank could not {action} checkpoint {path}: see its error")

    def manifest_engines(self) -> dict[str, Any]:
        """What the manifest says of each engine."""
        return {
            name: {"world_size": self.world_size, **layout} for name, layout in self.layouts.items()
        }

    def without_trained(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The entries that no engine's shards hold."""
        trained = trained_keys(self.layouts)
        return {key: value for key, value in state_dict.items() if key not in trained}

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read Lightning's state from a checkpoint folder, or a whole single-file checkpoint.

        Raises:
            FileNotFoundError: If there is none.
            ValueError: If it is damaged, incomplete or of another kind.
        """
        path = Path(checkpoint_path)
        if path.is_file():
            return DDPStrategy.load_checkpoint(self, path, weights_only)
        checkpoint_engines(path)
        with self.all_ranks_succeed("verify its share of", path):
            problem = contents_problem(path, self.global_rank, self.world_size)
            if problem is not None:
                raise refusal(path, problem)
        checkpoint: dict[str, Any] = torch.load(
            path / STATE_FILE, map_location="cpu", weights_only=weights_only is not False
        )
        checkpoint[FOLDER_KEY] = str(path)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Restore all weights: the engines' from their shards, the others as ever.

        Raises:
            RuntimeError: If `strict` and keys are missing or unexpected.
            ValueError: If a network has other parameters.
        """
        assert self.lightning_module is not None
        folder = checkpoint.get(FOLDER_KEY)
        if folder is None:
            DDPStrategy.load_model_state_dict(self, checkpoint, strict)
            return
        engines = checkpoint_engines(Path(folder))
        for name, layout in engines.items():
            with ShardReader(Path(folder) / name, layout) as reader:
                reader.load_weights(self.lightning_module.get_submodule(name))
        result = self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=False)
        missing = set(result.missing_keys) - trained_keys(engines)
        if strict and (missing or result.unexpected_keys):
            raise RuntimeError(
                f"checkpoint {folder}: missing keys {sorted(missing)}, unexpected keys "
                f"{sorted(result.unexpected_keys)}"
            )

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore master weights, moments and settings of every engine's optimizer.

        Raises:
            ValueError: If the checkpoint was written by another strategy or for other networks.
        """
        folder = checkpoint.get(FOLDER_KEY)
        if folder is None:
            raise ValueError(
                "checkpoint: a single file of another strategy holds no engine's state; resume it "
                "with the strategy that wrote it"
            )
        engines = checkpoint_engines(Path(folder))
        if list(engines) != list(self.engines):
            raise ValueError(
                f"checkpoint {folder}: expected engines for {list(self.engines)}, "
                f"got {list(engines)}"
            )
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            assert isinstance(optimizer, EngineOptimizer)
            name = optimizer.name
            with ShardReader(Path(folder) / name, engines[name]) as reader:
                reader.load_optimizer(optimizer, saved, self.layouts[name], self.global_rank)


def trained_keys(layouts: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Keys of the LightningModule's state dict that engines' shards hold."""
    keys = set()
    for network, layout in layouts.items():
        keys |= {f"{network}.{name}" for group in layout["groups"] for name, _ in group}
        keys |= {f"{network}.{alias}" for alias, name in layout["aliases"].items()}
    return keys
