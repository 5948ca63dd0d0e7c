"""Comparing policies on the same prompts: one call from folders to a report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from lit_rlhf.data import DataSource, DialogueEncoder, PromptExample
from lit_rlhf.evaluation.loading import load_policy, load_reward, load_shared_encoder, short_names
from lit_rlhf.evaluation.outcomes import (
    HeadToHead,
    Outcomes,
    ScoreSummary,
    outcome_rates,
    outcomes_table,
    score_summary,
)
from lit_rlhf.evaluation.output import print_table, progress_bar
from lit_rlhf.evaluation.responses import Responses, Turns
from lit_rlhf.evaluation.sampling import SampledBatch, load_prompts, sample_batches
from lit_rlhf.forward import LanguageModel
from lit_rlhf.functional import kl_estimate
from lit_rlhf.models import ModelOptions
from lit_rlhf.rewards import WeightedReward
from lit_rlhf.rollout import (
    RolloutBatch,
    SamplingOptions,
    compute_logprobs,
    compute_policy_statistics,
    decode_responses,
    rollout_metrics,
)

METRICS = (
    "response_length",
    "truncation_rate",
    "kl",
    "kl_per_token",
    "perplexity",
    "ref_perplexity",
    "entropy",
    "distinct_2",
)
"""What is measured of a policy besides its scores: the `rollout/*` metrics of the same name."""


@dataclass(frozen=True)
class PolicySamples:
    """A policy's responses to `N` prompts, in the order of the prompts.

    Attributes:
        prompts: Rendered prompts, `N` texts.
        responses: Decoded responses without special tokens, `N` texts.
        scores: Scores by reward, each `[N]` float32.
        kl: KL to the reference on each response, `[N]` float32, nats (k1, so it can be < 0).
        lengths: Tokens of each response, EOS included, `[N]` long.
        terminated: Whether each response ended by itself, `[N]` bool.
        metrics: Values by the names of `METRICS`, over all responses.
    """

    prompts: list[str]
    responses: list[str]
    scores: dict[str, Tensor]
    kl: Tensor
    lengths: Tensor
    terminated: Tensor
    metrics: dict[str, float]

    def records(self, policy: str) -> list[dict[str, Any]]:
        """One record for each response, for a JSON lines file."""
        return [
            {
                "policy": policy,
                "prompt": prompt,
                "response": self.responses[row],
                "scores": {name: scores[row].item() for name, scores in self.scores.items()},
                "kl": self.kl[row].item(),
                "response_length": int(self.lengths[row]),
                "terminated": bool(self.terminated[row]),
            }
            for row, prompt in enumerate(self.prompts)
        ]


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


def compare_policies(
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
    encoder = load_shared_encoder(policies, chat_template, max_prompt_length, options)
    encoded = load_prompts(prompts, encoder, max_prompts)
    reward_names = short_names(list(rewards), "rewards") if rewards else []
    judges = {
        name: load_reward(source, rewards[source], options, encoder).to(device)
        for name, source in zip(reward_names, rewards, strict=True)
    }
    reference = load_policy(policies[0], options, device)
    samples = {}
    for name, path in zip(names, policies, strict=True):
        policy = reference if path == policies[0] else load_policy(path, options, device)
        with progress_bar(f"responses of {name}", len(encoded.examples)) as progress:
            samples[name] = measure_policy(
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


@dataclass(frozen=True)
class _Part:
    """What is kept of one batch, on the CPU."""

    positions: list[int]
    texts: list[str]
    responses: list[str]
    rollouts: RolloutBatch
    scores: dict[str, Tensor]
    logprobs: Tensor
    ref_logprobs: Tensor
    entropy: Tensor


def measure_policy(
    policy: LanguageModel,
    reference: LanguageModel,
    encoder: DialogueEncoder,
    examples: Sequence[PromptExample],
    rewards: Mapping[str, WeightedReward],
    options: SamplingOptions,
    batch_size: int = 32,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> PolicySamples:
    """Sample one response to each prompt and measure it.

    Args:
        policy: The policy.
        reference: What KL is measured against, on the same device.
        encoder: The encoder of both.
        examples: The prompts, `N` of them.
        rewards: Rewards by name.
        options: How to sample; log-probs are taken at the same temperature.
        batch_size: Prompts per batch.
        seed: Of the sampling; the same seed gives every policy the same seeds, batch by batch.
        progress: Called with the number of prompts of each batch when it is done.

    Raises:
        ValueError: If there is no prompt, or prompts and responses do not fit into the model's
            positions.
    """
    if not examples:
        raise ValueError("examples: expected at least one prompt, got none")
    sampled = sample_batches(policy, encoder, examples, options, batch_size, seed, 1, progress)
    parts = [
        _measured(policy, reference, encoder, batch, rewards, options.temperature)
        for batch in sampled
    ]
    order = torch.tensor([i for part in parts for i in part.positions]).argsort()
    logprobs, ref_logprobs, entropy = (
        _joined([getattr(part, name) for part in parts], order)
        for name in ("logprobs", "ref_logprobs", "entropy")
    )
    response_ids, response_mask, terminated = (
        _joined([getattr(part.rollouts, name) for part in parts], order)
        for name in ("response_ids", "response_mask", "terminated")
    )
    metrics = rollout_metrics(
        logprobs, ref_logprobs, entropy, response_mask, response_ids, terminated
    )
    texts = [text for part in parts for text in part.texts]
    responses = [text for part in parts for text in part.responses]
    return PolicySamples(
        prompts=[texts[row] for row in order.tolist()],
        responses=[responses[row] for row in order.tolist()],
        scores={name: _joined([part.scores[name] for part in parts], order) for name in rewards},
        kl=kl_estimate(logprobs, ref_logprobs).sum(dim=1),
        lengths=response_mask.sum(dim=1),
        terminated=terminated,
        metrics={name: float(metrics[f"rollout/{name}"]) for name in METRICS},
    )


def _measured(
    policy: LanguageModel,
    reference: LanguageModel,
    encoder: DialogueEncoder,
    batch: SampledBatch,
    rewards: Mapping[str, WeightedReward],
    temperature: float,
) -> _Part:
    texts, rollouts = batch.prompts.texts, batch.rollouts
    statistics = rollouts.statistics_at(temperature)
    if statistics is None:
        statistics = compute_policy_statistics(policy, rollouts, temperature)
    ref_logprobs = (
        statistics.logprobs
        if reference is policy
        else compute_logprobs(reference, rollouts, temperature)
    )
    scores = {name: reward(rollouts, texts, None).cpu() for name, reward in rewards.items()}
    return _Part(
        batch.positions,
        texts,
        decode_responses(rollouts, encoder.tokenizer),
        rollouts.map(lambda tensor: tensor.cpu()),
        scores,
        statistics.logprobs.cpu(),
        ref_logprobs.cpu(),
        statistics.entropy.cpu(),
    )


def _joined(parts: Sequence[Tensor], order: Tensor) -> Tensor:
    """Rows of all batches in `order`, as wide as the widest; what is filled up is outside masks."""
    if parts[0].dim() == 2:
        width = max(part.shape[1] for part in parts)
        parts = [functional.pad(part, (0, width - part.shape[1])) for part in parts]
    return torch.cat(list(parts))[order]


def _report(
    path: str, samples: PolicySamples, baseline: PolicySamples, tie_margin: float, seed: int
) -> PolicyReport:
    rewards = [] if samples is baseline else list(samples.scores)
    return PolicyReport(
        path=path,
        scores={name: score_summary(scores, seed) for name, scores in samples.scores.items()},
        outcomes={
            name: outcome_rates(samples.scores[name], baseline.scores[name], tie_margin, seed)
            for name in rewards
        },
        metrics=samples.metrics,
    )


def _fields(outcomes: Mapping[str, Outcomes], reward: str) -> dict[str, Any] | None:
    return outcomes[reward]._asdict() if reward in outcomes else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# row, its metric, and how a value is written
_ROWS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("length, tokens", "response_length", "{:.1f}".format),
    ("truncated", "truncation_rate", "{:.1%}".format),
    ("KL, nats", "kl", "{:.2f}".format),
    ("perplexity", "perplexity", "{:.2f}".format),
    ("distinct-2", "distinct_2", "{:.3f}".format),
)


def comparison_table(comparison: Comparison) -> Table:
    """A column for each policy, a row for each reward and metric."""
    table = Table(
        box=box.HORIZONTALS,  # three policies fit into 80 columns
        padding=(0, 1),
        title=f"{comparison.n_prompts} prompts, one response each; mean [95 % interval]",
        caption=f"KL: per response, against {comparison.baseline}",
    )
    table.add_column("")
    reports = comparison.policies
    for name in reports:
        table.add_column(name, justify="right", overflow="fold")
    for reward in comparison.rewards:
        scores = (_score(report, reward) for report in reports.values())
        table.add_row(reward, *scores, end_section=reward == list(comparison.rewards)[-1])
    for label, metric, write in _ROWS:
        table.add_row(label, *(write(report.metrics[metric]) for report in reports.values()))
    return table


def print_comparison(comparison: Comparison) -> None:
    """Print scores and metrics, then who won, on standard output."""
    print_table(comparison_table(comparison))
    rows = comparison.head_to_heads
    if rows:
        print_table(outcomes_table(rows, comparison.baseline))


def _score(report: PolicyReport, reward: str) -> str:
    score = report.scores[reward]
    return f"{score.mean:.2f} [{score.low:.2f}, {score.high:.2f}]"
