"""`lit_rlhf configs`: the configurations that come with the project, found and copied by name."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path

import lit_rlhf
from lit_rlhf.cli.command import Command, run_group
from lit_rlhf.suggestions import did_you_mean

PACKAGE = Path(lit_rlhf.__file__).parent
# A wheel has the configurations inside the package, a checkout beside it.
CONFIGS = next(p for p in (PACKAGE / "configs", PACKAGE.parent / "configs") if p.is_dir())
"""Folder of the configurations that come with the project."""
_FIRST_SENTENCE = re.compile(r"(?:\d+\. )?.*?[.:](?=\s+[A-Z]|$)")
_NAMES_HELP = "Names of configurations, as `lit_rlhf configs list` shows them."


def list_configs() -> None:
    """List the configurations by name, with the first line of each."""
    names = config_names()
    width = max(map(len, names))
    for name in names:
        print(f"{name:<{width}}  {_read_summary(find_config(name))}")


def copy_configs(names: list[str], output_dir: str = "configs", overwrite: bool = False) -> None:
    """Copy configurations into a folder, to change them there.

    Args:
        names: Names of configurations.
        output_dir: Folder for the copies; quickstart/sft becomes quickstart/sft.yaml in it.
        overwrite: Replace files that exist.
    """
    copies = {find_config(name): Path(output_dir) / f"{_short(name)}.yaml" for name in names}
    for copy in copies.values():
        if copy.exists() and not overwrite:
            raise ValueError(f"{copy} exists already; --overwrite true replaces it")
    for config, copy in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(config, copy)
        print(copy)


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
    return list(_resolve(arguments))


def _resolve(arguments: Sequence[str]) -> Iterator[str]:
    previous = ""
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if previous in ("--config", "-c"):
            yield _resolve_one(argument)
        elif flag == "--config" and equals:
            yield f"{flag}={_resolve_one(value)}"
        else:
            yield argument
        previous = argument


def _resolve_one(value: str) -> str:
    # jsonargparse takes `key: value` and URLs too.
    if Path(value).exists() or ":" in value or "{" in value:
        return value
    return str(find_config(value))


def _short(name: str) -> str:
    return name.removeprefix("configs/").removesuffix(".yaml")


COMMANDS = {
    "list": Command(list_configs),
    "copy": Command(copy_configs, words={"names": _NAMES_HELP}),
}


def main(argv: Sequence[str]) -> None:
    """Entry point of `lit_rlhf configs`."""
    run_group(COMMANDS, argv, "lit_rlhf configs")
