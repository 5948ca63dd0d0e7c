"""`lit_rlhf fit|validate|test`: a LightningCLI for the training stages."""

import logging
import pydoc
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import torch
from jsonargparse import Namespace, set_parsing_settings
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
from lightning.pytorch.callbacks import Checkpoint, ProgressBar, WeightAveraging
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
)
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from lit_callbacks import PhaseSummary, ResumeCheckpoint, StageProgressBar, find_collapse
from lit_callbacks.trainer_attributes import is_dry_run
from lit_rlhf.checks import check_seed
from lit_rlhf.cli.configs import resolve_configs
from lit_rlhf.cli.configured_paths import suggest_preparation
from lit_rlhf.cli.registry import STAGES
from lit_rlhf.cli.runs import (
    DeleteEarlierRun,
    check_checkpoint_class,
    find_last_checkpoint,
    has_finished,
    hash_command,
    name_run,
    occupied_folders,
    seed_run,
)
from lit_rlhf.errors import UserError, end_with_message
from lit_rlhf.files import write_text
from lit_rlhf.modules import (
    ChangedRunError,
    FinishedWeights,
    StageModule,
    checkpoint_folders,
    merge_options,
    option_groups,
    training_folders,
    versioned_log_folder,
)
from lit_rlhf.parser import CommandParser, UsageError
from lit_rlhf.paths import check_output_options, walk_options
from lit_rlhf.strategies import find_newest_checkpoint, use_atomic_checkpoints
from lit_rlhf.terminal import one_line, print_line
from lit_rlhf.urls import has_password, redact_url

# A configuration names what is imported, so none is downloaded; importing LightningCLI enables it.
set_parsing_settings(config_read_mode_fsspec_enabled=False)

# a flag for a field of a group of options
_GROUP_FIELD = re.compile(r"(?P<group>--model(?:\.init_args)?\.(?!init_args\b)\w+)\.(?P<field>\w+)")
_SEED_OPTIONS = (
    "seed",
    "seed_everything",
    "data.seed",
    "data.split_seed",
    "model.seed",
    "model.head_seed",
)
_CONFIG_FLAGS = ("--config", "-c")
_NAME_HELP = (
    "name of the run: replaces the last part of model.output_dir and the name of the logger, so "
    "that the run stands beside others"
)
_SUFFIX_HELP = (
    "appended to that name unless --name is given; an overlay adds its own with `suffix+: [text]`"
)
_SEED_HELP = (
    "seed of all that the run draws at random: seed_everything, data.seed, and model.seed or "
    "model.head_seed, unless one has a flag of its own; what is held out of the data stays the same"
)
_MINUTES_BETWEEN_CHECKPOINTS = 15  # if a run configures no checkpoints
_COLLAPSED_STATUS = 3  # exit status of a run that a detector ended
_NO_METRIC = "Early stopping conditioned on metric"
"""How Lightning's error about a metric begins that is not logged, or not yet."""
_TRACKER_PACKAGES = {"CometLogger": "comet_ml", "MLFlowLogger": "mlflow", "WandbLogger": "wandb"}
"""Packages that are not dependencies, by the logger of Lightning that imports them."""


class RLHFArgumentParser(CommandParser, LightningArgumentParser):
    """LightningCLI's parser, with configurations by name and errors in one line."""

    stages: Sequence[CommandParser] = ()
    """Parsers of the commands, if this is the parser of the program."""

    def parse_args(  # type: ignore[override]  # the other arguments are handed on
        self, args: Sequence[str] | None = None, *others: Any, **options: Any
    ) -> Namespace:
        """Parse arguments, after `_group_null_flags` and `resolve_configs`."""
        words = _group_null_flags(sys.argv[1:] if args is None else args)
        try:
            words = resolve_configs(words)
        except ValueError as error:
            self.refuse(f"--config: {error}")
        return super().parse_args(words, *others, **options)

    def known_options(self) -> Iterable[str]:
        """Dotted names of all options, including options of the commands."""
        options = [self.get_defaults(), *(stage.get_defaults() for stage in self.stages)]
        return [name for namespace in options for name in namespace.keys()]  # noqa: SIM118

    def advise(self, arguments: Sequence[str]) -> str:
        """Say how a configuration is named if the arguments have none."""
        has_config = any(word.partition("=")[0] in _CONFIG_FLAGS for word in arguments)
        return "" if has_config else "; name a configuration: --config quickstart/sft"


def _group_null_flags(arguments: Sequence[str]) -> list[str]:
    """Write `--model.group.field null` as `--model.group {field: null}`.

    jsonargparse 4.53 reads the first as the text `None`.
    """
    grouped = list(arguments)
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        field = _GROUP_FIELD.fullmatch(name)
        if field is None or (value if equals else next(iter(arguments[index + 1 :]), "")) != "null":
            continue
        mapping = f"{{{field['field']}: null}}"
        if equals:
            grouped[index] = f"{field['group']}={mapping}"
        else:
            grouped[index : index + 2] = [field["group"], mapping]
    return grouped


def _check_option_ranges(model: Namespace) -> None:
    """Raise UsageError for an option out of its range: the module's error would name no group."""
    module = pydoc.locate(model.class_path)
    if not (isinstance(module, type) and issubclass(module, StageModule)):
        return
    for name in option_groups(module):
        options = model.init_args[name]
        try:
            merge_options(
                module, name, options.as_dict() if isinstance(options, Namespace) else options
            )
        except ValueError as error:
            raise UsageError(f"model.{error}") from error


def _check_callbacks(trainer: Namespace) -> None:
    """Raise ValueError for a callback that would copy the module, whose parts cannot be copied."""
    for callback in trainer.callbacks if isinstance(trainer.callbacks, list) else []:
        kind = pydoc.locate(str(getattr(callback, "class_path", "")))
        if isinstance(kind, type) and issubclass(kind, WeightAveraging):
            raise ValueError(
                f"trainer.callbacks: expected no {kind.__name__}, which copies the module and "
                "cannot; average models that were saved with lit_rlhf export"
            )


def _check_urls(settings: object) -> None:
    """Raise UsageError for a URL with a password: configuration and log would show it.

    Our own services name a variable in its place, see `ServiceUrl`, and others have variables of
    their own, such as MLflow's `MLFLOW_TRACKING_PASSWORD`.

    Args:
        settings: Parsed settings.
    """
    for name, value in walk_options(settings):
        for text in (name, value):  # a key may be a URL, too
            if isinstance(text, str) and has_password(text):
                raise UsageError(
                    f"{name}: expected a URL without a password, which the configuration and logs "
                    f"would show, got {redact_url(text)!r}; give it in an environment variable"
                )


def _check_seeds(settings: object) -> None:
    """Raise ValueError for a seed that NumPy does not take; the libraries' errors name no option.

    Args:
        settings: Parsed settings.
    """
    for name, value in walk_options(settings):
        if name in _SEED_OPTIONS and isinstance(value, int):
            check_seed(name, value)


def _check_installation(trainer: Namespace) -> None:
    """Raise ValueError if the Trainer's settings need a GPU or a package that is not there.

    Lightning would say so after the models are loaded.
    """
    gpus = {"gpu": (CUDAAccelerator, MPSAccelerator), "cuda": (CUDAAccelerator,)}
    kinds = gpus.get(trainer.accelerator)
    if kinds and not any(kind.is_available() for kind in kinds):
        raise ValueError(
            f"trainer.accelerator: got {trainer.accelerator}, but torch {torch.__version__} finds "
            "no GPU here; --trainer.accelerator cpu runs on the CPU"
        )
    for logger in trainer.logger if isinstance(trainer.logger, list) else [trainer.logger]:
        name = str(getattr(logger, "class_path", "")).rpartition(".")[2]
        if (package := _TRACKER_PACKAGES.get(name)) and find_spec(package) is None:
            requirement = package if name == "CometLogger" else f"'lit-rlhf[{package}]'"
            raise ValueError(
                f"{name} needs a package that is not installed: pip install {requirement}"
            )


def find_reason(error: Exception) -> Exception:
    """The error of a class, where jsonargparse repeats it for each type that is allowed there."""
    while str(error).startswith("Does not validate against any of the Union subtypes"):
        if not isinstance(error.__cause__, Exception):
            break
        error = error.__cause__
    return error


def name_option(error: Exception, settings: Namespace) -> Exception:
    """Name the option whose value is the path that an error is about, if it is about one."""
    message = str(error)
    for key, value in settings.items():
        if isinstance(value, str) and message.startswith("path: ") and f"got {value!r}" in message:
            name = key.replace(".init_args", "")
            return ValueError(f"{name}: {message.removeprefix('path: ')}")
    return error


class RLHFCLI(LightningCLI):
    """A LightningCLI in which configuration and flags win over a checkpoint's hyper-parameters."""

    def __init__(
        self,
        model_class: type[LightningModule],
        datamodule_class: type[LightningDataModule],
        args: ArgsType = None,
        **options: Any,
    ) -> None:
        self._arguments = sys.argv[1:] if args is None else args
        self._parsers: list[RLHFArgumentParser] = []
        # typing's cache may hold Union[float, int], which equals Lightning's Union[int, float], as
        # with torch 2.11: `limit_train_batches: 1`, one batch, would be parsed as 1.0, all batches
        hints = Trainer.__init__.__annotations__
        hints |= {n: int | hint for n, hint in hints.items() if {int, float} <= {*get_args(hint)}}
        super().__init__(model_class, datamodule_class, args=args, **options)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # called on instances
        """The commands that the arguments name, or all; each parser takes 0.3 s to build."""
        commands = {name: LightningCLI.subcommands()[name] for name in STAGES}
        named = [name for name in commands if name in self._arguments]
        return {name: commands[name] for name in named or commands}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Build the parser of the program, and then one for each command."""
        parser = super().init_parser(**kwargs)
        assert isinstance(parser, RLHFArgumentParser)
        self._parsers.append(parser)
        self._parsers[0].stages = self._parsers[1:]
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the flags of a fit, to all commands as they take its configuration."""
        parser.add_argument("--name", type=str | None, help=_NAME_HELP)
        parser.add_argument("--suffix", type=list[str], default=[], help=_SUFFIX_HELP)
        parser.add_argument("--seed", type=int | None, help=_SEED_HELP)
        parser.add_argument(
            "--overwrite",
            action="store_true",
            help="fit: replace the model, log and checkpoints of an earlier run of this name",
        )
        parser.add_argument(
            "--finished",
            type=FinishedWeights,
            default="last",
            help="fit: weights of the finished model: the last, or of the best checkpoint of the "
            "ModelCheckpoint in trainer.callbacks",
        )
        parser.add_argument(
            "--allow_changes",
            action="store_true",
            help="fit with --ckpt_path: resume although data, models or precision have changed",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse arguments, and check options and checkpoint before anything is built."""
        super().parse_arguments(parser, args)
        settings = self._settings()
        if self.config.get("subcommand"):
            if settings.weights_only is False:
                raise UsageError(
                    "--weights_only false would run code from the checkpoint. If you trust it, "
                    "load it in Python: Trainer.fit(..., weights_only=False)"
                )
            settings.weights_only = True  # for a checkpoint behind a URL, too
        _check_urls(settings.as_dict())
        try:
            _check_seeds(settings.as_dict())
            check_output_options(settings.as_dict())
        except ValueError as error:
            raise UsageError(str(error)) from error
        _check_option_ranges(settings.model)
        name_run(settings)
        seed_run(settings, self._arguments if isinstance(self._arguments, list) else ())
        self._given = self.config.clone()
        if settings.get("ckpt_path"):
            if Path(settings.ckpt_path).exists():
                check_checkpoint_class(settings.ckpt_path, settings.model.class_path)
            # LightningCLI would next parse the checkpoint's hyper-parameters over the
            # configuration, and the parser would import every class and function named there.
            settings.ckpt_path = None

    def _settings(self) -> Namespace:
        """Settings of the command."""
        subcommand = self.config.get("subcommand")
        settings: Namespace = self.config[subcommand] if subcommand else self.config
        return settings

    def before_instantiate_classes(self) -> None:
        """Return to the configuration as it was given, with the checkpoint."""
        self.config = self._given

    def instantiate_classes(self) -> None:
        """Build data, module and Trainer."""
        settings = self._settings()
        _check_installation(settings.trainer)
        _check_callbacks(settings.trainer)
        try:
            super().instantiate_classes()
        except ValueError as error:
            raise name_option(find_reason(error), settings) from error

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the Trainer, with atomic checkpoints and the callbacks that every run has."""
        if self.subcommand:
            trainer_settings = self.config_init[self.subcommand].trainer
            trainer_settings.callbacks = self._run_callbacks(trainer_settings)
        trainer = super().instantiate_trainer(**kwargs)
        if trainer.world_size == 1:
            # a rank of another program in the environment, such as RANK or SLURM_PROCID, would
            # keep loggers and messages from writing
            vars(rank_zero_only)["rank"] = 0
        use_atomic_checkpoints(trainer)
        return trainer

    def _run_callbacks(self, trainer: Namespace) -> list[Callback]:
        """The configured callbacks, a phase summary, the stage's bar and one `ResumeCheckpoint`.

        It saves at SIGTERM. A run that configures no checkpoints gets some to resume from, in place
        of Lightning's.
        """
        chosen = trainer.callbacks if isinstance(trainer.callbacks, list) else [trainer.callbacks]
        # The last one wins, as with all settings: a configuration and an overlay may have one.
        earlier = [c for c in chosen if isinstance(c, ResumeCheckpoint)][:-1]
        chosen = [c for c in chosen if c and c not in earlier]
        has_bar = any(isinstance(callback, ProgressBar) for callback in chosen)
        shows_bar = trainer.enable_progress_bar is not False and not trainer.barebones
        # Lightning's bar counts epochs, which PPO has none of, and shows no metrics of ours.
        if isinstance(self.model, StageModule) and shows_bar and not has_bar:
            chosen.insert(0, StageProgressBar(self.model.stage, list(self.model.progress_metrics)))
        if not any(isinstance(callback, PhaseSummary) for callback in chosen):
            chosen.insert(0, PhaseSummary())
        saves = trainer.enable_checkpointing is not False and not trainer.barebones
        if saves and not any(isinstance(callback, ResumeCheckpoint) for callback in chosen):
            is_own = any(isinstance(callback, Checkpoint) for callback in chosen)
            minutes = None if is_own else _MINUTES_BETWEEN_CHECKPOINTS
            chosen.append(ResumeCheckpoint(every_n_minutes=minutes))
        return chosen

    def before_fit(self) -> None:
        """Resolve `--ckpt_path last`."""
        settings = self.config_init["fit"]
        if settings.get("ckpt_path") == "last" and not self._is_finished(self.model):
            settings["ckpt_path"] = find_last_checkpoint(self.trainer)
            if settings["ckpt_path"] is not None:
                check_checkpoint_class(settings["ckpt_path"], self.config["fit"].model.class_path)

    def fit(self, model: LightningModule, **arguments: Any) -> None:
        """Train, unless the run is finished; at an interruption, print the command that resumes.

        A run that a detector ended as collapsed ends with `_COLLAPSED_STATUS`.

        Args:
            model: The module.
            **arguments: Further arguments of `Trainer.fit`.
        """
        settings = self._given["fit"]
        if isinstance(model, StageModule):
            model.command = hash_command(settings)
            model.allow_changes = settings.allow_changes
            model.finished = settings.finished
            if self._is_finished(model):
                rank_zero_info(
                    f"The run is finished, and its model is in {model.finished_dir}: nothing is "
                    "trained or written. To train again, leave out --ckpt_path last."
                )
                return
        writes = self.trainer.is_global_zero and not is_dry_run(self.trainer)
        if writes and self._begins_another_run(model):
            self._make_room(model, settings.overwrite)
        self._train(model, arguments)
        if find_collapse(self.trainer) is not None:
            # Lightning ends all processes if one that it has launched ends with an error.
            raise SystemExit(_COLLAPSED_STATUS if self.trainer.is_global_zero else 0)

    def _is_finished(self, model: LightningModule) -> bool:
        """Whether the run is to go on from its newest checkpoint, but has nothing left to do."""
        settings = self._given["fit"]
        if settings.ckpt_path != "last" or not isinstance(model, StageModule):
            return False
        model.trainer = self.trainer  # its default folder is the Trainer's log folder
        return has_finished(model.finished_dir, hash_command(settings))

    def _begins_another_run(self, model: LightningModule) -> bool:
        """Whether the run would replace what is in its folders, instead of continuing from it."""
        path = self._given["fit"].ckpt_path
        # a checkpoint from elsewhere begins another run
        parents = Path(path).resolve().parents if path else ()
        resumes = path == "last" or any(
            folder.resolve() in parents for folder in training_folders(self.trainer)
        )
        found_none = self.config_init["fit"].ckpt_path is None  # `last` too
        holds_model = isinstance(model, StageModule) and has_finished(model.finished_dir)
        return not resumes or (found_none and holds_model)

    def _train(self, model: LightningModule, arguments: Mapping[str, Any]) -> None:
        """Train, and turn how it may end into the command's own errors and statuses."""
        try:
            self.trainer.fit(model, **arguments)
        except ChangedRunError as error:
            raise UsageError(f"--ckpt_path: {error}") from error
        except RuntimeError as error:
            if str(error).startswith(_NO_METRIC):
                raise UserError(f"trainer.callbacks: {error}") from error
            raise
        except SystemExit as ended:  # SIGTERM, Ctrl-C
            self._print_resume_command()
            # Lightning ends with 1 at a Ctrl-C for which no checkpoint could be saved
            if ended.code == 1 and isinstance(ended.__context__, KeyboardInterrupt):
                raise SystemExit(128 + signal.SIGINT) from ended
            raise

    def _make_room(self, model: LightningModule, overwrite: bool) -> None:
        """Refuse folders with an earlier run, or have its files deleted when this one trains."""
        if overwrite:
            earlier = DeleteEarlierRun(self.trainer, model)
            # before any callback writes
            self.trainer.callbacks.insert(0, earlier)  # type: ignore[attr-defined]  # not declared
        elif occupied := occupied_folders(self.trainer, model):
            checkpoint = find_newest_checkpoint(*checkpoint_folders(self.trainer))
            resume = "" if checkpoint is None else ", continue that run with --ckpt_path last"
            raise UsageError(
                f"{' and '.join(map(str, occupied))}: expected no earlier run, got one that this "
                f"run would replace. Give this run another name with --name NAME{resume}, or "
                "replace the earlier one with --overwrite"
            )

    def _print_resume_command(self) -> None:
        """Print the command that resumes from the newest checkpoint, if there is one, on rank 0."""
        newest = find_newest_checkpoint(*checkpoint_folders(self.trainer))
        if newest is None or not self.trainer.is_global_zero:
            return
        if not isinstance(self._arguments, list):
            print_line(f"Resume from {newest}", flush=True)
            return
        # A logger that counts versions would have another folder next time, and `last` look there.
        versions = [logger.version for logger in self.trainer.loggers[:1]]
        value = "last" if all(isinstance(version, str) for version in versions) else str(newest)
        pairs = zip(["", *self._arguments], self._arguments, strict=False)
        words = [w for last, w in pairs if "--ckpt_path" not in (last, w.partition("=")[0])]
        words = [*(word for word in words if word != "--overwrite"), "--ckpt_path", value]
        print_line(f"To resume: {shlex.join(['lit_rlhf', *words])}", flush=True)


class SaveConfig(SaveConfigCallback):
    """Saves the configuration in the folder of the run's own log, if it has one.

    Lightning's writes into the current folder where a run has no logger, or one that names no
    folder, over a config.yaml that somebody keeps there.
    """

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save the configuration; Lightning calls it on the first rank.

        Args:
            trainer: The trainer of the run.
            pl_module: The module that it trains.
            stage: Whether it trains, validates or tests.
        """
        if not trainer.loggers:
            return
        # replaced as a whole, so that no link of that name is followed
        settings = self.parser.dump(self.config, skip_none=False)
        write_text(versioned_log_folder(trainer) / self.config_filename, settings)


def run_cli(args: ArgsType = None, cli: type[RLHFCLI] = RLHFCLI, **options: Any) -> RLHFCLI:
    """Run a LightningCLI command (`fit`, `validate`, `test`) with `args`.

    Options override the commands' settings of LightningCLI.
    """
    # jsonargparse finds a class by its short name (`--model PPOModule`) once it is imported
    import lit_rlhf.data
    import lit_rlhf.modules  # noqa: F401

    defaults: dict[str, Any] = {
        "subclass_mode_model": True,
        "subclass_mode_data": True,
        "seed_everything_default": 0,
        # Lightning's 50 would leave a short run without a curve.
        "trainer_defaults": {"log_every_n_steps": 1},
        "save_config_callback": SaveConfig,
        "save_config_kwargs": {"save_to_log_dir": False},
        "auto_configure_optimizers": False,
        "parser_class": RLHFArgumentParser,
        "parser_kwargs": {"description": __doc__, "prog": "lit_rlhf"},
    }
    settings = defaults | options
    try:
        return cli(LightningModule, LightningDataModule, args=args, **settings)
    except MisconfigurationException as error:
        raise UserError(str(error)) from error
    except UsageError as error:
        line = f"{settings['parser_kwargs']['prog']}: error: {error}"
        print(one_line(line), file=sys.stderr)
        raise SystemExit(2) from error


def hide_notes_of_libraries() -> None:
    """Hide warnings and notes of other libraries that users can do nothing about."""
    # Lightning 2.6.6 still calls what torch 2.9 has deprecated.
    warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
    # Reference and reward models are frozen in evaluation mode.
    warnings.filterwarnings("ignore", ".*in eval mode at the start of training")
    # LightningCLI warns about arguments other than sys.argv, which `quickstart` gives.
    warnings.filterwarnings("ignore", "LightningCLI's args parameter is intended")
    # A stage says itself, at its end, that no data were held out.
    warnings.filterwarnings("ignore", "Total length of `list` across ranks is zero")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(is_news)


_NO_NEWS = (
    "Tip: ",  # advice to install further products
    "TPU available: False",
    "Loading `train_dataloader` to estimate number of stepping batches",
    "`Trainer(limit_",  # repeats a setting
)
"""What messages of Lightning begin with that tell a user nothing."""


def is_news(record: logging.LogRecord) -> bool:
    """Whether a message of Lightning tells a user something."""
    return not record.getMessage().strip("\U0001f4a1 \n").startswith(_NO_NEWS)


def main(argv: Sequence[str]) -> None:
    """Entry point of `lit_rlhf fit`, `validate` and `test`."""
    hide_notes_of_libraries()
    command = next(word for word in argv if word in STAGES)

    try:
        run_cli(list(argv))
    except Exception as error:
        end_with_message(error, f"lit_rlhf {command}: error", partial(suggest_preparation, argv))
