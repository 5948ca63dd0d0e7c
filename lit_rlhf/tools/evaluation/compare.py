"""Compare policies: sample from each on the same prompts, score the responses, and see who wins.

Notation: `N` prompts, `B` prompts per batch, `T` response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from rich import box
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from lit_rlhf.data import DataSource, DialogueEncoder, OnBadRecord
from lit_rlhf.files import ProgressFile, write_json_lines
from lit_rlhf.forward import LanguageModel
from lit_rlhf.functional import kl_estimate
from lit_rlhf.models import ModelOptions
from lit_rlhf.rewards import Rewards, WeightedReward, plain_rewards, split_rewards
from lit_rlhf.rollout import (
    RolloutMetrics,
    SamplingOptions,
    compute_logprobs,
    compute_policy_statistics,
    decode_responses,
)
from lit_rlhf.tools.evaluation.loading import (
    load_policy,
    load_reward,
    load_shared_encoder,
    short_names,
)
from lit_rlhf.tools.evaluation.outcomes import (
    HeadToHead,
    Outcomes,
    ScoreSummary,
    outcome_rates,
    outcomes_table,
    score_summary,
)
from lit_rlhf.tools.evaluation.output import print_table, progress_bar
from lit_rlhf.tools.evaluation.responses import Responses, SampledResponse
from lit_rlhf.tools.evaluation.sampling import (
    EncodedPrompts,
    SampledBatch,
    collect_responses,
    encode_prompt_records,
    hash_prompts,
    model_files,
    read_prompts,
    sample_batches,
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
"""Metrics of a policy besides its scores: the `rollout/*` metrics of the same names."""

_METRIC_ROWS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("length, tokens", "response_length", "{:.1f}".format),
    ("truncated", "truncation_rate", "{:.1%}".format),
    ("KL, nats", "kl", "{:.2f}".format),
    ("perplexity", "perplexity", "{:.2f}".format),
    ("distinct-2", "distinct_2", "{:.3f}".format),
)
"""Rows of the table: label, metric, and how its value is formatted."""


@dataclass(frozen=True)
class PolicySamples:
    """A policy's responses to `N` prompts, in the order of the prompts, with their scores.

    Attributes:
        responses: The `N` responses. Their text is the one that the rewards read, with any
            whitespace at its ends.
        scores: Scores under each reward, `[N]` float32.
        kl: KL estimate to the reference on each response, `[N]` float32, nats. It is the k1
            estimate, so a single value can be negative.
        metrics: Values of `METRICS` over all responses.
    """

    responses: list[SampledResponse]
    scores: dict[str, Tensor]
    kl: Tensor
    metrics: dict[str, float]

    def records(self, policy: str) -> list[dict[str, Any]]:
        """Build one record per response, for a JSON lines file that `read_responses` reads.

        Args:
            policy: Name of the policy.
        """
        return [
            {
                "policy": policy,
                **asdict(response),
                "scores": {name: scores[row].item() for name, scores in self.scores.items()},
                "kl": self.kl[row].item(),
            }
            for row, response in enumerate(self.responses)
        ]


@dataclass(frozen=True)
class PolicyReport:
    """Summary of one policy.

    Attributes:
        path: Folder or hub id.
        scores: Mean score under each reward, with its interval.
        outcomes: Win, tie and lose rates against the baseline under each reward; empty for the
            baseline itself.
        metrics: Values of `METRICS`.
    """

    path: str
    scores: dict[str, ScoreSummary]
    outcomes: dict[str, Outcomes]
    metrics: dict[str, float]


@dataclass(frozen=True)
class Comparison:
    """Policies compared on the same prompts.

    Attributes:
        policies: Reports by policy name, the baseline first.
        samples: Responses by policy name.
        rewards: Source of each reward by its name; a rule is given as its mapping.
        n_prompts: Number of prompts.
        shortened: Number of prompts that lost their oldest turns or their beginning to fit.
    """

    policies: dict[str, PolicyReport]
    samples: dict[str, PolicySamples]
    rewards: dict[str, str | dict[str, Any]]
    n_prompts: int
    shortened: int

    @property
    def baseline(self) -> str:
        """Name of the first policy."""
        return next(iter(self.policies))

    @property
    def head_to_heads(self) -> list[HeadToHead]:
        """Each policy against the baseline, under each reward."""
        return [
            HeadToHead(name, reward, report.outcomes[reward])
            for reward in self.rewards
            for name, report in self.policies.items()
            if reward in report.outcomes
        ]

    @property
    def responses(self) -> Responses:
        """The responses of all policies as text, for a judge."""
        return Responses(
            [response.prompt for response in self.samples[self.baseline].responses],
            {
                name: [response.response for response in samples.responses]
                for name, samples in self.samples.items()
            },
        )

    def as_dict(self) -> dict[str, Any]:
        """Convert the report to JSON types, without the responses; None replaces inf and nan."""
        return {
            "baseline": self.baseline,
            "n_prompts": self.n_prompts,
            "shortened_prompts": self.shortened,
            "rewards": self.rewards,
            "policies": {
                name: {
                    "path": report.path,
                    "rewards": {
                        reward: {
                            **score._asdict(),
                            "against_baseline": report.outcomes[reward]._asdict()
                            if reward in report.outcomes
                            else None,
                        }
                        for reward, score in report.scores.items()
                    },
                    **{
                        metric: value if math.isfinite(value) else None
                        for metric, value in report.metrics.items()
                    },
                }
                for name, report in self.policies.items()
            },
        }

    def records(self) -> list[dict[str, Any]]:
        """Build one record per response of each policy; see `PolicySamples.records`."""
        return [
            record for name, samples in self.samples.items() for record in samples.records(name)
        ]


def compare_policies(
    policies: Sequence[str],
    prompts: DataSource,
    rewards: Rewards,
    sampling: SamplingOptions,
    model_options: ModelOptions | None = None,
    device: torch.device | None = None,
    batch_size: int = 32,
    tie_margin: float = 0.0,
    chat_template: str = "tokenizer",
    max_prompt_length: int | None = None,
    max_prompts: int | None = None,
    on_bad_record: OnBadRecord = "error",
    seed: int = 0,
    responses: str | Path | None = None,
) -> Comparison:
    """Sample from several policies on the same prompts, and score and compare the responses.

    Args:
        policies: Folders or hub ids of causal language models. The first is the baseline: the
            others win, tie or lose against it, and KL is measured from it.
        prompts: Where the prompts come from.
        rewards: Weights or mappings by source, or a list of sources, as for PPO: also callables and
            loaded reward models. Each reward is reported by itself, times its weight and never
            normalized. May be empty.
        sampling: How responses are sampled.
        model_options: How models are loaded; `None` takes the defaults.
        device: Where to run; `None` is the CPU.
        batch_size: Prompts per batch. The responses depend on it.
        tie_margin: Largest difference of scores (times the weight) that counts as a tie.
        chat_template: `tokenizer` for the policies' own, or the name of a built-in one.
        max_prompt_length: Longest prompt in tokens; `None` decides as `load_shared_encoder` does.
        max_prompts: Number of prompts to use, from the first; `None` uses all.
        on_bad_record: What to do about a record without a usable prompt, see `read_prompts`.
        seed: Seed of the sampling, the same for every policy, and of the bootstrap intervals.
        responses: JSON lines file for all responses with their scores and KL, written when they are
            complete. Until then `<responses>.partial` keeps the finished batches, from which the
            same call continues.

    Raises:
        OSError: If a file cannot be written.
        RecordError: If the prompts cannot be read.
        ValueError: If policies or reward models do not share one tokenizer and template, a policy
            is given twice, an argument is out of range, or the finished batches are those of
            another call.
    """
    model_options, device = model_options or ModelOptions(), device or torch.device("cpu")
    if not tie_margin >= 0:
        raise ValueError(f"tie_margin: expected a number >= 0, got {tie_margin}")
    names = short_names(policies, "policies")
    encoder = load_shared_encoder(policies, chat_template, max_prompt_length, model_options)
    records = read_prompts(prompts, max_prompts, on_bad_record)
    encoded = encode_prompt_records(records, encoder, on_bad_record)
    plain = plain_rewards(rewards)
    loaded_rewards = {
        name: load_reward(reward, model_options, encoder).to(device)
        for name, reward in split_rewards(rewards).items()
    }
    available = {name for example in encoded.examples for name in example.fields}
    for reward in loaded_rewards.values():
        reward.check_fields(available, "the prompts' records")
    settings = {
        "policies": model_files(policies),
        "prompts": hash_prompts(encoded),
        "rewards": plain,
        "reward_models": model_files(list(plain)),
        "sampling": asdict(sampling),
        "batch_size": batch_size,
        "seed": seed,
        "dtype": model_options.dtype,
        "device": str(device),
    }
    # the baseline stays loaded: it is every policy's reference
    reference = load_policy(policies[0], model_options, device)
    samples = {}
    with ProgressFile(responses, settings) as unfinished:
        for name, path in zip(names, policies, strict=True):
            policy = reference if path == policies[0] else load_policy(path, model_options, device)
            with progress_bar(f"responses of {name}", len(encoded.examples)) as progress:
                samples[name] = measure_policy(
                    policy,
                    reference,
                    encoder,
                    encoded,
                    loaded_rewards,
                    sampling,
                    batch_size,
                    seed,
                    progress,
                    unfinished,
                    name,
                )
            del policy  # frees its memory before the next one is loaded
        comparison = Comparison(
            policies={
                name: _summarize(path, samples[name], samples[names[0]], tie_margin, seed)
                for name, path in zip(names, policies, strict=True)
            },
            samples=samples,
            rewards={
                name: dict(value) if isinstance(value, Mapping) and "rule" in value else source
                for name, (source, value) in zip(loaded_rewards, plain.items(), strict=True)
            },
            n_prompts=len(encoded.examples),
            shortened=encoded.shortened,
        )
        if responses is not None:
            write_json_lines(responses, comparison.records())
    return comparison


def measure_policy(
    policy: LanguageModel,
    reference: LanguageModel,
    encoder: DialogueEncoder,
    prompts: EncodedPrompts,
    rewards: Mapping[str, WeightedReward],
    sampling: SamplingOptions,
    batch_size: int = 32,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
    unfinished: ProgressFile | None = None,
    name: str = "",
) -> PolicySamples:
    """Sample one response to each prompt and compute its scores and its KL to the reference.

    Args:
        policy: The policy.
        reference: The policy that KL is measured from; may be `policy` itself.
        encoder: The encoder of both.
        prompts: The prompts.
        rewards: Rewards by name.
        sampling: How to sample. Log-probs are taken at its temperature.
        batch_size: Prompts per batch.
        seed: Seed of the sampling; equal seeds give every policy the same seeds, batch by batch.
        progress: Called with the number of prompts after each batch.
        unfinished: Finished batches to continue from, and to add others to.
        name: Name of the policy in `unfinished`.

    Raises:
        ValueError: If there is no prompt, or prompts and responses do not fit into the model's
            positions.
    """
    if not prompts.examples:
        raise ValueError("prompts: expected at least one prompt, got none")
    unfinished = unfinished or ProgressFile(None, {})
    batches, responses = [], dict[int, list[SampledResponse]]()
    for tensors, texts in unfinished.batches(name):
        batch = _MeasuredBatch.from_json(tensors)
        batches.append(batch)
        for position, fields in zip(batch.positions, texts, strict=True):
            responses[position] = [SampledResponse(prompts.records[position].prompt, **fields)]
    if progress is not None:
        progress(len(responses))
    for sampled in sample_batches(
        policy,
        encoder,
        prompts.examples,
        sampling,
        batch_size,
        seed,
        progress=progress,
        finished=set(responses),
    ):
        texts = decode_responses(sampled.rollouts, encoder.tokenizer)
        collected = collect_responses(prompts.records, sampled, texts)
        batch = _measure_batch(policy, reference, sampled, rewards, sampling.temperature)
        fields = [collected[position][0].sampled_fields() for position in batch.positions]
        unfinished.add(name, [batch.as_json(), fields])
        responses |= collected
        batches.append(batch)
    # batches are sorted by length; everything is returned in the order of the prompts
    order = torch.tensor([i for batch in batches for i in batch.positions]).argsort()
    logprobs, ref_logprobs, entropy, response_ids, response_mask, terminated = (
        _join_batches([getattr(batch, name) for batch in batches], order)
        for name in (
            "logprobs",
            "ref_logprobs",
            "entropy",
            "response_ids",
            "response_mask",
            "terminated",
        )
    )
    totals = RolloutMetrics()
    totals.update(logprobs, ref_logprobs, entropy, response_mask, response_ids, terminated)
    metrics = totals.compute()
    return PolicySamples(
        responses=[responses[position][0] for position in range(len(prompts.examples))],
        scores={
            name: _join_batches([batch.scores[name] for batch in batches], order)
            for name in rewards
        },
        kl=kl_estimate(logprobs, ref_logprobs).sum(dim=1),
        metrics={name: float(metrics[f"rollout/{name}"]) for name in METRICS},
    )


class _MeasuredBatch(NamedTuple):
    """Tensors of one batch on the CPU; `[B]` or `[B, T]`, as in `RolloutMetrics`."""

    positions: list[int]
    scores: dict[str, Tensor]
    logprobs: Tensor
    ref_logprobs: Tensor
    entropy: Tensor
    response_ids: Tensor
    response_mask: Tensor
    terminated: Tensor

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON types. Floats keep all of their digits."""
        tensors = {name: getattr(self, name) for name in self._fields[2:]}
        return {
            "positions": self.positions,
            "scores": {name: scores.tolist() for name, scores in self.scores.items()},
            "tensors": {
                name: [str(tensor.dtype), tensor.tolist()] for name, tensor in tensors.items()
            },
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Undo `as_json`."""
        tensors = {
            name: torch.tensor(values, dtype=getattr(torch, dtype.removeprefix("torch.")))
            for name, (dtype, values) in fields["tensors"].items()
        }
        scores = {name: torch.tensor(values) for name, values in fields["scores"].items()}
        return cls(fields["positions"], scores, **tensors)


def _measure_batch(
    policy: LanguageModel,
    reference: LanguageModel,
    batch: SampledBatch,
    rewards: Mapping[str, WeightedReward],
    temperature: float,
) -> _MeasuredBatch:
    rollouts, prompts = batch.rollouts, batch.prompts
    statistics = rollouts.statistics_at(temperature)
    if statistics is None:
        statistics = compute_policy_statistics(policy, rollouts, temperature)
    # not a second forward for the baseline: its KL to itself has to be exactly 0
    ref_logprobs = (
        statistics.logprobs
        if reference is policy
        else compute_logprobs(reference, rollouts, temperature)
    )
    return _MeasuredBatch(
        positions=batch.positions,
        scores={
            name: reward(rollouts, prompts.texts, None, prompts.fields, prompts.turns).cpu()
            for name, reward in rewards.items()
        },
        logprobs=statistics.logprobs.cpu(),
        ref_logprobs=ref_logprobs.cpu(),
        entropy=statistics.entropy.cpu(),
        response_ids=rollouts.response_ids.cpu(),
        response_mask=rollouts.response_mask.cpu(),
        terminated=rollouts.terminated.cpu(),
    )


def _join_batches(parts: Sequence[Tensor], order: Tensor) -> Tensor:
    """Concatenate the rows of all batches, then sort them; narrower batches are zero-padded.

    The padding lies outside of the response mask, which is itself padded with False.
    """
    if parts[0].dim() == 2:
        width = max(part.shape[1] for part in parts)
        parts = [functional.pad(part, (0, width - part.shape[1])) for part in parts]
    return torch.cat(list(parts))[order]


def _summarize(
    path: str, samples: PolicySamples, baseline: PolicySamples, tie_margin: float, seed: int
) -> PolicyReport:
    compared = [] if samples is baseline else list(samples.scores)
    return PolicyReport(
        path=path,
        scores={name: score_summary(scores, seed) for name, scores in samples.scores.items()},
        outcomes={
            name: outcome_rates(samples.scores[name], baseline.scores[name], tie_margin)
            for name in compared
        },
        metrics=samples.metrics,
    )


def comparison_table(comparison: Comparison, narrow: bool = False) -> Table:
    """Build a terminal table with a column per policy and a row per reward and metric.

    Args:
        comparison: The comparison.
        narrow: Write intervals below their means; three policies then fit into 80 columns.
    """
    gap = "\n" if narrow else " "
    table = Table(
        box=box.HORIZONTALS,
        padding=(0, 1),
        title=f"{comparison.n_prompts} prompts, one response each; mean [95 % interval]",
        caption=f"KL: per response, against {comparison.baseline}",
    )
    table.add_column("")
    reports = comparison.policies.values()
    for name in comparison.policies:
        table.add_column(name, justify="right", overflow="fold")
    for reward in comparison.rewards:
        scores = [report.scores[reward] for report in reports]
        cells = (f"{score.mean:.2f}{gap}[{score.low:.2f}, {score.high:.2f}]" for score in scores)
        table.add_row(reward, *cells, end_section=reward == list(comparison.rewards)[-1])
    for label, metric, format_value in _METRIC_ROWS:
        table.add_row(label, *(format_value(report.metrics[metric]) for report in reports))
    return table


def print_comparison(comparison: Comparison) -> None:
    """Print scores and metrics, then who wins, on standard output."""
    print_table(comparison_table(comparison), comparison_table(comparison, narrow=True))
    rows = comparison.head_to_heads
    if rows:
        print_table(outcomes_table(rows, comparison.baseline))
