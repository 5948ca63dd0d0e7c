"""Log-probs and entropy of tokens.

Notation: `B` batch, `T` tokens, `V` vocabulary. Log-probs and entropies are in nats. float16 and
bfloat16 logits are cast to float32 first; float32 and float64 keep their precision.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lit_rlhf.checks import check_positive
from lit_rlhf.functional.masking import masked_average
from lit_rlhf.tensor_checks import check_floating, check_ids

__all__ = [
    "LogprobsAndEntropy",
    "language_model_loss",
    "tempered_logits",
    "token_logprobs",
    "token_logprobs_and_entropy",
]


def tempered_logits(logits: Tensor, temperature: float) -> Tensor:
    """Logits of the distribution at a sampling temperature: logits / temperature.

    Args:
        logits: Logits of any floating-point dtype, `[B, T, V]`.
        temperature: Sampling temperature, positive.

    Returns:
        Logits, `[B, T, V]`; float64 for float64 logits, float32 for all others.

    Examples:
        >>> tempered_logits(torch.tensor([[[1.0, 3.0]]]), temperature=2.0).tolist()
        [[[0.5, 1.5]]]
    """
    check_floating(3, logits=logits)
    check_positive("temperature", temperature)
    if logits.dtype != torch.float64:
        logits = logits.float()
    return logits if temperature == 1.0 else logits / temperature


def token_logprobs(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-prob of each token under the logits that predict it: log softmax(logits)[token].

    Args:
        logits: Logits, `[B, T, V]`, shifted already: position t predicts token t of `token_ids`.
        token_ids: The tokens, `[B, T]` integers, in [0, V).
        temperature: Sampling temperature of the distribution, positive.

    Returns:
        Log-probs, `[B, T]` nats, at most 0.

    Examples:
        >>> logits = torch.tensor([[[0.25, 0.75]]]).log()
        >>> round(token_logprobs(logits, torch.tensor([[1]])).exp().item(), 4)
        0.75
    """
    logits = tempered_logits(logits, temperature)
    check_ids(logits.shape[:2], token_ids=token_ids)
    # the fused log_softmax passes over the logits once forward and once backward
    return logits.log_softmax(-1).gather(-1, token_ids.long().unsqueeze(-1)).squeeze(-1)


class LogprobsAndEntropy(NamedTuple):
    """Result of `token_logprobs_and_entropy`.

    Attributes:
        logprobs: Log-prob of each token, `[B, T]` nats, at most 0.
        entropy: Entropy of the distribution that predicts each token, `[B, T]` nats, in [0, log V].
    """

    logprobs: Tensor
    entropy: Tensor


def token_logprobs_and_entropy(
    logits: Tensor, token_ids: Tensor, temperature: float = 1.0
) -> LogprobsAndEntropy:
    """`token_logprobs`, and the entropy -sum_v p(v) log p(v) of each distribution.

    Args:
        logits: Logits, `[B, T, V]`, shifted already: position t predicts token t of `token_ids`.
            -inf rules a token out.
        token_ids: The tokens, `[B, T]` integers, in [0, V).
        temperature: Sampling temperature of the distribution, positive.

    Returns:
        Log-probs and entropies, `[B, T]` nats each.

    Examples:
        >>> logits, ids = torch.zeros(1, 1, 4), torch.tensor([[2]])
        >>> logprobs, entropy = token_logprobs_and_entropy(logits, ids)
        >>> round(logprobs.item(), 4), round(entropy.item(), 4)
        (-1.3863, 1.3863)
    """
    # the tempered logits have no name, so that the entropy's temporaries can use their memory
    logprobs = tempered_logits(logits, temperature).log_softmax(-1)
    check_ids(logprobs.shape[:2], token_ids=token_ids)
    gathered = logprobs.gather(-1, token_ids.long().unsqueeze(-1)).squeeze(-1)
    # p log p tends to 0 for a token that is ruled out, but computes as 0 * -inf = NaN
    finite = logprobs.clamp(min=torch.finfo(logprobs.dtype).min)
    # without a product of the two in memory
    entropy = -torch.linalg.vecdot(logprobs.exp(), finite)
    return LogprobsAndEntropy(gathered, entropy)


def language_model_loss(
    logprobs: Tensor, mask: Tensor, denominator: Tensor | float | None = None
) -> Tensor:
    """Negative log-likelihood per token: loss of SFT, LM imitation (Eq. 2) and ptx (Eq. 17).

    Args:
        logprobs: Log-probs of the tokens, `[B, T]` nats, with a graph.
        mask: Tokens to train on, `[B, T]` bool.
        denominator: Divisor of the sum over tokens, positive; `None` for the count of `mask`.

    Returns:
        The loss, 0-dim, nats per token; 0 with a graph if the mask is empty. Its exponential is the
        perplexity.

    Examples:
        >>> logprobs, mask = torch.tensor([[-1.0, -3.0, -9.0]]), torch.tensor([[True, True, False]])
        >>> language_model_loss(logprobs, mask).item()
        2.0
    """
    check_floating(2, logprobs=logprobs)
    return -masked_average(logprobs, mask, denominator)
