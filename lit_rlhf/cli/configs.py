"""`lit_rlhf configs`: the configurations that come with the project, found and copied by name."""

import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile
from pathlib import Path

import yaml

import lit_rlhf
from lit_rlhf.command import Command
from lit_rlhf.suggestions import did_you_mean

_PACKAGE = Path(lit_rlhf.__file__).parent
# A wheel has the configurations inside the package, a checkout beside it.
CONFIGS = next(p for p in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if p.is_dir())
"""Folder of the configurations that come with the project."""
_OUTPUT = re.compile(r"^ *output_dir: (\S+)", re.MULTILINE)
_FIRST_SENTENCE = re.compile(r"(?:\d+\. )?.*?[.:](?=\s+[A-Z]|$)")
_COMMANDS: dict[str, str] = yaml.safe_load(
    Path(__file__).with_name("preparations.yaml").read_text("utf-8")
)
"""Commands that write the paths that configurations read and no stage writes."""


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
    resolved = list(arguments)
    for index, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if index and arguments[index - 1] in ("--config", "-c"):
            resolved[index] = _resolve_one(argument)
        elif flag == "--config" and equals:
            resolved[index] = f"{flag}={_resolve_one(value)}"
    return resolved


def _resolve_one(value: str) -> str:
    # jsonargparse takes `key: value` and URLs too.
    if Path(value).exists() or ":" in value or "{" in value:
        return value
    return str(find_config(value))


def find_preparation(arguments: Sequence[str], message: str) -> str:
    """The commands that write what configurations read and is not there, as a line for a shell.

    `arguments` are those of the command that failed, with the paths of its configurations. Unless
    its error, the `message`, names a missing path, there is nothing to prepare.
    """
    files = [Path(word) for word in arguments if word.endswith(".yaml") and Path(word).is_file()]
    known = dict(_COMMANDS)
    for folder in (CONFIGS, *(file.parent for file in files)):
        for file in sorted(folder.rglob("*.yaml") if folder == CONFIGS else folder.glob("*.yaml")):
            for output in _OUTPUT.findall(file.read_text("utf-8")):
                known.setdefault(output, f"lit_rlhf fit --config {config_name(file)}")
    if not any(_missing(message, known)):
        return ""
    texts = [message, *(file.read_text("utf-8") for file in files)]
    commands: dict[str, None] = {}

    def add(text: str, above: tuple[str, ...]) -> None:
        for path in _missing(text, known):
            if path not in above:
                command = known[path]
                named = command.removeprefix("lit_rlhf fit --config ")
                needs = (
                    command if named == command else Path(_resolve_one(named)).read_text("utf-8")
                )
                add(needs, (*above, path))
                commands[command] = None

    outputs = tuple(output for text in texts[1:] for output in _OUTPUT.findall(text))
    for text in texts:
        add(text, outputs)
    return " && ".join(commands)


def _missing(text: str, known: Collection[str]) -> Iterator[str]:
    """Known paths that a text names, or inside which it names one, and that are not there."""
    for path in known:
        if re.search(rf"(?<![\w/]){re.escape(path)}(?![\w.-])", text) and not Path(path).exists():
            yield path


def _short(name: str) -> str:
    return name.removeprefix("configs/").removesuffix(".yaml")


COMMANDS = {"list": Command(_list_configs), "copy": Command(_copy_configs, words=("names",))}
