"""Tiny runs of the three stages that have kept a checkpoint and left their model."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from tests.support import stages
from tests.support.engine_checkpoints import write_checkpoint_folder
from tests.support.stages import fit_module, nested


class SavedRun(NamedTuple):
    """A finished run of one process.

    Attributes:
        checkpoint: Its last checkpoint.
        finished: Folder of its finished model.
        module: Its module at the end.
        networks: Names of the trained networks.
    """

    checkpoint: Path
    finished: Path
    module: LightningModule
    networks: tuple[str, ...]


def saved_run(stage: str, root: Path, folder: Path, **options: Any) -> SavedRun:
    """A stage (`sft`, `reward` or `ppo`) on the models and data in `root`, and its last checkpoint.

    `options` are arguments of the module; what the run leaves goes to `folder`.
    """
    optimizer, finished = {"learning_rate": 1e-2}, folder / stage
    usual: dict[str, Any] = {"optimizer": optimizer}
    if stage == "ppo":
        usual = dict.fromkeys(("policy_optimizer", "critic_optimizer"), optimizer)
        usual |= {"sampling": {"temperature": 0.7}}
    size, options = 8 if stage == "ppo" else 4, nested(usual, options)
    module, data = stages.stage(stage, root, size, output_dir=str(finished), **options)
    fit_module(module, data, folder).save_checkpoint(folder / f"{stage}.ckpt")
    networks = {"sft": ("model",), "reward": ("networks",), "ppo": ("policy", "critic")}[stage]
    return SavedRun(folder / f"{stage}.ckpt", finished, module, networks)


def as_engines_write_it(run: SavedRun, path: Path, ranks: int) -> Path:
    """Write the run's checkpoint in the multi-engine strategy's format, with a shard per rank."""
    content = torch.load(run.checkpoint, weights_only=True)
    state: dict[str, Tensor] = content["state_dict"]
    trained, aliases = {}, {}
    for network in run.networks:
        module = run.module.get_submodule(network)
        weights = {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}
        names = {id(p): n for n, p in module.named_parameters()}
        every = module.named_parameters(remove_duplicate=False)
        trained[network] = weights
        aliases[network] = {n: names[id(p)] for n, p in every if n != names[id(p)]}
        known = {f"{network}.{name}" for name in (*weights, *aliases[network])}
        state = {name: tensor for name, tensor in state.items() if name not in known}
    return write_checkpoint_folder(path, content | {"state_dict": state}, trained, ranks, aliases)


STOPPED_AT = 3  # in the middle of an epoch


class SaveOnce(Callback):
    """Leaves `stopped.ckpt` in a folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "stopped.ckpt"

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == STOPPED_AT:
            trainer.save_checkpoint(self.path)
