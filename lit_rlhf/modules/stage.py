"""What the three stages share: model options, schedule, logging and the folder they leave."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase, get_scheduler

from lit_callbacks import count_resumed_epoch
from lit_rlhf.data import DialogueEncoder
from lit_rlhf.forward import LanguageModel, give_back_freed_memory, keep_freed_memory
from lit_rlhf.models import ModelCardInfo, ModelOptions, load_tokenizer, save_model_folder
from lit_rlhf.modules.guarded_step import SkippedUpdates, last_known_checkpoint
from lit_rlhf.modules.micro_batches import BatchT, MicroBatch, micro_batches
from lit_rlhf.modules.option_names import (
    NamedOptions,
    check_names,
    dotted_arguments,
    merge_options,
    plain_arguments,
)
from lit_rlhf.modules.options import OptimizerOptions
from lit_rlhf.modules.out_of_memory import explained_memory_errors, suggest_change
from lit_rlhf.modules.random_state import random_state, restore_random_state
from lit_rlhf.modules.timing import PhaseTimer
from lit_rlhf.stats import global_sum
from lit_rlhf.strategies import OptimizerStep, clipped_step

CONTRACT_KEY = "text_contract"  # of a checkpoint
# what to change when an update of SFT or reward modelling needs too much memory
MEMORY_SETTINGS = (
    "micro_batch_size",
    "data.tokens_per_batch",
    "data.max_length",
    "network.gradient_checkpointing",
)
MAX_SKIPPED_IN_A_ROW = 5


class StageModule(NamedOptions, LightningModule):
    """A stage that starts from a Hugging Face folder and leaves one for the next stage.

    Args:
        model_path: Local folder or hub id of the model that the stage starts from.
        output_dir: Folder for the finished model; `None` means `model/` in the run's log folder.
        network: How networks are loaded: type, attention, LoRA adapters, compilation.
        max_skipped_in_a_row: Updates of a network in a row that may be skipped, as a number is not
            finite, until training stops.

    Raises:
        ValueError: If the model path is neither a folder nor a hub id, or an option is out of its
            range.
        TypeError: If a keyword argument is no option of the class.
    """

    stage: ClassVar[str]

    def __init__(
        self,
        model_path: str,
        output_dir: str | None = None,
        network: ModelOptions = ModelOptions(),
        max_skipped_in_a_row: int = MAX_SKIPPED_IN_A_ROW,
    ) -> None:
        super().__init__()
        # Collects the arguments of the subclass too: it looks through the calling constructors.
        self.save_hyperparameters()
        # Checkpoints hold plain data, so that they are read with `weights_only=True`.
        self.save_hyperparameters(plain_arguments(type(self), self.hparams))
        # Manual in every stage: the gradient of a step that is split into micro-batches is divided
        # by the step's token count over all ranks, which `accumulate_grad_batches` cannot do.
        self.automatic_optimization = False
        self.model_path = model_path
        self.output_dir = output_dir
        self.network = merge_options(type(self), "network", network)
        self.skipped = SkippedUpdates(max_skipped_in_a_row)
        self.timer = PhaseTimer()
        self._random_state: dict[str, Any] = {}
        self._trained = False
        self._keeps_memory = False
        self._loader_states: list[dict[str, Any]] = []
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(
            model_path, trust_remote_code=self.network.trust_remote_code
        )

    @classmethod
    def load_from_checkpoint(cls, *arguments: Any, **options: Any) -> Self:
        """Load a module as `LightningModule.load_from_checkpoint` does.

        Args:
            *arguments: See there.
            **options: See there; a group of options may be its dataclass or a mapping.
        """
        # A checkpoint of the command line is instantiated by jsonargparse, which takes mappings.
        plain: dict[str, Any] = {
            name: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
            for name, value in options.items()
        }
        return super().load_from_checkpoint(*arguments, **plain)

    def build_optimizer(self, network: nn.Module, options: OptimizerOptions) -> Optimizer:
        """AdamW over what is trained of a network, in one kernel for all its weights."""
        parameters = (p for p in network.parameters() if p.requires_grad)
        return torch.optim.AdamW(
            parameters, lr=options.learning_rate, weight_decay=options.weight_decay, fused=True
        )

    def build_schedule(
        self, optimizer: Optimizer, options: OptimizerOptions, skipped_steps: int = 0
    ) -> LRScheduler:
        """The learning-rate schedule that the options name, over the steps of the run.

        Args:
            optimizer: Whose learning rate it drives.
            options: Its options.
            skipped_steps: Batches at the start of the run in which the optimizer does not step.

        Raises:
            ValueError: When the schedule needs the length of an endless run.
        """
        name = options.lr_scheduler
        total = self.trainer.estimated_stepping_batches - skipped_steps
        if name == "constant":
            return cast(LRScheduler, get_scheduler(name, optimizer))
        if math.isinf(total):
            raise ValueError(
                f"lr_scheduler: {name!r} needs the length of the run; set trainer.max_epochs or "
                "trainer.max_steps, or use lr_scheduler: constant"
            )
        schedule = get_scheduler(
            name,
            optimizer,
            num_warmup_steps=math.ceil(options.warmup_ratio * total),
            num_training_steps=max(int(total), 1),
            scheduler_specific_kwargs=(
                {"min_lr_rate": options.min_lr_ratio} if "min_lr" in name else None
            ),
        )
        return cast(LRScheduler, schedule)

    def rank_share(self, count: Tensor | int) -> Tensor:
        """A count summed over ranks and divided by their number.

        Dividing a rank's sum by it gives, once gradients and logs are averaged over ranks, the mean
        over all ranks' samples or tokens, however unevenly they are spread. A count that is 0
        everywhere is taken as 1, so that what is divided by it is 0.
        """
        total = global_sum(torch.as_tensor(count, dtype=torch.float32, device=self.device))
        return torch.maximum(total, torch.ones_like(total)) / self.trainer.world_size

    def mean_over_ranks(self, value: Tensor) -> Tensor:
        """The mean of every rank's `value`, 0-dim, without a graph."""
        return global_sum(value) / self.trainer.world_size

    def micro_batches(
        self, batch: BatchT, n_rows: int, size: int | None
    ) -> list[MicroBatch[BatchT]]:
        """A rank's batch in parts of `size` rows (`None`: one part), equally many on every rank.

        Every backward waits for the other ranks, but the dynamic batches of Section 4.2 differ in
        rows. A rank without rows left takes its first part again, with weight 0.
        """
        parts = [MicroBatch(part, 1.0) for part in micro_batches(batch, n_rows, size)]
        if size is not None:
            count = torch.tensor(len(parts), device=self.device)
            most = int(self.trainer.strategy.reduce(count, reduce_op="max"))
            parts += [MicroBatch(parts[0].rows, 0.0)] * (most - len(parts))
        return parts

    def networks_in_training(self) -> list[tuple[LightningOptimizer, LRScheduler]]:
        """Each network's optimizer with its schedule, as `configure_optimizers` lists them."""
        optimizers, schedules = self.optimizers(), self.lr_schedulers()
        pairs = zip(
            optimizers if isinstance(optimizers, list) else [optimizers],
            schedules if isinstance(schedules, list) else [schedules],
            strict=True,
        )
        return [(optimizer, cast(LRScheduler, schedule)) for optimizer, schedule in pairs]

    def step_network(
        self,
        network: str,
        optimizer: LightningOptimizer,
        max_norm: float | None,
        totals: Mapping[str, Tensor],
        place: str,
    ) -> OptimizerStep:
        """Clip and step; where a loss or the gradient is not finite on any rank, no rank steps.

        Weights, moments and step counts of the network are then as before, and schedules go on.

        Args:
            network: What is updated, in words.
            optimizer: Its optimizer, after the last `backward`.
            max_norm: Largest gradient norm (L2); `None`: no clipping.
            totals: The update's metrics; the losses are those whose key ends with `loss`.
            place: Where in the run, in words.

        Raises:
            TooManySkippedUpdates: If that happened `max_skipped_in_a_row` times in a row.
        """
        why = self.non_finite({key: loss for key, loss in totals.items() if key.endswith("loss")})
        if why:
            optimizer.zero_grad()
            step = OptimizerStep(torch.full((), torch.nan, device=self.device), applied=False)
        else:
            step = clipped_step(optimizer, max_norm)
            why = [] if step.applied else ["its gradient norm"]
        self.count_update(network, why, place)
        return step

    def non_finite(self, quantities: Mapping[str, Tensor]) -> list[str]:
        """Which quantities hold NaN or infinity on any rank, in words; alike on all ranks."""
        flags = torch.stack([~torch.isfinite(value).all() for value in quantities.values()])
        counts = zip(quantities, global_sum(flags.int()).tolist(), strict=True)
        n_ranks = self.trainer.world_size
        return [
            name if n_ranks == 1 else f"{name} (on {count} of {n_ranks} ranks)"
            for name, count in counts
            if count
        ]

    def memory_for(self, phase: str, ids: Tensor, *settings: str) -> AbstractContextManager[None]:
        """What explains an out-of-memory error of a phase.

        Args:
            phase: Its name.
            ids: The sequences that it handles, `[B, L]`.
            settings: What to change then: dotted names of options, or of other settings.
        """
        return explained_memory_errors(phase, ids, [suggest_change(s, self) for s in settings])

    def place(self, batch_idx: int) -> str:
        """Where in the run a training step is, in words; both count from 0."""
        return f"epoch {self.current_epoch}, batch {batch_idx}"

    def count_update(self, network: str, why: list[str], place: str) -> None:
        """Take note of an update, skipped if there is a `why`, and report that.

        Raises:
            TooManySkippedUpdates: If it is the last skipped one in a row that there may be.
        """
        if not why:
            self.skipped.applied(network)
            return
        checkpoint = last_known_checkpoint(self.trainer.checkpoint_callbacks)
        self.skipped.skipped(network, ", ".join(why), place, checkpoint)

    def step_schedule(self, schedule: LRScheduler) -> None:
        """Move a learning rate on, also where its optimizer's update was skipped.

        So the rate at a batch does not depend on how many updates were skipped before it.
        """
        if schedule.last_epoch > 0:
            schedule.step()
            return
        with warnings.catch_warnings():
            # torch takes a first update that was skipped for calls in the wrong order
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            schedule.step()

    def log_metrics(self, metrics: Mapping[str, Tensor], batch_size: int, prefix: str = "") -> None:
        """Log `metrics`, averaged over ranks.

        Args:
            metrics: Values by key (`stage/quantity`).
            batch_size: Number of samples behind them, which weighs validation batches.
            prefix: For instance `val/`.
        """
        self.log_dict(
            {prefix + key: value for key, value in metrics.items()},
            batch_size=batch_size,
            sync_dist=self.trainer.world_size > 1,
        )

    def log_text(self, key: str, text: str, step: int) -> None:
        """Write `text` (Markdown) to the TensorBoard loggers; other loggers do not take text."""
        for logger in self.loggers:
            if isinstance(logger, TensorBoardLogger) and self.trainer.is_global_zero:
                logger.experiment.add_text(key, text, step)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the random state, from which dropout draws, and how the run shows text."""
        checkpoint["random_state"] = random_state(self.device)
        if self.encoder is not None:
            checkpoint[CONTRACT_KEY] = asdict(self.encoder.contract)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take note of the random state and of the place in the data that training goes on from.

        Raises:
            ValueError: If a hyper-parameter is no option of the class, as in checkpoints of other
                versions.
        """
        # Lightning passes over arguments that the constructor does not take.
        saved = checkpoint.get(self.CHECKPOINT_HYPER_PARAMS_KEY, {})
        check_names(type(self), (name for name in saved if not name.startswith("_")))
        self._random_state = checkpoint.get("random_state", {})
        fit_loop = checkpoint.get("loops", {}).get("fit_loop", {})
        self._loader_states = fit_loop.get("state_dict", {}).get("combined_loader", [])

    def on_fit_start(self) -> None:
        """On a CPU, keep freed memory for what comes next."""
        self._keeps_memory = self.device.type == "cpu" and keep_freed_memory()

    def on_train_start(self) -> None:
        """Go on from the random state and the place in the data of a checkpoint, if there is one.

        Lightning (2.6.6) restores the place when it sets the loader up, but a schedule that asks
        for `trainer.estimated_stepping_batches` has it set up before the place is known.
        """
        loader: Any = self.trainer.train_dataloader
        if len(self._loader_states) == 1 and hasattr(loader, "load_state_dict"):
            loader.load_state_dict(self._loader_states[0])
        self._loader_states = []
        count_resumed_epoch(self.trainer)
        restore_random_state(self._random_state, self.device)
        self._random_state = {}
        self.timer = PhaseTimer(self.device)
        self._trained = True

    def on_fit_end(self) -> None:
        """Leave the finished model also where a kill came between the last step and its saving.

        A run that resumes from its very end has no batch left, and Lightning calls none of the
        hooks around training.
        """
        if self.trainer.ckpt_path is not None and not self._trained:
            self.on_train_end()
        self._trained = False
        if self._keeps_memory:
            give_back_freed_memory()

    @property
    def encoder(self) -> DialogueEncoder | None:
        """How the run's datamodule renders and tokenizes text; `None` without one of ours."""
        # Lightning sets `trainer.datamodule` without declaring it.
        return getattr(getattr(self.trainer, "datamodule", None), "encoder", None)

    @property
    def finished_dir(self) -> Path:
        """Folder that the finished model goes to."""
        if self.output_dir is not None:
            return Path(self.output_dir)
        return Path(self.trainer.log_dir or self.trainer.default_root_dir) / "model"

    def save_finished(
        self,
        model: LanguageModel,
        folder: Path,
        generation: dict[str, Any] | None = None,
        lm_head: nn.Module | None = None,
    ) -> None:
        """Leave `model` as a Hugging Face folder: weights, tokenizer, text contract, card."""
        if self.trainer.is_global_zero:
            save_model_folder(
                model,
                self.tokenizer if self.encoder is None else self.encoder.tokenizer,
                folder,
                contract=None if self.encoder is None else self.encoder.contract,
                card=self.card(),
                generation=generation,
                lm_head=None if lm_head is None else lm_head.state_dict(),
            )
            rank_zero_info(f"{self.stage}: saved the model to {folder}")
        self.trainer.strategy.barrier("lit_rlhf.save_finished")

    def card(self) -> ModelCardInfo:
        """What the model card says of this run."""
        metrics = {
            key: float(value)
            for key, value in self.trainer.callback_metrics.items()
            if torch.is_tensor(value) and value.numel() == 1 and "/" in key
        }
        return ModelCardInfo(
            stage=self.stage,
            base_model=self.model_path,
            config=dotted_arguments(self.hparams),
            metrics=metrics,
        )
