"""Runs functions as commands: their parameters are flags, or keys of a YAML file."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import Parameter, getdoc, signature
from itertools import pairwise
from typing import Any, Literal

from docstring_parser import parse

from lit_rlhf.checks import check_seed
from lit_rlhf.errors import end_with_message
from lit_rlhf.parser import CommandParser
from lit_rlhf.paths import check_output_path, check_written_folder
from lit_rlhf.suggestions import did_you_mean
from lit_rlhf.terminal import check_output, fold


@dataclass(frozen=True)
class Command:
    """A function as a command: its parameters are flags, or keys of a YAML file.

    Attributes:
        function: The function. Its parameters have plain types or dataclasses as types, and its
            docstring is the help.
        lists: Parameters that take several items, `--name a b`. One without a default is required,
            and the last flag wins; for others `--name a --name b` gives both.
        flags: Parameters that are False unless the flag `--name` is given.
        words: Parameters without a flag, which take several words if they are lists, and may be
            left out if they have a default.
        first: Name of the list whose flag may be left out before all other flags.
        then: Takes the function's result, for instance a dataclass of options, and gives the
            command's.
        writes: Parameters that name the files and folders that the command writes. No other command
            or run may write there at the same time.
        folders: Those of `writes` that are folders, into which files are written.
        streams: Those of `writes` that may be `-`, standard output.
        error_status: Exit status after an error.
    """

    function: Callable[..., Any]
    lists: Sequence[str] = ()
    flags: Sequence[str] = ()
    words: Sequence[str] = ()
    first: str = ""
    then: Callable[[Any], Any] | None = None
    writes: Sequence[str] = ()
    folders: Sequence[str] = ()
    streams: Sequence[str] = ()
    error_status: int = 1

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return str(self.function.__doc__).split("\n", maxsplit=1)[0]

    def build_parser(
        self, prog: str, parser_class: type[CommandParser] = CommandParser
    ) -> CommandParser:
        """Build the parser of the arguments.

        Args:
            prog: Name of the program and the command, for messages.
            parser_class: Class of the parser.
        """
        parameters = signature(self.function).parameters
        about = {
            parameter.arg_name: " ".join(str(parameter.description).split())
            for parameter in parse(str(getdoc(self.function))).params
        }
        counts = {name: _count(parameters[name]) for name in self.words}
        words = [_WORDS[count].format(name.upper()) for name, count in counts.items()]
        usage = " ".join([prog, *words, "[OPTIONS]"])
        # argparse's usage would not fit a narrow terminal
        parser = parser_class(prog, usage=usage, description=self.summary)
        parser.add_argument("--config", action="config", help="YAML file with these arguments.")
        for name in self.lists:
            required = parameters[name].default is Parameter.empty
            parser.add_argument(
                f"--{name}",
                nargs="+",
                action="store" if required else "extend",
                required=required,
                type=int if "list[int]" in str(parameters[name].annotation) else str,
                metavar="ITEM",
                help=about[name],
            )
        for name in self.flags:
            parser.add_argument(f"--{name}", action="store_true", help=about[name])
        for name, count in counts.items():
            parser.add_argument(name, nargs=count, metavar=name.upper(), help=about[name])
        parser.add_function_arguments(
            self.function,
            as_group=False,
            as_positional=False,
            skip={*self.lists, *self.flags, *self.words},
            fail_untyped=True,
        )
        return parser

    def run(self, argv: Sequence[str], prog: str) -> Any:  # noqa: ANN401  # the functions' results
        """Call the function with arguments from the command line, or end with a message.

        Args:
            argv: The arguments.
            prog: Name of the program and the command, for messages.
        """
        words = list(argv)
        if self.first and words and not words[0].startswith("-"):
            words.insert(0, f"--{self.first}")
        parser = self.build_parser(prog)
        parsed = parser.parse_args(self._complete_switches(words))
        try:
            arguments = parser.instantiate(parsed).as_dict()
            del arguments["config"]
            if "seed" in arguments:
                check_seed("seed", arguments["seed"])
            with self._lock_outputs(arguments):
                result = self.function(**arguments)
                if self.then is not None:
                    result = self.then(result)
        except Exception as error:
            end_with_message(error, prog, status=self.error_status)
        check_output(self.error_status)
        return result

    def _complete_switches(self, words: Sequence[str]) -> list[str]:
        """Write `--name` of a parameter that is a bool as `--name true`, unless a value follows."""
        parameters = signature(self.function).parameters.values()
        switches = {
            f"--{parameter.name}"
            for parameter in parameters
            if parameter.annotation in (bool, "bool") and parameter.name not in self.flags
        }
        completed = []
        for word, next_word in pairwise([*words, "--"]):
            completed.append(word)
            if word in switches and next_word.startswith("--"):
                completed.append("true")
        return completed

    def _lock_outputs(self, arguments: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Check and lock what the command writes."""
        outputs = [
            check_output_path(name, arguments[name])
            for name in self.writes
            if arguments[name] is not None and not (name in self.streams and arguments[name] == "-")
        ]
        for name in self.folders:
            if arguments[name] is not None:
                check_written_folder(name, arguments[name])
        if not outputs:
            return nullcontext()
        from lit_rlhf.files import lock_outputs  # imports what help does not wait for

        return lock_outputs(outputs)


_WORDS = {"+": "{0} [{0} ...]", "?": "[{}]", None: "{}"}
"""Words of a usage by how many there may be, as argparse writes it."""


def _count(parameter: Parameter) -> Literal["+", "?"] | None:
    if str(parameter.annotation).startswith("list"):
        return "+"
    return None if parameter.default is Parameter.empty else "?"


def run_group(commands: Mapping[str, Command], argv: Sequence[str], prog: str) -> object:
    """Run the command that the first argument names; without one, print the commands.

    Args:
        commands: The commands of the group by name.
        argv: The arguments.
        prog: Name of the program and the group, for messages.
    """
    if argv and argv[0] in commands:
        return commands[argv[0]].run(argv[1:], f"{prog} {argv[0]}")
    if argv and argv[0] not in ("-h", "--help"):
        raise SystemExit(
            f"{prog}: no command {argv[0]!r}{did_you_mean(argv[0], commands)} "
            f"({prog} --help lists all)"
        )
    lines = [f"  {name:<12} {command.summary}" for name, command in commands.items()]
    print(fold("\n".join([f"usage: {prog} COMMAND [OPTIONS]", "", *lines])))
    return None
