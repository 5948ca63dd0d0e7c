"""The formulas of PPO-max and of reward modelling, as pure functions of tensors.

Each formula names its equation in arXiv 2307.04964. Notation: `B` batch, `T` response tokens, `V`
vocabulary. Masks are bool and named `*_mask`, True keeps; log-probs are named `*_logprobs`, in
nats. Functions are named by what they return, a tensor or a NamedTuple. Losses are sums over tokens
divided by a `denominator`: with the token count of a whole step, the losses of micro-batches and
ranks add up to the mean over all of its tokens. A wrong shape, dtype or range raises ValueError
with the argument's name.
"""

from lit_rlhf.functional.advantages import AdvantageOutput, clipped_advantages, gae
from lit_rlhf.functional.kl import KLEstimator, adaptive_kl_coef, exact_kl, kl_estimate
from lit_rlhf.functional.logprobs import (
    language_model_loss,
    loss_perplexity,
    perplexity,
    tempered_logits,
    token_entropy,
    token_logprobs,
    token_logprobs_and_entropy,
)
from lit_rlhf.functional.masking import (
    Moments,
    length_mask,
    masked_mean,
    masked_moments,
    masked_sum,
    masked_var,
    masked_whiten,
    merged_moments,
)
from lit_rlhf.functional.metrics import Interval, distinct_n, response_ngrams, wilson_interval
from lit_rlhf.functional.policy_loss import (
    PolicyLoss,
    entropy_loss,
    kl_penalty_loss,
    policy_gradient_loss,
    surrogate_loss,
)
from lit_rlhf.functional.preference_loss import (
    PairwiseLoss,
    pairwise_reward_loss,
    preference_probability,
    reward_model_loss,
)
from lit_rlhf.functional.rewards import (
    TokenRewards,
    clipped_scores,
    length_penalty,
    normalized_scores,
    scaled_scores,
    token_rewards,
)
from lit_rlhf.functional.value_loss import ValueLoss, explained_variance, value_loss

__all__ = [
    "AdvantageOutput",
    "Interval",
    "KLEstimator",
    "Moments",
    "PairwiseLoss",
    "PolicyLoss",
    "TokenRewards",
    "ValueLoss",
    "adaptive_kl_coef",
    "clipped_advantages",
    "clipped_scores",
    "distinct_n",
    "entropy_loss",
    "exact_kl",
    "explained_variance",
    "gae",
    "kl_estimate",
    "kl_penalty_loss",
    "language_model_loss",
    "length_mask",
    "length_penalty",
    "loss_perplexity",
    "masked_mean",
    "masked_moments",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "merged_moments",
    "normalized_scores",
    "pairwise_reward_loss",
    "perplexity",
    "policy_gradient_loss",
    "preference_probability",
    "response_ngrams",
    "reward_model_loss",
    "scaled_scores",
    "surrogate_loss",
    "tempered_logits",
    "token_entropy",
    "token_logprobs",
    "token_logprobs_and_entropy",
    "token_rewards",
    "value_loss",
    "wilson_interval",
]
