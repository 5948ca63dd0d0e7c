"""A weighted sum of rewards, and the `rewards` argument that describes it.

In a configuration `rewards` is plain data: each entry maps a reward to its weight, or to a mapping
of options. In Python, a callable or a loaded reward model may take the place of a name. Notation:
`B` responses.
"""

import hashlib
import inspect
import math
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import torch
from jsonargparse import ArgumentError, ArgumentParser
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_rlhf.checks import check_choice
from lit_rlhf.data import Turns
from lit_rlhf.functional import Ensemble, ensemble_scores, normalized_scores
from lit_rlhf.imports import function_path
from lit_rlhf.models import ModelOptions
from lit_rlhf.rewards.functions import (
    CallableReward,
    decode_samples,
    warn_about_non_finite,
)
from lit_rlhf.rewards.judge import JudgeRule
from lit_rlhf.rewards.model import ModelReward
from lit_rlhf.rewards.remote import RemoteScorer
from lit_rlhf.rewards.rules import (
    ContainsRule,
    EqualsRule,
    FormatRule,
    LengthRule,
    RegexRule,
    SentimentRule,
)
from lit_rlhf.rollout import RolloutBatch, decode_responses
from lit_rlhf.stats import RunningMoments, global_masked_moments, global_sum

RewardObject = Any
"""A callable or a loaded reward model. jsonargparse could not parse a type that says so."""

Rewards = dict[str, float | dict[str, Any]] | list[str] | RewardObject
"""Rewards as `parse_rewards` takes them, with or without Python objects."""

RULES: dict[str, Callable[..., Any]] = {
    "length": LengthRule,
    "format": FormatRule,
    "regex": RegexRule,
    "equals": EqualsRule,
    "contains": ContainsRule,
    "sentiment": SentimentRule,
    "http": RemoteScorer,
    "judge": JudgeRule,
}
"""Ready-made reward functions by the name that `rule:` gives them."""

OWN_FUNCTIONS = ("lit_rlhf.tools.lab.gold:gold_reward", "lit_rlhf.tools.lab.gold:well_formed")
"""Reward functions of this package."""

COMMON_OPTIONS = ("weight", "normalize")
"""Options of every entry; a rule takes its own arguments too."""


@dataclass(frozen=True)
class RewardSpec:
    """One entry of `rewards`: a reward function or reward model, and its weight.

    `key` is its name in checkpoints (a rule's own name, or `reward_key`'s), and `name` a
    short one for metrics and messages. `source` is the callable, rule or loaded reward model, or
    the key for a path; `rule` names a ready-made one in `RULES`.
    """

    key: str
    source: Any
    name: str
    weight: float
    normalize: bool
    rule: str | None = None

    @property
    def is_model(self) -> bool:
        """Whether it is a reward model: neither a rule nor a Python function."""
        return _is_model(self.source)


class WeightedReward(nn.Module):
    """A weighted sum of rewards, in which several reward models may count as one.

    An entry with `normalize` enters the sum less the running mean and over the running standard
    deviation of its scores. In training mode these include the scores of the call itself, over all
    ranks, so every rank has to call it; they become permanent with `commit_moments`. In evaluation
    mode the moments stay as they are, and before the first score so do the scores.

    Entries are in `specs`, and their functions and models, in the same order, in `functions`.
    `raw_scores` are the last call's by name, `[B]`, before normalization and weights; `seconds` the
    time that each entry has taken so far. A reward model's score is the mean of its heads', which
    are in `head_scores`, `[B, K]`. In an ensemble each head counts like a reward model.

    Args:
        rewards: Rewards with their weights, see `parse_rewards`.
        options: How reward models are loaded.
        tokenizer: The policy's.
        timeout: Seconds that a call of a reward function may take; `None` for no limit.
        offload: Keep reward models in CPU memory between uses.
        shard: Keep an equal share of reward models on each rank between uses.
        ensemble: How the weighted scores of reward models enter the sum, see `ensemble_scores`.
    """

    def __init__(
        self,
        rewards: Rewards,
        options: ModelOptions,
        tokenizer: PreTrainedTokenizerBase,
        timeout: float | None = None,
        offload: bool = False,
        shard: bool = False,
        ensemble: Ensemble = "sum",
    ) -> None:
        super().__init__()
        self.ensemble = ensemble
        self.tokenizer = tokenizer
        self.specs = parse_rewards(rewards)
        self.functions = nn.ModuleList()
        self._members: list[int] = []  # of the ensemble, by entry
        for spec in self.specs:
            n_members, reward = 0, None
            if spec.is_model:
                loaded = None if isinstance(spec.source, str) else spec.source
                reward = ModelReward(spec.key, options, offload, loaded, shard)
                # one with weight 0 is only logged
                n_members = reward.n_heads if ensemble != "sum" and spec.weight != 0 else 0
            label = f"reward {spec.name!r} (rule: {spec.rule})" if spec.rule else ""
            self.functions.append(reward or CallableReward(spec.source, tokenizer, timeout, label))
            self._members.append(n_members)
        if ensemble != "sum" and sum(self._members) < 2:
            raise ValueError(
                "ensemble: expected sum with fewer than two reward models, or heads of one, of a "
                f"weight other than 0, got {ensemble}"
            )
        for model in self.models:
            model.choose_text(tokenizer)
        # Terms, a member's or an entry's, with their keys. Index and name are part of the key, so
        # that a checkpoint of other rewards, or of the same in another order, does not load. A dot
        # would nest the key.
        self._terms = [
            (spec, n > 0, f"{index}_{spec.name}{f'_{head}' if head else ''}".replace(".", "_"))
            for index, (spec, n) in enumerate(zip(self.specs, self._members, strict=True))
            for head in range(max(n, 1))
        ]
        self.moments = nn.ModuleDict(
            {key: RunningMoments() for spec, _, key in self._terms if spec.normalize}
        )
        self.seconds = dict.fromkeys((spec.name for spec in self.specs), 0.0)
        self.raw_scores: dict[str, Tensor] = {}
        self.head_scores: dict[str, Tensor] = {}
        self._pending: dict[str, RunningMoments] = {}

    @property
    def models(self) -> list[ModelReward]:
        """The reward models among the functions."""
        return [function for function in self.functions if isinstance(function, ModelReward)]

    def hash_sources(self) -> dict[str, str]:
        """SHA-256 of the files that define the reward functions, by key, which an edit changes.

        It is over all loaded files in the folder of the function's file but a script's own. There
        is none for models, for functions of this package, and for functions without a file.
        """
        loaded = [
            Path(str(getattr(module, "__file__", None)))
            for name, module in list(sys.modules.items())
            if name != "__main__"
        ]
        loaded = [f for f in loaded if f.suffix == ".py" and "site-packages" not in f.parts]
        hashes = {}
        for spec, reward in zip(self.specs, self.functions, strict=True):
            function = getattr(reward, "function", None)
            code = inspect.unwrap(function) if inspect.isroutine(function) else type(function)
            if code.__module__.partition(".")[0] == __name__.partition(".")[0]:
                continue
            with suppress(TypeError, OSError):  # built in, or no such file
                source = Path(inspect.getsourcefile(code) or "")
                files = sorted({source, *(f for f in loaded if f.is_relative_to(source.parent))})
                content = b"".join(file.read_bytes() for file in files)
                hashes[spec.key] = hashlib.sha256(content).hexdigest()
        return hashes

    def forward(
        self,
        rollouts: RolloutBatch,
        prompts: Sequence[str],
        max_tokens_per_forward: int | None = None,
        records: Sequence[Mapping[str, Any]] = (),
        turns: Sequence[Turns] = (),
    ) -> Tensor:
        """Score rollouts, `[B]` float32; a score that is not finite is reported by a warning.

        `prompts` are rendered, and `records` hold the fields of each prompt's record by name. Only
        a reward model with another tokenizer needs the prompts' `turns`. The limit on tokens is for
        reward models, see `RolloutBatch.split`.
        """
        self.raw_scores, self.head_scores = {}, {}
        scored: list[Tensor] = []
        for spec, function, n in zip(self.specs, self.functions, self._members, strict=True):
            start = perf_counter()
            if isinstance(function, ModelReward) and function.own_text is not None:
                responses = decode_responses(rollouts, self.tokenizer)
                ended, limit = rollouts.terminated, max_tokens_per_forward
                scores = function.score_text(turns, responses, ended, limit)
            else:
                scores = function(rollouts, prompts, max_tokens_per_forward, records)
            self.seconds[spec.name] += perf_counter() - start
            heads = scores.view(len(scores), -1)
            mean = self.raw_scores[spec.name] = heads.mean(1)
            if isinstance(function, ModelReward):
                self.head_scores[spec.name] = heads
                if not bool(torch.isfinite(mean).all()):
                    samples = decode_samples(rollouts, prompts, self.tokenizer)
                    warn_about_non_finite(f"reward model {function.path!r}", mean, samples)
            scored += heads.unbind(1) if n else [mean]
        members: list[Tensor] = []
        others: list[Tensor] = []
        for (spec, is_member, _), scores in zip(self._terms, self._normalize(scored), strict=True):
            (members if is_member else others).append(spec.weight * scores)
        if members:
            others.append(ensemble_scores(torch.stack(members), self.ensemble))
        return torch.stack(others).sum(0)

    def check_fields(self, available: Collection[str], where: str) -> None:
        """Check that the records have every field that a reward function needs."""
        for function in self.functions:
            if isinstance(function, CallableReward):
                function.check_fields(available, where)

    def spread(self) -> Tensor | None:
        """Disagreement of the reward models on each response of the last call, `[B]`.

        It is the standard deviation over the models' heads of their scores, each less its mean and
        over its standard deviation over the responses of all ranks: 0 if they rank responses alike.
        `None` for fewer than two heads. Every rank has to call it.
        """
        terms = []
        for raw in (head for heads in self.head_scores.values() for head in heads.unbind(1)):
            moments = global_masked_moments(raw, torch.ones_like(raw, dtype=torch.bool))
            terms.append(
                normalized_scores(raw, mean=moments.mean, std=moments.var.sqrt(), clip=None)
            )
        return torch.stack(terms).std(dim=0, correction=0) if len(terms) > 1 else None

    def commit_moments(self) -> None:
        """Make the moments of the last call in training mode permanent.

        An iteration that is skipped does not call this, so its scores leave no trace.
        """
        for key, moments in self._pending.items():
            self.moments[key].load_state_dict(moments.state_dict())
        self._pending = {}

    def _normalize(self, scored: Sequence[Tensor]) -> list[Tensor]:
        """Normalize the scores `[B]` of each term whose entry asks for it."""
        scores = {key: term for (_, _, key), term in zip(self._terms, scored, strict=True)}
        running = cast("Mapping[str, RunningMoments]", self.moments)
        self._pending = {}
        # a score that is not finite on any rank makes all ranks skip the iteration; its moments
        # would stay NaN for ever
        if self.training and running:
            bad = torch.stack([(~torch.isfinite(scores[key])).sum() for key in running])
            for key in () if global_sum(bad).any() else running:
                self._pending[key] = deepcopy(running[key])
                self._pending[key].update(scores[key])
        for key, committed in running.items():
            moments = self._pending.get(key, committed)
            scores[key] = normalized_scores(
                scores[key], mean=moments.mean, std=moments.std, clip=None
            )
        return list(scores.values())


def parse_rewards(rewards: Rewards) -> list[RewardSpec]:
    """Check rewards and their weights: a mapping, or a list or a single reward with weight 1.

    A reward without `rule` is a reward model's folder or hub id, or `package.module:function`, and
    its value the weight or a mapping of `weight` (1.0) and `normalize` (false). In Python it may
    also be a callable or a loaded reward model. With `rule`, a key of `RULES`, the key is a name of
    your choice, and the mapping may set the rule's own arguments too.
    """
    pairs = _list_pairs(rewards)
    if not pairs:
        raise ValueError(
            "rewards: expected at least one entry, a reward model's folder or "
            "'package.module:function' with its weight, or a rule; got none"
        )
    specs = [_parse_entry(source, value) for source, value in pairs]
    for names in ([spec.key for spec in specs], [spec.name for spec in specs]):
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(
                f"rewards: expected rewards of different names, got {twice[0]!r} twice; define "
                "functions by `def` with names of their own"
            )
    rules = [spec.name for spec in specs if spec.rule]
    short = shorten_names([spec.name for spec in specs], unchanged=rules)
    return [replace(spec, name=short[spec.name]) for spec in specs]


def plain_rewards(rewards: Rewards) -> dict[str, Any]:
    """Weight or mapping of each reward by its `reward_key`, for checkpoints and model cards."""
    return {reward_key(source): value for source, value in _list_pairs(rewards)}


def split_rewards(rewards: Rewards) -> dict[str, Rewards]:
    """Each reward as a `rewards` argument by itself, by its short name."""
    pairs = _list_pairs(rewards)
    names = [spec.name for spec in parse_rewards(rewards)] if pairs else []
    # the objects of a list need not be hashable, as keys would be
    return {
        name: {source: value} if isinstance(rewards, Mapping) else [source]
        for name, (source, value) in zip(names, pairs, strict=True)
    }


def reward_key(source: object) -> str:
    """The name of a reward in a checkpoint.

    This is a path or a rule's name as it is, `module:function` for a callable, and for a loaded
    model the folder or hub id that it was loaded from, or its class in angle brackets.
    """
    if isinstance(source, str | PathLike):
        return fspath(source)
    if _is_model(source):
        model: Any = source
        return getattr(model.config, "_name_or_path", "") or f"<{type(source).__name__}>"
    if callable(source):
        return function_path(source)
    raise ValueError(
        "rewards: expected a reward model, its folder, a callable, 'package.module:function', or a "
        f"list or a mapping of these, got {source!r:.100}"
    )


def is_function_path(path: str) -> bool:
    """Whether `path` is `package.module:function` rather than a model's folder or hub id."""
    # a folder's name may contain a colon too
    return ":" in path and not Path(path).exists()


def untrusted_rewards(rewards: Mapping[str, float | Mapping[str, Any]]) -> list[str]:
    """Entries that a received checkpoint may not decide on.

    These are functions of other packages, which are imported and called, servers, which get all
    prompts and responses, and Python objects, which it does not hold.
    """
    found = []
    for key, value in rewards.items():
        rule = value.get("rule") if isinstance(value, Mapping) else None
        foreign = rule is None and is_function_path(key) and key not in OWN_FUNCTIONS
        if foreign or rule in ("http", "judge") or key.startswith("<"):
            found.append(key)
    return found


def shorten_names(keys: Sequence[str], unchanged: Sequence[str] = ()) -> dict[str, str]:
    """Shorten paths to their last part, and keep the whole path where two parts would be equal.

    Keys that are names already stay `unchanged`.
    """
    tails = [key if key in unchanged else Path(key).name.rpartition(":")[2] for key in keys]
    return {
        key: tail if tails.count(tail) == 1 else key for tail, key in zip(tails, keys, strict=True)
    }


def _list_pairs(rewards: Rewards) -> list[tuple[Any, Any]]:
    if isinstance(rewards, Mapping):
        return list(rewards.items())
    several = isinstance(rewards, Sequence) and not isinstance(rewards, str)
    return [(source, 1.0) for source in (rewards if several else [rewards])]


def _is_model(source: object) -> bool:
    if isinstance(source, str):
        return not is_function_path(source)
    return isinstance(source, PreTrainedModel | PeftModel)


def _parse_entry(source: Any, value: Any) -> RewardSpec:  # noqa: ANN401  # as the user gives it
    """Check an entry; its name is still its path."""
    key = reward_key(source)
    place = f"rewards.{key}"
    if callable(value):
        raise ValueError(
            f"{place}: expected a weight, got {value!r:.100}; a Python object is the key and its "
            "weight the value: rewards={my_function: 1.0}"
        )
    options = dict(value) if isinstance(value, Mapping) else {"weight": value}
    rule = options.pop("rule", None)
    weight, normalize = options.pop("weight", 1.0), options.pop("normalize", False)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ValueError(f"{place}: expected a finite number as weight, got {weight!r}")
    if not isinstance(normalize, bool):
        raise ValueError(f"{place}.normalize: expected true or false, got {normalize!r}")
    if isinstance(source, str | PathLike):
        source = name = key
    else:  # a callable is called by its own name, wherever it is nested
        name = key if _is_model(source) else re.sub(r":.*\.", ":", key)
    if rule is not None:
        check_choice(f"{place}.rule", rule, list(RULES))
        source, name, options = _build_rule(rule, options, place), key, {}
    if options:
        raise ValueError(
            f"{place}: expected no option but {', '.join(COMMON_OPTIONS)} for a model or a "
            f"function, got {', '.join(options)}; a ready-made rule is named by "
            f"rule: {', '.join(RULES)}"
        )
    return RewardSpec(key, source, name, weight, normalize, rule)


def _build_rule(name: str, arguments: dict[str, Any], place: str) -> Callable[..., Any]:
    # jsonargparse checks names and types as it does for the rest of the configuration
    parser = ArgumentParser(exit_on_error=False)
    accepted = parser.add_class_arguments(RULES[name])
    try:
        rule: Callable[..., Any] = RULES[name](**parser.parse_object(arguments).as_dict())
    except (ArgumentError, ValueError) as error:
        takes = ", ".join([*accepted, *COMMON_OPTIONS])
        raise ValueError(f"{place}: {error} (rule: {name} takes {takes})") from error
    return rule
