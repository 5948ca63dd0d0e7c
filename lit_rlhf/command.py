"""Runs functions as commands: their parameters are flags, or keys of a YAML file."""

import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, getdoc, signature
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml
from jsonargparse import ArgumentParser, Namespace

from lit_rlhf.suggestions import did_you_mean
from lit_rlhf.terminal import fold

CONFIG_FLAGS = ("--config", "-c")


class UsageError(Exception):
    """Arguments that cannot be parsed. Its cause is the parser's error."""

    file: str | None = None
    """The configuration in which the error is, if it is in one."""


class CommandParser(ArgumentParser):
    """A parser whose errors are one line, which names the nearest option to an unknown one.

    Flags cannot be abbreviated: a new one would change what an old command means.
    """

    def __init__(self, *others: Any, **options: Any) -> None:
        super().__init__(*others, **{"allow_abbrev": False} | options)

    def parse_args(  # type: ignore[override]  # the other arguments are handed on
        self, args: Sequence[str] | None = None, *others: Any, **options: Any
    ) -> Namespace:
        """Parse arguments, or end with status 2 and one line that says what is wrong."""
        words = list(sys.argv[1:] if args is None else args)
        try:
            return super().parse_args(words, *others, **options)
        except UsageError as error:
            self.refuse(self.explain(error, words))

    def parse_path(self, cfg_path: str, *others: Any, **options: Any) -> Namespace:
        """Parse a configuration, and name it in an error."""
        try:
            parsed: Namespace = super().parse_path(cfg_path, *others, **options)
        except UsageError as error:
            error.file = str(cfg_path)
            raise
        return parsed

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise `UsageError`, for `parse_args` to explain."""
        if not self.exit_on_error:  # a parser that jsonargparse makes for a class
            super().error(message, ex)
        raise UsageError(message) from ex

    def refuse(self, message: str) -> NoReturn:
        """End with status 2 and one line."""
        self.exit(2, f"{self.prog.replace(' [options]', '')}: error: {message}\n")

    def explain(self, error: UsageError, words: Sequence[str]) -> str:
        """Name the first unknown option of the arguments; without one, repeat the error."""
        place = f"{error.file}: " if error.file else ""
        said = self.find_mistake(words) or f"{place}{summarize(error)}"
        of_group = "Unable to load config" in said  # it was given a value
        return f"{said}; a group has flags, --GROUP.FIELD" if of_group else said

    def find_mistake(self, words: Sequence[str]) -> str | None:
        """Look for a setting that does not exist."""
        return find_unknown_option(words, {*self.get_defaults().keys(), "config", "help"})


def summarize(error: BaseException) -> str:
    """Make one line of an error: the headings of jsonargparse's errors, and what caused them."""
    headings: dict[str, None] = {}
    while error.__cause__ is not None and (isinstance(error, UsageError) or is_parser_error(error)):
        heading = str(error).partition("\n")[0]
        if heading.endswith(":"):
            headings[heading] = None
        error = error.__cause__
    return " ".join([*headings, *str(error).split()])


def is_parser_error(error: BaseException) -> bool:
    """Whether jsonargparse has raised an error, whose message may then show all arguments."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals["__name__"]).startswith("jsonargparse")


def find_unknown_option(words: Sequence[str], known: Collection[str]) -> str | None:
    """Look for a setting that does not exist; name its file, unless it is a flag, and the nearest.

    `known` are dotted names of options, and `words` the arguments of a command.
    """
    for file, key, _ in read_settings(words):
        is_known = key in known or any(
            name.startswith(f"{key}.") or key.startswith(f"{name}.") for name in known
        )
        if not is_known:
            place = f"{file}: " if file else ""
            return f"{place}{key}: no such option{did_you_mean(key, known)}"
    return None


def read_settings(words: Sequence[str]) -> Iterator[tuple[str | None, str, object]]:
    """File (None for a flag), dotted key without `init_args`, and value of each setting."""
    for flag, value in read_flags(words):
        if flag not in CONFIG_FLAGS:
            yield None, _plain(flag.removeprefix("--")), value
            continue
        try:
            tree = yaml.safe_load(Path(value).read_text("utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            continue  # the parser says why
        for key, leaf in _leaves(tree):
            yield value, key, leaf


def read_flags(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each flag with its value, or with the next flag if it has none."""
    for index, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag.startswith("--") or flag in CONFIG_FLAGS:
            yield flag, value if equals else "".join(words[index + 1 : index + 2])


def _leaves(tree: object, key: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(tree, dict):
        for name, branch in tree.items():
            yield from _leaves(branch, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list):
        for item in tree:
            yield from _leaves(item, key)
    else:
        yield _plain(key), tree


def _plain(key: str) -> str:
    return key.replace(".init_args", "").replace("+", "")


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
    """

    function: Callable[..., Any]
    lists: Sequence[str] = ()
    flags: Sequence[str] = ()
    words: Sequence[str] = ()
    first: str = ""
    then: Callable[[Any], Any] | None = None

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return str(self.function.__doc__).split("\n", maxsplit=1)[0]

    def describe(self, name: str) -> str:
        """What the docstring says about a parameter."""
        doc = str(getdoc(self.function))
        found = re.search(rf"^    {name}: (.*(?:\n        .*)*)", doc, re.MULTILINE)
        return " ".join(found[1].split()) if found else ""

    def build_parser(
        self, prog: str, parser_class: type[CommandParser] | None = None
    ) -> CommandParser:
        """Build the parser of the arguments."""
        parameters = signature(self.function).parameters
        counts = {name: _count(parameters[name]) for name in self.words}
        words = [_WORDS[count].format(name.upper()) for name, count in counts.items()]
        usage = " ".join([prog, *words, "[OPTIONS]"])
        # argparse's usage would not fit a narrow terminal
        parser = (parser_class or CommandParser)(prog, usage=usage, description=self.summary)
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
                help=self.describe(name),
            )
        for name in self.flags:
            parser.add_argument(f"--{name}", action="store_true", help=self.describe(name))
        for name, count in counts.items():
            text = self.describe(name)
            parser.add_argument(name, nargs=count, metavar=name.upper(), help=text)
        parser.add_function_arguments(
            self.function,
            as_group=False,
            as_positional=False,
            skip={*self.lists, *self.flags, *self.words},
            fail_untyped=True,
        )
        return parser

    def run(self, argv: Sequence[str], prog: str) -> Any:  # noqa: ANN401  # of the functions
        """Call the function with arguments from the command line, or end with a message."""
        words = list(argv)
        if self.first and words and not words[0].startswith("-"):
            words.insert(0, f"--{self.first}")
        parser = self.build_parser(prog)
        parsed = parser.parse_args(words)
        try:
            given = parser.instantiate(parsed).as_dict()
            del given["config"]
            result = self.function(**given)
            return result if self.then is None else self.then(result)
        except Exception as error:
            from lit_rlhf.cli.errors import end_with_message  # imports torch and Lightning

            end_with_message(error, prog)


_WORDS = {"+": "{0} [{0} ...]", "?": "[{}]", None: "{}"}
"""Words of a usage by how many there may be, as argparse writes it."""


def _count(parameter: Parameter) -> Literal["+", "?"] | None:
    if str(parameter.annotation).startswith("list"):
        return "+"
    return None if parameter.default is Parameter.empty else "?"


def run_group(commands: Mapping[str, Command], argv: Sequence[str], prog: str) -> object:
    """Run the command that the first argument names; without one, print the commands."""
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
