"""Reward sources as a configuration names them: models, functions and rules, with weights.

A configuration holds plain data, so that it is read from YAML and from a checkpoint alike: a source
is a number (its weight), or a mapping, and is made into objects here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jsonargparse import ArgumentError, ArgumentParser

from lit_rlhf.rewards.remote import RemoteScorer
from lit_rlhf.rewards.rules import FormatRule, LengthRule, RegexRule

RULES: dict[str, Callable[..., Any]] = {
    "length": LengthRule,
    "format": FormatRule,
    "regex": RegexRule,
    "http": RemoteScorer,
}
COMMON = ("weight", "normalize")  # what every mapping may have


class RewardSource(NamedTuple):
    """One term of the reward.

    Attributes:
        name: In metrics and messages.
        weight: Its factor in the sum.
        normalize: Whether it enters the sum with mean 0 and standard deviation 1.
        path: A reward model's folder or hub id, or `package.module:function`; empty for a rule.
        rule: A ready-made rule; `None` for a model or a function.
        kind: Name of the rule; empty without one.
    """

    name: str
    weight: float
    normalize: bool
    path: str = ""
    rule: Callable[..., Any] | None = None
    kind: str = ""

    @property
    def is_model(self) -> bool:
        """Whether it is a reward model."""
        return self.rule is None and not is_function(self.path)


def is_function(source: str) -> bool:
    """Whether a reward source names a Python function rather than a model."""
    return ":" in source and not Path(source).exists()


def parse_reward_sources(rewards: Mapping[str, float | Mapping[str, Any]]) -> list[RewardSource]:
    """The sources that `rewards` describes, in its order.

    Args:
        rewards: A weight or a mapping by source. Without `rule` the key is a reward model's folder
            or hub id, or `package.module:function`, and the mapping may have `weight` (1.0) and
            `normalize` (false). With `rule`, a name of `RULES`, the key is any name, and the
            mapping has the rule's own arguments too.

    Raises:
        ValueError: If there is no source, or one is described wrongly; names it and its argument.
    """
    if not rewards:
        raise ValueError(
            "rewards: expected at least one source, a reward model's folder or "
            "'package.module:function', with its weight, or a rule; got none"
        )
    described = {
        key: dict(value) if isinstance(value, Mapping) else {"weight": value}
        for key, value in rewards.items()
    }
    names = source_names(list(described), [key for key in described if "rule" in described[key]])
    return [_source(key, names[key], settings) for key, settings in described.items()]


def source_names(keys: Sequence[str], whole: Sequence[str] = ()) -> dict[str, str]:
    """The last part of each path or function name, or the whole where two would be equal.

    Args:
        keys: Paths and names.
        whole: Those that are names already.
    """
    tails = [key if key in whole else Path(key).name.rpartition(":")[2] for key in keys]
    return {
        key: tail if tails.count(tail) == 1 else key for tail, key in zip(tails, keys, strict=True)
    }


def _source(key: str, name: str, settings: dict[str, Any]) -> RewardSource:
    place = f"rewards.{key}"
    kind = settings.pop("rule", None)
    weight, normalize = settings.pop("weight", 1.0), settings.pop("normalize", False)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ValueError(f"{place}: expected a finite number as weight, got {weight!r}")
    if not isinstance(normalize, bool):
        raise ValueError(f"{place}.normalize: expected true or false, got {normalize!r}")
    if kind is None:
        if settings:
            raise ValueError(
                f"{place}: expected {', '.join(COMMON)} and no more for a model or a function, got "
                f"{', '.join(settings)}; a ready-made rule is named by rule: {', '.join(RULES)}"
            )
        return RewardSource(name, weight, normalize, path=key)
    if kind not in RULES:
        raise ValueError(f"{place}.rule: expected one of {', '.join(RULES)}, got {kind!r}")
    return RewardSource(name, weight, normalize, rule=_rule(kind, settings, place), kind=kind)


def _rule(kind: str, arguments: dict[str, Any], place: str) -> Callable[..., Any]:
    parser = ArgumentParser(exit_on_error=False)
    accepted = parser.add_class_arguments(RULES[kind])
    try:
        checked = parser.parse_object(arguments).as_dict()
        rule: Callable[..., Any] = RULES[kind](**checked)
    except (ArgumentError, ValueError) as error:
        takes = ", ".join([*accepted, *COMMON])
        raise ValueError(f"{place}: {error} (rule: {kind} takes {takes})") from error
    return rule
