"""`lit_rlhf doctor`: check a PPO run before it starts."""

import json
import logging
import pydoc
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser

from lit_rlhf.cli.training import RLHFCLI, hide_notes_of_libraries, run_cli
from lit_rlhf.files import write_text
from lit_rlhf.modules import PPOModule
from lit_rlhf.terminal import fold, help_text
from lit_rlhf.tools.doctor import Display, Report, examine
from lit_rlhf.tools.doctor.plan import examination_settings, plan_run
from lit_rlhf.tools.doctor.run import ALL_CHECKS, START, START_ABOUT, report_start_failure

PROG = "lit_rlhf doctor"
USAGE, HELP = help_text("doctor usage"), help_text("doctor")
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
        given = vars(self.config.trainer)
        self.plan = plan_run(given)
        for name, value in examination_settings(given).items():
            self.config.trainer[name] = value

    def instantiate_classes(self) -> None:
        """Build module, data and Trainer, and keep an error for the report."""
        try:
            super().instantiate_classes()
        except Exception as error:  # any kind, from the user's models or classes
            self.start_error = error


@contextmanager
def _silence_lightning() -> Iterator[None]:
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


def main(argv: Sequence[str]) -> Report:
    """Run `lit_rlhf doctor`; the exit status is 1 if a check failed, 2 for unusable arguments."""
    arguments = list(argv)
    if not arguments or {"-h", "--help"} & set(arguments):
        abouts = [(START, START_ABOUT), *((check.name, check.about) for check in ALL_CHECKS)]
        checks = "\n".join(f"  {name:<16} {about}" for name, about in abouts)
        text = fold(HELP.format(usage=USAGE, checks=checks))
        print(text, file=sys.stdout if arguments else sys.stderr)
        raise SystemExit(0 if arguments else 2)
    parser = {"prog": PROG, "usage": USAGE, "description": __doc__}
    with tempfile.TemporaryDirectory(prefix="lit_rlhf_doctor_") as folder, _silence_lightning():
        # callbacks or loggers of the user's own may write to the default folder
        arguments += ["--trainer.default_root_dir", folder]
        cli = run_cli(
            arguments, DoctorCLI, run=False, save_config_callback=None, parser_kwargs=parser
        )
        assert isinstance(cli, DoctorCLI)
        display = Display()
        if cli.start_error is not None:
            report = report_start_failure(cli.start_error, cli.plan, display)
        else:
            report = examine(cli.model, cli.datamodule, cli.trainer, cli.plan, display)
    display.show_summary(report)
    output: str | None = cli.config.output
    if output is not None:
        print(f"Report: {write_text(output, json.dumps(report.as_dict(), indent=2) + chr(10))}")
    if report.failed:
        raise SystemExit(1)
    return report
