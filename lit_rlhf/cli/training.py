"""`lit_rlhf fit|validate|test|predict`: a LightningCLI for the training stages."""

from __future__ import annotations

import hashlib
import json
import logging
import pydoc
import re
import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
from lightning.pytorch.callbacks import ProgressBar, RichModelSummary
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_info
from rich.console import Console
from rich.table import Table

from lit_callbacks import (
    PhaseSummary,
    ResumeCheckpoint,
    StageProgressBar,
    default_checkpoint_dir,
    find_collapse,
)
from lit_rlhf.cli.command import CommandParser, suggest_option
from lit_rlhf.cli.configs import resolve_configs
from lit_rlhf.cli.errors import end_with_message, explain_usage_error
from lit_rlhf.strategies import (
    find_newest_checkpoint,
    read_lightning_state,
    use_atomic_checkpoints,
)

# a flag for a field of a group of options
GROUP_FIELD = re.compile(r"(?P<group>--model(?:\.init_args)?\.(?!init_args\b)\w+)\.(?P<field>\w+)")

MISSING_STAGE = re.compile(r"arguments are required: (\w+)\.(?:data|model)\b")  # jsonargparse 4.53
NAME_HELP = (
    "name of the run: replaces the last part of model.output_dir and the name of the logger, so "
    "that the run stands beside others"
)
SUFFIX_HELP = (
    "appended to that name unless --name is given; an overlay adds its own with `suffix+: [text]`"
)
COLLAPSED_STATUS = 3  # exit status of a run that a detector ended
FINISHED_FILE = "finished.json"
"""File in the log folder of a finished run: which command it was, and where its model is."""


class RLHFArgumentParser(CommandParser, LightningArgumentParser):
    """LightningCLI's parser, with configurations by name and errors in one line.

    Attributes:
        words: The arguments that were parsed.
        stages: Of the parser of the program: those of its commands.
    """

    words: Sequence[str] = ()
    stages: Sequence[CommandParser] = ()

    def parse_args(  # type: ignore[override]  # the other arguments are handed on
        self, args: Sequence[str] | None = None, *others: Any, **options: Any
    ) -> Namespace:
        """Parse arguments, after `group_null_flags` and `resolve_configs`."""
        given = group_null_flags(sys.argv[1:] if args is None else args)
        try:
            given = resolve_configs(given)
        except ValueError as error:
            self.error(f"--config: {error}", error)
        self.words = given
        return super().parse_args(given, *others, **options)

    def explain(self, message: str) -> str:
        """Say which option is wrong, in which file, and which one is nearest."""
        if missing := MISSING_STAGE.search(message):
            return f"{message}; name a configuration: lit_rlhf {missing[1]} --config quickstart/sft"
        known = [flag for parser in (self, *self.stages) for flag in parser.flags()]
        advised = suggest_option(message, known)
        return advised if advised != message else explain_usage_error(message, self.words, known)


class NetworkSummary(RichModelSummary):
    """The networks of a stage with their sizes.

    Lightning's summary adds FLOPs, which are 0 as it sees no forward pass, and counts of modules.
    """

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        *others: Any,
        **options: Any,
    ) -> None:
        """Print a row for each network, and the number of parameters that are trained."""
        del others, options
        columns = dict(summary_data)
        table = Table("Network", "Class", "Parameters")
        for row in zip(columns["Name"], columns["Type"], columns["Params"], strict=True):
            table.add_row(*row)
        table.caption = f"{trainable_parameters:,} of {total_parameters:,} parameters are trained"
        Console().print(table)


def group_null_flags(arguments: Sequence[str]) -> list[str]:
    """Write `--model.group.field null` as `--model.group {field: null}`.

    jsonargparse 4.53 reads the first as the text `None`, since it formats the parsed value into a
    new flag for the parser of the class.
    """
    grouped = list(arguments)
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        field = GROUP_FIELD.fullmatch(name)
        if field is None or (value if equals else next(iter(arguments[index + 1 :]), "")) != "null":
            continue
        mapping = f"{{{field['field']}: null}}"
        if equals:
            grouped[index] = f"{field['group']}={mapping}"
        else:
            grouped[index : index + 2] = [field["group"], mapping]
    return grouped


def check_option_ranges(parser: LightningArgumentParser, model: Namespace) -> None:
    """End with a usage error if an option in a group of a stage is out of its range.

    Otherwise the groups would be checked when the module is built, and the error would not say of
    which group the option is.
    """
    from lit_rlhf.modules import StageModule, merge_options, option_groups

    module = pydoc.locate(model.class_path)
    if not (isinstance(module, type) and issubclass(module, StageModule)):
        return
    for name in option_groups(module):
        try:
            merge_options(module, name, model.init_args[name].as_dict())
        except ValueError as error:
            parser.error(f"model.init_args.{error}")


class RLHFCLI(LightningCLI):
    """A LightningCLI in which configuration and flags win over a checkpoint's hyper-parameters."""

    _is_finished = False

    def __init__(
        self,
        model_class: type[LightningModule],
        datamodule_class: type[LightningDataModule],
        args: ArgsType = None,
        **options: Any,
    ) -> None:
        """Take LightningCLI's arguments, and do all that it does."""
        self._arguments = sys.argv[1:] if args is None else args
        self._parsers: list[RLHFArgumentParser] = []
        super().__init__(model_class, datamodule_class, args=args, **options)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # called on instances
        """The commands that the arguments name, or all; each parser takes 0.3 s to build."""
        commands = LightningCLI.subcommands()
        named = [name for name in commands if name in self._arguments]
        return {name: commands[name] for name in named or commands}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Build the parser of the program, and then that of each command."""
        parser = super().init_parser(**kwargs)
        assert isinstance(parser, RLHFArgumentParser)
        self._parsers.append(parser)
        self._parsers[0].stages = self._parsers[1:]
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the flags of a fit, to all commands as they take its configuration."""
        parser.add_argument("--name", type=str | None, help=NAME_HELP)
        parser.add_argument("--suffix", type=list[str], default=[], help=SUFFIX_HELP)
        parser.add_argument(
            "--overwrite",
            action="store_true",
            help="fit: replace the model, log and checkpoints of an earlier run of this name",
        )
        parser.add_argument(
            "--allow_changes",
            action="store_true",
            help="fit with --ckpt_path: resume although data, models or precision have changed",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse arguments, and check options and checkpoint before anything is built."""
        super().parse_arguments(parser, args)
        subcommand = self.config.get("subcommand")
        given = self.config[subcommand] if subcommand else self.config
        if subcommand:
            self._read_tensors_only(parser, given)
        check_option_ranges(parser, given.model)
        self._name_run(parser, given)
        self._given = self.config.clone()
        if given.get("ckpt_path"):
            if Path(given.ckpt_path).exists():
                check_checkpoint_class(parser, given.ckpt_path, given.model.class_path)
            # LightningCLI would next parse the checkpoint's hyper-parameters over the
            # configuration, and the parser would import every class and function named there.
            given.ckpt_path = None

    @staticmethod
    def _name_run(parser: LightningArgumentParser, given: Namespace) -> None:
        """Give the run's folders its name."""
        from lit_rlhf.cli.run_names import name_run

        try:
            name_run(given)
        except ValueError as error:
            parser.error(str(error))

    @staticmethod
    def _read_tensors_only(parser: LightningArgumentParser, given: Namespace) -> None:
        """Read checkpoints without running code from them, also those behind a URL."""
        if given.weights_only is False:
            parser.error(
                "--weights_only false would run code from the checkpoint. If you trust it, load it "
                "in Python: Trainer.fit(..., weights_only=False)"
            )
        given.weights_only = True

    def before_instantiate_classes(self) -> None:
        """Return to the configuration as it was given, with the checkpoint."""
        self.config = self._given

    def instantiate_classes(self) -> None:
        """Build data, module and Trainer.

        Raises:
            ValueError: If a GPU is asked for and there is none. Lightning would say so after the
                models are loaded.
        """
        subcommand = self.config.get("subcommand")
        given = self.config[subcommand] if subcommand else self.config
        accelerator = given.trainer.accelerator
        gpus = {"gpu": (CUDAAccelerator, MPSAccelerator), "cuda": (CUDAAccelerator,)}
        if accelerator in gpus and not any(kind.is_available() for kind in gpus[accelerator]):
            raise ValueError(
                f"trainer.accelerator: got {accelerator}, but torch {torch.__version__} finds no "
                "GPU here; --trainer.accelerator cpu runs on the CPU"
            )
        super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the Trainer, and add what every run has.

        These are atomic checkpoints, one at SIGTERM, a progress bar and a phase summary.
        """
        from lit_rlhf.modules import StageModule

        given = self.config_init[self.subcommand].trainer if self.subcommand else None
        if given is not None and isinstance(self.model, StageModule):
            chosen = given.callbacks if isinstance(given.callbacks, list) else [given.callbacks]
            has_bar = any(isinstance(callback, ProgressBar) for callback in chosen)
            # Lightning's bar counts epochs, which PPO has none of, and shows no metrics of ours.
            if given.enable_progress_bar is not False and not given.barebones and not has_bar:
                bar = StageProgressBar(self.model.stage, list(self.model.progress_metrics))
                given.callbacks = [bar, *(callback for callback in chosen if callback)]
        if given is not None and isinstance(given.callbacks, list):
            # The last one wins, as with all settings: a configuration and an overlay may have one.
            earlier = [c for c in given.callbacks if isinstance(c, ResumeCheckpoint)][:-1]
            given.callbacks = [c for c in given.callbacks if c not in earlier]
        trainer = super().instantiate_trainer(**kwargs)
        use_atomic_checkpoints(trainer)
        for index, callback in enumerate(trainer.callbacks):  # type: ignore[attr-defined]
            if type(callback) is RichModelSummary:  # Lightning's default
                trainer.callbacks[index] = NetworkSummary()  # type: ignore[attr-defined]
        # Lightning does not declare the attribute
        added: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, PhaseSummary) for callback in added):
            added.insert(0, PhaseSummary())
        callbacks = trainer.checkpoint_callbacks
        if callbacks and not any(isinstance(c, ResumeCheckpoint) for c in callbacks):
            added.append(ResumeCheckpoint())
        return trainer

    def before_fit(self) -> None:
        """Resolve `--ckpt_path last`."""
        given = self.config_init["fit"]
        if given.get("ckpt_path") == "last":
            self._is_finished = self._find_finished_model() is not None
            given["ckpt_path"] = find_last_checkpoint(self.parser, self.trainer)
            if given["ckpt_path"] is not None:
                class_path = self.config["fit"].model.class_path
                check_checkpoint_class(self.parser, given["ckpt_path"], class_path)

    def fit(self, model: LightningModule, **arguments: Any) -> None:
        """Train, unless the run is finished; at an interruption, print the command that resumes.

        A run that a detector ended as collapsed ends with `COLLAPSED_STATUS`.

        Args:
            model: The module.
            **arguments: Of `Trainer.fit`.
        """
        from lit_rlhf.modules import ChangedRunError, StageModule

        if self._is_finished:
            rank_zero_info(
                f"The run is finished, and its model is in {self._find_finished_model()}: nothing "
                "is trained or written. To train again, leave out --ckpt_path last."
            )
            return
        if self.trainer.is_global_zero and not self._is_trial():
            self._make_room(model)
        finished = self._finished_file()
        if isinstance(model, StageModule):
            model.allow_changes = self.config["fit"].allow_changes
        if self.trainer.is_global_zero and not self._is_trial():
            finished.unlink(missing_ok=True)
        try:
            self.trainer.fit(model, **arguments)
        except ChangedRunError as error:
            self.parser.error(f"--ckpt_path: {error}")
        except SystemExit:  # SIGTERM, Ctrl-C
            self._print_resume_command()
            raise
        if find_collapse(self.trainer) is not None:
            # Lightning ends all processes if one that it has launched ends with an error.
            raise SystemExit(COLLAPSED_STATUS if self.trainer.is_global_zero else 0)
        if (
            self.trainer.is_global_zero
            and self.trainer.checkpoint_callbacks
            and isinstance(model, StageModule)
            and not self._is_trial()
        ):
            record = {"command": self._command_hash(), "model": str(model.finished_dir)}
            finished.parent.mkdir(parents=True, exist_ok=True)
            finished.write_text(json.dumps(record), encoding="utf-8")

    def _make_room(self, model: LightningModule) -> None:
        """Refuse folders with an earlier run, or have its files deleted when this one trains."""
        from lit_rlhf.cli.run_names import DeleteEarlierRun, occupied_folders
        from lit_rlhf.modules import folders_during

        if self._given["fit"].ckpt_path is not None:
            return
        if self.config["fit"].overwrite:
            earlier = DeleteEarlierRun(folders_during(self.trainer))
            # before any callback writes
            self.trainer.callbacks.insert(0, earlier)  # type: ignore[attr-defined]  # not declared
            return
        if occupied := occupied_folders(self.trainer, model):
            checkpoint = find_newest_checkpoint(*checkpoint_folders(self.trainer))
            resume = "" if checkpoint is None else ", continue that run with --ckpt_path last"
            self.parser.error(
                f"{' and '.join(map(str, occupied))}: expected no earlier run, got one that this "
                f"run would replace. Give this run another name with --name NAME{resume}, or "
                "replace the earlier one with --overwrite"
            )

    def _is_trial(self) -> bool:
        # Lightning sets `fast_dev_run` without declaring it.
        return bool(getattr(self.trainer, "fast_dev_run", False))

    def _finished_file(self) -> Path:
        return default_checkpoint_dir(self.trainer).parent / FINISHED_FILE

    def _find_finished_model(self) -> str | None:
        """Folder of the model, if this command has finished before; `None` otherwise."""
        try:
            record = json.loads(self._finished_file().read_text(encoding="utf-8"))
            weights = any(Path(record["model"]).glob("*.safetensors"))
            finished = weights and record["command"] == self._command_hash()
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return str(record["model"]) if finished else None

    def _command_hash(self) -> str:
        """Hash of all settings of a run, which are not those of how it starts."""
        settings = self._given["fit"].as_dict()
        for name in ("config", "ckpt_path", "allow_changes", "overwrite"):
            settings.pop(name, None)
        text = json.dumps(settings, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def _print_resume_command(self) -> None:
        """Print the command that resumes from the newest checkpoint, if there is one, on rank 0."""
        newest = find_newest_checkpoint(*checkpoint_folders(self.trainer))
        if newest is None or not self.trainer.is_global_zero:
            return
        if not isinstance(self._arguments, list):
            print(f"Resume from {newest}", flush=True)
            return
        # A logger that counts versions would have another folder next time, and `last` look there.
        versions = [logger.version for logger in self.trainer.loggers[:1]]
        value = "last" if all(isinstance(version, str) for version in versions) else str(newest)
        words = [*drop_flag(self._arguments, "--ckpt_path"), "--ckpt_path", value]
        words = [word for word in words if word != "--overwrite"]
        print(f"To resume: {shlex.join(['lit_rlhf', *words])}", flush=True)


def drop_flag(arguments: Sequence[str], name: str) -> list[str]:
    """Arguments without a flag and its value."""
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == name:
            next(rest, None)
        elif not argument.startswith(f"{name}="):
            kept.append(argument)
    return kept


def find_last_checkpoint(parser: LightningArgumentParser, trainer: Trainer) -> str | None:
    """The newest checkpoint in the folders of the run's checkpoint callbacks; `None` without one.

    Lightning's own `last` finds only what a ModelCheckpoint with `save_last` has saved.
    """
    if not trainer.checkpoint_callbacks:
        parser.error(
            "--ckpt_path last: the run keeps no checkpoints. Add configs/overlays/resumable.yaml, "
            "or set trainer.enable_checkpointing to true"
        )
    folders = checkpoint_folders(trainer)
    found = find_newest_checkpoint(*folders)
    if found is None:
        rank_zero_info(
            f"--ckpt_path last: no checkpoint in {', '.join(map(str, folders))}; the run starts "
            "from the beginning"
        )
        return None
    return str(found)


def checkpoint_folders(trainer: Trainer) -> list[Path]:
    """The folders of a trainer's checkpoint callbacks, each once, in the order of the callbacks."""
    default = default_checkpoint_dir(trainer)
    return list(
        dict.fromkeys(
            Path(getattr(callback, "dirpath", None) or default)
            for callback in trainer.checkpoint_callbacks
        )
    )


def check_checkpoint_class(parser: LightningArgumentParser, path: str, configured: str) -> None:
    """End with a usage error if a checkpoint cannot be read, or is of another class.

    Args:
        parser: Parser of the command.
        path: The checkpoint.
        configured: Class path of the configured module.
    """
    try:
        checkpoint = read_lightning_state(path)
    except (OSError, ValueError) as error:
        parser.error(f"--ckpt_path: {error}")
    saved = checkpoint.get("hyper_parameters", {}).get("_class_path", configured)
    if saved.rpartition(".")[2] != configured.rpartition(".")[2]:
        parser.error(
            f"--ckpt_path {path} is a checkpoint of {saved}, but the configuration trains "
            f"{configured}. --ckpt_path resumes a run of the same class; to start a stage from an "
            "earlier one, point --model.model_path at the folder that the earlier stage left."
        )


def run_cli(args: ArgsType = None, cli: type[RLHFCLI] = RLHFCLI, **options: Any) -> RLHFCLI:
    """Run a LightningCLI command (`fit`, `validate`, `test`, `predict`) with `args`.

    Args:
        args: Arguments of the command; `None`: those of the process.
        cli: Class that runs it.
        **options: Arguments of LightningCLI that override those of the commands.
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
        "save_config_kwargs": {"overwrite": True},
        "auto_configure_optimizers": False,
        "parser_class": RLHFArgumentParser,
        "parser_kwargs": {"description": __doc__, "prog": "lit_rlhf"},
    }
    return cli(LightningModule, LightningDataModule, args=args, **(defaults | options))


def hide_notes_of_libraries() -> None:
    """Hide warnings and notes of other libraries that users can do nothing about."""
    # Lightning 2.6.6 still calls what torch 2.9 has deprecated.
    warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
    # Reference and reward models are frozen in evaluation mode.
    warnings.filterwarnings("ignore", ".*in eval mode at the start of training")
    # LightningCLI warns about arguments other than sys.argv, which `quickstart` gives.
    warnings.filterwarnings("ignore", "LightningCLI's args parameter is intended")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(is_no_advertisement)


def is_no_advertisement(record: logging.LogRecord) -> bool:
    """Tell Lightning's advice to install further products from other messages."""
    return "Tip: For seamless cloud" not in record.getMessage()


def main(argv: Sequence[str]) -> None:
    """Entry point of `lit_rlhf fit`, `validate`, `test` and `predict`."""
    hide_notes_of_libraries()
    try:
        run_cli(list(argv))
    except Exception as error:
        names = LightningCLI.subcommands()
        end_with_message(error, f"lit_rlhf {next(word for word in argv if word in names)}")
