"""Runs functions as commands: their parameters are flags, or keys of a YAML file."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any, NoReturn, TypeVar

from jsonargparse import ArgumentParser

Result = TypeVar("Result")
# messages of jsonargparse 4.53
UNRECOGNIZED = re.compile(r"^unrecognized arguments: (?P<flag>--[^=\s]+)")
REQUIRED = "the following arguments are required: "
PARSER_KEY = re.compile(r'^Parser key "([^"]+)": ')


@dataclass(frozen=True)
class Command:
    """A function as one command of a group.

    Attributes:
        function: The function.
        lists: As in `run_command`.
        words: As in `run_command`.
    """

    function: Callable[..., Any]
    lists: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)


class CommandParser(ArgumentParser):
    """A parser whose errors are one line, which names the nearest option to an unknown one."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End with status 2 and one line, without the usage."""
        if not self.exit_on_error:  # a parser that jsonargparse makes for a class
            super().error(message, ex)
        name = self.prog.replace(" [options]", "")  # in the prog of a parser of a subcommand
        self.exit(2, f"{name}: error: {self.explain(message)}\n")

    def flags(self) -> list[str]:
        """All flags."""
        return re.findall(r"--[\w.]+", self.format_help())

    def explain(self, message: str) -> str:
        """Make one line of a message, with advice."""
        message, flags = PARSER_KEY.sub(r"\1: ", " ".join(message.split())), self.flags()
        if message.startswith(REQUIRED):
            names = message.removeprefix(REQUIRED).split(", ")
            flagged = (f"--{name}" if f"--{name}" in flags else name for name in names)
            return REQUIRED + ", ".join(flagged)
        return suggest_option(message, flags)


def suggest_option(message: str, known: Iterable[str]) -> str:
    """Add the nearest known option to an error about an unrecognized one."""
    unknown = UNRECOGNIZED.search(message)
    near = difflib.get_close_matches(unknown["flag"], known, n=1) if unknown else []
    return f"{message}; did you mean {near[0]}?" if near else message


def insert_flag(argv: Sequence[str], flag: str) -> list[str]:
    """Put a flag before words that stand before all flags; without such words add nothing."""
    return [flag, *argv] if argv and not argv[0].startswith("-") else list(argv)


def run_group(commands: Mapping[str, Command], argv: Sequence[str], prog: str) -> object:
    """Run the command that the first argument names; without one, print the commands.

    Raises:
        SystemExit: With a message, if there is no such command.
    """
    if argv and argv[0] in commands:
        chosen = commands[argv[0]]
        name = f"{prog} {argv[0]}"
        return run_command(chosen.function, argv[1:], name, chosen.lists, words=chosen.words)
    if argv and argv[0] not in ("-h", "--help"):
        near = difflib.get_close_matches(argv[0], commands, n=1)
        advice = f"did you mean {near[0]}? " if near else ""
        raise SystemExit(
            f"{prog}: no command {argv[0]!r}; {advice}{prog} --help lists all commands"
        )
    lines = [
        f"  {name:<12} {str(command.function.__doc__).splitlines()[0]}"
        for name, command in commands.items()
    ]
    print("\n".join([f"usage: {prog} COMMAND [OPTIONS]", "", *lines]))
    return None


def run_command(
    function: Callable[..., Result],
    argv: Sequence[str],
    prog: str,
    lists: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
    words: Mapping[str, str] | None = None,
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
        words: Help by name for parameters that take words without a flag.

    Raises:
        SystemExit: With a message and without a traceback, if the arguments cannot be used. The
            original error is its cause.
    """
    lists, flags, words = lists or {}, flags or {}, words or {}
    summary = str(function.__doc__).split("\n", maxsplit=1)[0]
    parser = CommandParser(prog=prog, description=summary)
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
    for name, text in words.items():
        parser.add_argument(name, nargs="+", metavar=name.upper(), help=text)
    parser.add_function_arguments(
        function,
        as_group=False,
        as_positional=False,
        skip={*lists, *flags, *words},
        fail_untyped=True,
    )
    parsed = parser.parse_args(list(argv))
    try:
        given = parser.instantiate(parsed).as_dict()
        del given["config"]
        return function(**given)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        raise SystemExit(f"{prog}: {' '.join(str(error).split())}") from error
