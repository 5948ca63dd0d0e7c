"""What SFT, reward modelling and PPO share: optimizers, checkpoints, the finished model."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, Self, cast

import numpy as np
import torch
from lightning.fabric.utilities import AttributeDict
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase

from lit_callbacks import Collapse, count_resumed_epoch, find_collapse
from lit_rlhf.data import DialogueEncoder, PromptDataModule, RecordDataModule
from lit_rlhf.forward import (
    LanguageModel,
    give_back_freed_memory,
    keep_freed_memory,
    limit_kept_memory,
)
from lit_rlhf.models import (
    ModelCardInfo,
    ModelOptions,
    check_model_path,
    load_tokenizer,
    replace_folder,
    save_model_folder,
)
from lit_rlhf.modules.guarded_step import UpdateGuard
from lit_rlhf.modules.micro_batches import MicroBatch, split_rows, tokens_within_memory
from lit_rlhf.modules.option_names import (
    check_names,
    dotted_arguments,
    merge_options,
    option_groups,
    plain_arguments,
)
from lit_rlhf.modules.options import OptimizerOptions
from lit_rlhf.modules.out_of_memory import explain_memory_errors, suggest_change
from lit_rlhf.modules.resuming import (
    SETTINGS_KEY,
    ChangedSetting,
    OptimizerSettings,
    apply_optimizer_settings,
    check_changes,
    describe_run,
    find_changes,
    optimizer_settings,
)
from lit_rlhf.modules.run_folders import RunFolders, check_finished_dir, log_folder
from lit_rlhf.modules.schedules import build_schedule
from lit_rlhf.modules.timing import PhaseTimer
from lit_rlhf.stats import FixedDtypeBuffers, global_max, global_sum, world_size
from lit_rlhf.strategies import AtomicCheckpointIO

CONTRACT_KEY = "text_contract"  # of a checkpoint
METRICS_KEY = "last_metrics"  # of a checkpoint
MACHINE_METRICS = ("time/", "memory/", "throughput/")  # of the machine, not of the model
COLLAPSE_FILE = "collapse.json"
"""File in a finished model's folder that says that a detector ended the run."""
# what to change when an update of SFT or reward modelling runs out of memory
SUPERVISED_MEMORY = (
    "micro_batch_size",
    "micro_batch_tokens",
    "data.tokens_per_batch",
    "data.max_length",
    "network.gradient_checkpointing",
)
MAX_SKIPPED_IN_A_ROW = 5


class TrainedNetwork(NamedTuple):
    """How a network is trained.

    Attributes:
        optimizer: Its optimizer.
        schedule: The learning-rate schedule of the optimizer.
    """

    optimizer: LightningOptimizer
    schedule: LRScheduler


class StageModule(FixedDtypeBuffers, LightningModule):
    """A stage that starts from a Hugging Face folder and leaves one for the next stage.

    Attributes:
        allow_changes: Resume also from a checkpoint of a run with other data, models or precision;
            set it before the fit. The settings that count are in `docs/resume.md`.

    Args:
        model_path: Local folder or hub id of the model that the stage starts from.
        output_dir: Folder for the finished model; `None` means `model/` in the run's log folder.
        network: How networks are loaded: type, attention, LoRA adapters, compilation.
        max_skipped_in_a_row: Number of updates of a network in a row, skipped because a number is
            not finite, at which training stops.

    Raises:
        ValueError: If `model_path` is neither a folder nor a hub id, or an option is out of its
            range.
        TypeError: If a keyword argument is no option of the class.
    """

    stage: ClassVar[str]
    progress_metrics: ClassVar[Sequence[str]] = ()
    """Metrics that the command line's progress bar shows by default."""
    object_arguments: ClassVar[tuple[str, ...]] = ()
    """Arguments that may be Python objects; the class adds what checkpoints hold of them."""

    def __init__(
        self,
        model_path: str,
        output_dir: str | None = None,
        network: ModelOptions = ModelOptions(),
        max_skipped_in_a_row: int = MAX_SKIPPED_IN_A_ROW,
    ) -> None:
        super().__init__()
        check_model_path(model_path)  # before a model is taken for a hyper-parameter
        # Collects the arguments of the subclass too: it looks through the calling constructors.
        # Those are left out that may be models, which it would copy.
        self.save_hyperparameters(ignore=self.object_arguments)
        # Checkpoints hold plain data, so that they are read with `weights_only=True`.
        self.save_hyperparameters(plain_arguments(type(self), self.hparams))
        # Manual in every stage: the gradient of a step that is split into micro-batches is divided
        # by the step's token count over all ranks, which `accumulate_grad_batches` cannot do.
        self.automatic_optimization = False
        self.model_path = model_path
        self.output_dir = output_dir
        self.network = merge_options(type(self), "network", network)
        if self.network.load_in_4bit and self.network.lora_rank == 0:
            raise ValueError(
                "network.load_in_4bit: expected network.lora_rank > 0, got 0: weights in 4 bits "
                "cannot be trained, and LoRA trains adapters beside them"
            )
        self.guard = UpdateGuard(max_skipped_in_a_row)
        self.timer = PhaseTimer()
        self.folders = RunFolders()
        self.allow_changes = False
        self._settings: dict[str, Any] | None = None  # of this run, for its checkpoints
        self._changes: list[ChangedSetting] = []  # since the checkpoint that the run resumes from
        self._configured: list[OptimizerSettings] = []
        self._saved_metrics: dict[str, float] = {}
        self._collapse: Collapse | None = None  # what ended the run
        self._random_state: dict[str, Any] = {}
        self._trained = False
        # of `limit_kept_memory`; `None` where freed memory is not kept
        self._resident_floor: int | None = None
        self._loader_states: list[dict[str, Any]] = []
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(
            model_path, trust_remote_code=self.network.trust_remote_code
        )

    @property
    def hparams_initial(self) -> AttributeDict:
        """The arguments as loggers get them: a mapping by path or function is text.

        Loggers join nested keys with slashes, and MLflow refuses the key of an absolute path.
        """
        arguments = super().hparams_initial
        for name, value in arguments.items():
            if isinstance(value, Mapping) and not all(str(key).isidentifier() for key in value):
                arguments[name] = ", ".join(f"{key}: {entry}" for key, entry in value.items())
        return arguments

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path | IO[bytes],
        map_location: object = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **options: Any,
    ) -> Self:
        """Build a module of this class from a checkpoint's arguments, and load its weights.

        Nothing that the checkpoint names is imported or run: neither a class, nor the code of a
        model, nor a reward function of another package. What is needed of these is given as an
        option.

        Args:
            checkpoint_path: File, URL or binary stream.
            map_location: Where tensors go, as for `torch.load`.
            hparams_file: Not supported, as checkpoints hold their arguments.
            strict: Whether missing and unexpected weights are errors; `None` for the module's
                setting.
            weights_only: False unpickles the file, which can run code from it.
            **options: Arguments that win over the checkpoint's; a group of options may be its
                dataclass or a mapping. Code that comes with a model is run only if `network` is
                given here with `trust_remote_code`.

        Raises:
            ValueError: If the file is damaged, an argument in it is not an option of the class, or
                it names code that is not given as an option.
        """
        if hparams_file is not None:
            raise ValueError(f"hparams_file: expected None, got {hparams_file}")
        if map_location is None and not torch.cuda.is_available():
            map_location = "cpu"
        if isinstance(checkpoint_path, str | Path):
            load: Callable[..., dict[str, Any]] = AtomicCheckpointIO().load_checkpoint
        else:
            load = torch.load
        content = load(checkpoint_path, map_location, weights_only=weights_only is not False)
        # Names with an underscore are LightningCLI's, for a function of its own that would build
        # the class named there, and import any other class named among the arguments.
        saved = {
            name: value
            for name, value in content.get(cls.CHECKPOINT_HYPER_PARAMS_KEY, {}).items()
            if not name.startswith("_")
        }
        check_names(cls, saved)
        module = cls(**cls.trusted_arguments(saved, options))
        module.on_load_checkpoint(content)
        module.load_state_dict(
            content["state_dict"], strict=module.strict_loading if strict is None else strict
        )
        tensors = (t for t in content["state_dict"].values() if isinstance(t, Tensor))
        return module.to(next(tensors, torch.empty(0)).device)

    @classmethod
    def trusted_arguments(
        cls, saved: Mapping[str, Any], given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Merge the arguments of a checkpoint with those given now, which win.

        Args:
            saved: The checkpoint's. Its setting of `trust_remote_code` is ignored.
            given: Those that the user gives now.

        Raises:
            ValueError: If the checkpoint names code that is not given now.
        """
        arguments = {**saved, **given}
        if "network" in saved and "network" not in given:
            arguments["network"] = {**saved["network"], "trust_remote_code": False}
        return arguments

    def build_optimizer(self, network: nn.Module, options: OptimizerOptions) -> Optimizer:
        """AdamW over the trainable parameters of a network, fused into one kernel.

        Weight decay acts on matrices only. It would pull the scales of norms towards 0.
        """
        trained = [p for p in network.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": options.weight_decay},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            # DeepSpeed takes no empty group; adapters have matrices only
            [group for group in groups if group["params"]],
            lr=options.learning_rate,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            fused=True,
        )

    def build_schedule(self, optimizer: Optimizer, options: OptimizerOptions) -> LRScheduler:
        """The learning-rate schedule of the only optimizer, over the batches of the run.

        Raises:
            ValueError: If the schedule needs the length of a run that has none.
        """
        total = float(self.trainer.estimated_stepping_batches)
        return build_schedule(optimizer, options, lambda: total)

    def trained_networks(self) -> list[TrainedNetwork]:
        """Each network's optimizer and schedule, in the order of `configure_optimizers`."""
        optimizers, schedules = self.optimizers(), self.lr_schedulers()
        pairs = zip(
            optimizers if isinstance(optimizers, list) else [optimizers],
            schedules if isinstance(schedules, list) else [schedules],
            strict=True,
        )
        return [
            TrainedNetwork(optimizer, cast(LRScheduler, schedule)) for optimizer, schedule in pairs
        ]

    def step_schedule(self, schedule: LRScheduler) -> None:
        """Step a learning-rate schedule, also after an update that was skipped.

        The learning rate of a batch then does not depend on how many updates were skipped.
        """
        if schedule.last_epoch > 0:
            schedule.step()
            return
        with warnings.catch_warnings():
            # torch takes a skipped first update for a schedule that is stepped before its optimizer
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            schedule.step()

    def global_denominator(self, count: Tensor | int) -> Tensor:
        """Sum of `count` over ranks, divided by the number of ranks, 0-dim float32.

        A rank divides its sum of losses by this. Gradients and logged values are averaged over
        ranks afterwards, which gives the mean over the samples or tokens of all ranks, however
        unevenly they are spread. If the sum is 0, it is taken as 1.
        """
        total = global_sum(torch.as_tensor(count, dtype=torch.float32, device=self.device))
        return torch.maximum(total, torch.ones_like(total)) / world_size()

    def global_means(self, metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Means of metrics over ranks, in a single reduction on the module's device.

        A share in a global mean (see `global_denominator`) becomes that mean.

        Args:
            metrics: 0-dim numbers by key, the same keys on every rank. They may be on the host,
                as times are: a process group of GPUs does not reduce those.

        Returns:
            0-dim float64 tensors on the module's device, without graphs.
        """
        values = [value.detach().to(self.device, torch.float64) for value in metrics.values()]
        means = global_sum(torch.stack(values)) / world_size()
        return dict(zip(metrics, means.unbind(), strict=True))

    def micro_batches(
        self, model: LanguageModel, lengths: Tensor, max_rows: int | None, max_tokens: int | None
    ) -> list[MicroBatch]:
        """A rank's batch in parts within the limits, as many parts on every rank.

        Without limits the batch is one part, on a CPU one or as many as fit into little memory.

        Every backward may wait for the other ranks, but ranks differ in tokens, and in the dynamic
        batches of Section 4.2 in rows. A rank that has no rows left takes its first part again,
        with weight 0.

        Args:
            model: The network that is trained.
            lengths: Real tokens of each row of this rank's batch, `[B]`.
            max_rows: Most rows of a part; `None`: no limit.
            max_tokens: Most tokens of a part; `None`: no limit. A longer row is a part by itself.
        """
        if max_rows is None and max_tokens is None and self.device.type == "cpu":
            max_tokens = tokens_within_memory(model)
        parts = [MicroBatch(rows, 1.0) for rows in split_rows(lengths, max_rows, max_tokens)]
        if max_rows is not None or max_tokens is not None:
            most = global_max(len(parts), self.device)
            parts += [MicroBatch(parts[0].rows, 0.0)] * (most - len(parts))
        return parts

    @contextmanager
    def phase(
        self, name: str, ids: Tensor, settings: Sequence[str], timer: PhaseTimer | None = None
    ) -> Iterator[None]:
        """Time a phase of a training step, and explain an out-of-memory error in it.

        Args:
            name: Name of the phase.
            ids: The sequences that it processes, `[B, L]`.
            settings: What to change when memory runs out: dotted names of options, or of settings
                elsewhere in a configuration.
            timer: Timer of the phase; `None` takes the module's.

        Raises:
            torch.OutOfMemoryError: If memory runs out, with the sizes and the settings.
        """
        changes = [suggest_change(setting, self) for setting in settings]
        with (timer or self.timer)(name), explain_memory_errors(name, ids, changes):
            yield

    def log_evaluation(self, metrics: Mapping[str, Tensor], prefix: str) -> None:
        """Log the results of a validation or test set, at its end.

        Args:
            metrics: Values of all batches and ranks by key (`stage/quantity`), equal on all ranks.
            prefix: Prefix of the keys, for instance `val/`.
        """
        self.log_dict(
            {prefix + key: value for key, value in metrics.items()},
            # Lightning 2.6.6 warns of every key that is logged per epoch without it.
            sync_dist=self.trainer.world_size > 1,
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the random generators, the text contract, the run's settings and last metrics."""
        checkpoint["random_state"] = random_state(self.device)
        checkpoint[SETTINGS_KEY] = self.run_settings()
        checkpoint[METRICS_KEY] = self.last_metrics()
        if self.encoder is not None:
            checkpoint[CONTRACT_KEY] = asdict(self.encoder.contract)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the random state and the position in the data until training starts.

        Raises:
            ValueError: If a hyper-parameter of the checkpoint is not an option of the class, as in
                checkpoints of other versions.
            ChangedRunError: If a run would resume that is another one than the checkpoint's, and
                `allow_changes` is off.
        """
        # Lightning drops hyper-parameters that the constructor does not take, without a word.
        saved = checkpoint.get(self.CHECKPOINT_HYPER_PARAMS_KEY, {})
        check_names(type(self), (name for name in saved if not name.startswith("_")))
        if self._is_resuming():
            self._changes = find_changes(self, checkpoint, self.run_settings())
            check_changes(self._changes, self.allow_changes)
        self._saved_metrics = checkpoint.get(METRICS_KEY, {})
        self._random_state = checkpoint.get("random_state", {})
        fit_loop = checkpoint.get("loops", {}).get("fit_loop", {})
        self._loader_states = fit_loop.get("state_dict", {}).get("combined_loader", [])

    @property
    def inputs(self) -> dict[str, list[str]]:
        """Folders or hub ids of the models that the stage starts from, by option."""
        return {"model_path": [self.model_path]}

    def configure_callbacks(self) -> list[Callback]:
        """Release the run's folders when it ends."""
        self._trained = False  # Lightning calls this first; the fit before may have failed
        return [self.folders]

    def prepare_data(self) -> None:
        """On rank 0, check the folder of the finished model, and lock the run's folders.

        Later hooks would be too late: in between, loggers open their files, which can delete those
        of a run that is going on.
        """
        if self.trainer.state.fn != TrainerFn.FITTING or not self.trainer.is_global_zero:
            return
        check_lightning_tools(self)
        check_finished_dir(self.trainer, self.finished_dir, self.inputs)
        if not self.fast_dev_run:
            self.folders.lock(self.trainer, self.finished_dir)

    @property
    def fast_dev_run(self) -> bool:
        """Whether the Trainer only tries the code out. Lightning does not declare its attribute."""
        return bool(getattr(self.trainer, "fast_dev_run", False))

    def _is_resuming(self) -> bool:
        """Whether a checkpoint is loaded in order to resume a fit.

        It is also loaded by `load_from_checkpoint`, for evaluation, and by callbacks and the Tuner,
        which go back to an earlier state of the same run.
        """
        try:
            trainer = self.trainer
        except RuntimeError:  # there is none
            return False
        return trainer.state.fn == TrainerFn.FITTING and not self._trained

    def run_settings(self) -> dict[str, Any]:
        """Settings of data and Trainer that a run which resumes is compared with, as plain data."""
        settings = self._settings or describe_run(
            self.trainer, self.datamodule, self.input_checksums()
        )
        # The examples are those of training during a fit only.
        self._settings = settings if self.trainer.state.fn == TrainerFn.FITTING else None
        return settings

    def input_checksums(self) -> Mapping[str, object]:
        """Checksums of what the run reads besides its data, by names for error messages."""
        return {}

    def on_fit_start(self) -> None:
        """Check the dtype of the weights, and keep the configured learning rates.

        On a CPU, freed memory is kept for the next allocations.

        Raises:
            ValueError: If weights that are trained are float16.
        """
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        for optimizer in self.trainer.optimizers:
            # Engines that keep float32 masters have those in their groups, not the weights.
            check_trained_weights(optimizer, names)
        self._trained = False  # the trials of a Tuner end before this hook
        # A checkpoint's state is loaded later and replaces the optimizers' settings.
        self._configured = [
            optimizer_settings(optimizer, schedule)
            for optimizer, schedule in self.trained_networks()
        ]
        self._settings = None  # of an earlier fit
        keeps_memory = self.device.type == "cpu" and keep_freed_memory()
        self._resident_floor = 0 if keeps_memory else None

    def on_train_start(self) -> None:
        """Restore random state and position in the data from a checkpoint, and apply changes.

        Lightning (2.6.6) restores the position when it sets up the loader. But a schedule that asks
        for `trainer.estimated_stepping_batches` has it set up before the checkpoint is read.
        """
        loader: Any = self.trainer.train_dataloader
        if len(self._loader_states) == 1 and hasattr(loader, "load_state_dict"):
            loader.load_state_dict(self._loader_states[0])
        self._loader_states = []
        count_resumed_epoch(self.trainer)
        if self._changes:
            for change in self._changes:
                rank_zero_info(f"resumed with another value, {change}")
            self.apply_changes({change.name for change in self._changes})
        self._changes = []
        restore_random_state(self._random_state, self.device)
        self._random_state = {}
        self.timer = PhaseTimer(self.device)
        self._trained = True

    def on_train_batch_end(self, *_: object) -> None:
        """Return some of the freed memory that is kept on a CPU, if there is much of it."""
        if self._resident_floor is not None:
            self._resident_floor = limit_kept_memory(self._resident_floor)

    def apply_changes(self, names: set[str]) -> None:
        """Put configured values in place of those that a checkpoint has restored.

        Options that the module reads from its attributes are the configured ones anyway.

        Args:
            names: Dotted names of the settings that differ from those of the checkpoint.
        """
        groups = [
            name
            for name, default in option_groups(type(self)).items()
            if isinstance(default, OptimizerOptions)
        ]
        networks = zip(groups, self.trained_networks(), self._configured, strict=True)
        for group, (optimizer, schedule), configured in networks:
            fields = {name.removeprefix(f"{group}.") for name in names if name.startswith(group)}
            if fields:
                apply_optimizer_settings(optimizer, schedule, configured, fields)

    def on_fit_end(self) -> None:
        """Save the finished model, unless the fit was a trial.

        `on_train_end` would be too early: Lightning calls it at the end of every trial of a Tuner
        too, but not for a run that resumes from its very end, where a kill came between the last
        step and the saving.
        """
        ended = self._trained or self.trainer.ckpt_path is not None
        if ended and not self.fast_dev_run:
            self.save_finished()
        if self._resident_floor is not None:
            give_back_freed_memory()

    @property
    def datamodule(self) -> LightningDataModule | None:
        """The run's datamodule, if it has one. Lightning does not declare its attribute."""
        return getattr(self.trainer, "datamodule", None)

    @property
    def encoder(self) -> DialogueEncoder | None:
        """The encoder of the run's datamodule; `None` for a datamodule without one."""
        return getattr(self.datamodule, "encoder", None)

    @property
    def finished_dir(self) -> Path:
        """Folder of the finished model."""
        if self.output_dir is not None:
            return Path(self.output_dir)
        return log_folder(self.trainer) / "model"

    def save_finished(self) -> None:
        """Save the finished networks to `finished_dir`, on rank 0 and all at once.

        Of a run that a detector has ended, the last healthy weights are saved, with a file that
        says so, and nothing if there are none.
        """
        folder = self.finished_dir
        self._collapse = find_collapse(self.trainer)
        if self._collapse is not None:
            if self._collapse.checkpoint is None:
                rank_zero_warn(
                    f"{self.stage}: stopped as {self._collapse.verdict.level.word}, and no healthy "
                    f"weights were kept: {folder} is not written. With "
                    "trainer.enable_checkpointing: true, StopTraining keeps them"
                )
                return
            self.load_healthy_weights(self._collapse.checkpoint)
        if self.trainer.is_global_zero:
            with replace_folder(folder) as partial:
                self.write_finished(partial)
                if self._collapse is not None:
                    record = collapse_record(self._collapse)
                    (partial / COLLAPSE_FILE).write_text(json.dumps(record, indent=1), "utf-8")
            rank_zero_info(f"{self.stage}: saved the model to {folder}")
        self.trainer.strategy.barrier("lit_rlhf.save_finished")

    def load_healthy_weights(self, path: Path) -> None:
        """Load the weights of a checkpoint of this run, and its metrics for the card."""
        strategy = self.trainer.strategy
        checkpoint = strategy.load_checkpoint(path, weights_only=True)
        self.on_load_checkpoint(checkpoint)
        strategy.load_model_state_dict(checkpoint, strict=self.strict_loading)

    def write_finished(self, folder: Path) -> None:
        """Write the finished networks to an empty folder, with `write_network`."""
        raise NotImplementedError

    def write_network(
        self,
        model: LanguageModel,
        folder: Path,
        generation: dict[str, Any] | None = None,
        lm_head: nn.Module | None = None,
        card: ModelCardInfo | None = None,
    ) -> None:
        """Write a network as a Hugging Face folder.

        Args:
            model: The network; adapters are merged.
            folder: Where to.
            generation: Settings of its `generation_config.json`; `None`: those of the start.
            lm_head: Output layer that was trained beside a scalar model.
            card: Its model card; `None`: that of the run.
        """
        save_model_folder(
            model,
            self.tokenizer if self.encoder is None else self.encoder.tokenizer,
            folder,
            contract=None if self.encoder is None else self.encoder.contract,
            card=card or self.card(),
            generation=generation,
            lm_head=None if lm_head is None else lm_head.state_dict(),
        )

    def last_metrics(self) -> dict[str, float]:
        """The last value of each logged metric, also of one logged before the run was resumed."""
        logged = {
            key: float(value)
            for key, value in self.trainer.callback_metrics.items()
            if torch.is_tensor(value) and value.numel() == 1 and "/" in key
            # those of callbacks, and those that a resumed run cannot repeat
            if not key.startswith(("monitor/", *MACHINE_METRICS))
        }
        return self._saved_metrics | logged

    def card(self) -> ModelCardInfo:
        """The model card of this run: its options, data and final metrics."""
        collapse = self._collapse
        datasets, files = name_training_data(self.datamodule)
        return ModelCardInfo(
            stage=self.stage,
            base_model=self.model_path,
            config=dotted_arguments(self.hparams),
            metrics=self.last_metrics() if collapse is None else self._saved_metrics,
            note=None if collapse is None else describe_collapse(collapse),
            datasets=datasets,
            files=files,
        )


def check_lightning_tools(module: LightningModule) -> None:
    """Refuse tools of Lightning that do not fit manual optimization or generation.

    Raises:
        ValueError: If the module was compiled as a whole, or a callback averages its weights.
    """
    # private to Lightning (2.6.6), which asks for it in `to_uncompiled`
    if module._compiler_ctx is not None:
        raise ValueError(
            "model: expected a module that is not compiled, got torch.compile(module), whose "
            "training step generates text and steps optimizers. Set network.torch_compile, which "
            "compiles the networks' forward passes"
        )
    callbacks = module.trainer.callbacks  # type: ignore[attr-defined]  # set, but not declared
    if any(isinstance(callback, StochasticWeightAveraging) for callback in callbacks):
        raise ValueError(
            "trainer.callbacks: expected no StochasticWeightAveraging, got one: it would replace "
            "the learning-rate schedule, which a stage steps itself, and its average would not be "
            "the finished model. Lower the learning rate at the end instead "
            "(optimizer.lr_scheduler: cosine_with_min_lr)"
        )


class TrainingData(NamedTuple):
    """Hub ids of a run's training data, and names of those that are not on the hub."""

    datasets: list[str]
    files: list[str]


def name_training_data(datamodule: LightningDataModule | None) -> TrainingData:
    """Name the sources of a datamodule; those of a class of its own are not known."""
    names = TrainingData([], [])
    if not isinstance(datamodule, RecordDataModule):
        return names
    ptx = datamodule.ptx_sources if isinstance(datamodule, PromptDataModule) else []
    for source in (*datamodule.sources["train"], *ptx):
        if source.is_remote:
            names.datasets.append(source.path)
        else:
            names.files.append(source.label)
    return names


def describe_collapse(collapse: Collapse) -> str:
    """How a detector ended a run, and which weights were saved, for the model card."""
    step, (level, sentence, stopped_at) = collapse.healthy_step, collapse.verdict
    return (
        f"Training was stopped as {level.word} at step {stopped_at}: {sentence}. The weights are "
        f"those of step {step}, the last healthy ones, and so are the metrics."
    )


def collapse_record(collapse: Collapse) -> dict[str, Any]:
    """The same as plain data, for `COLLAPSE_FILE`."""
    return {
        "verdict": collapse.verdict.level.word,
        "reasons": collapse.verdict.sentence,
        "stopped_at_step": collapse.verdict.step,
        "weights_of_step": collapse.healthy_step,
    }


def check_trained_weights(optimizer: Optimizer, names: Mapping[int, str]) -> None:
    """Refuse float16 weights, and warn of bfloat16 weights, that an optimizer steps in place.

    Args:
        optimizer: Optimizer of the weights, without masters in float32.
        names: Names of the parameters by their `id`.

    Raises:
        ValueError: If a weight is float16.
    """
    n_movable, n_weights, network, learning_rate = 0, 0, "", 0.0
    for group in optimizer.param_groups:
        # Schedules keep the learning rate of the options here, and may start a warm-up at 0.
        group_rate = float(group.get("initial_lr", group["lr"]))
        for parameter in group["params"]:
            name = names.get(id(parameter), "weights")
            if parameter.dtype == torch.float16:
                raise ValueError(
                    "network.dtype, trainer.precision: expected float32 or bfloat16 weights for "
                    f"training, got float16 in {name}: the squares of gradients vanish in float16, "
                    "and Adam then makes steps without measure; take float32 weights, with "
                    "trainer.precision: bf16-mixed to compute in bfloat16"
                )
            if parameter.dtype == torch.bfloat16:
                n_movable += count_movable(parameter, group_rate)
                n_weights += parameter.numel()
                network, learning_rate = name.partition(".")[0], group_rate
    if n_weights:
        rank_zero_warn(
            f"{network}: a step at a learning rate of {learning_rate:g} can change {n_movable:,} "
            f"of {n_weights:,} weights ({n_movable / n_weights:.2%}), as the others are rounded "
            "back to what they were in bfloat16. Take float32 weights (network.dtype: float32, "
            "with trainer.precision: bf16-mixed to compute in bfloat16), or a strategy that keeps "
            "float32 masters (multi_deepspeed_stage_2)"
        )


@torch.no_grad()
def count_movable(weights: Tensor, learning_rate: float) -> int:
    """Number of weights that change if `learning_rate`, about a step of Adam, is added or taken.

    Args:
        weights: Of any floating dtype; the sum is rounded to it.
        learning_rate: Size of the step, positive.

    Examples:
        >>> weights = torch.tensor([1.0, 1e-4], dtype=torch.bfloat16)
        >>> count_movable(weights, 1e-6)  # 1 + 1e-6 is 1
        1
    """
    count = 0
    for part in torch.split(weights.detach().flatten(), 2**24):  # float32 copies of one part
        steps = (part.float() + learning_rate, part.float() - learning_rate)
        up, down = (step.to(part.dtype) != part for step in steps)
        count += int((up | down).sum())
    return count


def random_state(device: torch.device) -> dict[str, Any]:
    """States of the global random generators of torch (CPU and `device`), NumPy and Python.

    Dropout draws from torch's; a reward function may draw from any of them.
    """
    legacy: Any = np.random.get_state()  # noqa: NPY002
    name, keys, *rest = legacy
    state = {
        "cpu": torch.get_rng_state(),
        "python": random.getstate(),
        # a plain tensor: `weights_only` does not allow arrays
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Set the random generators that `state`, a result of `random_state`, holds."""
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state:
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
