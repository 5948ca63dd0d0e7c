"""Compare policies: sample from each on the same prompts, score the responses, and see who wins.

Notation: `N` prompts, `B` prompts per batch, `T` response tokens.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lit_callbacks.gain import opening_of, repetition_of
from lit_rlhf.checks import check_count, check_not_negative
from lit_rlhf.data import (
    DataSource,
    DialogueEncoder,
    OnBadRecord,
    PromptBatch,
    PromptExample,
    PromptRecord,
)
from lit_rlhf.files import ProgressFile
from lit_rlhf.forward import LanguageModel, set_longest_sequence
from lit_rlhf.functional import best_of_n, best_of_n_kl, kl_estimate
from lit_rlhf.models import ModelOptions, max_positions
from lit_rlhf.rewards import Rewards, Scores, WeightedReward, plain_rewards, split_rewards
from lit_rlhf.rollout import (
    RolloutBatch,
    RolloutMetrics,
    SamplingOptions,
    compute_policy_statistics,
    decode_responses,
)
from lit_rlhf.tools.evaluation.loading import CPU, load_policy, load_shared_encoder, short_names
from lit_rlhf.tools.evaluation.outcomes import (
    HeadToHeads,
    Outcomes,
    ScoreSummary,
    outcome_rates,
    outcomes_table,
    score_summary,
)
from lit_rlhf.tools.evaluation.output import make_table, print_table, progress_bar, to_json_types
from lit_rlhf.tools.evaluation.responses import Responses, SampledResponse
from lit_rlhf.tools.evaluation.sampling import (
    EncodedPrompts,
    count_shortened,
    describe_responses,
    encode_prompt_records,
    hash_models,
    hash_prompts,
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


class MetricRow(NamedTuple):
    """A row of the table.

    Attributes:
        label: Its name in the table.
        metric: Name of the metric.
        format_value: Formats the value of the metric.
    """

    label: str
    metric: str
    format_value: Callable[[float], str]


_METRIC_ROWS = (
    MetricRow("length, tokens", "response_length", "{:.1f}".format),
    MetricRow("truncated", "truncation_rate", "{:.1%}".format),
    MetricRow("commonest opening", "commonest_opening", "{:.1%}".format),
    MetricRow("repetition", "repetition", "{:.1%}".format),
    MetricRow("KL, nats", "kl", "{:.2f}".format),
    MetricRow("perplexity", "perplexity", "{:.2f}".format),
    MetricRow("distinct-2", "distinct_2", "{:.3f}".format),
)


@dataclass(frozen=True)
class PolicySamples:
    """A policy's responses to `N` prompts, in the order of the prompts, with their scores.

    Attributes:
        responses: The responses, `S` in a row for each prompt.
        scores: Scores of the responses by reward, `[N * S]` float32; NaN where it abstains.
        kl: k1 estimates of the KL to the reference in nats, `[N * S]` float32. A single value can
            be negative.
        metrics: The values of `METRICS`, as far as there are any (`distinct_2` needs a response of
            two tokens), the share of the commonest opening (`commonest_opening`), and the mean
            share of pairs of words that a response repeats (`repetition`).
        samples_per_prompt: Number of responses to each prompt, `S`.
    """

    responses: list[SampledResponse]
    scores: dict[str, Tensor]
    kl: Tensor
    metrics: dict[str, float]
    samples_per_prompt: int = 1

    def by_prompt(self, reward: str) -> Tensor:
        """Scores of each prompt's responses, `[N, S]`."""
        return self.scores[reward].view(-1, self.samples_per_prompt)

    def voted(self, *rewards: str) -> Tensor:
        """Whether rewards have a vote for all responses to a prompt, `[N]` bool."""
        votes = [~self.by_prompt(reward).isnan().any(1) for reward in rewards]
        voted = torch.stack(votes).all(0)
        if not voted.any():
            raise ValueError(
                "rewards: expected at least one prompt all of whose responses have scores of "
                f"{' and '.join(rewards)}, got none: it abstains"
            )
        return voted

    def records(self, policy: str) -> list[dict[str, Any]]:
        """Build one record per response, for a JSON lines file that `read_responses` reads."""
        return [
            {
                "policy": policy,
                **asdict(response),
                "scores": {
                    name: None if scores[row].isnan() else scores[row].item()
                    for name, scores in self.scores.items()
                },
                "kl": self.kl[row].item(),
            }
            for row, response in enumerate(self.responses)
        ]


@dataclass(frozen=True)
class PolicyReport:
    """Summary of one policy.

    Attributes:
        path: Folder or hub id.
        scores: Means over prompts, by reward.
        outcomes: Win, tie and lose rates by reward; empty for the baseline itself.
        metrics: The metrics of `PolicySamples`.
        differences: Scores minus the baseline's on the same prompt, by reward; empty for the
            baseline itself.
        complete: Mean scores of the responses that ended, by reward; NaN without any.
    """

    path: str
    scores: dict[str, ScoreSummary]
    outcomes: dict[str, Outcomes]
    metrics: dict[str, float]
    differences: dict[str, ScoreSummary] = field(default_factory=dict)
    complete: dict[str, float] = field(default_factory=dict)


class BestOf(NamedTuple):
    """The best of `n` samples of the baseline by the first reward, over all subsets.

    Attributes:
        n: Number of samples to choose from.
        kl: KL of the best sample from the baseline, in nats.
        scores: Means over prompts, by reward.
        differences: Scores of each other policy minus these, by policy and reward.
    """

    n: int
    kl: float
    scores: dict[str, ScoreSummary]
    differences: dict[str, dict[str, ScoreSummary]]


@dataclass(frozen=True)
class Comparison:
    """Policies compared on the same prompts.

    Attributes:
        policies: Summaries by policy, the baseline first.
        samples: Responses by policy, the baseline first.
        rewards: Source of each reward by its name, or a rule's mapping.
        n_prompts: Number of prompts.
        shortened: Number of prompts that were cut to fit.
        inputs: Hashes of weights, prompts and reward functions.
        best_of: The best of n of the baseline for each n.
    """

    policies: dict[str, PolicyReport]
    samples: dict[str, PolicySamples]
    rewards: dict[str, str | dict[str, Any]]
    n_prompts: int
    shortened: int
    inputs: dict[str, Any] = field(default_factory=dict)
    best_of: list[BestOf] = field(default_factory=list)

    @property
    def baseline(self) -> str:
        """Name of the first policy."""
        return next(iter(self.policies))

    @property
    def samples_per_prompt(self) -> int:
        """Responses of each policy to each prompt."""
        return next((samples.samples_per_prompt for samples in self.samples.values()), 1)

    @property
    def head_to_heads(self) -> list[HeadToHeads]:
        """Each policy against the baseline, under each reward."""
        others = {name: report for name, report in self.policies.items() if report.outcomes}
        return [
            HeadToHeads(
                judge=reward,
                outcomes={name: report.outcomes[reward] for name, report in others.items()},
            )
            for reward in (self.rewards if others else ())
        ]

    @property
    def responses(self) -> Responses:
        """The first response of all policies to each prompt as text, for a judge."""
        n = self.samples_per_prompt
        return Responses(
            prompts=[response.prompt for response in self.samples[self.baseline].responses[::n]],
            by_policy={
                name: [response.response for response in samples.responses[::n]]
                for name, samples in self.samples.items()
            },
        )

    def as_dict(self) -> dict[str, Any]:
        """Convert the report to JSON types, without the responses."""
        report: dict[str, Any] = to_json_types(
            {
                "baseline": self.baseline,
                "n_prompts": self.n_prompts,
                "shortened_prompts": self.shortened,
                "inputs": self.inputs,
                "rewards": self.rewards,
                "policies": {
                    name: {
                        "path": report.path,
                        "rewards": {
                            reward: {
                                **score._asdict(),
                                "complete": report.complete.get(reward),
                                "against_baseline": report.outcomes.get(reward),
                                "minus_baseline": report.differences.get(reward),
                            }
                            for reward, score in report.scores.items()
                        },
                        **report.metrics,
                    }
                    for name, report in self.policies.items()
                },
                **({"best_of": self.best_of} if self.best_of else {}),
            }
        )
        return report

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
    *,
    model_options: ModelOptions = ModelOptions(),
    device: torch.device = CPU,
    batch_size: int = 32,
    tie_margin: float = 0.0,
    chat_template: str = "tokenizer",
    max_prompt_length: int | None = None,
    max_prompts: int | None = None,
    on_bad_record: OnBadRecord = "error",
    seed: int = 0,
    responses: str | Path | None = None,
    samples_per_prompt: int = 1,
    best_of: Sequence[int] = (),
    keep_until: ExitStack | None = None,
) -> Comparison:
    """Sample from several policies on the same prompts, and score and compare the responses.

    Args:
        policies: Folders or hub ids. The first is the baseline, which the others are compared with.
        prompts: Where the prompts are.
        rewards: Weights by source, or sources. A source is a reward model, its folder or hub id, a
            callable or `package.module:function`. Each reward is reported by itself, times its
            weight. There may be none.
        sampling: How responses are sampled.
        model_options: How the models are loaded.
        device: Where they compute.
        batch_size: Prompts per batch. The samples depend on it.
        tie_margin: Largest difference of scores that counts as a tie, at least 0.
        chat_template: Template of the dialogues; `tokenizer` for the baseline's own.
        max_prompt_length: Longest prompt in tokens; see `load_shared_encoder`.
        max_prompts: Number of prompts, from the first; `None` for all.
        on_bad_record: Whether a bad prompt is an `error` or left out (`skip`).
        seed: Seed of the sampling, the same for every policy, and of the bootstrap intervals.
        responses: JSON lines file for all responses. Until it is complete, `<responses>.partial`
            keeps finished batches, from which the same call continues.
        samples_per_prompt: Number of responses of each policy to each prompt. Their scores are
            averaged.
        best_of: Sizes for the best of n of the baseline, from 1 to `samples_per_prompt`. The first
            reward chooses.
        keep_until: Has finished batches kept until it is closed without an error, for instance
            until a report on the comparison is written. `None`: until the responses are written.
    """
    check_count("samples_per_prompt", samples_per_prompt)
    if best_of and not (rewards and 1 <= min(best_of) <= max(best_of) <= samples_per_prompt):
        raise ValueError(
            f"best_of: expected sizes from 1 to the {samples_per_prompt} samples_per_prompt and a "
            f"reward that chooses, got {list(best_of)} with {len(plain_rewards(rewards))} rewards"
        )
    check_not_negative("tie_margin", tie_margin)
    paths = dict(zip(short_names(policies, "policies"), policies, strict=True))
    encoder = load_shared_encoder(
        policies,
        chat_template=chat_template,
        max_prompt_length=max_prompt_length,
        model_options=model_options,
    )
    records = read_prompts(prompts, max_prompts, on_bad_record)
    encoded = encode_prompt_records(records, encoder, on_bad_record)
    examples = encoded.examples
    _check_room(policies, examples, sampling, model_options)
    loaded_rewards = _load_rewards(rewards, model_options, encoder, examples, device)
    plain = plain_rewards(rewards)
    inputs = {
        "policies": hash_models(policies),
        "prompts": hash_prompts(examples),
        "reward_models": hash_models(list(plain)),
        **{
            f"source of reward {name}": source_hash
            for name, reward in loaded_rewards.items()
            for source_hash in reward.hash_sources().values()
        },
    }
    settings = {
        **inputs,
        "rewards": plain,
        "sampling": asdict(sampling),
        "batch_size": batch_size,
        "samples_per_prompt": samples_per_prompt,
        "seed": seed,
        "dtype": model_options.dtype,
        "device": str(device),
    }
    # the baseline stays loaded: it is every policy's reference
    reference = load_policy(policies[0], model_options, device, encoder.tokenizer)
    samples: dict[str, PolicySamples] = {}
    with ExitStack() as run_files:
        unfinished = (keep_until or run_files).enter_context(ProgressFile(responses, settings))
        for name, path in paths.items():
            policy = reference
            if samples:
                policy = load_policy(path, model_options, device, encoder.tokenizer)
            samples[name] = measure_policy(
                policy=policy,
                reference=reference,
                encoder=encoder,
                prompts=encoded,
                rewards=loaded_rewards,
                sampling=sampling,
                batch_size=batch_size,
                seed=seed,
                unfinished=unfinished,
                name=name,
                samples_per_prompt=samples_per_prompt,
            )
        baseline = next(iter(samples.values()))
        comparison = Comparison(
            policies={
                name: _summarize(
                    of_policy,
                    baseline=baseline,
                    path=paths[name],
                    tie_margin=tie_margin,
                    seed=seed,
                )
                for name, of_policy in samples.items()
            },
            samples=samples,
            rewards={
                name: dict(value) if isinstance(value, Mapping) and "rule" in value else source
                for name, (source, value) in zip(loaded_rewards, plain.items(), strict=True)
            },
            n_prompts=len(examples),
            shortened=count_shortened(examples),
            inputs=inputs,
            best_of=[_best_of(samples, n=n, seed=seed) for n in best_of],
        )
        unfinished.finish(comparison.records())
    return comparison


def measure_policy(
    *,
    policy: LanguageModel,
    reference: LanguageModel,
    encoder: DialogueEncoder,
    prompts: EncodedPrompts,
    rewards: Mapping[str, WeightedReward],
    sampling: SamplingOptions,
    batch_size: int = 32,
    seed: int = 0,
    unfinished: ProgressFile | None = None,
    name: str = "policy",
    samples_per_prompt: int = 1,
) -> PolicySamples:
    """Sample responses to each prompt and compute their scores and their KL to the reference.

    Log-probs are taken at the temperature of the sampling.

    Args:
        policy: The policy.
        reference: The policy that the KL is taken to; may be `policy` itself.
        encoder: The encoder of the prompts.
        prompts: The prompts, at least one.
        rewards: Rewards by name.
        sampling: How responses are sampled.
        batch_size: Prompts per batch.
        seed: Seed of the sampling. With equal seeds, policies draw with the same seeds batch by
            batch.
        unfinished: File of finished batches, which receives each new one.
        name: Name of the policy in that file and on the progress bar.
        samples_per_prompt: Number of responses to each prompt.
    """
    records, examples = prompts
    if not examples:
        raise ValueError("prompts: expected at least one prompt, got none")
    longest = max(len(example.input_ids) for example in examples) + sampling.max_new_tokens
    for network in (policy, reference):
        set_longest_sequence(network, longest)
    for reward in rewards.values():
        reward.set_longest_sequence(longest)

    def describe(batch: PromptBatch, rollouts: RolloutBatch) -> dict[str, Any]:
        texts = decode_responses(rollouts, encoder.tokenizer)
        by_prompt = describe_responses(batch, rollouts, texts)
        return {
            "responses": [response for rows in by_prompt for response in rows],
            **_measure_batch(
                policy=policy,
                reference=reference,
                prompts=batch,
                rollouts=rollouts,
                rewards=rewards,
                temperature=sampling.temperature,
            ),
        }

    sampled = sample_batches(
        lambda: policy,
        encoder,
        examples,
        sampling=sampling,
        batch_size=batch_size,
        seed=seed,
        describe=describe,
        responses_per_prompt=samples_per_prompt,
        unfinished=unfinished,
        name=name,
    )
    batches = []
    with progress_bar(f"responses of {name}", len(examples)) as progress:
        for batch in sampled:
            batches.append(batch)
            progress(len(batch["positions"]))
    return _join_batches(batches, records, samples_per_prompt)


def _join_batches(
    batches: Sequence[Mapping[str, Any]], prompts: Sequence[PromptRecord], samples_per_prompt: int
) -> PolicySamples:
    """Join the results of batches, which are sorted by length, in the order of the prompts.

    Args:
        batches: The results, see `_measure_batch`, with their responses and `positions`.
        prompts: The prompts that the positions count.
        samples_per_prompt: Number of responses to each prompt.
    """
    positions = [position for batch in batches for position in batch["positions"]]
    rows = torch.tensor(positions).argsort().unsqueeze(1) * samples_per_prompt
    order = (rows + torch.arange(samples_per_prompt)).flatten()
    sampled = [fields for batch in batches for fields in batch["responses"]]
    responses = [
        SampledResponse(prompt=prompts[row // samples_per_prompt].prompt, **sampled[place])
        for row, place in enumerate(order.tolist())
    ]
    scores: dict[str, Tensor] = {}
    for reward in batches[0]["scores"]:
        values = [score for batch in batches for score in batch["scores"][reward]]
        numbers = [math.nan if score is None else score for score in values]
        scores[reward] = torch.tensor(numbers)[order]
    tensors: dict[str, Any] = {}
    for key in batches[0]["tensors"]:
        sequences = [torch.tensor(row) for batch in batches for row in batch["tensors"][key]]
        # by zeros outside of the response mask
        tensors[key] = pad_sequence(sequences, batch_first=True)[order]
    return PolicySamples(
        responses=responses,
        scores=scores,
        kl=kl_estimate(tensors["logprobs"], tensors["ref_logprobs"]).sum(dim=1),
        metrics=_describe_samples(responses, tensors),
        samples_per_prompt=samples_per_prompt,
    )


def _describe_samples(
    responses: Sequence[SampledResponse], tensors: Mapping[str, Any]
) -> dict[str, float]:
    """Compute the metrics of `PolicySamples`.

    Args:
        responses: The responses.
        tensors: What `RolloutMetrics` takes of them, in the same order.
    """
    totals = RolloutMetrics()
    totals.update(**tensors, terminated=torch.tensor([response.ended for response in responses]))
    computed = totals.compute()
    metrics = {
        metric: float(computed[f"rollout/{metric}"])
        for metric in METRICS
        if f"rollout/{metric}" in computed
    }
    texts = [response.response for response in responses]
    openings = Counter(map(opening_of, texts))
    return {
        **metrics,
        "commonest_opening": max(openings.values()) / len(texts),
        "repetition": fmean(map(repetition_of, texts)),
    }


def _measure_batch(
    *,
    policy: LanguageModel,
    reference: LanguageModel,
    prompts: PromptBatch,
    rollouts: RolloutBatch,
    rewards: Mapping[str, WeightedReward],
    temperature: float,
) -> dict[str, Any]:
    """Compute scores, and the tensors that `RolloutMetrics` takes, as JSON types."""
    n_samples = len(rollouts.response_ids) // len(prompts.texts)
    prompts = prompts.select([p for p in range(len(prompts.texts)) for _ in range(n_samples)])
    statistics = rollouts.statistics_at(temperature)
    if statistics is None:
        statistics = compute_policy_statistics(policy, rollouts, temperature=temperature)
    # not a second forward for the baseline: its KL to itself has to be exactly 0
    ref_logprobs = (
        statistics.logprobs
        if reference is policy
        else compute_policy_statistics(reference, rollouts, temperature=temperature).logprobs
    )
    tensors = {
        "logprobs": statistics.logprobs,
        "ref_logprobs": ref_logprobs,
        "entropy": statistics.entropy,
        "response_mask": rollouts.response_mask,
        "response_ids": rollouts.response_ids,
    }
    return {
        "scores": {
            name: _score(name, reward, rollouts, prompts) for name, reward in rewards.items()
        },
        "tensors": {name: values.tolist() for name, values in tensors.items()},
    }


def _score(
    name: str, reward: WeightedReward, rollouts: RolloutBatch, prompts: PromptBatch
) -> list[float | None]:
    """Scores of one reward, times its weight; `None` where it abstains."""
    scores: Scores = reward(rollouts, prompts.texts, records=prompts.fields, turns=prompts.turns)
    (votes,) = scores.votes.values()
    broken = scores.total[votes & ~scores.total.isfinite()]
    if len(broken):
        raise ValueError(f"rewards: expected finite scores of {name}, got {float(broken[0])}")
    pairs = zip(scores.total.tolist(), votes.tolist(), strict=True)
    return [score if has_vote else None for score, has_vote in pairs]


def _check_room(
    policies: Sequence[str],
    examples: Sequence[PromptExample],
    sampling: SamplingOptions,
    model_options: ModelOptions,
) -> None:
    """Refuse prompts that leave no room for a response in the policies' positions.

    Args:
        policies: Folders or hub ids.
        examples: The prompts.
        sampling: How responses are sampled.
        model_options: How the models are loaded.
    """
    limits = [
        limit for path in policies if (limit := max_positions(path, model_options)) is not None
    ]
    if not limits:
        return
    positions = min(limits)
    room = positions - sampling.max_new_tokens
    if room < 1:
        raise ValueError(
            f"max_new_tokens: expected fewer than the model's {positions} positions, got "
            f"{sampling.max_new_tokens}"
        )
    lengths = [len(example.input_ids) for example in examples]
    n_long = sum(length > room for length in lengths)
    if n_long:
        raise ValueError(
            f"prompts: {n_long} of {len(lengths)} are too long: {sampling.max_new_tokens} new "
            f"tokens (--max_new_tokens) leave {room} of the model's {positions} positions, and the "
            f"longest prompt has {max(lengths)}; --max_prompt_length {room} shortens them to their "
            "last turns"
        )


def _load_rewards(
    rewards: Rewards,
    model_options: ModelOptions,
    encoder: DialogueEncoder,
    examples: Sequence[PromptExample],
    device: torch.device,
) -> dict[str, WeightedReward]:
    """Load each reward, to be reported by itself times its weight, and check that it fits."""
    fields = {name for example in examples for name in example.fields}
    loaded = {}
    for name, entry in split_rewards(rewards).items():
        reward = WeightedReward(entry, model_options, encoder.tokenizer, may_abstain=True).eval()
        for model in reward.models:
            model.check_contract(encoder.contract)
        reward.check_fields(fields, "the prompts' records")
        loaded[name] = reward.to(device)
    return loaded


def _summarize(
    samples: PolicySamples, *, baseline: PolicySamples, path: str, tie_margin: float, seed: int
) -> PolicyReport:
    """Summarize a policy's samples, and compare them with the baseline's.

    A reward that abstains from a response leaves its prompt out.
    """
    ended = torch.tensor([response.ended for response in samples.responses])
    outcomes = {}
    differences = {}
    for name in () if samples is baseline else samples.scores:
        voted = samples.voted(name) & baseline.voted(name)
        policy_scores = samples.by_prompt(name)[voted]
        baseline_scores = baseline.by_prompt(name)[voted]
        outcomes[name] = outcome_rates(policy_scores, baseline_scores, tie_margin)
        differences[name] = score_summary((policy_scores.double() - baseline_scores).mean(1), seed)
    return PolicyReport(
        path=path,
        scores={
            name: score_summary(samples.by_prompt(name)[samples.voted(name)].double().mean(1), seed)
            for name in samples.scores
        },
        outcomes=outcomes,
        metrics=samples.metrics,
        differences=differences,
        complete={name: float(of[ended].nanmean()) for name, of in samples.scores.items()},
    )


def _best_of(samples: Mapping[str, PolicySamples], *, n: int, seed: int) -> BestOf:
    baseline, *others = samples
    baseline_samples = samples[baseline]
    proxy = next(iter(baseline_samples.scores))
    best: dict[str, Tensor] = {}  # NaN where a reward abstains
    for name in baseline_samples.scores:
        voted = baseline_samples.voted(proxy, name)
        best[name] = torch.full(voted.shape, torch.nan, dtype=torch.float64)
        best[name][voted] = best_of_n(
            proxies=baseline_samples.by_prompt(proxy)[voted],
            values=baseline_samples.by_prompt(name)[voted],
            n=n,
        )
    return BestOf(
        n=n,
        kl=best_of_n_kl(n),
        scores={name: score_summary(_finite(values), seed) for name, values in best.items()},
        differences={
            other: {
                name: score_summary(
                    _finite(samples[other].by_prompt(name).double().mean(1) - values), seed
                )
                for name, values in best.items()
            }
            for other in others
        },
    )


def _finite(values: Tensor) -> Tensor:
    return values[values.isfinite()]


def print_comparison(comparison: Comparison) -> None:
    """Print scores and metrics, scores of the best of n, and then who wins, on standard output."""
    n = comparison.samples_per_prompt
    reports = comparison.policies.values()
    table = make_table(
        f"{comparison.n_prompts} prompts, {'one response' if n == 1 else f'{n} responses'} each; "
        "mean [95 % interval]",
        ["", *comparison.policies],
        caption=f"KL: per response, against {comparison.baseline}",
    )
    for reward in comparison.rewards:
        table.add_row(reward, *_score_cells(report.scores[reward] for report in reports))
        complete = (f"{report.complete.get(reward, math.nan):.2f}" for report in reports)
        last = reward == list(comparison.rewards)[-1]
        table.add_row("  of complete responses", *complete, end_section=last)
    for label, metric, format_value in _METRIC_ROWS:
        values = (report.metrics.get(metric) for report in reports)
        table.add_row(label, *("-" if v is None else format_value(v) for v in values))
    print_table(table)
    if comparison.best_of:
        chosen = next(iter(comparison.rewards))
        title = f"best of n of {comparison.baseline} by {chosen}; mean [95 % interval]"
        table = make_table(title, ["n", "KL", *comparison.rewards])
        for best in comparison.best_of:
            cells = _score_cells(best.scores.values())
            table.add_row(str(best.n), f"{best.kl:.2f}", *cells)
        print_table(table)
    if judged := comparison.head_to_heads:
        print_table(outcomes_table(judged, comparison.baseline))


def _score_cells(scores: Iterable[ScoreSummary]) -> list[str]:
    return [f"{score.mean:.2f} [{score.low:.2f}, {score.high:.2f}]" for score in scores]
