"""Checks that the distributions which PPO compares are those that they should be."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from transformers import GenerationConfig

from lit_rlhf.doctor.agreement import tokenizer_of
from lit_rlhf.doctor.case import FEW, Case, first_rows
from lit_rlhf.doctor.findings import Finding, failure, ok, warning
from lit_rlhf.forward import eval_mode, unwrap_model
from lit_rlhf.functional import kl_estimate, masked_mean, token_logprobs
from lit_rlhf.modules import PPOModule
from lit_rlhf.rollout import RolloutBatch, TokenStatistics, using_generation_config

FAR = 5.0  # standard errors that a mean does not leave by chance
MANY = 32  # tokens from which on a mean has a standard error worth the name
PADDING = 4  # columns that are added on either side
LONGEST = 32  # response tokens of the comparison with generation's own log-probs


def kl_to_reference(case: Case) -> Finding:
    """KL(policy, reference) = 0 before the first step."""
    assert case.rollouts is not None
    assert case.estimates is not None
    estimates, mask = case.estimates, case.rollouts.response_mask
    # k3 is positive token by token: opposite differences do not cancel
    tokens = kl_estimate(estimates.logprobs, estimates.ref_logprobs, "k3")
    kl, limit = float(masked_mean(tokens, mask)), case.tolerance(1e-6, 1e-2)
    if kl <= limit:
        return ok(f"KL(policy, reference) is {kl:.1e} nats per token.")
    return failure(
        f"KL(policy, reference) is {kl:.2g} nats per token before the first step, expected 0 (at "
        f"most {limit:g}): they are not the same model.",
        "Policy and reference both come from model.model_path: see what changes one of them after "
        "loading, and leave model.memory.frozen_dtype null.",
    )


def ratio(case: Case) -> Finding:
    """Ratio = 1 in the first minibatch, before any step."""
    assert case.updates is not None
    metrics = case.updates[0].metrics
    first, kl = metrics["ppo/ratio"], metrics["ppo/approx_kl"]
    if abs(first - 1) <= case.tolerance(1e-3, 3e-2) and kl <= case.tolerance(1e-6, 1e-2):
        return ok(f"The ratio is {first:.6f} before the first step, KL of old to new {kl:.1e}.")
    changes = {
        "rollout": "The update must compute log-probs as `estimate` does: look for dropout that is "
        "active in training mode, another temperature, or an overridden experience().",
        "reference": "With model.loss.old_policy: reference it is taken against the reference, see "
        "the KL to it; the default is rollout.",
    }
    return failure(
        f"The ratio is {first:.4f} before the first step (KL of old to new policy {kl:.2g} nats "
        "per token), expected 1.",
        changes[case.module.loss.old_policy],
    )


def padding(case: Case) -> Finding:
    """Log-probs, values and scores that do not depend on padding."""
    assert case.rollouts is not None
    assert case.batch is not None
    rows = range(min(FEW, len(case.rollouts.response_ids)))
    alone = [_readings(case, _row(case.rollouts, row), [case.batch.texts[row]]) for row in rows]
    wide = padded(first_rows(case.rollouts), int(tokenizer_of(case).pad_token_id))
    padded_readings = _readings(case, wide, case.batch.texts[: len(rows)])
    limit = case.tolerance(1e-3, 5e-2)
    worst = {
        name: max(_difference(one[name][0], values[row]) for row, one in enumerate(alone))
        for name, values in padded_readings.items()
    }
    off = {name: by for name, by in worst.items() if not by <= limit}
    if not off:
        most = max(worst.values())
        return ok(f"Padding on either side changes log-probs, values and scores by {most:.1e}.")
    told = ", ".join(f"{name} by {by:.2g}" for name, by in off.items())
    return failure(
        f"The same responses with and without padding differ: {told} on average (at most {limit:g} "
        "is rounding).",
        "That model attends to padding or counts positions from it. Use one that takes "
        "attention_mask and position_ids (model.network.attn_implementation: eager to try).",
    )


def sampling(case: Case) -> Finding:
    """Responses that come from the distribution which they are scored with."""
    assert case.rollouts is not None
    assert case.estimates is not None
    assert case.batch is not None
    # what generation knew of its tokens must not vouch for itself
    scored = case.scored or case.estimates
    excess, errors = surprise(case.rollouts, scored)
    options = case.module.sampling.off_policy_options
    if options:
        return warning(
            f"{', '.join(options)} make samples differ from the policy that is scored: their "
            f"log-probs are {excess:+.3f} nats per token off what its entropy says. PPO's ratio "
            "and KL are biased.",
            "Leave these options of model.sampling at their defaults.",
        )
    temperature = case.module.sampling.temperature
    if abs(errors) > FAR:
        return failure(
            f"The rollouts do not come from the distribution that they are scored with: their "
            f"log-probs are {excess:+.3f} nats per token off what its entropy says "
            f"({abs(errors):.0f} standard errors).",
            f"rollout() must sample with softmax(logits / {temperature:g}), see "
            "model.sampling.temperature, all tokens allowed, as estimate() scores.",
        )
    mask = case.rollouts.response_mask
    known = case.rollouts.statistics_at(case.module.sampling.temperature)
    gap = (
        generation_gap(case)
        if known is None
        else _difference(known.logprobs[mask], scored.logprobs[mask])
    )
    limit = case.tolerance(1e-3, 5e-2)
    if not gap <= limit:
        return failure(
            f"Generation gives its own tokens other log-probs than scoring does: {gap:.2g} nats "
            f"per token apart on average (at most {limit:g} is rounding).",
            "The model's forward with its cache differs from the one without: try "
            "model.network.attn_implementation: eager, or another transformers version.",
        )
    return ok(
        f"At temperature {temperature:g} generation's log-probs and the scored ones are "
        f"{gap:.1e} apart."
    )


def surprise(rollouts: RolloutBatch, estimates: TokenStatistics) -> tuple[float, float]:
    """How far log-probs are from minus the entropy, which they are on average if truly sampled.

    Returns:
        The mean over tokens in nats, and the same in standard errors; 0 of few tokens.
    """
    excess = (estimates.logprobs + estimates.entropy)[rollouts.response_mask].double()
    mean = float(excess.mean())
    error = float(excess.std(correction=0)) / len(excess) ** 0.5
    return mean, mean / error if len(excess) >= MANY and error > 0 else 0.0


def generation_gap(case: Case) -> float:
    """Mean difference of generation's own log-probs of its tokens to the scored ones, nats."""
    assert case.batch is not None
    module = case.module
    ids, mask = case.batch.input_ids[:FEW], case.batch.attention_mask[:FEW]
    options = replace(
        module.sampling, max_new_tokens=min(module.sampling.max_new_tokens, LONGEST)
    ).generation_kwargs()
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        **options,
        # no end: all rows are of one length, and tokens behind an EOS are as good as others
        eos_token_id=None,
        pad_token_id=tokenizer_of(case).pad_token_id,
        output_scores=True,
        return_dict_in_generate=True,
    )
    inner = unwrap_model(module.policy)
    open_config = GenerationConfig()  # type: ignore[no-untyped-call]
    with torch.no_grad(), eval_mode(inner), using_generation_config(inner, open_config):
        generated = inner.generate(  # type: ignore[operator]
            input_ids=ids, attention_mask=mask.long(), generation_config=config
        )
    tokens = generated.sequences[:, ids.shape[1] :]
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    rollouts = RolloutBatch(ids, mask, tokens, everywhere, torch.zeros_like(everywhere[:, 0]))
    # the scores are processed: they are at the sampling temperature already
    own = token_logprobs(torch.stack(generated.scores, dim=1), tokens)
    return _difference(own, module.estimate(rollouts).logprobs)


def padded(rollouts: RolloutBatch, pad_token_id: int) -> RolloutBatch:
    """The same rollouts with more columns of padding on either side."""
    rows = len(rollouts.response_ids)
    fill = rollouts.response_ids.new_full((rows, PADDING), pad_token_id)
    no = torch.zeros_like(fill, dtype=torch.bool)
    return RolloutBatch(
        torch.cat([fill, rollouts.prompt_ids], dim=1),
        torch.cat([no, rollouts.prompt_mask], dim=1),
        torch.cat([rollouts.response_ids, fill], dim=1),
        torch.cat([rollouts.response_mask, no], dim=1),
        rollouts.terminated,
    )


def _row(rollouts: RolloutBatch, row: int) -> RolloutBatch:
    """One rollout without padding."""
    prompt, response = rollouts.prompt_mask[row], rollouts.response_mask[row]
    return RolloutBatch(
        rollouts.prompt_ids[row, prompt][None],
        prompt[prompt][None],
        rollouts.response_ids[row, response][None],
        response[response][None],
        rollouts.terminated[row][None],
    )


def _readings(case: Case, rollouts: RolloutBatch, prompts: list[str]) -> dict[str, list[Tensor]]:
    """By network, what it says of each rollout: a vector without padding."""
    module: PPOModule = case.module
    estimates = module.estimate(rollouts)
    masks = rollouts.response_mask

    def rows(values: Tensor) -> list[Tensor]:
        return [row[mask] for row, mask in zip(values, masks, strict=True)]

    found = {
        "policy": rows(estimates.logprobs),
        "reference": rows(estimates.ref_logprobs),
        "critic": rows(estimates.values),
    }
    for source in module.reward.models:
        scores = source(rollouts, prompts, None)  # a few: all at once
        found[f"reward model {source.path!r}"] = list(scores[:, None])
    return found


def _difference(a: Tensor, b: Tensor) -> float:
    """Mean distance, relative where numbers are large."""
    return float(((a - b).abs() / (1 + b.abs())).mean())
