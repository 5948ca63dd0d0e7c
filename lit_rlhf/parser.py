"""The parser of all commands: jsonargparse's, with errors of one line."""

import os
import re
import sys
from argparse import ArgumentError
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, Namespace, _paths, _stubs_resolver, set_loader

from lit_callbacks.files import check_file, find_repeated
from lit_rlhf.imports import current_folder, import_class_module
from lit_rlhf.suggestions import did_you_mean, find_nearest
from lit_rlhf.terminal import one_line
from lit_rlhf.yaml_loading import MAX_BYTES, load_yaml, strict_flags

_MODE = "lit_rlhf"  # the name of the loader among jsonargparse's

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
        settings: dict[str, Any] = {"allow_abbrev": False, "parser_mode": _MODE}
        super().__init__(*others, **settings | options)

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
            # parsing a file changes to its folder
            with current_folder(os.getcwd()), strict_flags(), _bounded_files():
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
            error.file = error.file or str(cfg_path)
            raise
        return parsed

    def parse_string(self, content: str, *others: Any, **options: Any) -> Namespace:
        """Parse the text of a configuration, whose groups have to be mappings.

        Args:
            content: The text.
            *others: Further arguments of jsonargparse.
            **options: The same, by keyword.
        """
        try:
            loaded = load_yaml(content)
        except yaml.YAMLError:
            loaded = {}  # jsonargparse says what is wrong with it
        groups = {option.rpartition(".")[0] for option in self.known_options()} - {""}
        _check_groups(loaded, groups)
        if twice := find_repeated(_option_names(loaded)):
            raise UsageError(f"expected each option once, got {twice} by two spellings of its name")
        parsed: Namespace = super().parse_string(content, *others, **options)
        return parsed

    def check_known(self, keys: Iterable[str]) -> None:
        """Raise `UsageError` for a key of a configuration that is neither an option nor of one."""
        options = {*self.known_options(), "config"}
        for key in keys:
            path = key.split(".")
            if options.isdisjoint(".".join(path[:length]) for length in range(1, len(path) + 1)):
                raise UsageError(f"{key}: no such option{did_you_mean(key, options)}")

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
        line = f"{self.prog.replace(' [options]', '')}: error: {one_line(message)}"
        self.exit(2, f"{line}\n")


@contextmanager
def _bounded_files() -> Iterator[None]:
    """Have jsonargparse check each file before it reads it inside the block.

    A file is named by `--config`, or as the value of a group such as `judge` or `model`.
    """
    files: Any = _paths.Path  # private, but all files are read by its method
    read: Callable[[_paths.Path], str] = files.read_text

    def read_bounded(path: _paths.Path) -> str:
        try:
            check_file(path.absolute, MAX_BYTES)
            return read(path)
        except ValueError as error:  # of the encoding, too
            reason = str(error).removeprefix(f"{path.absolute}: ")
            if isinstance(error, UnicodeDecodeError):
                reason = f"expected text in UTF-8: {reason}"
            unreadable = UsageError(reason)
            unreadable.file = path.relative
            raise unreadable from error

    files.read_text = read_bounded
    try:
        yield
    finally:
        files.read_text = read


def _check_groups(loaded: object, groups: Collection[str], name: str = "") -> None:
    """Raise `UsageError` for a group of options that is no mapping.

    Args:
        loaded: Content of a configuration, or of a part of it.
        groups: Dotted names of all groups.
        name: Dotted name of the part; empty for the whole.
    """
    if not isinstance(loaded, Mapping):
        place = f"{name}: " if name else ""
        raise UsageError(f"{place}expected options, NAME: VALUE, got {loaded!r:.100}")
    for key, value in loaded.items():
        path = f"{name}.{key}" if name else str(key)
        is_group = any(f"{group}.".startswith(f"{path}.") for group in groups)
        # a text may be the path of a file with the options of the group
        if is_group and not isinstance(value, str):
            _check_groups(value, groups, path)


def _option_names(loaded: object, name: str = "") -> Iterator[str]:
    """Dotted names of the options in a configuration: a key may be such a name itself."""
    if isinstance(loaded, Mapping) and loaded:
        for key, value in loaded.items():
            yield from _option_names(value, f"{name}.{key}" if name else str(key))
    else:
        yield name.replace(".init_args", "")


def load_value(text: str) -> Any:  # noqa: ANN401  # whatever the text holds
    """Load a value or a file for jsonargparse, and the modules of its classes.

    Args:
        text: A value on the command line, or the content of a configuration.
    """
    value = load_yaml(text)
    if isinstance(value, dict) and value and all(part is None for part in value.values()):
        # jsonargparse takes `name:` and `{a, b}` for text
        names = set(text.strip(" {}").replace(" ", "").split(","))
        if names == set(value) or text.strip() == f"{next(iter(value))}:":
            return text
    for class_path in _find_class_paths(value):
        import_class_module(class_path)
    return value


set_loader(_MODE, load_value, (yaml.YAMLError,))


def _look_for_stubs_on_own_path() -> None:
    """Have jsonargparse (4.53) look for stubs of types in the folders of `sys.path`.

    It would ask another Python for its path, which runs a `json.py` of the current folder.
    """
    stubs: Any = _stubs_resolver  # which exports nothing
    if stubs.typeshed_client_support:
        folders = [Path(folder) for folder in sys.path if folder]
        context = stubs.tc.get_search_context(search_path=folders)
        stubs.stubs_resolver = stubs.StubsResolver(search_context=context)


_look_for_stubs_on_own_path()


def _find_class_paths(value: object, key: object = None) -> Iterator[str]:
    """Find what names a class: by the key `class_path`, or by a capital letter."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _find_class_paths(part, name)
    elif isinstance(value, list):
        for part in value:
            yield from _find_class_paths(part)
    elif isinstance(value, str) and all(part.isidentifier() for part in value.split(".")):
        is_class = value.rpartition(".")[2][0].isupper()
        if "." in value and (key == "class_path" or is_class):
            yield value


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
