"""Names of a module's options: its arguments, and the fields of arguments that are groups."""

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

from lit_rlhf.suggestions import did_you_mean

OptionsT = TypeVar("OptionsT")


def check_names(cls: type, names: Iterable[str]) -> None:
    """Raise ValueError unless the module class `cls` takes arguments of these names."""
    parameters = list(_parameters(cls))
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    parameter_names = {p.name for p in parameters}
    for name in names:
        if name not in parameter_names:
            suggestion = did_you_mean(name, option_names(cls))
            raise ValueError(f"{cls.__name__}: {name}: no such option{suggestion}")


def option_names(cls: type) -> list[str]:
    """Names of the options of a module's class; options in groups have dotted names."""
    groups = option_groups(cls)
    names = [p.name for p in _parameters(cls) if p.kind is not p.VAR_KEYWORD]
    return [
        dotted
        for name in names
        for dotted in (
            [f"{name}.{field.name}" for field in fields(groups[name])] if name in groups else [name]
        )
    ]


def option_groups(cls: type) -> dict[str, Any]:
    """Groups of options of a module's class by name: the defaults of its parameters."""
    groups: dict[str, Any] = {}
    for parameter in _parameters(cls):
        if is_dataclass(parameter.default):
            groups.setdefault(parameter.name, parameter.default)
    return groups


def merge_options(cls: type, name: str, options: OptionsT | Mapping[str, Any]) -> OptionsT:
    """Convert a group of options to its dataclass.

    A mapping of some of its fields, as in checkpoints and YAML, takes the others from the default
    of the parameter.
    """
    default = option_groups(cls)[name]
    if not isinstance(options, Mapping) and isinstance(options, type(default)):
        return options
    if not isinstance(options, Mapping):
        raise ValueError(
            f"{name}: expected {type(default).__name__} or a mapping of its fields, got {options!r}"
        )
    for key in options.keys() - {field.name for field in fields(default)}:
        suggestion = did_you_mean(f"{name}.{key}", option_names(cls))
        raise ValueError(f"{name}.{key}: no such option{suggestion}")
    try:
        return cast(OptionsT, replace(default, **options))
    except ValueError as error:  # names the field only, which several groups may have
        raise ValueError(f"{name}.{error}") from error


def plain_arguments(cls: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a module as plain data, with groups as mappings of all their fields."""
    groups = option_groups(cls)
    return {
        name: asdict(merge_options(cls, name, value)) if name in groups else value
        for name, value in arguments.items()
    }


def dotted_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Plain arguments of a module in one level, with dotted names for options in groups."""
    by_dotted_name: dict[str, Any] = {}
    for name, value in arguments.items():
        if name == "_instantiator":  # LightningCLI's, for `load_from_checkpoint`
            continue
        if isinstance(value, Mapping) and name != "rewards":  # whose keys are paths, not options
            by_dotted_name |= {f"{name}.{key}": option for key, option in value.items()}
        else:
            by_dotted_name[name] = value
    return by_dotted_name


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as JSON and YAML have them: a tuple becomes a list, an object of a class its text."""
    converted: dict[str, Any] = json.loads(json.dumps(dict(values), default=str))
    return converted


def _parameters(cls: type) -> Iterator[inspect.Parameter]:
    """Parameters of a class, and of its bases as long as a `**` parameter passes them on."""
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        _, *parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        yield from (p for p in parameters if p.kind is not p.VAR_POSITIONAL)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return
