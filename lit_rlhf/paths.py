"""Paths of models and data, which are checked before torch is imported."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lit_callbacks.files import LARGEST_TEXT, check_file
from lit_callbacks.files import check_output_path as check_output_path

LINE_SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
JSON_SUFFIXES = (*LINE_SUFFIXES, ".json", ".json.gz")
TEXT_SUFFIXES = (".txt", ".txt.gz")
CSV_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
TABLE_SUFFIXES = (".parquet", ".arrow")
FILE_SUFFIXES = (*JSON_SUFFIXES, *CSV_SUFFIXES, *TEXT_SUFFIXES, *TABLE_SUFFIXES)
"""The suffixes of data files. Any other path is a dataset."""
_TEXT_SUFFIXES = (".json", ".jinja", ".txt", ".md", ".model")
"""What files of a model end with that are read as a whole, its tokenizer among them."""
_SPREADSHEETS = (".xlsx", ".xls", ".ods")
WRONG_VALUES = (TypeError, AttributeError, KeyError, AssertionError, RecursionError)
"""Errors of libraries for a configuration with values that they do not expect."""
_OUTPUT_OPTION = re.compile(r"(?:.*_)?(?:dir|dirpath|directory|folder|output)")
"""Names of options of any class that are folders or files to write."""
_HUB_ID = re.compile(r"(\w([\w.-]*\w)?/)?\w([\w.-]*\w)?", re.ASCII)


def is_file_path(path: str) -> bool:
    """Whether a path names a data file, which need not exist, as opposed to a dataset."""
    return path.lower().endswith(FILE_SUFFIXES)


def check_data_paths(paths: Iterable[str]) -> None:
    """Refuse names of data files that are not there, and files of other kinds.

    Other paths may be datasets on the hub.
    """
    for path in paths:
        if is_file_path(path):
            if not Path(path).exists():
                raise ValueError(f"{path}: no such file")
        elif (Path(path).exists() and not Path(path).is_dir()) or path.lower().endswith(
            _SPREADSHEETS
        ):
            raise ValueError(
                f"{path}: expected a file with one of the suffixes {', '.join(FILE_SUFFIXES)}; a "
                "spreadsheet can be saved as .csv"
            )


class Option(NamedTuple):
    """An option of a configuration.

    Attributes:
        name: Its dotted name, as a flag has it; all items of a list have the name of the list.
        value: Its value.
    """

    name: str
    value: Any


def walk_options(settings: object, name: str = "") -> Iterator[Option]:
    """Go through all options of a configuration, down to what is neither a mapping nor a list.

    Args:
        settings: Parsed settings, or a part of them.
        name: Dotted name of the part.

    Yields:
        Each option.
    """
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            yield from walk_options(value, f"{name}.{key}" if name else str(key))
    elif isinstance(settings, list):
        for value in settings:
            yield from walk_options(value, name)
    else:
        yield Option(name.replace(".init_args", ""), settings)


def check_output_options(settings: object) -> None:
    """Check the paths in all options of a configuration that name what is written.

    The classes of other packages are among them, such as loggers, profilers and callbacks: they
    would make a folder called `~`.

    Args:
        settings: Parsed settings.
    """
    for name, value in walk_options(settings):
        is_output = _OUTPUT_OPTION.fullmatch(name.rpartition(".")[2])
        # an empty one is the class's own default
        if is_output and isinstance(value, str | Path) and str(value):
            check_output_path(name, str(value))


def check_outputs(outputs: Mapping[str, str | None], inputs: Iterable[str | None] = ()) -> None:
    """Refuse outputs that cannot be files, or would replace an input or each other.

    Args:
        outputs: Paths by the option that names them; `None` for no output.
        inputs: Files and folders that the command reads; `None` for none. What is in such a folder
            may not be replaced either.
    """
    reserved_paths = {os.path.realpath(path) for path in inputs if path is not None}
    for name, path in outputs.items():
        if path is None or (Path(path).exists() and not os.path.isdir(path) | os.path.isfile(path)):
            continue  # a device or a pipe
        file = os.path.realpath(path)
        why = ""
        if os.path.isdir(file):
            why = "a folder"
        elif file in reserved_paths:
            why = "one that this command reads or writes"
        elif os.path.exists(file) and reserved_paths.intersection(map(str, Path(file).parents)):
            why = "one in a folder that this command reads"  # such as a model's config.json
        if why:
            raise ValueError(f"{name}: expected a file of its own, got {path}, {why}")
        reserved_paths.add(file)


def check_written_folder(name: str, path: str) -> None:
    """Refuse what is no folder, or lies below a file, where a command writes files into a folder.

    Args:
        name: Option that names the folder, for errors.
        path: The folder, which need not exist.
    """
    for place in (Path(path), *Path(path).parents):
        if place.exists() and not place.is_dir():
            raise ValueError(f"{name}: expected a folder, got {path}: {place} is a file")


def is_or_contains(folder: Path, path: Path) -> bool:
    """Whether a path is a folder or lies in it, links resolved; neither has to exist.

    Args:
        folder: The folder.
        path: A file or folder.
    """
    return path.resolve().is_relative_to(folder.resolve())


def check_output_folder(name: str, path: str, inputs: Iterable[str | None]) -> None:
    """Refuse a folder to be replaced that is or contains what a command reads.

    Args:
        name: Option that names the folder, for errors.
        path: The folder.
        inputs: Files, folders and hub ids that the command reads; `None` for none.
    """
    for source in inputs:
        # a hub id is no path
        if source is None or not Path(source).exists():
            continue
        if is_or_contains(Path(path), Path(source)):
            raise ValueError(
                f"{name}: expected a folder of its own, got {path}, which is or contains "
                f"{source}, which this command reads"
            )


def check_inputs(models: Mapping[str, Any], data: Iterable[str | None] = ()) -> None:
    """Refuse models and data files that are not there.

    Args:
        models: By the option that names them: a path, a list of paths, rewards with their weights,
            or `None`. Paths of data files are checked as such: they may stand in place of a policy.
        data: Data files and ids of datasets; `None` for none.
    """
    files = [path for path in data if path is not None]
    for name, value in models.items():
        for path in _list_models(value):
            if is_file_path(path):
                files.append(path)
            else:
                check_model_path(path, name)
    check_data_paths(files)


def _list_models(value: object) -> list[str]:
    """Paths of the models that an option names."""
    if isinstance(value, Mapping):  # rewards: a rule of our own has a name and no model
        rules = [
            key for key, entry in value.items() if isinstance(entry, Mapping) and "rule" in entry
        ]
        return _list_models([key for key in value if key not in rules])
    if isinstance(value, str):
        value = [value]
    paths = value if isinstance(value, Sequence) else []
    return [path for path in paths if isinstance(path, str) and not is_function_path(path)]


def source_path(word: str) -> str:
    """The path in a source that is given as PATH or NAME=PATH; a path may itself contain a `=`."""
    name, sign, path = word.partition("=")
    if not sign or Path(word).exists():
        return word
    if not name or not path:
        raise ValueError(f"preferences: expected PATH or NAME=PATH, got {word!r}")
    return path


def is_function_path(path: str) -> bool:
    """Whether `path` is `package.module:function` rather than a model's folder or hub id."""
    # a folder's name may contain a colon too
    return ":" in path and not Path(path).exists()


def check_model_path(path: str | Path, name: str = "path") -> None:
    """Refuse a path that is neither a folder nor can be a hub id.

    transformers takes any string that is not a folder for a hub id: for a mistyped folder it asks
    the network, several times, and then reports a missing repository.

    Args:
        path: The path.
        name: Option that names it, for errors.
    """
    if not isinstance(path, str | Path):
        raise ValueError(
            f"{name}: expected a folder with a model or a hub id, got an object of the type "
            f"{type(path).__name__}. The tokenizer, the copies of a network and a resumed run are "
            "all read from there: save the model and its tokenizer with save_pretrained(folder), "
            "and give the folder"
        )
    if path != "" and Path(path).is_dir():
        for file in Path(path).iterdir():
            if file.exists() and not (file.is_file() or file.is_dir()):  # reading it may not end
                raise ValueError(f"{name}: expected a model's files, got the device or pipe {file}")
            if file.suffix in _TEXT_SUFFIXES and file.is_file():
                check_file(file, LARGEST_TEXT)
        for index in Path(path).glob("*.index.json"):
            _check_parts(index, name)
        return
    if Path(path).is_file():
        raise ValueError(
            f"{name}: expected a folder with a model, got the file {path}; `lit_rlhf export` makes "
            "such a folder from a checkpoint or a GGUF file"
        )
    expected = (
        f"{name}: expected a folder with a model or a hub id (name or owner/name), got "
        f"{str(path)!r}, which is not a folder here and "
    )
    advice = "; if another stage writes the folder, run that one first"
    if isinstance(path, Path) or Path(path).exists() or _HUB_ID.fullmatch(path) is None:
        raise ValueError(expected + "not of the form of a hub id" + advice)
    owner, _, model = path.partition("/")
    if model and Path(owner).is_dir():
        raise ValueError(
            expected + f"no hub id either: {owner!r} is a folder without {model!r}" + advice
        )


def _check_parts(index: Path, name: str) -> None:
    """Refuse a list of a model's files that leads out of its folder, or is none.

    Args:
        index: The list.
        name: Option that names the folder, for errors.
    """
    try:
        parts = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        outside = [part for part in parts if Path(part).name != part]
    except (ValueError, *WRONG_VALUES) as error:
        raise ValueError(f"{name}: expected a list of files in {index}: {error!r}") from error
    if outside:
        raise ValueError(f"{name}: expected files beside {index}, which lists {outside[0]}")
