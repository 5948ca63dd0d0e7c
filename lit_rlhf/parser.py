"""The parser of all commands: jsonargparse's, with errors of one line."""

import re
import sys
from argparse import ArgumentError
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace

from lit_rlhf.suggestions import did_you_mean, find_nearest

# as jsonargparse 4.53 and argparse call an option that there is not
_UNKNOWN = re.compile(
    r"(?:Group '(?P<group>[\w.]+)' does not accept )?[Oo]ption '(?P<option>[\w.]+)'"
    r"|[Uu]nrecognized arguments: --(?P<flag>[\w.]+)"
)

# how jsonargparse 4.53 begins an error about a section with a class, such as `model`
_SECTION = re.compile(r'Parser key "(?P<name>\w+)":')


class UsageError(Exception):
    """Arguments that cannot be parsed, in one line.

    Attributes:
        file: The configuration in which the error is, if it is in one.
    """

    file: str | None = None


class UnknownOptionError(ArgumentError):
    """An option that a parser does not have.

    Attributes:
        option: Its dotted name in the parser.
        nearest: The option that was perhaps meant; `None` if none is similar.

    Args:
        option: The dotted name.
        nearest: The option that was perhaps meant.
    """

    def __init__(self, option: str, nearest: str | None) -> None:
        advice = "" if nearest is None else f"; did you mean {nearest}?"
        super().__init__(None, f"{option}: no such option{advice}")
        self.option = option
        self.nearest = nearest

    def inside(self, section: str) -> "UnknownOptionError":
        """The same error for a parser that has this one's options in a section."""
        nearest = None if self.nearest is None else f"{section}.{self.nearest}"
        return UnknownOptionError(f"{section}.{self.option}", nearest)


class CommandParser(ArgumentParser):
    """A parser whose errors are one line, which names the nearest option to an unknown one.

    Flags cannot be abbreviated: a new one would change what an old command means.
    """

    def __init__(self, *others: Any, **options: Any) -> None:
        super().__init__(*others, **{"allow_abbrev": False} | options)

    def parse_args(  # type: ignore[override]  # the other arguments are handed on
        self, args: Sequence[str] | None = None, *others: Any, **options: Any
    ) -> Namespace:
        """Parse arguments, or end with status 2 and one line that says what is wrong.

        Args:
            args: The arguments. Default: the process's.
            *others: Further arguments of jsonargparse.
            **options: The same, by keyword.
        """
        words = list(sys.argv[1:] if args is None else args)
        try:
            return super().parse_args(words, *others, **options)
        except UsageError as error:
            place = f"{error.file}: " if error.file else ""
            self.refuse(f"{place}{error}{self.advise(words)}")

    def parse_path(self, cfg_path: str, *others: Any, **options: Any) -> Namespace:
        """Parse a configuration, and name it in an error.

        Args:
            cfg_path: The file.
            *others: Further arguments of jsonargparse.
            **options: The same, by keyword.
        """
        try:
            parsed: Namespace = super().parse_path(cfg_path, *others, **options)
            self.check_known(parsed.keys())
        except UsageError as error:
            error.file = str(cfg_path)
            raise
        return parsed

    def check_known(self, keys: Iterable[str]) -> None:
        """Raise `UsageError` for a key of a configuration that is neither an option nor of one."""
        known = {*self.known_options(), "config"}
        for key in keys:
            path = key.split(".")
            if known.isdisjoint(".".join(path[:length]) for length in range(1, len(path) + 1)):
                raise UsageError(f"{key}: no such option{did_you_mean(key, known)}")

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise an error of one line.

        Args:
            message: What jsonargparse says, in several lines.
            ex: Its error, with the reasons as causes.
        """
        unknown = self.find_unknown_option(message, ex)
        problem = unknown or ArgumentError(None, summarize(message, ex))
        if not self.exit_on_error:  # a parser that jsonargparse makes for the class of a section
            raise problem
        raise UsageError(str(problem)) from ex

    def find_unknown_option(
        self, message: str, error: BaseException | None
    ) -> UnknownOptionError | None:
        """Say which option does not exist; `None` for another error.

        Args:
            message: What jsonargparse says.
            error: Its error. One of its causes is the error of a section's parser, if it is there.
        """
        if unknown := _UNKNOWN.search(message):
            name = unknown["option"] or unknown["flag"]
            if unknown["group"]:
                name = f"{unknown['group']}.{name}"
            return UnknownOptionError(name, find_nearest(name, self.known_options()))
        if isinstance(error, UnknownOptionError):  # raised by this parser, about a flag
            return error
        section = _SECTION.match(message)
        while error is not None and not isinstance(error, UnknownOptionError):
            error = error.__cause__
        return None if section is None or error is None else error.inside(section["name"])

    def known_options(self) -> Iterable[str]:
        """Dotted names of all options."""
        return self.get_defaults().keys()

    def advise(self, arguments: Sequence[str]) -> str:
        """What to do about an error in arguments, for the end of its line."""
        return ""

    def refuse(self, message: str) -> NoReturn:
        """End with status 2 and one line."""
        self.exit(2, f"{self.prog.replace(' [options]', '')}: error: {message}\n")


def summarize(message: str, error: BaseException | None) -> str:
    """Make one line of an error of jsonargparse: the options that it names, and the last reason.

    Args:
        message: Its message, which repeats all types that a value could have had.
        error: The error itself. Each of its causes is about a part of the value.
    """
    headings = dict.fromkeys([message.partition("\n")[0]])
    reason = message
    while error is not None:
        reason = str(error)
        headings[reason.partition("\n")[0]] = None
        error = error.__cause__
    named = [h for h in headings if h.endswith(":") and not reason.startswith(h)]
    line = " ".join([*named, *reason.split()])
    # a group of options was given a value, which is taken for a file
    return f"{line}; a group has flags, --GROUP.FIELD" if "Unable to load config" in line else line
