"""Runs small modules under a strategy, in separate processes, and writes the results.

The tests call `outcome`, and launchers of two nodes this file, with the arguments FOLDER STRATEGY
DEVICES PRECISION SCENARIO... Rank 0 writes FOLDER/SCENARIO.pt.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, TensorDataset

from lit_callbacks import ResumeCheckpoint
from lit_rlhf.files import partial_path
from lit_rlhf.strategies import MultiEngineDeepSpeedStrategy, backward, find_newest_checkpoint
from lit_rlhf.strategies.checkpoint_files import AtomicCheckpointIO
from lit_rlhf.strategies.folder_checkpoints import full_tensor
from tests.support import toy_modules
from tests.support.ranks import run_on_ranks

ROOT = Path(__file__).resolve().parents[2]
DDP = "ddp_find_unused_parameters_true"
NAMES_USED = (  # attributes of DeepSpeed's ZeRO optimizer in `engine_optimizer`
    *("_coalesce_grad_reduction", "all_grad_tensors", "averaged_gradients", "clip_grad"),
    *("cpu_offload", "micro_step_id", "ready_for_gradients", "reset_cpu_buffers"),
    *("set_gradient_accumulation_boundary", "update_lp_params"),
)
NAMES_USED_OFFLOADED = (*NAMES_USED, "_offload_accumulated_param_ids")


def strategy_of(name: str) -> str | Strategy:
    """The strategy of a registered name or of a variant: small buckets, one network in float32."""
    small = {"zero_optimization": {"reduce_bucket_size": 40}}
    if name == "small_buckets":
        return MultiEngineDeepSpeedStrategy(config=small)
    if name == "small_buckets_offload":
        return MultiEngineDeepSpeedStrategy(offload_optimizer=True, config=small)
    if name == "second_in_fp32":
        return MultiEngineDeepSpeedStrategy(fp32_networks=["second"])
    return name


def batches(count: int = toy_modules.STEPS) -> DataLoader[Any]:
    """One item per step: modules look up the batch by its index."""
    return DataLoader(TensorDataset(torch.arange(count)))


class Runs:
    """One scenario per method."""

    def __init__(self, folder: Path, strategy: str, devices: int, precision: Any) -> None:
        self.folder = folder
        self.strategy = strategy
        self.devices = devices
        self.precision = precision

    def trainer(self, **arguments: Any) -> Trainer:
        return Trainer(
            accelerator=os.environ.get("RUN_ON", "cpu"),
            devices=self.devices,
            num_nodes=int(os.environ.get("RUN_NODES", "1")),
            strategy=strategy_of(self.strategy),
            precision=self.precision,
            default_root_dir=self.folder,
            use_distributed_sampler=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            # reads folders too; the other strategies write and read their own format
            plugins=[AtomicCheckpointIO()] if self.strategy in ("auto", DDP) else [],
            **{"max_epochs": 1, "enable_checkpointing": False, **arguments},
        )

    def trained(self, module: Any, steps: int = toy_modules.STEPS, **arguments: Any) -> Trainer:
        trainer = self.trainer(**arguments)
        trainer.fit(module, batches(steps))
        return trainer

    def recorded(self, module: toy_modules.TwoNetworks) -> dict[str, Any]:
        self.trained(module)
        return {"state": module.state_dict(), "records": module.records}

    def gan(self) -> dict[str, Any]:
        return self.recorded(toy_modules.Gan())

    def policy_and_critic(self) -> dict[str, Any]:
        return self.recorded(toy_modules.PolicyAndCritic())

    def faults(self) -> dict[str, Any]:
        return self.recorded(toy_modules.WithFaults())

    def language_models(self) -> dict[str, Any]:
        module, trainer = toy_modules.LanguageModels(), self.trainer()

        def on_train_end() -> None:
            trainer.save_checkpoint(self.folder / "language_models.ckpt")

        module.on_train_end = on_train_end  # type: ignore[method-assign]
        trainer.fit(module, batches(6))
        return {"state": module.state_dict(), "records": module.records}

    def pretraining(self) -> dict[str, Any]:
        """Pre-train only the critic; return weights before and after, and the policy's moments."""
        module = toy_modules.PolicyAndCritic(pretraining=toy_modules.STEPS)
        start = {k: v.clone() for k, v in module.state_dict().items()}
        self.trained(module)
        policy = module.trainer.optimizers[0]
        return {"start": start, "state": module.state_dict(), "moments": len(policy.state)}

    def clipping(self) -> dict[str, Any]:
        result = {}
        for name, scale, script in (
            ("small", 1e-2, "step"),
            ("huge", 1e6, "step"),
            ("nan", float("nan"), "step"),
            ("abandoned", 1e-2, "abandon"),
            ("abandoned_more", 1e-2, "abandon_more"),
            ("lightning", 1e6, "lightning"),
        ):
            module = toy_modules.Probe(scale, script)
            self.trained(module, 1)
            result[name] = {"moved": module.moved(), "records": module.records}
        return result

    def names(self) -> dict[str, Any]:
        """Return DeepSpeed's attributes that the strategy uses but that are missing, and dtypes."""
        module = toy_modules.Gan()
        module.frozen.bfloat16()  # a reference model may be loaded in bf16 to save memory
        trainer = self.trainer()
        by_name: dict[str, Any] = {}

        def on_train_end() -> None:  # while the engines exist
            strategy = trainer.strategy
            zeros = [engine.optimizer for engine in strategy.engines.values()]
            names = NAMES_USED_OFFLOADED if strategy.offload_optimizer else NAMES_USED
            by_name["missing"] = [n for n in names for zero in zeros if not hasattr(zero, n)]
            by_name["dtypes"] = {k: v.dtype for k, v in module.state_dict().items()}
            groups = [group for opt in trainer.optimizers for group in opt.param_groups]
            by_name["masters"] = [group["params"][0].dtype for group in groups]
            states = [state for opt in trainer.optimizers for state in opt.state.values()]
            by_name["state"] = [value.dtype for state in states for value in state.values()]

        module.on_train_end = on_train_end  # type: ignore[method-assign]
        trainer.fit(module, batches(2))
        return by_name

    def save(self) -> dict[str, Any]:
        """An uninterrupted run that leaves checkpoints, `step=19` after 12 of 20 batches."""
        module = toy_modules.PolicyAndCritic()
        every: dict[str, Any] = {"every_n_train_steps": 1, "save_top_k": -1, "save_last": "link"}
        saving = ModelCheckpoint(self.folder / "saved", "{step}", **every)
        self.trainer(enable_checkpointing=True, callbacks=[saving]).fit(module, batches())
        return {"state": module.state_dict(), "records": module.records}

    def checkpoint(self) -> Path:
        """The checkpoint half-way of another run, or of this one."""
        return Path(os.environ.get("RESUME_FROM", self.folder / "saved" / "step=19.ckpt"))

    def resume(self) -> dict[str, Any]:
        """Resume from the checkpoint half-way."""
        module = toy_modules.PolicyAndCritic()
        seen: dict[str, Any] = {}

        def on_fit_start() -> None:
            seen.update({k: v.clone() for k, v in module.state_dict().items()})

        module.on_fit_start = on_fit_start  # type: ignore[method-assign]
        trainer = self.trainer()
        trainer.fit(module, batches(), ckpt_path=str(self.checkpoint()))
        seen_and_last = {"at_start": seen, "global_step": trainer.global_step}
        return {"state": module.state_dict(), "records": module.records, **seen_and_last}

    def validate(self) -> dict[str, Any]:
        """Weights of a module that only validates a checkpoint, without engines."""

        class Validated(toy_modules.PolicyAndCritic):
            def validation_step(self, batch: object, batch_idx: int) -> None:
                """Nothing: the weights are looked at afterwards."""

        module = Validated()
        self.trainer().validate(module, batches(1), ckpt_path=str(self.checkpoint()))
        return {"state": module.state_dict()}

    def damaged(self) -> dict[str, Any]:
        """Return the errors about a checkpoint with a truncated shard, and with a flipped bit."""
        messages = {}
        for damage in ("cut", "flipped"):
            copy = self.folder / damage / "copy.ckpt"
            shutil.copytree(self.checkpoint(), copy)
            shutil.copytree(self.checkpoint(), self.folder / damage / "step=1.ckpt")
            shard = copy / "second" / "rank_00001.safetensors"
            content = shard.read_bytes()
            flipped = content[:-10] + bytes([content[-10] ^ 1]) + content[-9:]
            shard.write_bytes(content[:-10] if damage == "cut" else flipped)
            try:
                self.trainer().fit(toy_modules.PolicyAndCritic(), batches(), ckpt_path=str(copy))
            except ValueError as error:
                messages[damage] = str(error)
        return messages

    def kept(self) -> dict[str, Any]:
        """Checkpoints of ResumeCheckpoint after a kill in the middle of a save, and a resume."""
        folder = self.folder / "kept"
        keep = ResumeCheckpoint(every_n_batches=6, dirpath=str(folder))
        self.trained(toy_modules.PolicyAndCritic(), enable_checkpointing=True, callbacks=[keep])
        before = sorted(path.name for path in folder.iterdir())
        torch.distributed.barrier()
        if os.environ.get("LOCAL_RANK", "0") == "0":
            (folder / "batch=18.ckpt").rename(partial_path(folder / "batch=18.ckpt"))
        torch.distributed.barrier()
        again = ResumeCheckpoint(every_n_batches=6, dirpath=str(folder))
        trainer = self.trainer(enable_checkpointing=True, callbacks=[again])
        module = toy_modules.PolicyAndCritic()
        trainer.fit(module, batches(), ckpt_path=find_newest_checkpoint(folder))
        after = sorted(path.name for path in folder.iterdir())
        return {"state": module.state_dict(), "before": before, "after": after}

    def disk_full(self) -> dict[str, Any]:
        """Let the last rank fail to write; return each rank's error, and the files left."""
        path = self.folder / "full" / "last.ckpt"
        module = toy_modules.PolicyAndCritic(pretraining=0)
        trainer, message = self.trainer(max_steps=4), ""

        def on_train_end() -> None:
            nonlocal message
            trainer.save_checkpoint(path)
            if trainer.global_rank == trainer.world_size - 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
            try:
                trainer.save_checkpoint(path)
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
            unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)

        module.on_train_end = on_train_end  # type: ignore[method-assign]
        trainer.fit(module, batches())
        left = sorted(p.name for p in path.parent.iterdir())
        return {"told": message, "left": left, "state": module.state_dict()}

    def refused(self) -> dict[str, Any]:
        """Return the messages about misuse while engines exist."""

        class Misuse(toy_modules.Gan):
            def __init__(self, script: Callable[[Misuse], None]) -> None:
                super().__init__()
                self.script = script

            def training_step(self, batch: object, batch_idx: int) -> None:
                self.script(self)

        def manual(module: Misuse) -> None:
            module.manual_backward(module.first(torch.ones(1, 4)).sum())

        def foreign(module: Misuse) -> None:
            other = torch.optim.SGD(module.first.parameters())
            backward(module, module.first(torch.ones(1, 4)).sum(), other)  # type: ignore[arg-type]

        def early(module: Misuse) -> None:
            module.pair()[0].step()

        messages = {}
        for script in (manual, early, foreign):
            try:
                self.trained(Misuse(script), 1)
            except (ValueError, RuntimeError) as error:
                messages[script.__name__] = str(error)
        return messages


def outcome(
    folder: Path,
    strategy: str,
    devices: int,
    *scenarios: str,
    precision: str = "32-true",
    environment: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Run scenarios in separate processes, one per device, and read what rank 0 wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    added = {"DS_ACCELERATOR": "cpu", "NODE_RANK": "0", **(environment or {})}
    arguments = [folder, strategy, devices, precision, scenarios, added]  # for `on_a_rank`
    run_on_ranks(on_a_rank, devices, folder, *arguments, fresh="RUN_ON" in added)
    return {
        name: torch.load(folder / f"{name}.pt", map_location="cpu", weights_only=False)
        for name in scenarios
    }


def on_a_rank(
    rank: int, folder: Path, strategy: str, devices: int, precision: str, scenarios: Any, added: Any
) -> None:
    """Run scenarios on one of the ranks, with variables `added` to the environment."""
    os.environ |= {"LOCAL_RANK": str(rank), **added}
    runs = Runs(folder, strategy, devices, precision)
    for scenario in scenarios:
        result = tree_map(full_tensor, getattr(runs, scenario)())
        if rank == 0:
            torch.save(result, folder / f"{scenario}.pt")


def main() -> None:
    """Run the scenarios named on the command line."""
    folder, strategy, devices, precision, *scenarios = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    runs = Runs(Path(folder), strategy, int(devices), precision)
    for scenario in scenarios:
        result = tree_map(full_tensor, getattr(runs, scenario)())
        launched = ("RANK", "SLURM_PROCID", "LOCAL_RANK")  # by torchrun, SLURM, Lightning
        if int(next((os.environ[name] for name in launched if name in os.environ), 0)) == 0:
            torch.save(result, Path(folder) / f"{scenario}.pt")


if __name__ == "__main__":
    main()
