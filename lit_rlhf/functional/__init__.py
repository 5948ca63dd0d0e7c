"""The formulas of PPO-max and of reward modelling, as pure functions of tensors.

Each formula names its equation in arXiv 2307.04964, or the paper that it comes from. Notation: `B`
batch, `T` response tokens, `V` vocabulary. Masks are bool and named `*_mask`; True keeps. Log-probs
are named `*_logprobs` and are in nats. A function is named by what it returns: a tensor,
or a NamedTuple where there are two results or more. Tensors come first, options are keyword-only.

Losses are sums over tokens divided by a `denominator`. With the token count of a whole step as
denominator, the losses of micro-batches and ranks add up to the mean over all tokens of the step.

A wrong shape, dtype or range raises a ValueError that names the argument.
"""

from lit_rlhf.functional import advantages, kl, logprobs, losses, masking, metrics, rewards
from lit_rlhf.functional.advantages import *
from lit_rlhf.functional.kl import *
from lit_rlhf.functional.logprobs import *
from lit_rlhf.functional.losses import *
from lit_rlhf.functional.masking import *
from lit_rlhf.functional.metrics import *
from lit_rlhf.functional.rewards import *

__all__ = [
    *advantages.__all__,
    *kl.__all__,
    *logprobs.__all__,
    *losses.__all__,
    *masking.__all__,
    *metrics.__all__,
    *rewards.__all__,
]
