"""Checks that the distributions which PPO compares are the right ones, before the first update."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lit_rlhf.forward import longest_sequence, unwrap_model
from lit_rlhf.functional import kl_estimate, masked_mean, token_logprobs
from lit_rlhf.ppo import PPO
from lit_rlhf.rollout import RolloutBatch, TokenStatistics, generate_with_transformers
from lit_rlhf.tools.doctor.case import FEW, Case
from lit_rlhf.tools.doctor.report import Finding, failure, ok, warning

FAR = 5.0  # standard errors that a mean does not reach by chance
_MIN_TOKENS = 32  # fewest tokens whose mean has a meaningful standard error
_N_PADDING = 4  # columns of padding added on either side
_MAX_RESPONSE = 32  # response tokens of the comparison with generation's own log-probs


def check_reference(case: Case) -> Finding:
    """Check that KL(policy, reference) is 0."""
    estimates = case.estimates
    mask = case.rollouts.response_mask
    # k3 is positive at each token, so that differences of opposite sign do not cancel
    tokens = kl_estimate(estimates.logprobs, estimates.ref_logprobs, "k3")
    kl = float(masked_mean(tokens, mask))
    limit = case.tolerance(full=1e-6, low=1e-2)
    if kl <= limit:
        return ok(f"KL(policy, reference) is {kl:.1e} nats per token.")
    return failure(
        f"KL(policy, reference) is {kl:.2g} nats per token before the first update, expected 0 (at "
        f"most {limit:g}): they are not the same model.",
        "Policy and reference both come from model.model_path: see what changes one of them after "
        "loading, and leave model.memory.frozen_dtype null.",
    )


def check_ratio(case: Case) -> Finding:
    """Check that the ratio of the first minibatch is 1."""
    metrics = case.updates[0]["policy"].metrics
    ratio = metrics["ppo/ratio"]
    kl = metrics["ppo/approx_kl"]
    # the KL sees ratios that are 1 only on average
    is_one = abs(ratio - 1) <= case.tolerance(full=1e-3, low=3e-2)
    if is_one and kl <= case.tolerance(full=1e-6, low=1e-2):
        return ok(f"The ratio is {ratio:.6f} before the first update, KL of old to new {kl:.1e}.")
    changes = {
        "rollout": "The update must compute log-probs as `estimate` does: look for dropout that is "
        "active in training mode, another temperature, or an overridden experience().",
        "reference": "With model.loss.old_policy: reference the ratio is taken against the "
        "reference: see the KL to it. The default is rollout.",
    }
    return failure(
        f"The ratio is {ratio:.4f} before the first update (KL of old to new policy {kl:.2g} nats "
        "per token), expected 1.",
        changes[case.module.loss.old_policy],
    )


def check_padding(case: Case) -> Finding:
    """Check that log-probs, values and scores do not depend on padding.

    Rollouts without padding are compared with the same rollouts in a batch with too much of it,
    and beside the longest possible sequence where a network may depend on it.
    """
    few = case.rollouts.select(slice(FEW))
    texts = case.batch.texts[:FEW]
    alone = []
    for row, text in enumerate(texts):
        prompt = int(few.prompt_mask[row].sum())
        response = int(few.lengths[row])
        single_row = few.select(slice(row, row + 1), slice(-prompt, None), slice(response))
        alone.append(_outputs_by_network(case, single_row, [text]))
    longest = _longest_sequence(case)
    beside = few if longest is None else _add_row(few, longest)
    padded = _add_padding(beside, int(case.tokenizer.pad_token_id))
    if longest is None:
        together = _outputs_by_network(case, padded, texts)
    else:
        with _in_one_forward(case.module.ppo, padded.sequence_mask.numel()):
            together = _outputs_by_network(case, padded, [*texts, texts[0]])
    limit = case.tolerance(full=1e-3, low=5e-2)
    largest = {
        name: max(
            _mean_difference(outputs[name][0], values[row]) for row, outputs in enumerate(alone)
        )
        for name, values in together.items()
    }
    too_large = {name: value for name, value in largest.items() if not value <= limit}
    if not too_large:
        return ok(
            "Padding on either side changes log-probs, values and scores by at most "
            f"{max(largest.values()):.1e}."
        )
    listed = ", ".join(f"{name} by {value:.2g}" for name, value in too_large.items())
    return failure(
        f"The same responses with and without padding differ: {listed} on average (at most "
        f"{limit:g} is rounding).",
        "That model attends to padding or counts positions from it. Use one that takes "
        "attention_mask and position_ids (model.network.attn_implementation: eager to try).",
    )


def check_sampling(case: Case) -> Finding:
    """Check that responses come from the distribution that they are scored with."""
    # log-probs that generation computed must not be compared with themselves
    scored = case.rescored or case.estimates
    gap, standard_errors = measure_entropy_gap(case.rollouts, scored)
    if options := case.module.sampling.off_policy_options:
        return warning(
            f"With {', '.join(options)} samples differ from the policy that is scored: their "
            f"log-probs are {gap:+.3f} nats per token away from minus its entropy. PPO's "
            "ratio and KL are biased.",
            "Leave these options of model.sampling at their defaults.",
        )
    temperature = case.module.sampling.temperature
    if abs(standard_errors) > FAR:
        return failure(
            "The rollouts do not come from the distribution that they are scored with: their "
            f"log-probs are {gap:+.3f} nats per token away from minus its entropy "
            f"({abs(standard_errors):.0f} standard errors).",
            f"rollout() must sample from softmax(logits / {temperature:g}), see "
            "model.sampling.temperature, over all tokens, as estimate() scores.",
        )
    mask = case.rollouts.response_mask
    sampled = case.rollouts.statistics_at(case.module.sampling.temperature)
    difference = (
        _generation_difference(case)
        if sampled is None
        else _mean_difference(sampled.logprobs[mask], scored.logprobs[mask])
    )
    limit = case.tolerance(full=1e-3, low=5e-2)
    if not difference <= limit:
        return failure(
            "Generation gives its own tokens other log-probs than scoring does: they differ by "
            f"{difference:.2g} nats per token on average (at most {limit:g} is rounding).",
            "The model's forward with its cache differs from the one without: try "
            "model.network.attn_implementation: eager, or another transformers version.",
        )
    return ok(
        f"At temperature {temperature:g} generation's log-probs and the scored ones differ by "
        f"{difference:.1e}."
    )


class EntropyGap(NamedTuple):
    """Mean of the log-probs of sampled tokens plus the entropy.

    It is 0 in expectation if the tokens were sampled from the distribution of the log-probs.

    Attributes:
        mean: The mean in nats.
        standard_errors: The same in its standard errors; 0 for few tokens.
    """

    mean: float
    standard_errors: float


def measure_entropy_gap(rollouts: RolloutBatch, estimates: TokenStatistics) -> EntropyGap:
    """Compare the log-probs of sampled tokens with the entropy of their distribution.

    Args:
        rollouts: The samples.
        estimates: Log-probs and entropy of their tokens under the policy, in nats.
    """
    excess = (estimates.logprobs + estimates.entropy)[rollouts.response_mask].double()
    mean = float(excess.mean())
    error = float(excess.std(correction=0)) / len(excess) ** 0.5
    is_known = len(excess) >= _MIN_TOKENS and error > 0
    return EntropyGap(mean=mean, standard_errors=mean / error if is_known else 0.0)


def _generation_difference(case: Case) -> float:
    """Mean difference of transformers' log-probs in generation to the scored ones, in nats."""
    module = case.module
    ids = case.batch.input_ids[:FEW]
    mask = case.batch.attention_mask[:FEW]
    limit = min(module.sampling.max_new_tokens, _MAX_RESPONSE)
    generated = generate_with_transformers(
        unwrap_model(module.policy),
        prompt_ids=ids,
        prompt_mask=mask,
        options=module.sampling,
        # without an end all rows have one length; tokens after an EOS serve as well as others
        eos_token_ids=(),
        pad_token_id=int(case.tokenizer.pad_token_id),
        max_new_tokens=limit,
        output_scores=True,
        return_dict_in_generate=True,
    )
    tokens = generated.sequences[:, ids.shape[1] :]
    all_tokens = torch.ones_like(tokens, dtype=torch.bool)
    rollouts = RolloutBatch(
        prompt_ids=ids,
        prompt_mask=mask,
        response_ids=tokens,
        response_mask=all_tokens,
        terminated=torch.zeros_like(all_tokens[:, 0]),
    )
    # transformers' scores are logits at the sampling temperature already
    logprobs = token_logprobs(torch.stack(generated.scores, dim=1), tokens)
    return _mean_difference(logprobs, module.ppo.estimate(rollouts).logprobs)


def _add_padding(rollouts: RolloutBatch, pad_token_id: int) -> RolloutBatch:
    """The same rollouts with more columns of padding on either side."""
    padding_left = (_N_PADDING, 0)
    padding_right = (0, _N_PADDING)
    return RolloutBatch(
        prompt_ids=functional.pad(rollouts.prompt_ids, padding_left, value=pad_token_id),
        prompt_mask=functional.pad(rollouts.prompt_mask, padding_left),
        response_ids=functional.pad(rollouts.response_ids, padding_right, value=pad_token_id),
        response_mask=functional.pad(rollouts.response_mask, padding_right),
        terminated=rollouts.terminated,
    )


def _longest_sequence(case: Case) -> int | None:
    """The longest sequence of the run, if the rotary factors of a network may depend on it."""
    lengths = [longest_sequence(network) for network in case.networks().values()]
    return min((length for length in lengths if length is not None), default=None)


def _add_row(rollouts: RolloutBatch, n_tokens: int) -> RolloutBatch:
    """Add a row of `n_tokens` tokens, which are all the same one."""
    n_more = n_tokens - rollouts.sequence_shape[1]
    token = int(rollouts.prompt_ids[0, -1])

    def add_row(values: Tensor, value: int | bool) -> Tensor:
        return torch.cat([values, torch.full_like(values[:1], value)])

    return RolloutBatch(
        prompt_ids=add_row(functional.pad(rollouts.prompt_ids, (n_more, 0)), token),
        prompt_mask=add_row(functional.pad(rollouts.prompt_mask, (n_more, 0)), True),
        response_ids=add_row(rollouts.response_ids, token),
        response_mask=add_row(rollouts.response_mask, True),
        terminated=add_row(rollouts.terminated, False),
    )


@contextmanager
def _in_one_forward(ppo: PPO, n_tokens: int) -> Iterator[None]:
    """Let one forward of the scoring compute up to `n_tokens` tokens inside the context."""
    original_memory = ppo.memory
    ppo.memory = replace(original_memory, max_tokens_per_forward=n_tokens)
    try:
        yield
    finally:
        ppo.memory = original_memory


def _outputs_by_network(
    case: Case, rollouts: RolloutBatch, prompts: list[str]
) -> dict[str, list[Tensor]]:
    """Log-probs, values or score of each rollout, without padding, by network."""
    module = case.module
    estimates = module.ppo.estimate(rollouts)
    masks = rollouts.response_mask

    def rows(values: Tensor) -> list[Tensor]:
        return [row[mask] for row, mask in zip(values, masks, strict=True)]

    outputs = {"policy": rows(estimates.logprobs), "reference": rows(estimates.ref_logprobs)}
    if module.critic is not None:
        outputs["critic"] = rows(estimates.values)
    for model in module.reward.models:
        if model.own_text is not None:  # it is given text, not the ids that differ here
            continue
        scores = model(rollouts, prompts, None)  # few rollouts: all in one forward
        outputs[f"reward model {model.path!r}"] = list(scores[:, None])
    return outputs


def _mean_difference(first: Tensor, second: Tensor) -> float:
    """Mean absolute difference, relative where values are large."""
    return float(((first - second).abs() / (1 + second.abs())).mean())
