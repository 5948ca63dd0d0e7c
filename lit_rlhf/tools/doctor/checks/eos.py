"""The check that the policy can end a response, and learns to."""

import math

import torch
from torch import Tensor

from lit_rlhf.forward import eval_mode, response_logits, stop_token_ids
from lit_rlhf.functional import token_logprobs
from lit_rlhf.rollout import RolloutBatch
from lit_rlhf.tools.doctor.case import FEW, Case
from lit_rlhf.tools.doctor.report import Finding, failure, ok, warning

_UNREACHABLE = 1e-6  # probability of EOS below which no rollout will ever sample it
_MOST = 0.5  # share of cut-off responses above which there is a warning


def check_eos(case: Case) -> Finding:
    """Check that EOS ends rollouts, can be sampled, and is trained."""
    tokenizer = case.tokenizer
    ids = stop_token_ids(case.module.policy)
    if ids and tokenizer.eos_token_id not in ids:
        return failure(
            f"Rollouts end at {tokenizer.eos_token!r} (id {tokenizer.eos_token_id}), but the "
            f"generation config of {case.module.model_path!r} has "
            f"{tokenizer.convert_ids_to_tokens(ids)}.",
            "Set eos_token in the folder's tokenizer_config.json to the token that ends its SFT "
            "responses, or correct eos_token_id in generation_config.json.",
        )
    if (untrained := _find_untrained_eos(case)) is not None:
        return untrained
    return _describe_ends(case)


def _find_untrained_eos(case: Case) -> Finding | None:
    """Report responses that ended while their EOS is outside the loss."""
    rollouts = case.rollouts
    tokenizer = case.tokenizer
    mask = case.experience.loss_mask if hasattr(case, "experience") else rollouts.response_mask
    stop_ids = rollouts.response_ids.new_tensor(stop_token_ids(case.module.policy, tokenizer))
    trained = (torch.isin(rollouts.response_ids, stop_ids) & mask).any(1)
    untrained = rollouts.terminated & ~trained
    if not bool(untrained.any()):
        return None
    reason = (
        " The padding token is EOS too: masks must be built from lengths, not from ids."
        if tokenizer.pad_token_id == tokenizer.eos_token_id
        else ""
    )
    return failure(
        f"{int(untrained.sum())} of {int(rollouts.terminated.sum())} responses that ended have "
        f"their EOS outside Experience.loss_mask, so it is not trained.{reason}",
        "rollout() and experience() must keep the EOS inside response_mask and loss_mask.",
    )


def _describe_ends(case: Case) -> Finding:
    """Report how many responses ended, and how probable that was."""
    rollouts = case.rollouts
    limit = case.module.sampling.max_new_tokens
    count = len(rollouts.terminated)
    cut_off = int((~rollouts.terminated).sum())
    if cut_off == count:
        most = math.exp(float(_eos_logprobs(case, rollouts.select(slice(FEW))).max()))
        observation = (
            f"None of {count} responses ended within {limit} tokens; EOS had a probability of at "
            f"most {most:.1e}."
        )
        if most < _UNREACHABLE:
            return failure(
                f"{observation} The policy cannot end a response.",
                "Use as model.model_path a model whose SFT responses ended with EOS "
                f"({case.tokenizer.eos_token!r}), or set the tokenizer's eos_token to what they "
                "ended with.",
            )
        return warning(
            observation, f"Raise model.sampling.max_new_tokens (now {limit}), or train SFT longer."
        )
    share = f"{cut_off / count:.0%} of {count} responses were cut off at {limit} tokens"
    if cut_off / count > _MOST:
        return warning(
            f"{share}: the reward model scores unfinished text, and EOS is seldom trained.",
            f"Raise model.sampling.max_new_tokens (now {limit}), or set "
            "model.reward_shaping.missing_eos_penalty.",
        )
    ended = rollouts.terminated
    last = (rollouts.lengths[ended] - 1).unsqueeze(1)
    # a geometric mean, as for the examples
    sampled = math.exp(float(case.estimates.logprobs[ended].gather(1, last).mean()))
    text = f"{share}; EOS is trained, with probability {sampled:.2f} where responses end"
    if (in_data := _data_eos_probability(case)) is not None:
        text += f" and {in_data:.2f} where ptx examples end"
    return ok(f"{text}.")


def _data_eos_probability(case: Case) -> float | None:
    """Geometric mean of the probability of EOS at the end of ptx examples; `None` without any."""
    if case.batch.ptx is None:
        return None
    ptx = case.batch.ptx
    ids = ptx.input_ids[:FEW]
    mask = ptx.attention_mask[:FEW]
    last = mask.sum(1, keepdim=True) - 1
    ended = (ids.gather(1, last) == case.tokenizer.eos_token_id)[:, 0]
    if not bool(ended.any()):
        return None
    # as rollouts: the first token is the prompt, the others are its response
    rows = RolloutBatch(
        prompt_ids=ids[:, :1],
        prompt_mask=mask[:, :1],
        response_ids=ids[:, 1:],
        response_mask=mask[:, 1:],
        terminated=ended,
    )
    logprobs = _eos_logprobs(case, rows).gather(1, last - 1)[ended]
    return math.exp(float(logprobs.mean()))


@torch.no_grad()
def _eos_logprobs(case: Case, rollouts: RolloutBatch) -> Tensor:
    """Log-prob of EOS in place of each response token, `[B, T]`, in nats; -inf in padding."""
    ids = torch.full_like(rollouts.response_ids, int(case.tokenizer.eos_token_id))
    policy = case.module.policy
    with eval_mode(policy):
        logits = response_logits(
            policy, rollouts.sequence_ids, rollouts.sequence_mask, ids.shape[1]
        )
    logprobs = token_logprobs(logits, ids, case.module.sampling.temperature)
    return logprobs.masked_fill(~rollouts.response_mask, -math.inf)
