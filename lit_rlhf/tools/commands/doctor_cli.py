"""The doctor's command line: it reads a configuration as `lit_rlhf fit` does."""

import logging
import pydoc
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser

from lit_rlhf.cli.training import RLHFCLI, hide_notes_of_libraries, run_cli
from lit_rlhf.modules import PPOModule
from lit_rlhf.parser import UsageError
from lit_rlhf.paths import check_outputs
from lit_rlhf.tools.doctor import Display, Report, examine
from lit_rlhf.tools.doctor.plan import examination_settings, plan_run
from lit_rlhf.tools.doctor.run import report_start_failure

_LOGGERS = ("lightning.pytorch", "lightning.fabric")


class DoctorCLI(RLHFCLI):
    """Reads a configuration as `fit` does and builds module, data and Trainer without a run."""

    start_error: Exception | None = None
    """The error of building them, if there was one."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the flags of `fit`, and the path of the report."""
        super().add_arguments_to_parser(parser)
        skip: set[str | int] = {"model", "train_dataloaders", "val_dataloaders", "datamodule"}
        parser.add_method_arguments(Trainer, "fit", skip=skip)
        parser.add_argument("--output", type=str | None, help="JSON file for the findings.")

    def before_instantiate_classes(self) -> None:
        """Refuse other stages, and set the Trainer up for the examination."""
        super().before_instantiate_classes()
        class_path = self.config.model.class_path
        module = pydoc.locate(class_path)
        if not (isinstance(module, type) and issubclass(module, PPOModule)):
            self.parser.error(
                f"the doctor checks PPO runs, this configuration trains {class_path}. Pass the "
                "configuration of the PPO stage, for instance configs/ppo/hh_cpu.yaml"
            )
        settings = vars(self.config.trainer)
        try:
            check_outputs({"output": self.config.output})
        except ValueError as error:
            raise UsageError(str(error)) from error
        self.plan = plan_run(settings)
        for name, value in examination_settings(settings).items():
            self.config.trainer[name] = value

    def instantiate_classes(self) -> None:
        """Build module, data and Trainer, and keep an error for the report."""
        try:
            super().instantiate_classes()
        except Exception as error:  # any kind, from the user's models or classes
            self.start_error = error


@contextmanager
def silence_lightning() -> Iterator[None]:
    """Suppress Lightning's messages and advice, which are about training."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)
        hide_notes_of_libraries()
        try:
            for logger in loggers:
                logger.setLevel(logging.WARNING)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


class Examination(NamedTuple):
    """What the doctor found.

    Attributes:
        report: The findings.
        output: File for them, if the arguments name one.
    """

    report: Report
    output: str | None


def examine_run(arguments: Sequence[str], parser: Mapping[str, str]) -> Examination:
    """Build module, data and Trainer of a PPO run, check them, and print the findings.

    Args:
        arguments: Arguments of `lit_rlhf doctor`.
        parser: Arguments of the parser: `prog`, `usage` and `description`.
    """
    with silence_lightning():
        cli = run_cli(
            list(arguments), DoctorCLI, run=False, save_config_callback=None, parser_kwargs=parser
        )
        assert isinstance(cli, DoctorCLI)
        display = Display()
        if cli.start_error is not None:
            report = report_start_failure(cli.start_error, cli.plan, display)
        else:
            report = examine(cli.model, cli.datamodule, cli.trainer, cli.plan, display)
    display.show_summary(report)
    return Examination(report, cli.config.output)
