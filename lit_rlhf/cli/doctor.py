"""`lit_rlhf doctor`: check a PPO run before it starts."""

from __future__ import annotations

import json
import logging
import pydoc
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser

from lit_callbacks import PhaseSummary
from lit_rlhf.cli.main import RLHFCLI, run_cli
from lit_rlhf.doctor import Display, Report, examine, run_plan
from lit_rlhf.doctor.case import raised
from lit_rlhf.doctor.examination import BEFORE, DURING, START, START_ABOUT, not_reached
from lit_rlhf.doctor.plan import examining_settings
from lit_rlhf.evaluation import write_text
from lit_rlhf.modules import PPOModule

PROG = "lit_rlhf doctor"
USAGE = """\
lit_rlhf doctor --config CONFIG [--config OVERLAY ...] [--output REPORT]
                       [any flag of `lit_rlhf fit`, e.g. --model.seed 1]"""
HELP = """\
usage: {usage}

Check a PPO run before it starts: one rollout and two optimizer steps on your
own models, prompts and strategy. Nothing is saved, and no file is changed.

options:
  --config CONFIG  YAML file as for `lit_rlhf fit`; of several the last wins
  --output REPORT  JSON file for the findings
  -h, --help       this text; `lit_rlhf fit --help` has the flags of the run

checks:
{checks}

exit status: 0 if no check failed (a warning is no failure), 1 if one did,
2 if the configuration cannot be read or is not PPO's."""
LOGGERS = ("lightning.pytorch", "lightning.fabric")


class DoctorCLI(RLHFCLI):
    """Reads a configuration as `fit` does, and makes module and data but no run of it."""

    refused: Exception | None = None

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """What `fit` takes beside the classes, and where the report goes."""
        skip: set[str | int] = {"model", "train_dataloaders", "val_dataloaders", "datamodule"}
        parser.add_method_arguments(Trainer, "fit", skip=skip)
        parser.add_argument("--output", type=str | None, help="JSON file for the findings.")

    def before_instantiate_classes(self) -> None:
        """Refuse other stages, and exchange the Trainer's settings for those of the examination."""
        super().before_instantiate_classes()
        class_path = self.config.model.class_path
        module = pydoc.locate(class_path)
        if not (isinstance(module, type) and issubclass(module, PPOModule)):
            self.parser.error(
                f"the doctor checks PPO runs, this configuration trains {class_path}. Give it the "
                "configuration of the PPO stage, for instance configs/ppo/hh_cpu.yaml"
            )
        given = vars(self.config.trainer)
        self.plan = run_plan(given)
        for name, value in examining_settings(given).items():
            self.config.trainer[name] = value

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The Trainer of the examination, which has no phases to sum up."""
        trainer = super().instantiate_trainer(**kwargs)
        # Lightning does not declare the attribute
        trainer.callbacks = [  # type: ignore[attr-defined]
            callback
            for callback in trainer.callbacks  # type: ignore[attr-defined]
            if not isinstance(callback, PhaseSummary)
        ]
        return trainer

    def instantiate_classes(self) -> None:
        """Make module, data and Trainer; what they refuse is the first finding."""
        try:
            super().instantiate_classes()
        except Exception as error:  # of the user's models or classes: any kind
            self.refused = own_error(error)


def own_error(error: Exception) -> Exception:
    """The error behind those that the parser makes of it, which show all arguments."""
    inner: BaseException | None = error
    while isinstance(inner, Exception):
        frames = list(traceback.walk_tb(inner.__traceback__))
        if not frames[-1][0].f_globals["__name__"].startswith("jsonargparse"):
            return inner
        inner = inner.__cause__ or inner.__context__
    return error


def examined(cli: DoctorCLI, display: Display) -> Report:
    """The findings of what a configuration describes."""
    if cli.refused is None:
        return examine(cli.model, cli.datamodule, cli.trainer, cli.plan, display)
    report = Report(stand_in=cli.plan.stand_in)
    report.findings[START] = raised(cli.refused)
    report.findings |= {check.name: not_reached() for check in (*BEFORE, *DURING)}
    for name, finding in report.findings.items():
        display.show(name, finding)
    return report


def usage() -> str:
    """The help."""
    abouts = [(START, START_ABOUT), *((check.name, check.about) for check in (*BEFORE, *DURING))]
    lines = (f"  {name:<16} {about}" for name, about in abouts)
    return HELP.format(usage=USAGE, checks="\n".join(lines))


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Without Lightning's advice and messages, which are for a training."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)
        warnings.filterwarnings("ignore", ".*in eval mode at the start of training")
        # Lightning 2.6.6 still looks at pytrees the way that torch 2.9 deprecated
        warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
        try:
            for logger in loggers:
                logger.setLevel(logging.WARNING)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def main(argv: Sequence[str]) -> Report:
    """Entry point of `lit_rlhf doctor`.

    Raises:
        SystemExit: With status 1 if a check failed, 2 for arguments that cannot be used.
    """
    arguments = list(argv)
    if {"-h", "--help"} & set(arguments):
        print(usage())
        raise SystemExit(0)
    if not arguments:
        print(usage(), file=sys.stderr)
        raise SystemExit(2)
    parser = {"prog": PROG, "usage": USAGE, "description": __doc__}
    with tempfile.TemporaryDirectory(prefix="lit_rlhf_doctor_") as folder, quiet_lightning():
        # a folder of its own, for whatever writes to the default one
        arguments += ["--trainer.default_root_dir", folder]
        cli = run_cli(
            arguments, DoctorCLI, run=False, save_config_callback=None, parser_kwargs=parser
        )
        assert isinstance(cli, DoctorCLI)
        display = Display()
        report = examined(cli, display)
    display.summary(report)
    output: str | None = cli.config.output
    if output is not None:
        print(f"Report: {write_text(output, json.dumps(report.as_dict(), indent=2) + chr(10))}")
    if report.failed:
        raise SystemExit(1)
    return report
