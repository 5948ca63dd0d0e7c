"""Runs a function as a command: its parameters are flags, or keys of a YAML file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from typing import TypeVar

from jsonargparse import ArgumentParser

Result = TypeVar("Result")


def run_command(
    function: Callable[..., Result],
    argv: Sequence[str],
    prog: str,
    lists: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
) -> Result:
    """Call a function with arguments from the command line.

    Args:
        function: The function. Its parameters have plain types or dataclasses as types, and its
            docstring is the help.
        argv: Flags. `--config` takes a YAML file of arguments.
        prog: Name of the command, for help and errors.
        lists: Help by name for parameters that take several strings, `--name a b`. A parameter
            without a default is required, and the last flag wins; for others `--name a --name b`
            gives both.
        flags: Help by name for parameters that are False unless the flag `--name` is given.

    Raises:
        SystemExit: With a message and without a traceback, if the arguments cannot be used. The
            original error is its cause.
    """
    lists, flags = lists or {}, flags or {}
    summary = str(function.__doc__).split("\n", maxsplit=1)[0]
    parser = ArgumentParser(prog=prog, description=summary)
    parser.add_argument("--config", action="config", help="YAML file with these arguments.")
    parameters = signature(function).parameters
    for name, text in lists.items():
        required = parameters[name].default is Parameter.empty
        parser.add_argument(
            f"--{name}",
            nargs="+",
            action="store" if required else "extend",
            required=required,
            metavar="ITEM",
            help=text,
        )
    for name, text in flags.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    parser.add_function_arguments(
        function, as_group=False, as_positional=False, skip={*lists, *flags}, fail_untyped=True
    )
    parsed = parser.parse_args(list(argv))
    try:
        given = parser.instantiate(parsed).as_dict()
        del given["config"]
        return function(**given)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        raise SystemExit(f"{prog}: {error}") from error
