"""How a tool is called: a function of plain types, its arguments as flags or from a YAML file."""

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
    """Call `function` with the arguments in `argv`.

    Args:
        function: Its type hints, plain types and dataclasses, are the arguments' types, its
            docstring is the help.
        argv: Flags, among them `--config` with a YAML file of arguments.
        prog: What the command is called, for help and errors.
        lists: Help by name of the parameters that take several strings, `--name a b`. Required, and
            the last one given wins, where the parameter has no default; else `--name a --name b`
            gives both.
        flags: Help by name of the parameters that are False unless given, `--name`.

    Raises:
        SystemExit: With a message and without a traceback, when the arguments cannot be used. The
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
