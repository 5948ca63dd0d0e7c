"""What the steps of experiments give to the command line."""

from collections.abc import Iterable
from typing import Any

from experiments.processes import Step
from tests.support.config_parsing import cli_parser


def options_of(steps: Iterable[Step], *names: str) -> list[dict[str, Any]]:
    """Options of data and module of `lit_rlhf fit` in the steps of these names."""
    commands = {step.name: step.command[2:] for step in steps}
    fits = (cli_parser().parse_args(commands[name]).fit.as_dict() for name in names)
    return [{**fit["data"]["init_args"], **fit["model"]["init_args"]} for fit in fits]
