"""Comparing policies on the same prompts: one call from folders to a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lit_rlhf.data import DataSource, DialogueEncoder, TextContract
from lit_rlhf.data.contract import CONTRACT_FILE
from lit_rlhf.evaluation.comparison import (
    HeadToHead,
    Outcomes,
    ScoreSummary,
    outcomes,
    score_summary,
)
from lit_rlhf.evaluation.policies import PolicySamples, policy_samples
from lit_rlhf.evaluation.progress import progress_line
from lit_rlhf.evaluation.responses import Responses, Turns
from lit_rlhf.evaluation.sampling import encode_prompts, loaded_policy
from lit_rlhf.models import ModelOptions, load_tokenizer
from lit_rlhf.rewards import WeightedReward, source_names
from lit_rlhf.rollout import SamplingOptions

DEFAULT_PROMPT_LENGTH = 512


@dataclass(frozen=True)
class PolicyReport:
    """What one policy's responses are worth.

    Attributes:
        path: Folder or hub id.
        scores: Mean score and its interval, by reward.
        outcomes: Win, tie and lose rates against the baseline, by reward; none for the baseline
            itself.
        metrics: Length (tokens), truncation rate, KL (nats per response) and so on, by the names of
            `lit_rlhf.evaluation.policies.METRICS`.
    """

    path: str
    scores: dict[str, ScoreSummary]
    outcomes: dict[str, Outcomes]
    metrics: dict[str, float]


@dataclass(frozen=True)
class Comparison:
    """Policies on the same prompts.

    Attributes:
        policies: Reports by policy name, the baseline first.
        samples: The responses, by policy name.
        rewards: Sources of the rewards by reward name, a rule as its mapping.
        n_prompts: Number of prompts.
        shortened: Prompts that lost their oldest turns or their beginning to fit the length.
        dialogues: The prompts as they were read.
    """

    policies: dict[str, PolicyReport]
    samples: dict[str, PolicySamples]
    rewards: dict[str, str | dict[str, Any]]
    n_prompts: int
    shortened: int
    dialogues: Sequence[Turns] = ()

    @property
    def baseline(self) -> str:
        """Name of the first policy."""
        return next(iter(self.policies))

    @property
    def head_to_heads(self) -> list[HeadToHead]:
        """Each policy against the baseline, by each reward."""
        return [
            HeadToHead(name, reward, outcomes)
            for reward in self.rewards
            for name, report in self.policies.items()
            for outcomes in [report.outcomes.get(reward)]
            if outcomes is not None
        ]

    @property
    def answered(self) -> Responses:
        """What the policies said to the prompts as they were read."""
        responses = {name: samples.responses for name, samples in self.samples.items()}
        return Responses(self.dialogues, responses)

    def as_dict(self) -> dict[str, Any]:
        """The report without the responses, as JSON takes it: null where a number is not finite."""
        return {
            "baseline": self.baseline,
            "n_prompts": self.n_prompts,
            "shortened_prompts": self.shortened,
            "rewards": self.rewards,
            "policies": {
                name: {
                    "path": report.path,
                    "rewards": {
                        key: score._asdict() | {"against_baseline": _fields(report.outcomes, key)}
                        for key, score in report.scores.items()
                    },
                    **{key: _finite(value) for key, value in report.metrics.items()},
                }
                for name, report in self.policies.items()
            },
        }

    def records(self) -> list[dict[str, Any]]:
        """One record for each response of each policy."""
        return [
            record for name, samples in self.samples.items() for record in samples.records(name)
        ]


def compared_policies(
    policies: Sequence[str],
    prompts: DataSource,
    rewards: Mapping[str, float | Mapping[str, Any]],
    sampling: SamplingOptions,
    options: ModelOptions | None = None,
    device: torch.device | None = None,
    batch_size: int = 32,
    tie_margin: float = 0.0,
    chat_template: str = "tokenizer",
    max_prompt_length: int | None = None,
    max_prompts: int | None = None,
    seed: int = 0,
) -> Comparison:
    """Sample from several policies on the same prompts, and score and compare the responses.

    Args:
        policies: Folders or hub ids of causal language models. The first is the baseline: the
            others win, tie or lose against it, and it is the reference of KL.
        prompts: Where the prompts come from.
        rewards: Weight or mapping by source, as for PPO; here each is reported by itself, times its
            weight and not normalized. May be empty.
        sampling: How responses are sampled.
        options: How models are loaded; `None` takes the defaults.
        device: Where to run; `None` is the CPU.
        batch_size: Prompts per batch.
        tie_margin: Largest difference in a reward (times its weight) that still is a tie.
        chat_template: `tokenizer` for the policies' own, or the name of a built-in one.
        max_prompt_length: Longest prompt in tokens; `None` takes the longest sequence that the
            baseline was trained on if its folder says so, else 512.
        max_prompts: Use only this many of the first prompts; `None` takes all.
        seed: Of sampling and of the intervals.

    Raises:
        RecordError: If the prompts cannot be read.
        ValueError: If policies or reward models do not share one tokenizer and template, a policy
            is named twice, or an argument is out of range.
    """
    options, device = options or ModelOptions(), device or torch.device("cpu")
    if not tie_margin >= 0:
        raise ValueError(f"tie_margin: expected a number >= 0, got {tie_margin}")
    names = short_names(policies, "policies")
    encoder = shared_encoder(policies, chat_template, max_prompt_length, options)
    encoded = encode_prompts(prompts, encoder, max_prompts)
    reward_names = short_names(list(rewards), "rewards") if rewards else []
    judges = {
        name: loaded_reward(source, rewards[source], options, encoder).to(device)
        for name, source in zip(reward_names, rewards, strict=True)
    }
    reference = loaded_policy(policies[0], options, device)
    samples = {}
    for name, path in zip(names, policies, strict=True):
        policy = reference if path == policies[0] else loaded_policy(path, options, device)
        with progress_line(f"responses of {name}", len(encoded.examples)) as progress:
            samples[name] = policy_samples(
                policy,
                reference,
                encoder,
                encoded.examples,
                judges,
                sampling,
                batch_size,
                seed,
                progress,
            )
        del policy  # before the next one is loaded
    return Comparison(
        policies={
            name: _report(path, samples[name], samples[names[0]], tie_margin, seed)
            for name, path in zip(names, policies, strict=True)
        },
        samples=samples,
        rewards={
            name: dict(value) if isinstance(value, Mapping) and "rule" in value else source
            for name, (source, value) in zip(judges, rewards.items(), strict=True)
        },
        n_prompts=len(encoded.examples),
        shortened=encoded.counts.shortened + encoded.counts.cut_prompts,
        dialogues=encoded.dialogues,
    )


def shared_encoder(
    policies: Sequence[str],
    chat_template: str = "tokenizer",
    max_prompt_length: int | None = None,
    options: ModelOptions | None = None,
) -> DialogueEncoder:
    """The one encoder of several policies, the first one's.

    Raises:
        ValueError: If a policy would be shown text otherwise than its folder says it was trained,
            or otherwise than the first policy; with both renderings.
    """
    trust_remote_code = (options or ModelOptions()).trust_remote_code
    encoders: list[DialogueEncoder] = []
    for path in policies:
        saved = _saved_contract(path)
        limit = max_prompt_length
        if limit is None:
            limit = DEFAULT_PROMPT_LENGTH if saved is None else saved.max_length
        tokenizer = load_tokenizer(path, trust_remote_code)
        try:
            encoder = DialogueEncoder(tokenizer, chat_template, limit)
        except ValueError as error:
            raise ValueError(f"policy {path!r}: {error}") from error
        mismatch = None if saved is None else saved.mismatch(encoder.contract)
        if mismatch is not None:
            raise ValueError(
                f"model {path!r}: expected to show it text as in its training (here), got other "
                f"text (there): {mismatch}"
            )
        mismatch = None if not encoders else encoder.contract.mismatch(encoders[0].contract)
        if mismatch is not None:
            raise ValueError(
                f"model {path!r} (here): expected one that reads text as the first one, "
                f"{policies[0]!r} (there), does, or they cannot be compared: {mismatch}"
            )
        encoders.append(encoder)
    return encoders[0]


def loaded_reward(
    source: str,
    weight: float | Mapping[str, Any],
    options: ModelOptions,
    encoder: DialogueEncoder,
) -> WeightedReward:
    """One reward by itself, times its weight.

    Raises:
        ValueError: If there is no such reward, or it is a reward model that was trained on text
            rendered otherwise than the policies'.
    """
    reward = WeightedReward({source: weight}, options, encoder.tokenizer).eval()
    for model in reward.models:
        model.check_contract(encoder.contract)
    return reward


def short_names(sources: Sequence[str], argument: str) -> list[str]:
    """The last part of each path or function name, or the whole where two would be equal.

    Raises:
        ValueError: If a source is named twice, or there is none.
    """
    if not sources or len(set(sources)) < len(sources):
        raise ValueError(f"{argument}: expected one or more, each once, got {list(sources)}")
    return list(source_names(sources).values())


def _report(
    path: str, samples: PolicySamples, baseline: PolicySamples, tie_margin: float, seed: int
) -> PolicyReport:
    rewards = [] if samples is baseline else list(samples.scores)
    return PolicyReport(
        path=path,
        scores={name: score_summary(scores, seed) for name, scores in samples.scores.items()},
        outcomes={
            name: outcomes(samples.scores[name], baseline.scores[name], tie_margin, seed)
            for name in rewards
        },
        metrics=samples.metrics,
    )


def _saved_contract(path: str) -> TextContract | None:
    return TextContract.load(path) if (Path(path) / CONTRACT_FILE).is_file() else None


def _fields(outcomes: Mapping[str, Outcomes], reward: str) -> dict[str, Any] | None:
    return outcomes[reward]._asdict() if reward in outcomes else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
