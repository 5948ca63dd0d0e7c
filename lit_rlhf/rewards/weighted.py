"""A weighted sum of rewards, and the `rewards` argument that describes it.

In a configuration `rewards` is plain data: each entry maps a reward to its weight, or to a mapping
of options. In Python, a callable or a loaded reward model may take the place of a name. Notation:
`B` responses.
"""

import hashlib
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, cast

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
from lit_rlhf.paths import is_function_path
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
from lit_rlhf.rewards.scores import Scores, Votes
from lit_rlhf.rollout import RolloutBatch, decode_responses
from lit_rlhf.stats import RunningMoments, fail_together, global_sum
from lit_rlhf.yaml_loading import strict_flags

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

    Attributes:
        key: Its name in checkpoints: a rule's own name, or `reward_key`'s.
        source: The callable, rule or loaded reward model, or the key for a path.
        name: A short name for metrics and messages.
        weight: Weight in the sum.
        normalize: Whether its scores are normalized by their running moments.
        rule: Name of a ready-made rule in `RULES`; `None` for others.
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


class RewardTerm(NamedTuple):
    """A term of the weighted sum: an entry of `rewards`, or in an ensemble a head of its model.

    Attributes:
        key: Key of its running moments.
        weight: Weight in the sum.
        is_normalized: Whether its scores are normalized.
        is_member: Whether it belongs to the ensemble.
    """

    key: str
    weight: float
    is_normalized: bool
    is_member: bool


class WeightedReward(nn.Module):
    """A weighted sum of rewards, in which several reward models may count as one.

    A reward may abstain, see `RewardFunction`: it then adds nothing for that response.

    An entry with `normalize` enters the sum less the running mean and over the running standard
    deviation of its scores. In training mode these include the scores of the call itself, over all
    ranks, so every rank has to call it. The moments themselves change only in `commit_moments`. In
    evaluation mode only the moments so far count, and before the first score the scores stay as
    they are.

    In an ensemble each head of a reward model counts like a reward model.

    Attributes:
        specs: The entries, in order.
        functions: The reward function or reward model of each entry, in the same order.
        moments: Running moments of the entries with `normalize`; in an ensemble, of each head.
        seconds: Time that each entry has taken so far, by its short name.

    Args:
        rewards: Rewards with their weights, see `parse_rewards`.
        options: How reward models are loaded.
        tokenizer: The policy's.
        timeout: Seconds that a call of a reward function may take; `None` for no limit.
        offload: Keep reward models in CPU memory between uses.
        shard: Keep an equal share of reward models on each rank between uses.
        ensemble: How the weighted scores of reward models enter the sum, see `ensemble_scores`.
        may_abstain: Whether all rewards together may abstain from a response, whose total is then
            0. Otherwise this is an error.
    """

    def __init__(
        self,
        rewards: Rewards,
        options: ModelOptions,
        tokenizer: PreTrainedTokenizerBase,
        *,
        timeout: float | None = None,
        offload: bool = False,
        shard: bool = False,
        ensemble: Ensemble = "sum",
        may_abstain: bool = False,
    ) -> None:
        super().__init__()
        self.ensemble = ensemble
        self.may_abstain = may_abstain
        self.tokenizer = tokenizer
        self.specs = parse_rewards(rewards)
        self.functions = nn.ModuleList()
        for spec in self.specs:
            if spec.is_model:
                loaded = None if isinstance(spec.source, str) else spec.source
                self.functions.append(
                    ModelReward(spec.key, options, offload=offload, loaded=loaded, shard=shard)
                )
            else:
                label = f"reward {spec.name!r} (rule: {spec.rule})" if spec.rule else ""
                self.functions.append(
                    CallableReward(spec.source, tokenizer, timeout=timeout, label=label)
                )
        # Members of the ensemble that each entry adds: the heads of its model, or none. An entry
        # with weight 0 is only logged.
        self._n_members = [
            function.n_heads
            if isinstance(function, ModelReward) and ensemble != "sum" and spec.weight != 0
            else 0
            for spec, function in zip(self.specs, self.functions, strict=True)
        ]
        if ensemble != "sum" and sum(self._n_members) < 2:
            raise ValueError(
                "ensemble: expected sum with fewer than two reward models, or heads of one, of a "
                f"weight other than 0, got {ensemble}"
            )
        for model in self.models:
            model.choose_text(tokenizer)
        self._terms = [
            RewardTerm(
                key=_term_key(index, spec.name, head),
                weight=spec.weight,
                is_normalized=spec.normalize,
                is_member=n_members > 0,
            )
            for index, (spec, n_members) in enumerate(zip(self.specs, self._n_members, strict=True))
            for head in range(max(n_members, 1))
        ]
        self.moments = nn.ModuleDict(
            {term.key: RunningMoments() for term in self._terms if term.is_normalized}
        )
        self.seconds = dict.fromkeys((spec.name for spec in self.specs), 0.0)

    @property
    def models(self) -> list[ModelReward]:
        """The reward models among the functions."""
        return [function for function in self.functions if isinstance(function, ModelReward)]

    def set_longest_sequence(self, n_tokens: int) -> None:
        """Fix rotary factors of reward models for sequences of at most `n_tokens` tokens."""
        for model in self.models:
            model.set_longest_sequence(n_tokens)

    def hash_sources(self) -> dict[str, str]:
        """SHA-256 of the files that define the reward functions, by key, which an edit changes.

        It is over all loaded files in the folder of the function's file but a script's own. There
        is none for models, for functions of this package, and for functions without a file.
        """
        hashes = {}
        for spec, reward in zip(self.specs, self.functions, strict=True):
            if not isinstance(reward, CallableReward):
                continue
            function = reward.function
            code = inspect.unwrap(function) if inspect.isroutine(function) else type(function)
            if code.__module__.partition(".")[0] == __name__.partition(".")[0]:
                continue
            with suppress(TypeError, OSError):  # built in, or no such file
                source = Path(inspect.getsourcefile(code) or "")
                loaded = (f for f in _loaded_files() if f.is_relative_to(source.parent))
                files = sorted({source, *loaded})
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
    ) -> Scores:
        """Score rollouts; a score that is not finite is reported by a warning.

        A function that fails on one rank fails on all of them, so every rank has to call this if a
        reward is a function.

        Args:
            rollouts: `B` responses with their prompts.
            prompts: The rendered prompts.
            max_tokens_per_forward: Most tokens that a reward model reads at a time, see
                `RolloutBatch.split`.
            records: Fields of each prompt's record by name, for reward functions.
            turns: The turns of each prompt, for a reward model with another tokenizer.
        """
        by_name: dict[str, Votes] = {}
        head_scores: list[Tensor] = []
        by_term: list[Votes] = []
        entries = zip(self.specs, self.functions, self._n_members, strict=True)
        for spec, function, n_members in entries:
            start = perf_counter()
            if isinstance(function, CallableReward):
                with fail_together(f"score responses by {function.label}"):
                    scores, mask = function.vote(rollouts, prompts, records)
                terms: Sequence[Tensor] = [scores]
            else:
                heads = self._score_by_model(
                    cast(ModelReward, function),
                    rollouts,
                    prompts,
                    max_tokens_per_forward=max_tokens_per_forward,
                    turns=turns,
                )
                head_scores.append(heads)
                scores = heads.mean(1)
                mask = torch.ones_like(scores, dtype=torch.bool)
                terms = heads.unbind(1) if n_members else [scores]
            self.seconds[spec.name] += perf_counter() - start
            by_name[spec.name] = Votes(scores, mask)
            by_term += [Votes(term, mask) for term in terms]
            if isinstance(function, ModelReward) and not bool(torch.isfinite(scores).all()):
                samples = decode_samples(rollouts, prompts, self.tokenizer)
                warn_about_non_finite(f"reward model {function.path!r}", scores, samples)
        # models never abstain
        has_functions = any(isinstance(function, CallableReward) for function in self.functions)
        if has_functions and not self.may_abstain:
            with fail_together("find a score for each response"):
                self._require_votes(by_name, rollouts, prompts)
        uncounted = self._find_uncounted(by_term)
        return Scores(
            total=self._sum_terms(by_term, uncounted),
            by_name={name: votes.scores for name, votes in by_name.items()},
            head_scores=torch.cat(head_scores, dim=1) if head_scores else None,
            uncounted=uncounted,
            votes={name: votes.mask for name, votes in by_name.items()},
        )

    def _score_by_model(
        self,
        model: ModelReward,
        rollouts: RolloutBatch,
        prompts: Sequence[str],
        *,
        max_tokens_per_forward: int | None,
        turns: Sequence[Turns],
    ) -> Tensor:
        """Scores `[B, K]` of a reward model's heads; it reads text if its tokenizer differs."""
        if model.own_text is None:
            scores: Tensor = model(rollouts, prompts, max_tokens_per_forward)
        else:
            scores = model.score_text(
                turns=turns,
                responses=decode_responses(rollouts, self.tokenizer),
                terminated=rollouts.terminated,
                max_tokens_per_forward=max_tokens_per_forward,
            )
        return scores.view(len(scores), -1)

    def have_vote(self, votes: Mapping[str, Tensor]) -> Tensor:
        """Whether a reward with a weight has a vote for each response, `[B]` bool.

        Args:
            votes: Whether each reward has a vote, `[B]` bool by its short name.
        """
        counted = [spec for spec in self.specs if spec.weight != 0] or self.specs
        return torch.stack([votes[spec.name] for spec in counted]).any(0)

    def _require_votes(
        self, by_name: Mapping[str, Votes], rollouts: RolloutBatch, prompts: Sequence[str]
    ) -> None:
        """Refuse a response for which every reward that counts abstains.

        Args:
            by_name: Votes of each reward by its short name.
            rollouts: The responses.
            prompts: The rendered prompts.
        """
        has_vote = self.have_vote({name: votes.mask for name, votes in by_name.items()})
        without = (~has_vote).nonzero().flatten().tolist()
        if without:
            labels = [
                getattr(function, "label", f"reward model {spec.name!r}")
                for spec, function in zip(self.specs, self.functions, strict=True)
            ]
            samples = decode_samples(rollouts, prompts, self.tokenizer)
            raise ValueError(
                f"{', '.join(labels)}: expected {len(prompts)} scores, one for each response, got "
                f"None from all rewards with a weight for {samples.describe(without[0])}; "
                f"{len(without)} of {len(prompts)} responses have no score"
            )

    def check_fields(self, available: Collection[str], where: str) -> None:
        """Check that the records have every field that a reward function needs."""
        for function in self.functions:
            if isinstance(function, CallableReward):
                function.check_fields(available, where)

    def commit_moments(self, scores: Scores) -> None:
        """Count scores of a call in training mode in the running moments; a collective.

        An iteration that is skipped does not call this, so its scores leave no trace.

        Args:
            scores: Result of the call, or of several calls in one.
        """
        for key, raw in scores.uncounted.items():
            self._moments_of(key).update(raw)

    def _find_uncounted(self, by_term: Sequence[Votes]) -> dict[str, Tensor]:
        """Scores of the normalized terms in training mode, if all of all ranks are finite."""
        scores = {
            term.key: votes.scores[votes.mask]
            for term, votes in zip(self._terms, by_term, strict=True)
            if term.is_normalized
        }
        if not self.training or not scores:
            return {}
        # A score that is not finite on any rank makes all ranks skip the iteration; its moments
        # would stay NaN for ever.
        n_bad = torch.stack([(~torch.isfinite(raw)).sum() for raw in scores.values()])
        return {} if global_sum(n_bad).any() else scores

    def _sum_terms(self, by_term: Sequence[Votes], uncounted: Mapping[str, Tensor]) -> Tensor:
        """Normalize the scores `[B]` of terms, combine the ensemble, and add all by weight."""
        members: list[Tensor] = []
        others: list[Tensor] = []
        for term, (raw, mask) in zip(self._terms, by_term, strict=True):
            scores = raw
            if term.is_normalized:
                moments = self._moments_of(term.key)
                if term.key in uncounted:
                    moments = deepcopy(moments)
                    moments.update(uncounted[term.key])
                scores = normalized_scores(raw, mean=moments.mean, std=moments.std, clip=None)
            weighted = (term.weight * scores).masked_fill(~mask, 0.0)
            (members if term.is_member else others).append(weighted)
        if members:
            others.append(ensemble_scores(torch.stack(members), self.ensemble))
        return torch.stack(others).sum(0)

    def _moments_of(self, key: str) -> RunningMoments:
        return cast(RunningMoments, self.moments[key])


def _loaded_files() -> Iterator[Path]:
    """Files of the modules of users that are loaded, without a script's own."""
    for name, module in list(sys.modules.items()):
        file = str(getattr(module, "__file__", None))
        if name != "__main__" and file.endswith(".py") and "site-packages" not in file:
            yield Path(file)


def _term_key(index: int, name: str, head: int) -> str:
    """Key of a term in checkpoints.

    Index and name are part of it, so that a checkpoint of other rewards, or of the same in another
    order, does not load. A dot would nest the key.
    """
    suffix = f"_{head}" if head else ""
    return f"{index}_{name}{suffix}".replace(".", "_")


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
    models = [spec.key for spec in specs if spec.is_model and isinstance(spec.source, str)]
    folders: dict[str, str] = {}
    for model in models:
        earlier = folders.setdefault(os.path.realpath(model), model)
        if earlier != model:
            raise ValueError(
                f"rewards: expected each reward model once, got {earlier} and {model}, which are "
                "one folder"
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


def untrusted_rewards(rewards: Mapping[str, float | Mapping[str, Any]]) -> list[str]:
    """Entries that a received checkpoint may not decide on.

    These are functions of other packages, which are imported and called, servers, which get all
    prompts and responses, and Python objects, which it does not hold.
    """
    untrusted = []
    for key, value in rewards.items():
        rule = value.get("rule") if isinstance(value, Mapping) else None
        foreign = rule is None and is_function_path(key) and key not in OWN_FUNCTIONS
        if foreign or rule in ("http", "judge") or key.startswith("<"):
            untrusted.append(key)
    return untrusted


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
    weight = options.pop("weight", 1.0)
    normalize = options.pop("normalize", False)
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
        source = _build_rule(rule, options, place)
        name = key
        options = {}
    if options:
        raise ValueError(
            f"{place}: expected no option but {', '.join(COMMON_OPTIONS)} for a model or a "
            f"function, got {', '.join(options)}; a ready-made rule is named by "
            f"rule: {', '.join(RULES)}"
        )
    return RewardSpec(
        key=key, source=source, name=name, weight=weight, normalize=normalize, rule=rule
    )


def _build_rule(name: str, arguments: dict[str, Any], place: str) -> Callable[..., Any]:
    # jsonargparse checks names and types as it does for the rest of the configuration
    parser = ArgumentParser(exit_on_error=False)
    accepted = parser.add_class_arguments(RULES[name])
    try:
        with strict_flags():
            parsed = parser.parse_object(arguments)
        rule: Callable[..., Any] = RULES[name](**parsed.as_dict())
    except (ArgumentError, ValueError) as error:
        takes = ", ".join([*accepted, *COMMON_OPTIONS])
        raise ValueError(f"{place}: {error} (rule: {name} takes {takes})") from error
    return rule
