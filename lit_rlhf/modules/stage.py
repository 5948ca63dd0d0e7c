"""The base of SFT, reward modelling and PPO: optimizers, updates, checkpoints."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, Self

import torch
from lightning.fabric.utilities import AttributeDict
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase

from lit_callbacks.trainer_attributes import find_callbacks, is_dry_run
from lit_rlhf.finite import require_finite_weights
from lit_rlhf.forward import (
    LanguageModel,
    has_bfloat16,
    is_sharded,
    set_longest_sequence,
    unwrap_model,
)
from lit_rlhf.micro_batches import LossShare
from lit_rlhf.models import (
    ModelCardInfo,
    ModelOptions,
    check_model_path,
    load_tokenizer,
    merged_state_dict,
    save_model_folder,
)
from lit_rlhf.modules.finished_model import find_best_keeper, model_card, save_finished
from lit_rlhf.modules.option_names import check_names, merge_options, plain_arguments
from lit_rlhf.modules.options import OptimizerOptions
from lit_rlhf.modules.phase_timer import PhaseTimer
from lit_rlhf.modules.resume import Resume
from lit_rlhf.modules.run_folders import RunFolders, check_finished_dir, log_folder
from lit_rlhf.modules.run_state import RunState
from lit_rlhf.modules.schedules import build_schedule
from lit_rlhf.modules.updates import (
    TrainedNetwork,
    UpdateGuard,
    step_schedule,
    trained_networks,
)
from lit_rlhf.paths import check_output_path
from lit_rlhf.stats import FixedDtypeBuffers, fail_together, global_means
from lit_rlhf.strategies import AtomicCheckpointIO, full_tensor

# what to change when an update of SFT or reward modelling runs out of memory
SUPERVISED_MEMORY = (
    "micro_batch_size",
    "micro_batch_tokens",
    "data.tokens_per_batch",
    "data.max_length",
    "network.gradient_checkpointing",
)
MAX_SKIPPED_IN_A_ROW = 5


class StageModule(FixedDtypeBuffers, RunState):
    """A stage that starts from a Hugging Face folder and leaves one for the next stage.

    `RunState` describes its attributes.

    Args:
        model_path: Local folder or hub id of the model that the stage starts from.
        output_dir: Folder for the finished model; `None` means `model/` in the run's log folder.
        network: How networks are loaded: type, attention, LoRA adapters, compilation.
        max_skipped_in_a_row: Number of updates of a network in a row, skipped because a number is
            not finite, at which training stops.
    """

    trained_names: ClassVar[Sequence[str]] = ("model",)
    """Names of the networks that are trained, in the order of `configure_optimizers`."""
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
        if output_dir is not None:
            check_output_path("output_dir", output_dir)
        # Collects the arguments of the subclass too: it looks through the calling constructors.
        # Arguments that may be models are left out: it would copy them.
        self.save_hyperparameters(ignore=self.object_arguments)
        # Checkpoints hold plain data, so that they are read with `weights_only=True`.
        self.save_hyperparameters(plain_arguments(type(self), self.hparams))
        # Manual in every stage: the gradient of a step that is split into micro-batches is divided
        # by the step's token count over all ranks, which `accumulate_grad_batches` cannot do.
        self.automatic_optimization = False
        self.model_path = model_path
        self.output_dir = output_dir
        self.inputs = {"model_path": [model_path]}
        self.input_checksums = {}
        self.network = merge_options(type(self), "network", network)
        if self.network.load_in_4bit and self.network.lora_rank == 0:
            raise ValueError(
                "network.load_in_4bit: expected network.lora_rank > 0, got 0: weights in 4 bits "
                "cannot be trained, and LoRA trains adapters beside them"
            )
        self.guard = UpdateGuard(max_skipped_in_a_row)
        self.timer = PhaseTimer(self)
        self.folders = RunFolders()
        self.allow_changes = False
        self.finished = "last"
        self.best = None
        self.command = None
        self.resume = Resume()
        self.collapse = None
        self.has_trained = False
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
        option: a network with `trust_remote_code`, for instance. Options win over the checkpoint's
        arguments; a group may be its dataclass or a mapping.

        Args:
            checkpoint_path: File, URL or binary stream.
            map_location: Where tensors go, as for `torch.load`.
            hparams_file: Not supported: checkpoints hold their arguments.
            strict: Whether missing and unexpected weights are errors; `None`: as the module says.
            weights_only: False unpickles the file, which can run code from it.
            **options: Arguments of the class.
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
        # Names with an underscore are LightningCLI's, for its own function, which would build
        # the class named there, and import any other class named among the arguments.
        saved = {
            name: value
            for name, value in content.get(cls.CHECKPOINT_HYPER_PARAMS_KEY, {}).items()
            if not name.startswith("_")
        }
        check_names(cls, saved)
        module = cls(**cls.trusted_arguments(saved=saved, given=options))
        module.on_load_checkpoint(content)
        module.load_state_dict(
            content["state_dict"], strict=module.strict_loading if strict is None else strict
        )
        tensors = (t for t in content["state_dict"].values() if isinstance(t, Tensor))
        return module.to(next(tensors, torch.empty(0)).device)

    @classmethod
    def trusted_arguments(
        cls, *, saved: Mapping[str, Any], given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Merge a checkpoint's arguments with those given now, which win.

        A setting of `trust_remote_code` in the checkpoint is ignored.
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
        """The learning-rate schedule of the only optimizer, over the batches of the run."""
        total = float(self.trainer.estimated_stepping_batches)
        return build_schedule(optimizer, options, lambda: total)

    def trained_networks(self) -> dict[str, TrainedNetwork]:
        """Optimizer and schedule of each trained network, by its name, during a fit."""
        return trained_networks(self, self.trained_names)

    def supervised_update(
        self,
        shares: Iterable[LossShare],
        *,
        max_norm: float | None,
        shape: Sequence[int],
        n_tokens: int,
        batch_idx: int,
    ) -> dict[str, Tensor]:
        """Update the only network on a batch; return metrics over ranks.

        Args:
            shares: The micro-batches' shares in the loss.
            max_norm: Largest norm of the gradient; `None`: no clipping.
            shape: Sequences and tokens of each in the batch, for a message about memory.
            n_tokens: Tokens of the batch on this rank, without padding.
            batch_idx: Number of the batch in its epoch, from 0.
        """
        (network,) = self.trained_networks().values()
        with self.timer("update", shape, SUPERVISED_MEMORY):
            update = self.guard.update(
                self,
                network.optimizer,
                shares,
                max_norm=max_norm,
                network="the model",
                place=f"epoch {self.current_epoch}, batch {batch_idx}",
            )
        step_schedule(network.schedule)
        metrics = {
            **update.metrics,
            f"{self.stage}/grad_norm": update.grad_norm,
            f"{self.stage}/skipped_updates": self.guard.pop_count(),
            **self.timer.pop_metrics(n_tokens, "tokens"),
        }
        return global_means(metrics, self.device)

    def evaluation_metrics(self) -> dict[str, Tensor]:
        """Metrics of all batches and ranks since the start of the set, equal on all ranks."""
        raise NotImplementedError

    def on_validation_epoch_end(self) -> None:
        """Log the metrics of the set as `val/*`, or `test/*` while testing."""
        prefix = evaluation_prefix(self.trainer)
        self.log_dict(
            {prefix + key: value for key, value in self.evaluation_metrics().items()},
            # Lightning 2.6.6 warns of every key that is logged per epoch without it.
            sync_dist=self.trainer.world_size > 1,
        )

    def test_step(self, batch: Any, batch_idx: int) -> None:  # noqa: ANN401
        """Add a batch to the results of the test set, as validation does."""
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        """Log the metrics of the test set."""
        self.on_validation_epoch_end()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save what an exact resume needs."""
        self.resume.save(self, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that the checkpoint is of this run, and keep its state until training starts."""
        # Lightning drops hyper-parameters that the constructor does not take, without a word.
        saved = checkpoint.get(self.CHECKPOINT_HYPER_PARAMS_KEY, {})
        check_names(type(self), (name for name in saved if not name.startswith("_")))
        self.resume.load(self, checkpoint)

    def configure_callbacks(self) -> list[Callback]:
        """Callbacks that lock the run's folders, save the finished model and resume."""
        self.has_trained = False  # Lightning calls this first; the fit before may have failed
        return [self.folders, self.resume]

    def setup(self, stage: str) -> None:
        """Fix rotary factors that depend on the sequence for the longest one of the data."""
        if self.encoder is not None:
            set_longest_sequence(self, self.encoder.max_length)

    def prepare_data(self) -> None:
        """On rank 0, check the folder of the finished model, and lock the run's folders.

        Later hooks would be too late: in between, loggers open their files, which can delete those
        of another run that is training.
        """
        if self.trainer.state.fn != TrainerFn.FITTING or not self.trainer.is_global_zero:
            return
        _check_lightning_tools(self)
        check_finished_dir(self.trainer, self.finished_dir, self.inputs)
        if self.finished == "best":
            find_best_keeper(self.trainer)
        if not is_dry_run(self.trainer):
            self.folders.lock(self.trainer, self.finished_dir)

    def on_fit_start(self) -> None:
        """Check the weights."""
        require_finite_weights(self, self.stage, "model_path, rewards, ckpt_path")
        precision = str(self.trainer.precision)
        if self.device.type == "cpu" and precision.startswith("bf16") and not has_bfloat16():
            rank_zero_warn(
                f"trainer.precision={precision}: this processor has no instructions for bfloat16, "
                "in which it computes several times slower than in float32; take 32-true"
            )
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        for optimizer in self.trainer.optimizers:
            # Engines that keep float32 masters have those in their groups, not the weights.
            _check_trained_weights(optimizer, names)

    @property
    def finished_dir(self) -> Path:
        """Folder of the finished model."""
        if self.output_dir is not None:
            return Path(self.output_dir)
        return log_folder(self.trainer) / "model"

    def save_finished(self) -> None:
        """Save the finished networks to `finished_dir`, on rank 0 and all at once."""
        save_finished(self, self.resume, self.folders)

    def model_card(self) -> ModelCardInfo:
        """The model card of the run: its options, data and final metrics."""
        return model_card(self, self.resume, self.folders)

    def write_network(
        self,
        model: LanguageModel,
        folder: Path,
        generation: dict[str, Any] | None = None,
        lm_head: nn.Module | None = None,
        card: ModelCardInfo | None = None,
    ) -> None:
        """Write a network as a Hugging Face folder, with adapters merged.

        Every rank calls it, since a sharded network is gathered, and rank 0 writes.

        Args:
            model: The network.
            folder: An empty folder.
            generation: Settings of `generation_config.json`; `None`: the starting model's.
            lm_head: An output layer that was trained beside a scalar model.
            card: The model card; `None`: the run's.
        """
        state = None
        if is_sharded(model):
            state = gather_state(merged_state_dict(model), unwrap_model(model))
        head = None if lm_head is None else gather_state(lm_head.state_dict(), lm_head)
        with fail_together(f"write {folder}"):
            if self.global_rank == 0:
                save_model_folder(
                    model,
                    self.tokenizer if self.encoder is None else self.encoder.tokenizer,
                    folder,
                    contract=None if self.encoder is None else self.encoder.contract,
                    card=card or self.model_card(),
                    generation=generation,
                    lm_head=head,
                    state=state,
                )


def gather_state(state: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """Gather a state dict with whole weights on rank 0; the other ranks get only part of it."""
    weights: dict[str, Tensor] = {}
    for name, tensor in state.items():
        full = full_tensor(tensor)
        if not isinstance(tensor, DTensor) or distributed.get_rank() == 0:
            weights[name] = full
    for name, source in getattr(network, "all_tied_weights_keys", {}).items():
        # one tensor, so that saving sees the tie, unless adapters have made them differ
        if name in weights and source in weights and torch.equal(weights[name], weights[source]):
            weights[name] = weights[source]
    return weights


def evaluation_prefix(trainer: Trainer) -> str:
    """Prefix of the metrics of the set that is evaluated: `val/` or `test/`."""
    return "test/" if trainer.testing else "val/"


def _check_lightning_tools(module: LightningModule) -> None:
    """Refuse tools of Lightning that do not fit manual optimization or generation."""
    # private to Lightning (2.6.6), which asks for it in `to_uncompiled`
    if module._compiler_ctx is not None:
        raise ValueError(
            "model: expected a module that is not compiled, got torch.compile(module), whose "
            "training step generates text and steps optimizers. Set network.torch_compile, which "
            "compiles the networks' forward passes"
        )
    clip = module.trainer.gradient_clip_val
    if clip is not None and not clip >= 0:  # or NaN; Lightning refuses a positive one
        raise ValueError(
            f"trainer.gradient_clip_val: expected none, got {clip}: each network is clipped by "
            "itself (grad_clip in the options of its optimizer)"
        )
    if find_callbacks(module.trainer, StochasticWeightAveraging):
        raise ValueError(
            "trainer.callbacks: expected no StochasticWeightAveraging, got one: it would replace "
            "the learning-rate schedule, which a stage steps itself, and its average would not be "
            "the finished model. Lower the learning rate at the end instead "
            "(optimizer.lr_scheduler: cosine_with_min_lr)"
        )


def _check_trained_weights(optimizer: Optimizer, names: Mapping[int, str]) -> None:
    """Refuse float16 weights, and warn of bfloat16 ones, that an optimizer steps without masters.

    `names` has the name of each parameter by its `id`.
    """
    n_movable = 0
    n_weights = 0
    network = ""
    learning_rate = 0.0
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
                network = name.partition(".")[0]
                learning_rate = group_rate
    if n_weights:
        rank_zero_warn(
            f"{network}: a step at a learning rate of {learning_rate:g} can change {n_movable:,} "
            f"of {n_weights:,} weights ({n_movable / n_weights:.2%}): the others are rounded "
            "back to what they were in bfloat16. Take float32 weights (network.dtype: float32, "
            "with trainer.precision: bf16-mixed to compute in bfloat16), or a strategy that keeps "
            "float32 masters (multi_deepspeed_stage_2)"
        )


@torch.no_grad()
def count_movable(weights: Tensor, learning_rate: float) -> int:
    """Number of weights that change if `learning_rate`, about a step of Adam, is added or taken.

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
