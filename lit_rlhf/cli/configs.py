"""`lit_rlhf configs`: the configurations that come with the project, found and copied by name."""

import os
import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import lit_rlhf
from lit_callbacks.files import write_text
from lit_rlhf.command import Command
from lit_rlhf.suggestions import did_you_mean
from lit_rlhf.terminal import print_line

_PACKAGE = Path(lit_rlhf.__file__).parent
# A wheel has the configurations inside the package, a checkout beside it.
CONFIGS = next(p for p in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if p.is_dir())
"""Folder of the configurations that come with the project."""
_FIRST_SENTENCE = re.compile(r"(?:\d+\. )?.*?[.:](?=\s+[A-Z]|$)")


def _list_configs() -> None:
    """List the configurations by name, with the first line of each."""
    names = config_names()
    width = max(map(len, names))
    for name in names:
        print(f"{name:<{width}}  {_read_summary(find_config(name))}")


def _copy_configs(names: list[str], output_dir: str = "configs", overwrite: bool = False) -> None:
    """Copy configurations into a folder, to change them there.

    Args:
        names: Names of configurations, as `lit_rlhf configs list` shows them.
        output_dir: Folder for the copies; quickstart/sft becomes quickstart/sft.yaml in it.
        overwrite: Replace files that exist.
    """
    copies = {find_config(name): Path(output_dir) / f"{_short(name)}.yaml" for name in names}
    for copy in copies.values():
        if copy.exists() and not overwrite:
            raise ValueError(f"{copy} exists already; --overwrite replaces it")
    for config, copy in copies.items():
        print_line(str(write_text(copy, config.read_text("utf-8"))))


def _read_summary(config: Path) -> str:
    """First sentence of the comment at the top of a configuration."""
    comment = takewhile(lambda line: line.startswith("#"), config.read_text("utf-8").splitlines())
    text = " ".join(line.removeprefix("#").strip() for line in comment)
    sentence = _FIRST_SENTENCE.match(text)
    return sentence.group() if sentence else text


def config_names() -> list[str]:
    """Names of all configurations, for instance `quickstart/sft`."""
    return sorted(config_name(path) for path in CONFIGS.rglob("*.yaml"))


def config_name(path: Path) -> str:
    """The name of a configuration that comes with the project; of other files the path."""
    if path.is_relative_to(CONFIGS):
        return path.relative_to(CONFIGS).with_suffix("").as_posix()
    return str(path)


def find_config(name: str) -> Path:
    """Find a configuration by `quickstart/sft`, with or without `configs/` and `.yaml`."""
    names = config_names()
    if _short(name) in names:
        return CONFIGS / f"{_short(name)}.yaml"
    raise ValueError(
        f"no file or configuration {name!r}{did_you_mean(_short(name), names)} "
        "(lit_rlhf configs list names those that come with lit_rlhf)"
    )


def resolve_configs(arguments: Sequence[str]) -> list[str]:
    """Replace names of configurations behind `--config` by their paths; existing files win."""
    resolved = list(arguments)
    for index, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if index and arguments[index - 1] in ("--config", "-c"):
            resolved[index] = resolve_config(argument)
        elif flag == "--config" and equals:
            resolved[index] = f"{flag}={resolve_config(value)}"
    return resolved


def resolve_config(value: str) -> str:
    """Path of a configuration that is given by name; whatever else jsonargparse takes stays."""
    # jsonargparse takes `key: value` and URLs too.
    if os.path.exists(value) or ":" in value or "{" in value:
        return value
    return str(find_config(value))


def _short(name: str) -> str:
    return name.removeprefix("configs/").removesuffix(".yaml")


_OUTPUT = ("output_dir",)
COMMANDS = {
    "list": Command(_list_configs),
    "copy": Command(_copy_configs, words=("names",), writes=_OUTPUT, folders=_OUTPUT),
}
