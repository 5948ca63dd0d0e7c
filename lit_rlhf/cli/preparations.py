"""Finds the commands that write the files which a configuration reads and which are missing."""

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from lit_rlhf.cli.configs import CONFIGS, config_name, resolve_config

_OUTPUT = re.compile(r"^ *output_dir: (\S+)", re.MULTILINE)
_FIT = "lit_rlhf fit --config "
_STAGES = ("sft", "reward", "ppo")  # as `lit_rlhf start` names their configurations
_LARGEST = 2**16  # bytes of a configuration


def find_preparation(arguments: Sequence[str], message: str) -> str:
    """Name the commands that write the missing files of configurations, as a line for a shell.

    Args:
        arguments: Those of the command that failed, with the paths of its configurations.
        message: Its error. Unless it names a missing path, there is nothing to prepare.
    """
    files = [Path(word) for word in arguments if word.endswith(".yaml")]
    writers = _read_writers(files)
    if not any(_find_missing(message, writers)):
        return ""
    texts = [_read_small(file) for file in files]
    outputs = {output for text in texts for output in _OUTPUT.findall(text)}
    commands = [
        command for text in (message, *texts) for command in _prepare(text, writers, outputs)
    ]
    return " && ".join(dict.fromkeys(commands))


def _read_writers(files: Sequence[Path]) -> dict[str, str]:
    """Commands by the path that they write: packaged ones, and stages beside the given files.

    Other configurations beside them are not read: there may be many, and anything.
    """
    path = Path(__file__).with_name("preparations.yaml")
    writers: dict[str, str] = yaml.safe_load(path.read_text("utf-8"))
    beside = [file.parent / f"{stage}.yaml" for file in files for stage in _STAGES]
    for config in [*sorted(CONFIGS.rglob("*.yaml")), *beside]:
        for output in _OUTPUT.findall(_read_small(config)):
            writers.setdefault(output, f"{_FIT}{config_name(config)}")
    return writers


def _prepare(text: str, writers: Mapping[str, str], done: Collection[str]) -> Iterator[str]:
    """The commands for what a text reads, each after the commands for what it reads itself.

    Args:
        text: A configuration, a command or a message.
        writers: Commands by the path that they write.
        done: Paths for which a command is there already.
    """
    for path in _find_missing(text, writers):
        if path not in done:
            command = writers[path]
            reads = command
            if command.startswith(_FIT):
                reads = _read_small(Path(resolve_config(command.removeprefix(_FIT))))
            yield from _prepare(reads, writers, {*done, path})
            yield command


def _find_missing(text: str, paths: Collection[str]) -> Iterator[str]:
    """Those of some paths that a text names, or inside which it names one, and that are missing."""
    for path in paths:
        if re.search(rf"(?<![\w/]){re.escape(path)}(?![\w.-])", text) and not os.path.exists(path):
            yield path


def _read_small(file: Path) -> str:
    """The text of a file; empty for what is no small file of text.

    Advice is for an error that is there already: it may not become one, or wait, itself.
    """
    try:
        if not file.is_file() or file.stat().st_size > _LARGEST:
            return ""
        return file.read_text("utf-8", errors="replace")
    except OSError:
        return ""
