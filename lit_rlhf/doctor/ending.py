"""The check that the policy can end a response, and learns to."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lit_rlhf.doctor.agreement import tokenizer_of
from lit_rlhf.doctor.case import FEW, Case, first_rows
from lit_rlhf.doctor.findings import Finding, failure, ok, warning
from lit_rlhf.forward import eval_mode, response_logits, unwrap_model
from lit_rlhf.functional import token_logprobs
from lit_rlhf.rollout import RolloutBatch

UNREACHABLE = 1e-6  # a probability of EOS that no rollout will ever meet
MOSTLY = 0.5  # share of cut-off responses from which on there is something to say


def eos(case: Case) -> Finding:
    """EOS that ends rollouts, can be sampled, and is learned from."""
    assert case.rollouts is not None
    rollouts, tokenizer = case.rollouts, tokenizer_of(case)
    ids = set(generation_eos_ids(case))
    if ids and tokenizer.eos_token_id not in ids:
        return failure(
            f"Rollouts end at {tokenizer.eos_token!r} (id {tokenizer.eos_token_id}), the "
            f"generation config of {case.module.model_path!r} says "
            f"{tokenizer.convert_ids_to_tokens(sorted(ids))}.",
            "Set eos_token in the folder's tokenizer_config.json to the token that its SFT "
            "responses end with, or correct eos_token_id in generation_config.json.",
        )
    if (trained := _untrained(case)) is not None:
        return trained
    others = rollouts.response_ids.new_tensor(sorted(ids - {tokenizer.eos_token_id}))
    passed = (torch.isin(rollouts.response_ids, others) & rollouts.response_mask).any(1)
    if bool(passed.any()):
        return warning(
            f"{int(passed.sum())} of {len(passed)} responses go on behind "
            f"{tokenizer.convert_ids_to_tokens(others.tolist())}, where the model's generation "
            f"config ends; rollouts end at {tokenizer.eos_token!r} alone.",
            "Set eos_token in tokenizer_config.json to the token that ends the model's answers.",
        )
    return _reached(case)


def generation_eos_ids(case: Case) -> list[int]:
    """The EOS ids that the policy's folder names for generation; empty for none."""
    config = unwrap_model(case.module.policy).generation_config
    ids = None if config is None else config.eos_token_id
    if ids is None:
        return []
    return [int(i) for i in ids] if isinstance(ids, list | tuple) else [int(ids)]


def _untrained(case: Case) -> Finding | None:
    """Ended responses whose EOS is not among the tokens that are learned from."""
    assert case.rollouts is not None
    rollouts, tokenizer = case.rollouts, tokenizer_of(case)
    mask = rollouts.response_mask if case.experience is None else case.experience.loss_mask
    learned = ((rollouts.response_ids == tokenizer.eos_token_id) & mask).any(1)
    lost = rollouts.terminated & ~learned
    if not bool(lost.any()):
        return None
    why = (
        " The padding token is EOS too: masks must come from lengths, not from ids."
        if tokenizer.pad_token_id == tokenizer.eos_token_id
        else ""
    )
    return failure(
        f"{int(lost.sum())} of {int(rollouts.terminated.sum())} responses that ended have an EOS "
        f"that is not learned from (outside Experience.loss_mask).{why}",
        "rollout() and experience() must keep the EOS inside response_mask and loss_mask.",
    )


def _reached(case: Case) -> Finding:
    """How many responses ended, and how likely that was."""
    assert case.rollouts is not None
    rollouts, limit = case.rollouts, case.module.sampling.max_new_tokens
    count, cut = len(rollouts.terminated), int((~rollouts.terminated).sum())
    if cut == count:
        most = math.exp(float(eos_logprobs(case, first_rows(rollouts)).max()))
        found = (
            f"No response of {count} ended within {limit} tokens; EOS had a probability of "
            f"{most:.1e} at most."
        )
        if most < UNREACHABLE:
            return failure(
                f"{found} The policy cannot end a response.",
                "Take as model.model_path a model whose SFT responses ended with EOS "
                f"({tokenizer_of(case).eos_token!r}), or set the tokenizer's eos_token to what "
                "they ended with.",
            )
        return warning(
            found, f"Raise model.sampling.max_new_tokens (now {limit}), or train SFT longer."
        )
    share = f"{cut / count:.0%} of {count} responses were cut off at {limit} tokens"
    if cut / count > MOSTLY:
        return warning(
            f"{share}: scores of half sentences, and an EOS that is seldom learned from.",
            f"Raise model.sampling.max_new_tokens (now {limit}), or set "
            "model.reward_shaping.missing_eos_penalty.",
        )
    ends = _end_logprobs(case)
    text = f"{share}; EOS is learned from, with probability {ends:.2f} where responses end"
    if (data := _data_end(case)) is not None:
        text += f", {data:.2f} where ptx examples end"
    return ok(f"{text}.")


def _end_logprobs(case: Case) -> float:
    """Geometric mean of the probability of EOS where it was sampled."""
    assert case.rollouts is not None
    assert case.estimates is not None
    rows = case.rollouts.terminated
    last = (case.rollouts.lengths[rows] - 1).unsqueeze(1)
    return math.exp(float(case.estimates.logprobs[rows].gather(1, last).mean()))


def _data_end(case: Case) -> float | None:
    """Geometric mean of the probability of EOS at the end of ptx examples that have one."""
    assert case.batch is not None
    if case.batch.ptx is None:
        return None
    ptx = case.batch.ptx
    ids, mask = ptx.input_ids[:FEW], ptx.attention_mask[:FEW]
    last = mask.sum(1, keepdim=True) - 1
    ended = (ids.gather(1, last) == tokenizer_of(case).eos_token_id)[:, 0]
    if not bool(ended.any()):
        return None
    # what follows the first token as a response to it
    rows = RolloutBatch(ids[:, :1], mask[:, :1], ids[:, 1:], mask[:, 1:], ended)
    logprobs = eos_logprobs(case, rows).gather(1, last - 1)[ended]
    return math.exp(float(logprobs.mean()))


@torch.no_grad()
def eos_logprobs(case: Case, rollouts: RolloutBatch) -> Tensor:
    """Log-prob of EOS in the place of each response token, `[B, T]`; -inf behind the response."""
    ids = torch.full_like(rollouts.response_ids, int(tokenizer_of(case).eos_token_id))
    policy = case.module.policy
    with eval_mode(policy):
        logits = response_logits(
            policy, rollouts.sequence_ids, rollouts.sequence_mask, ids.shape[1]
        )
    logprobs = token_logprobs(logits, ids, case.module.sampling.temperature)
    return logprobs.masked_fill(~rollouts.response_mask, -math.inf)
