"""Names of options: those that a module takes, and advice about others."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from difflib import SequenceMatcher
from typing import Any, Self, TypeVar, cast

OptionsT = TypeVar("OptionsT")

RENAMED: dict[str, tuple[str, ...]] = {
    "advantage_clip": ("advantages.clip",),
    "advantage_normalization": ("advantages.normalization",),
    "critic_grad_clip": ("critic_optimizer.grad_clip",),
    "critic_lr": ("critic_optimizer.learning_rate",),
    "critic_pretrain_iterations": ("critic_pretraining.iterations",),
    "critic_pretrain_value_loss": ("critic_pretraining.target_value_loss",),
    "policy_grad_clip": ("policy_optimizer.grad_clip",),
    "policy_kl_penalty": ("loss.kl_penalty_coef",),
    "policy_lr": ("policy_optimizer.learning_rate",),
    "reward_clip": ("reward_shaping.clip",),
    "reward_normalization": ("reward_shaping.normalization",),
    "reward_scaling": ("reward_shaping.scaling",),
    "scoring_tokens": ("memory.max_tokens_per_forward",),
}
"""Dotted names of renamed options by old name, except for those that only moved into a group."""
SIMILAR = 0.6  # similarity (`SequenceMatcher.ratio`) from which a name may be a misspelling


class NamedOptions:
    """Checks the names of keyword arguments before a module is built.

    Python refuses an unknown keyword before the body of `__init__` runs, so the check is in
    `__new__`. It is in a class of its own because jsonargparse reads the signature of `__new__`
    instead of that of `__init__` for a class that defines `__new__` itself.
    """

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Check the names of `options`."""
        del arguments
        check_names(cls, options, TypeError)
        return super().__new__(cls)


def check_names(
    cls: type,
    names: Iterable[str],
    error: type[Exception] = ValueError,
    others_allowed: bool = False,
) -> None:
    """Check that `cls` takes arguments of these names.

    Args:
        cls: A module's class.
        names: Of arguments.
        error: Type of the error.
        others_allowed: Refuse only old names of options, because the others may be those of a
            subclass. Classes with a `**` parameter always allow others.

    Raises:
        error: If `cls` does not take a name.
    """
    parameters = list(_parameters(cls))
    known = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    others_allowed |= any(p.kind is p.VAR_KEYWORD for p in parameters)
    for name in names:
        if name not in known and (not others_allowed or moved_to(cls, name)):
            raise error(f"{cls.__name__}: {name}: {explain_unknown_option(cls, name)}")


def explain_unknown_option(cls: type, name: str) -> str:
    """Advice about an option that a module does not have.

    Args:
        cls: The module's class.
        name: Name that was given, for instance `policy_lr` or `sampling.temprature`.
    """
    now = moved_to(cls, name)
    if now:
        return f"no such option; it is now {' and '.join(now)}"
    leaf = _leaf(name)

    def similarity(known: str) -> float:
        pairs = ((name, known), (leaf, _leaf(known)))
        return max(SequenceMatcher(None, a, b).ratio() for a, b in pairs)

    nearest = max((*option_groups(cls), *option_names(cls)), key=similarity)
    if similarity(nearest) < SIMILAR:
        return f"no such option of {cls.__name__}"
    return f"no such option; did you mean {nearest}?"


def moved_to(cls: type, name: str) -> list[str]:
    """Dotted names of the options of `cls` that were called `name`; empty if there are none."""
    known, leaf = option_names(cls), _leaf(name)
    renamed = [new for new in RENAMED.get(leaf, ()) if new in known]
    return renamed or [new for new in known if _leaf(new) == leaf and new != name]


def option_names(cls: type) -> list[str]:
    """Names of the options of a module's class; those in groups have dotted names."""
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


def merge_options(cls: type, name: str, given: OptionsT | Mapping[str, Any]) -> OptionsT:
    """Convert a group of options to its dataclass.

    Args:
        cls: The module's class.
        name: Name of the group.
        given: The dataclass, or a mapping of some of its fields, as in checkpoints and YAML. Other
            fields are taken from the default of the parameter.

    Raises:
        ValueError: If `given` has an unknown field, a field is out of its range, or it is neither.
    """
    default = option_groups(cls)[name]
    if not isinstance(given, Mapping) and isinstance(given, type(default)):
        return given
    if not isinstance(given, Mapping):
        raise ValueError(
            f"{name}: expected {type(default).__name__} or a mapping of its fields, got {given!r}"
        )
    for key in given.keys() - {field.name for field in fields(default)}:
        raise ValueError(f"{name}.{key}: {explain_unknown_option(cls, f'{name}.{key}')}")
    try:
        return cast(OptionsT, replace(default, **given))
    except ValueError as error:  # names the field only, and several groups may have one like it
        raise ValueError(f"{name}.{error}") from error


def plain_arguments(cls: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a module as plain data, with groups as mappings of all their fields."""
    groups = option_groups(cls)
    return {
        name: asdict(merge_options(cls, name, value)) if name in groups else value
        for name, value in arguments.items()
    }


def dotted_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Plain arguments of a module in one level, with dotted names for those in groups."""
    shown: dict[str, Any] = {}
    for name, value in arguments.items():
        if name == "_instantiator":  # LightningCLI's, for `load_from_checkpoint`
            continue
        if isinstance(value, Mapping) and name != "rewards":  # whose keys are paths, not options
            shown |= {f"{name}.{key}": option for key, option in value.items()}
        else:
            shown[name] = value
    return shown


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _parameters(cls: type) -> Iterator[inspect.Parameter]:
    """Parameters of a class, and those of its bases as long as a `**` parameter passes them on."""
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        _, *parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        yield from (p for p in parameters if p.kind is not p.VAR_POSITIONAL)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return
