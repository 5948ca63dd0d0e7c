"""Errors of the stages' commands in one line: what is wrong, in which file, and what to do."""

import inspect
import os
import pydoc
import re
import traceback
from collections.abc import Collection, Sequence
from io import IOBase
from typing import NoReturn

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

import lit_callbacks
import lit_rlhf.data
import lit_rlhf.modules
from lit_rlhf.cli.configs import find_preparation
from lit_rlhf.command import find_unknown_option, is_parser_error, read_settings, summarize
from lit_rlhf.files import FolderInUseError
from lit_rlhf.modules import TooManySkippedUpdates, is_out_of_memory, option_names
from lit_rlhf.rewards import RewardError
from lit_rlhf.suggestions import did_you_mean

_USER_ERRORS = (
    ValueError,
    OSError,
    ImportError,
    MisconfigurationException,
    RewardError,
    TooManySkippedUpdates,
    torch.OutOfMemoryError,
    FolderInUseError,
)
"""Errors whose message says what the user can do."""
_SECTIONS = {"model": lit_rlhf.modules, "data": lit_rlhf.data}
"""Sections of a configuration that name a class, and the package of ours."""
_CLASSES = [
    f"{package.__name__}.{name}"
    for package in (lit_rlhf.modules, lit_rlhf.data, lit_callbacks)
    for name in getattr(package, "__all__", vars(package))
]


def find_mistake(words: Sequence[str], known: Collection[str]) -> str | None:
    """Look for a class or an option that does not exist, see `find_unknown_option`.

    The options of model and data are not among those that are `known`.
    """
    chosen: dict[str, type] = {}
    for file, key, value in read_settings(words):
        section = key.removesuffix(".class_path")
        if not isinstance(value, str) or (section == key and key not in _SECTIONS):
            continue
        try:
            found = getattr(_SECTIONS.get(section), value, None) or pydoc.locate(value)
        except pydoc.ErrorDuringImport:  # the parser says why
            continue
        if inspect.isclass(found):
            chosen[section] = found
        elif section in _SECTIONS or "." in value:  # others may be called by their short names
            place = f"{file}: " if file else ""
            return f"{place}{key}: no such class {value}{did_you_mean(value, _CLASSES)}"
    options = {f"{name}.class_path" for name in _SECTIONS} | {f"{name}.help" for name in _SECTIONS}
    for section in _SECTIONS.keys() & chosen:
        options |= {f"{section}.{name}" for name in option_names(chosen[section])}
    others = {*_SECTIONS} - chosen.keys()  # without a class, all of their options may exist
    return find_unknown_option(words, (set(known) - _SECTIONS.keys()) | options | others)


def end_with_message(error: Exception, prefix: str, arguments: Sequence[str] = ()) -> NoReturn:
    """End with a message and status 1 for an error that a user can mend; raise others again.

    The message has the commands that write what the configurations in `arguments` lack.
    """
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, KeyboardInterrupt):
            raise inner
        inner = inner.__context__
    original = original_error(error)
    message = summarize(original) or type(original).__name__
    if isinstance(original, OSError) and original.errno and original.filename is None:
        message += written_file(original)
    try:
        os.getcwd()
    except FileNotFoundError:
        message += f"; the current folder {os.environ.get('PWD', '')} was deleted"
    of_file = (  # raised by tokenizers, and by torch for a checkpoint of other weights
        type(original) is Exception and "(os error " in message
    ) or message.startswith("Error(s) in loading state_dict")
    if not (isinstance(original, _USER_ERRORS) or of_file):
        # Python's words, if a limit on memory or processes leaves no room for a thread
        if not is_out_of_memory(original) and "can't start new thread" not in message:
            raise error
        message = f"out of memory, or at a limit (`ulimit -v`, `ulimit -u`, a container): {message}"
    for _, key, value in read_settings(arguments):
        if isinstance(value, str) and f"got {value!r}" in message:  # the key that the user knows
            message = re.sub("^path:", f"{key}:", message)
    preparation = find_preparation(arguments, message)
    advice = f"; this prepares it: {preparation}" if preparation else ""
    raise SystemExit(f"{prefix}: {message}{advice}") from original


def written_file(error: OSError) -> str:
    """The file that a library wrote when the system refused it, for the end of a message."""
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        for value in frame.f_locals.values():
            for file in (value, *getattr(value, "__dict__", {}).values()):
                name = getattr(file, "name", None) if isinstance(file, IOBase) else None
                if isinstance(name, str | bytes) and name[:1] not in ("<", b"<"):
                    return f": {os.fsdecode(name)!r}"
    return ""


def original_error(error: Exception) -> Exception:
    """The first error in the chain that was not raised by jsonargparse, or `error` without one."""
    inner: BaseException | None = error
    while isinstance(inner, Exception):
        if not is_parser_error(inner):
            return inner
        inner = inner.__cause__ or inner.__context__
    return error
