"""Errors of the command line in one line: what is wrong, in which file, and what to do."""

from __future__ import annotations

import difflib
import pydoc
import re
import traceback
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule

import lit_callbacks
import lit_rlhf.data
import lit_rlhf.modules
from lit_rlhf.modules import TooManySkippedUpdates, explain_unknown_option
from lit_rlhf.rewards import RewardError

USER_ERRORS = (
    ValueError,
    OSError,
    ImportError,
    MisconfigurationException,
    RewardError,
    TooManySkippedUpdates,
    torch.OutOfMemoryError,
)
"""Errors whose message says what the user can do."""

# What jsonargparse 4.53 says about an unknown option of a class: in a file or a flag, in a group of
# a file, in a flag for a group.
UNKNOWN_OPTION = re.compile(
    r"class_path '(?P<class>[\w.]+)':\s+"
    r"(?:Option '(?P<option>[^']+)' is not accepted"
    r"|Group '(?P<group>[^']+)' does not accept option '(?P<field>[^']+)'"
    r"|unrecognized arguments: --(?P<flag>[^=\s]+))"
)
# of a command: in a file
UNKNOWN_KEY = re.compile(r"^(?:Subcommand '\w+'|Parser) does not accept option '(?P<key>[^']+)'")
PARSER_KEY = re.compile(r'Parser key "([^"]+)"')
CLASS = re.compile(r"(?:Expected a dot import path string: |has no attribute ')(?P<name>\w+)")
# lines of jsonargparse's errors about values that say nothing by themselves
NOISE = re.compile(
    r"Does not validate|Subtypes:|Errors:|Given value|Problem with given|Parser key|Subclass types"
    r"|Not a valid subclass|Expected a <class 'NoneType'>|a class path|a dict with"
)

# What it says about an argument whose class, one of several types, cannot be built.
BUILD_ERROR = re.compile(
    r"Problem with given class_path '[\w.]*?(?P<class>\w+)':\s+(?P<reason>.*?)\s+"
    r"(?:- Expected|Given value type)",
    re.DOTALL,
)
MISSING_PACKAGE = re.compile(r"Requirement '(?P<requirement>[^']+)' not met")  # Lightning's loggers


def explain_usage_error(message: str, arguments: Sequence[str], flags: Iterable[str]) -> str:
    """Say in one line what is wrong with the arguments of a stage's command.

    Args:
        message: Message of jsonargparse.
        arguments: The command's arguments; those behind `--config` are files.
        flags: The command's flags, `--trainer.max_epochs` and so on.

    Returns:
        The option, the file that it is in, and the nearest option if there is none of its name.
        Other messages come as they are, but in one line.
    """
    key, advice = _explain(message, list(flags))
    if key:
        advice = f"{key}: {advice}"
    file = _find_file(key, arguments)
    return f"{file}: {advice}" if file else advice


def _explain(message: str, flags: Sequence[str]) -> tuple[str, str]:
    """The option that a message is about, empty if it is about none, and what to do."""
    unknown = UNKNOWN_OPTION.search(message)
    key = UNKNOWN_KEY.search(message)
    if unknown is not None:
        found = pydoc.locate(unknown["class"])
        group = f"{unknown['group']}." if unknown["group"] else ""
        name = group + (unknown["option"] or unknown["field"] or unknown["flag"])
        if isinstance(found, type):
            return f"{_section(found, message)}.{name}", explain_unknown_option(found, name)
    if key is not None:
        near = difflib.get_close_matches(f"--{key['key']}", flags, n=1)
        advice = f"; did you mean {near[0].removeprefix('--')}?" if near else ""
        return key["key"], f"no such option{advice}"
    keys = PARSER_KEY.findall(message)
    if not keys:
        return "", " ".join(line.strip() for line in message.splitlines())
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    reason = next((line for line in lines if line and not NOISE.match(line)), lines[-1])
    value = re.search(r"^\s*Given value: (.*)$", message, re.MULTILINE)
    if len(keys) == 1 and value and "class_path" not in message:
        reason = f"{reason}. Got value: {value[1]}"
    return ".".join(keys), reason + _nearest_class(reason)


def _section(found: type, message: str) -> str:
    """Where the options of a class stand in a configuration."""
    if issubclass(found, LightningModule):
        return "model.init_args"
    if issubclass(found, LightningDataModule):
        return "data.init_args"
    keys = PARSER_KEY.findall(message)
    return f"{keys[0]}: {found.__name__}" if keys else found.__name__


def _nearest_class(reason: str) -> str:
    named = CLASS.search(reason)
    known = {*lit_rlhf.modules.__all__, *lit_rlhf.data.__all__, *lit_callbacks.__all__}
    near = difflib.get_close_matches(named["name"], sorted(known), n=1) if named else []
    return f"; did you mean {near[0]}?" if near else ""


def _find_file(key: str, arguments: Sequence[str]) -> str | None:
    """The file that sets an option; without an option, the one that is no YAML.

    Returns:
        The last configuration with the option; `None` if there is none, or a flag sets it.
    """
    words = [word for argument in arguments for word in argument.split("=", 1)]
    option = key.partition(":")[0].replace(".init_args", "")
    if f"--{option}" in [word.replace(".init_args", "") for word in words]:
        return None
    files = [b for a, b in pairwise(words) if a in ("--config", "-c")]
    for file in reversed(files):
        try:
            tree = yaml.safe_load(Path(file).read_text("utf-8"))
        except (OSError, ValueError):
            continue
        except yaml.YAMLError:
            return file
        if option and _has_option(tree, option.split(".")):
            return file
    return None


def _has_option(tree: object, path: Sequence[str]) -> bool:
    for step in path:
        if isinstance(tree, dict) and step not in tree:
            tree = tree.get("init_args")
        if not isinstance(tree, dict) or step not in tree:
            return False
        tree = tree[step]
    return True


def end_with_message(error: Exception, prog: str) -> NoReturn:
    """End with a message and status 1 for an error that a user can mend; raise others again.

    Raises:
        SystemExit: With the message; the error is its cause.
    """
    original = original_error(error)
    if not isinstance(original, USER_ERRORS):
        raise error
    message = _explain_build_error(" ".join(str(original).split()))
    raise SystemExit(f"{prog}: error: {message or type(original).__name__}") from original


def _explain_build_error(message: str) -> str:
    """The reason alone, if the message is about a class that cannot be built; else the message."""
    failed = BUILD_ERROR.search(message)
    if failed is None:
        return message
    if missing := MISSING_PACKAGE.search(failed["reason"]):
        return (
            f"{failed['class']} needs a package that is not installed: "
            f"pip install '{missing['requirement']}'"
        )
    return f"{failed['class']}: {failed['reason']}"


def original_error(error: Exception) -> Exception:
    """The error that jsonargparse raised others from, whose messages show all arguments."""
    inner: BaseException | None = error
    # the first error of the chain, from the outside, that was not raised in jsonargparse itself
    while isinstance(inner, Exception):
        frames = list(traceback.walk_tb(inner.__traceback__))
        if not frames[-1][0].f_globals["__name__"].startswith("jsonargparse"):
            return inner
        inner = inner.__cause__ or inner.__context__
    return error
