"""Mutants that change nothing that a caller can see, each with the reason."""

# ruff: noqa: E501  # lines are quoted whole
from __future__ import annotations

from typing import NamedTuple


class Equivalent(NamedTuple):
    """A mutant that no test can notice.

    Attributes:
        module: Path of the module inside the package.
        text: The line.
        was: What stands there.
        now: What the mutant has there.
        reason: Why nothing changes.
    """

    module: str
    text: str
    was: str
    now: str
    reason: str


EQUIVALENTS: tuple[Equivalent, ...] = (
    Equivalent(
        "functional/advantages.py",
        "advantages = torch.zeros_like(values)",
        "torch.zeros_like",
        "torch.ones_like",
        "the loop writes every column",
    ),
    Equivalent(
        "functional/kl.py",
        "log_ratio = log_ratio.masked_fill(logprobs == -torch.inf, 0.0)",
        "0.0",
        "1.0",
        "it is multiplied by the probability of a token that is ruled out, 0",
    ),
    Equivalent(
        "functional/logprobs.py",
        "finite = logprobs.masked_fill(logprobs == -torch.inf, 0.0)",
        "0.0",
        "1.0",
        "it is multiplied by the probability of a token that is ruled out, 0",
    ),
    Equivalent(
        "functional/logprobs.py",
        "return logits if temperature == 1.0 else logits / temperature",
        "logits if temperature == 1.0 else logits / temperature",
        "(logits / temperature)",
        "a division by 1 is exact; it is left out to save time",
    ),
    Equivalent(
        "functional/masking.py",
        "return kept.sum() if dim is None else kept.sum(dim)",
        "kept.sum() if dim is None else kept.sum(dim)",
        "kept.sum(dim)",
        "`sum(None)` is the sum of all; mypy does not know it",
    ),
    Equivalent(
        "functional/masking.py",
        "return total / (mask.sum() if dim is None else mask.sum(dim)).clamp(min=1)",
        "mask.sum() if dim is None else mask.sum(dim)",
        "mask.sum(dim)",
        "`sum(None)` is the sum of all; mypy does not know it",
    ),
    Equivalent(
        "functional/losses.py",
        "x.masked_fill(~mask, 0.0) for x in (logprobs, old_logprobs.detach(), advantages.detach())",
        "0.0",
        "1.0",
        "any finite number will do: what is outside the mask is masked again at the end",
    ),
    Equivalent(
        "functional/losses.py",
        "too_large = (advantages < 0) & (losses > largest)",
        "advantages < 0",
        "(advantages <= 0)",
        "with an advantage of 0 both losses are 0",
    ),
    Equivalent(
        "functional/rewards.py",
        "check_tensors(logprobs.shape[:1], scores=scores)",
        "logprobs",
        "ref_logprobs",
        "both have one shape by the check before",
    ),
    Equivalent(
        "functional/losses.py",
        "x.masked_fill(~mask, 0.0) for x in (values, old_values.detach(), returns.detach())",
        "0.0",
        "1.0",
        "any finite number will do: what is outside the mask is masked again at the end",
    ),
    Equivalent(
        "functional/losses.py",
        "clipped = (bounded_errors > errors) & ((values - old_values).abs() > value_clip)",
        "(values - old_values).abs() > value_clip",
        "((values - old_values).abs() >= value_clip)",
        "exactly at the bound both errors are equal",
    ),
    Equivalent(
        "functional/losses.py",
        "unexplained = moments(returns.double() - values.double(), mask).var",
        "returns.double()",
        "returns",
        "the other operand of the difference is float64",
    ),
    Equivalent(
        "functional/losses.py",
        "unexplained = moments(returns.double() - values.double(), mask).var",
        "values.double()",
        "values",
        "the other operand of the difference is float64",
    ),
    Equivalent(
        "functional/losses.py",
        "explained = 1.0 - unexplained / torch.where(total > 0, total, torch.ones_like(total))",
        "total > 0",
        "(total >= 0)",
        "the last line does not read the quotient of a total of 0",
    ),
    Equivalent(
        "functional/losses.py",
        "explained = 1.0 - unexplained / torch.where(total > 0, total, torch.ones_like(total))",
        "0",
        "(-1)",
        "the last line does not read the quotient of a total of 0",
    ),
    Equivalent(
        "functional/losses.py",
        "explained = 1.0 - unexplained / torch.where(total > 0, total, torch.ones_like(total))",
        "torch.ones_like",
        "torch.zeros_like",
        "the last line does not read the quotient of a total of 0",
    ),
    Equivalent(
        "rollout/sampling.py",
        "if options.repetition_penalty != 1:",
        "options.repetition_penalty != 1",
        "True",
        "a penalty of 1 changes nothing; it is left out to save time",
    ),
    Equivalent(
        "rollout/sampling.py",
        "if options.repetition_penalty != 1:",
        "1",
        "(0)",
        "a penalty of 1 changes nothing; it is left out to save time",
    ),
    Equivalent(
        "rollout/sampling.py",
        "if options.min_new_tokens:",
        "options.min_new_tokens",
        "True",
        "no response is shorter than 0 tokens",
    ),
    Equivalent(
        "rollout/sampling.py",
        "return scores.argmax(-1)",
        "-1",
        "(1)",
        "the tensor has two dimensions",
    ),
    Equivalent(
        "rollout/sampling.py",
        "if options.top_p < 1:",
        "options.top_p < 1",
        "True",
        "a nucleus of 1 keeps every token that has a probability",
    ),
    Equivalent(
        "rollout/sampling.py",
        "if options.top_p < 1:",
        "options.top_p < 1",
        "(options.top_p <= 1)",
        "a nucleus of 1 keeps every token that has a probability",
    ),
    Equivalent(
        "rollout/sampling.py",
        "if options.top_p < 1:",
        "1",
        "2",
        "a nucleus of 1 keeps every token that has a probability",
    ),
    Equivalent(
        "rollout/sampling.py",
        "cumulative = scores.softmax(-1).cumsum(-1, dtype=torch.float64)",
        "-1",
        "(1)",
        "the tensor has two dimensions",
    ),
    Equivalent(
        "stats.py",
        "return torch.cat([rows[: int(count)] for rows, count in zip(of_ranks, counts, strict=True)])",
        "zip(of_ranks, counts, strict=True)",
        "zip(of_ranks, counts)",
        "both lists have an element for each rank",
    ),
    Equivalent(
        "stats.py",
        "return torch.cat([rows[: int(count)] for rows, count in zip(of_ranks, counts, strict=True)])",
        "True",
        "False",
        "both lists have an element for each rank",
    ),
    Equivalent(
        "stats.py",
        "return self.m2 / self.count.clamp(min=1)",
        "1",
        "2",
        "of one number the sum of squared differences is 0",
    ),
    Equivalent(
        "modules/ppo.py",
        "return int(torch.randint(2**31, (), generator=generator))",
        "31",
        "(30)",
        "any large number of seeds will do",
    ),
    Equivalent(
        "modules/ppo.py",
        "means = {key: torch.stack([m[key] for m in history]).nanmean() for key in history[0]}",
        "0",
        "(-1)",
        "all minibatches of an iteration log the same metrics",
    ),
    Equivalent(
        "ppo/algorithm.py",
        "entropy[0][:, -mask.shape[1] :], mask, self.loss.entropy_clip, denominator=tokens",
        "0",
        "(-1)",
        "the list has one element",
    ),
    Equivalent(
        "ppo/algorithm.py",
        "return policy_gradient_loss(",
        "policy_gradient_loss( logprobs, experience.advantages, mask, denominator=tokens )",
        "policy_gradient_loss(experience.advantages, logprobs, mask, denominator=tokens)",
        "the loss is a product of the two, and advantages have no gradient",
    ),
    Equivalent(
        "modules/ppo.py",
        "index = index.to(self.device)  # once: each field would copy it, and wait",
        "index.to(self.device)",
        "index",
        "the index is on the CPU already; test_device_audit.py counts the waits on a GPU",
    ),
    Equivalent(
        "stats.py",
        "if now.dtype != buffer.dtype:",
        "now.dtype != buffer.dtype",
        "True",
        "a buffer that was moved alone equals the original on the new device",
    ),
)
