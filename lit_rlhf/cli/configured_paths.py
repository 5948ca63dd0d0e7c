"""Paths that the configurations and flags of a stage name, checked before torch is imported."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from lit_rlhf.cli.configs import resolve_configs
from lit_rlhf.cli.preparations import find_preparation
from lit_rlhf.errors import end_with_message
from lit_rlhf.paths import Option, check_inputs
from lit_rlhf.yaml_loading import load_yaml, read_yaml

_SECTIONS = ("model", "data")
_CHECKPOINT_WORDS = ("last", "best", "hpc", "registry")
"""What `--ckpt_path` takes besides paths."""


def refuse_missing(command: str, arguments: Sequence[str]) -> None:
    """End a command in one line if a model, data file or checkpoint is not there.

    Args:
        command: Its name.
        arguments: Those of the command.
    """
    if any(word.startswith("--print_config") for word in arguments):
        return
    try:
        check_configured_paths(arguments)
    except (ValueError, OSError) as error:  # OSError: a name that is too long, for instance
        end_with_message(
            error, f"lit_rlhf {command}: error", partial(suggest_preparation, arguments)
        )


def suggest_preparation(arguments: Sequence[str], message: str) -> str:
    """Name the commands that write what an error misses, for the end of its line.

    Args:
        arguments: Those of the command that failed.
        message: Its error.
    """
    preparation = find_preparation(resolve_configs(arguments), message)
    return f"; this prepares it: {preparation}" if preparation else ""


def check_configured_paths(arguments: Sequence[str]) -> None:
    """Refuse a model, data file or checkpoint that is not there.

    Only what is certain without the parser is refused. All else, such as rewards that several files
    give, is left to the classes, which come after torch.

    Args:
        arguments: Those of a command that takes the configurations of a stage.
    """
    with suppress(ValueError):  # a configuration that is not there: the parser tells
        arguments = resolve_configs(arguments)
    values_by_option: dict[str, list[Any]] = {}
    for option, value in _read_options(arguments):
        values_by_option.setdefault(option, []).append(value)
    models = values_by_option.get("model.model_path", [None])[-1]
    rewards = values_by_option.get("model.rewards", [])
    # a mapping may be merged with an earlier one
    certain = rewards[0] if len(rewards) == 1 else None
    sources = [values_by_option[name][-1] for name in values_by_option if name.endswith("_sources")]
    check_inputs(
        {"model.model_path": models, "model.rewards": certain},
        [path for listed in sources for path in _source_paths(listed)],
    )
    checkpoint = values_by_option.get("--ckpt_path", [None])[-1]
    if isinstance(checkpoint, str) and not _may_be_checkpoint(checkpoint):
        raise ValueError(
            f"--ckpt_path: expected a checkpoint, or last for the newest, got {checkpoint}, which "
            "does not exist"
        )


def _read_options(arguments: Sequence[str]) -> Iterator[Option]:
    """Options of models and data in the order in which they are given.

    What cannot be read is left out: the parser tells.
    """
    words = [*arguments, ""]
    for word, next_word in pairwise(words):
        name, equals, value = word.partition("=")
        text = value if equals else next_word
        section, dot, option = name.removeprefix("--").replace(".init_args", "").partition(".")
        with suppress(OSError, ValueError, yaml.YAMLError):
            if name in ("--config", "-c"):
                content = read_yaml(text)
                for part in _SECTIONS if isinstance(content, Mapping) else ():
                    yield from _flatten(part, content.get(part))
            elif name == "--ckpt_path":
                yield Option(name, text)
            elif name.startswith("--") and section in _SECTIONS:
                content = load_yaml(text)
                if dot:
                    yield Option(f"{section}.{option}", content)
                else:
                    yield from _flatten(section, content)


def _flatten(section: str, content: object) -> Iterator[Option]:
    """Options of a section, with or without the class that takes them."""
    if isinstance(content, Mapping):
        arguments = content.get("init_args")
        options = arguments if isinstance(arguments, Mapping) else content
        for name, value in options.items():
            yield Option(f"{section}.{name}", value)


def _source_paths(sources: object) -> Iterator[str]:
    """Paths of the sources of data in a list."""
    for source in sources if isinstance(sources, list) else ():
        path = source.get("path") if isinstance(source, Mapping) else None
        if isinstance(path, str):
            yield path


def _may_be_checkpoint(path: str) -> bool:
    """Whether a path exists, or is no path of this machine."""
    return path.startswith(_CHECKPOINT_WORDS) or "://" in path or Path(path).exists()
