"""Log-probabilities, entropy and perplexity of tokens.

Notation: `B` batch, `T` tokens, `V` vocabulary. Log-probs and entropies are in nats. float16 and
bfloat16 logits are raised to float32 first; float32 and float64 stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rlhf.functional.checks import (
    check_dims,
    check_floating,
    check_integer,
    check_positive,
    check_same,
    check_shape,
)
from lit_rlhf.functional.masking import masked_average


def tempered_logits(logits: Tensor, temperature: float) -> Tensor:
    """Logits of the distribution at a temperature, in float32 or better.

    Args:
        logits: `[B, T, V]`, floating-point.
        temperature: Positive.

    Returns:
        `[B, T, V]`; float32, or float64 for float64 logits.

    Raises:
        ValueError: If `logits` is not floating-point or not 3-dim, or `temperature` not positive.
    """
    check_dims("logits", logits, 3)
    check_floating("logits", logits)
    check_positive("temperature", temperature)
    if logits.dtype != torch.float64:
        logits = logits.float()
    return logits if temperature == 1.0 else logits / temperature


def token_logprobs(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each token under the logits that predict it.

    Args:
        logits: `[B, T, V]`, floating-point; position t holds the logits *of* token t, so the caller
            has shifted them.
        token_ids: `[B, T]` integers in [0, V).
        temperature: That of sampling: a distribution is scored as it was sampled from.

    Returns:
        `[B, T]` nats; float32, or float64 for float64 logits.

    Raises:
        ValueError: For a wrong shape or dtype, or a temperature that is not positive.
    """
    logits = tempered_logits(logits, temperature)
    _check_token_ids(token_ids, logits)
    # the fused log_softmax passes over the logits once forward and once backward
    return _of_tokens(logits.log_softmax(-1), token_ids)


def token_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy of each position's distribution over the vocabulary.

    Args:
        logits: `[B, T, V]`, floating-point; -inf rules a token out.
        temperature: That of sampling.

    Returns:
        `[B, T]` nats, in [0, log V]; float32, or float64 for float64 logits.

    Raises:
        ValueError: For a wrong shape or dtype, or a temperature that is not positive.
    """
    return _entropy(tempered_logits(logits, temperature).log_softmax(-1))


def token_logprobs_and_entropy(
    logits: Tensor, token_ids: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` and `token_entropy` from one pass over the logits.

    Args:
        logits: `[B, T, V]`, floating-point; position t holds the logits *of* token t.
        token_ids: `[B, T]` integers in [0, V).
        temperature: That of sampling.

    Returns:
        Both `[B, T]`.

    Raises:
        ValueError: For a wrong shape or dtype, or a temperature that is not positive.
    """
    logits = tempered_logits(logits, temperature)
    _check_token_ids(token_ids, logits)
    logprobs = logits.log_softmax(-1)
    return _of_tokens(logprobs, token_ids), _entropy(logprobs)


def language_model_loss(
    logprobs: Tensor, mask: Tensor, denominator: Tensor | float | None = None
) -> Tensor:
    """Negative log-likelihood per token: loss of SFT, LM imitation (Eq. 2) and ptx (Eq. 17).

    Args:
        logprobs: `[B, T]` nats.
        mask: Tokens that are trained on, `[B, T]` bool.
        denominator: What the sum over `mask` is divided by; `None` takes the count of `mask`.

    Returns:
        0-dim nats; 0 with a graph if `mask` is empty.

    Raises:
        ValueError: For a wrong shape or dtype, or a denominator as in `masked_average`.
    """
    check_dims("logprobs", logprobs, 2)
    check_same(logprobs.shape, logprobs=logprobs)
    return -masked_average(logprobs, mask, denominator)


def loss_perplexity(loss: Tensor) -> Tensor:
    """Perplexity of a token-weighted mean negative log-likelihood.

    Args:
        loss: Nats per token, any shape.

    Returns:
        Shape of `loss`; 1 is certainty.
    """
    return loss.exp()


def perplexity(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Exponential of the mean negative log-likelihood over all kept tokens.

    Every token weighs the same, whichever response it is from: a mean of per-response perplexities
    is another number.

    Args:
        logprobs: `[B, T]` nats.
        mask: `[B, T]` bool.

    Returns:
        0-dim; 1 if `mask` is empty.

    Raises:
        ValueError: For a wrong shape or dtype.
    """
    return loss_perplexity(language_model_loss(logprobs, mask))


def _check_token_ids(token_ids: Tensor, logits: Tensor) -> None:
    check_integer("token_ids", token_ids)
    check_shape("token_ids", token_ids, logits.shape[:2])


def _of_tokens(logprobs: Tensor, token_ids: Tensor) -> Tensor:
    return logprobs.gather(-1, token_ids.long().unsqueeze(-1)).squeeze(-1)


def _entropy(logprobs: Tensor) -> Tensor:
    # p log p of a token that is ruled out is 0 in the limit, and 0 * -inf as it stands
    finite = logprobs.masked_fill(logprobs == -torch.inf, 0.0)
    return -(logprobs.exp() * finite).sum(-1)
