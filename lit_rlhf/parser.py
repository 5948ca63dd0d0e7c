"""The parser of all commands: jsonargparse's, with errors of one line."""

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace

from lit_rlhf.suggestions import did_you_mean

# as jsonargparse 4.53 and argparse call an option that there is not
_UNKNOWN = re.compile(
    r"(?:Group '(?P<group>[\w.]+)' does not accept )?[Oo]ption '(?P<option>[\w.]+)'"
    r"|[Uu]nrecognized arguments: --(?P<flag>[\w.]+)"
)

# what `summarize` makes of an option that the class of a section, such as `model`, does not have
_UNKNOWN_IN_SECTION = re.compile(
    r"Parser key \"(?P<section>\w+)\": Problem with given class_path '[^']*': "
    r"(?P<name>[\w.]+): no such option(; did you mean (?P<meant>[\w.]+)\?)?"
)


class UsageError(Exception):
    """Arguments that cannot be parsed, in one line.

    Attributes:
        file: The configuration in which the error is, if it is in one.
    """

    file: str | None = None


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
            args: The arguments. Default: those of the process.
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
            for key in parsed.keys():  # noqa: SIM118  # a Namespace has no iterator over its keys
                self.check_known(key)
        except UsageError as error:
            error.file = str(cfg_path)
            raise
        return parsed

    def check_known(self, key: str) -> None:
        """Raise `UsageError` for a key of a configuration that is neither an option nor of one."""
        known = {*self.known_options(), "config"}
        path = key.split(".")
        if known.isdisjoint(".".join(path[:length]) for length in range(1, len(path) + 1)):
            raise UsageError(f"{key}: no such option{did_you_mean(key, known)}")

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise an error of one line.

        Args:
            message: What jsonargparse says, in several lines.
            ex: Its error, with the reasons as causes.
        """
        line = self.name_nearest(message) or summarize(message, ex)
        if not self.exit_on_error:  # a parser that jsonargparse makes for a class
            super().error(line)
        raise UsageError(line) from ex

    def name_nearest(self, message: str) -> str | None:
        """Say which option an unknown one may have meant; `None` for another error."""
        unknown = _UNKNOWN.search(message)
        if unknown is None:
            return None
        name = unknown["option"] or unknown["flag"]
        if unknown["group"]:
            name = f"{unknown['group']}.{name}"
        return f"{name}: no such option{did_you_mean(name, self.known_options())}"

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
    # the class of a section has no such option: it is the section's to those who write it
    if unknown := _UNKNOWN_IN_SECTION.fullmatch(line):
        section = unknown["section"]
        meant = f"; did you mean {section}.{unknown['meant']}?" if unknown["meant"] else ""
        return f"{section}.{unknown['name']}: no such option{meant}"
    # a group of options was given a value, which is taken for a file
    return f"{line}; a group has flags, --GROUP.FIELD" if "Unable to load config" in line else line
