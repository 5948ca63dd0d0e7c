"""The options of PPO in typed groups, each read as an attribute of `PPO`.

Each default is here and nowhere else.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from lit_rlhf.checks import (
    check_choice,
    check_count,
    check_fields,
    check_not_negative,
    check_number,
    check_positive,
    check_unit_interval,
)
from lit_rlhf.functional import Aggregation, Ensemble, KLEstimator
from lit_rlhf.models import DTYPES, DType
from lit_rlhf.rollout import SamplingOptions

Estimator = Literal["gae", "rloo", "grpo", "dr_grpo", "reinforce_plus_plus"]
OldPolicy = Literal["rollout", "reference"]
PolicyObjective = Literal["clip", "kl_penalty", "unclipped", "policy_gradient"]
Truncation = Literal["terminal", "bootstrap", "mask"]


@dataclass(frozen=True)
class RewardShapingOptions:
    """From a response's raw score to the rewards of its tokens (Eqs. 18, 19).

    Attributes:
        ensemble: How the weighted scores of several reward models make one: `sum`, `mean` or `min`.
            The last two take a model's heads apart. Functions and rules are added. Models and heads
            on unlike scales need `normalize` in `rewards`.
        normalization: Subtract the running mean of all scores so far, and divide by their running
            standard deviation (Eq. 18).
        scaling: Divide by the running standard deviation only, instead of `normalization`.
        clip: Bound on the size of the score after that; `None`: no clipping.
        kl_coef: Weight of the per-token KL penalty (Eqs. 3, 19), in reward per nat.
        kl_estimator: How a token's KL is estimated. Only `k1` has the gradient of KL, see
            `lit_rlhf.functional.kl_estimate`.
        kl_target: KL that an adaptive coefficient aims at, in nats per response; `None`: the
            coefficient is fixed.
        kl_horizon: Rollouts over which the adaptive coefficient adapts.
        missing_eos_penalty: Subtracted from the score of a response that was cut off.
        overlong_buffer: Tokens before `sampling.max_new_tokens` over which that penalty grows from
            0, whether a response ends or not (DAPO); `None`: only what was cut off is penalized.
        spread_coef: Subtracted from the score per unit of `rollout/score_spread`, the disagreement
            of several reward models on the response: mean minus k standard deviations.
    """

    ensemble: Ensemble = "sum"
    normalization: bool = True
    scaling: bool = False
    clip: float | None = 0.8
    kl_coef: float = 0.05
    kl_estimator: KLEstimator = "k1"
    kl_target: float | None = None
    kl_horizon: int = 10000
    missing_eos_penalty: float = 0.0
    overlong_buffer: int | None = None
    spread_coef: float = 0.0

    def __post_init__(self) -> None:
        check_fields(check_positive, self, "clip", "kl_target", "kl_horizon")
        check_choice("ensemble", self.ensemble, get_args(Ensemble))
        check_fields(check_not_negative, self, "kl_coef", "missing_eos_penalty", "spread_coef")
        check_fields(check_count, self, "overlong_buffer")
        check_choice("kl_estimator", self.kl_estimator, get_args(KLEstimator))
        if self.scaling and self.normalization:
            raise ValueError(
                "scaling, normalization: expected one of them, got both: normalization divides by "
                "the standard deviation, too; set normalization: false to scale only"
            )
        if self.overlong_buffer is not None and self.missing_eos_penalty == 0:
            raise ValueError(
                "overlong_buffer, missing_eos_penalty: expected missing_eos_penalty > 0 with an "
                f"overlong_buffer, got {self.overlong_buffer} and 0: it is the penalty's full size"
            )
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError(
                f"kl_target, kl_coef: expected kl_coef > 0 with a kl_target, got {self.kl_target} "
                "and 0: the coefficient is adapted by factors, so that it would stay 0"
            )


@dataclass(frozen=True)
class AdvantageOptions:
    """Advantages: generalized advantage estimation (Eqs. 7-12), or an estimator without a critic.

    Attributes:
        estimator: `gae`, with the critic. The others load and train none: `rloo`, `grpo` and
            `dr_grpo` compare the `responses_per_prompt` to a prompt, `reinforce_plus_plus` whitens
            the sum of the rewards that follow a token over all responses of the iteration.
            `docs/estimators.md` says what else each paper sets.
        gamma: Discount of a token; 1 for estimators that compare whole responses.
        lam: lambda of GAE (0.9 in the paper, Appendix C.3); 1 gives Monte-Carlo advantages.
        lam_alpha: alpha of a lambda that grows with the response's length, in place of `lam`: see
            `lit_rlhf.functional.length_adaptive_lam` (VAPO, arXiv 2504.05118, has 0.05).
        critic_lam: lambda of the critic's targets (VC-PPO, arXiv 2503.01491, has 1); `None`: the
            advantages' lambda.
        learned_prompts: Prompts of an iteration and rank that the update learns from, first those
            whose responses differ in their scores (DAPO's dynamic sampling, arXiv 2503.14476);
            `None`: all of `data.batch_size`. For estimators that compare the responses to a prompt.
        normalization: Whiten the advantages of each minibatch over its response tokens on all
            ranks. Not part of PPO-max, which constrains rewards instead (Section 5.3.1).
        clip: Bound on the size of an advantage after that; `None`: no clipping.
        truncation: Value after the last token of a response that was cut off: zero (`terminal`) or
            the critic's (`bootstrap`). `mask` does not learn from such a response, and estimators
            without a critic do not compare others with it.
    """

    estimator: Estimator = "gae"
    gamma: float = 1.0
    lam: float = 0.9
    lam_alpha: float | None = None
    critic_lam: float | None = None
    learned_prompts: int | None = None
    normalization: bool = False
    clip: float | None = None
    truncation: Truncation = "terminal"

    def __post_init__(self) -> None:
        check_choice("estimator", self.estimator, get_args(Estimator))
        check_fields(check_unit_interval, self, "gamma", "lam", "critic_lam")
        check_fields(check_positive, self, "lam_alpha", "clip")
        check_fields(check_count, self, "learned_prompts")
        check_choice("truncation", self.truncation, get_args(Truncation))
        if not self.uses_critic and self.truncation == "bootstrap":
            raise ValueError(
                f"truncation: expected terminal or mask with estimator: {self.estimator}, got "
                "bootstrap, which is a value of the critic"
            )
        if self.compares_responses and self.gamma != 1:
            raise ValueError(
                f"gamma: expected 1 with estimator: {self.estimator}, which compares whole "
                f"responses, got {self.gamma}"
            )
        if self.learned_prompts is not None and not self.compares_responses:
            raise ValueError(
                "learned_prompts: expected an estimator that compares the responses to a prompt "
                f"(rloo, grpo, dr_grpo), got {self.estimator}"
            )

    @property
    def uses_critic(self) -> bool:
        """Whether a critic is loaded and trained."""
        return self.estimator == "gae"

    @property
    def compares_responses(self) -> bool:
        """Whether advantages need several responses to a prompt."""
        return self.estimator in ("rloo", "grpo", "dr_grpo")


@dataclass(frozen=True)
class PPOLossOptions:
    """The losses of policy and critic.

    Attributes:
        policy_objective: Clipped surrogate (`clip`, Eq. 15), PPO-penalty (`kl_penalty`, Eq. 14),
            surrogate without clipping (`unclipped`, Eq. 13), or the plain policy gradient without
            importance sampling (`policy_gradient`).
        ratio_clip: epsilon of the clipped surrogate.
        ratio_clip_high: epsilon of its upper end, for an interval that is wider above; `None`:
            `ratio_clip`.
        dual_clip: Bound c > 1 on the ratio at negative advantages, where the clipped surrogate has
            none (arXiv 1912.09729); `None`: no bound.
        kl_penalty_coef: beta of PPO-penalty (Eq. 14).
        old_policy: What the ratio is taken against: the policy that sampled (`rollout`), or the
            reference (Section 5.3.2).
        value_coef: Weight of the value loss when it is added to the policy's, with a shared trunk
            (`critic_init: shared`).
        value_clip: epsilon of the clipped value loss (Eq. 16); `None`: no clipping.
        aggregation: How the losses of tokens make the policy's: their mean over all tokens
            (`token_mean`), the mean over responses of their means (`sequence_mean`), or of their
            sums over `sampling.max_new_tokens` (`sequence_sum`); see
            `lit_rlhf.functional.response_weights`. An entropy bonus is a mean over tokens.
        importance_cap: Largest weight of a token that was drawn from another distribution than the
            policy's, by `sampler` or with `sampling.top_p` and the like, see
            `lit_rlhf.functional.truncated_importance`; `None`: no weights.
        ref_kl_coef: Weight of KL to the reference in the policy's loss (k3), like GRPO's; together
            with or instead of the penalty in the rewards, `reward_shaping.kl_coef`.
        entropy_coef: Weight of the entropy bonus.
        entropy_clip: Entropy of a token above which it gets no bonus (Appendix B.3), in nats;
            `None`: no bound. The entropy is at most the log of the vocabulary's size.
        ptx_coef: Weight of the language-model loss (Eq. 17). The loss is used if
            `data.ptx_sources` are given.
    """

    policy_objective: PolicyObjective = "clip"
    ratio_clip: float = 0.2
    ratio_clip_high: float | None = None
    dual_clip: float | None = None
    kl_penalty_coef: float = 0.1
    old_policy: OldPolicy = "rollout"
    value_coef: float = 0.1
    value_clip: float | None = 0.2
    aggregation: Aggregation = "token_mean"
    importance_cap: float | None = 2.0
    ref_kl_coef: float = 0.0
    entropy_coef: float = 0.0
    entropy_clip: float | None = None
    ptx_coef: float = 0.1

    def __post_init__(self) -> None:
        check_choice("policy_objective", self.policy_objective, get_args(PolicyObjective))
        check_choice("old_policy", self.old_policy, get_args(OldPolicy))
        check_choice("aggregation", self.aggregation, get_args(Aggregation))
        check_fields(check_positive, self, "ratio_clip", "ratio_clip_high", "importance_cap")
        check_fields(check_positive, self, "value_clip", "entropy_clip")
        if self.dual_clip is not None:
            check_number("dual_clip", self.dual_clip, "a number > 1", lambda value: value > 1)
        check_fields(check_not_negative, self, "kl_penalty_coef", "entropy_coef", "ptx_coef")
        check_fields(check_not_negative, self, "value_coef", "ref_kl_coef")
        if self.old_policy == "reference" and self.policy_objective == "kl_penalty":
            raise ValueError(
                "old_policy, policy_objective: expected old_policy: rollout with kl_penalty, got "
                "reference: the penalty is KL(old policy || policy), estimated on samples of the "
                "old policy, and rollouts are not samples of the reference"
            )
        if self.aggregation != "token_mean" and self.policy_objective == "kl_penalty":
            raise ValueError(
                "aggregation: expected token_mean with policy_objective: kl_penalty, whose penalty "
                f"is a mean over tokens, got {self.aggregation}"
            )
        if self.policy_objective != "clip" and (self.ratio_clip_high or self.dual_clip):
            raise ValueError(
                "ratio_clip_high, dual_clip: expected neither with policy_objective: "
                f"{self.policy_objective}, which has no clipping"
            )


@dataclass(frozen=True)
class MemoryOptions:
    """Bounds on PPO's memory outside the update. The algorithm does not depend on it.

    Attributes:
        frozen_dtype: Type of the weights of reference and reward models; `None`: `network.dtype`.
        offload_frozen: Keep reference and reward models in CPU memory between uses.
        shard_frozen: Keep an equal share of reference and reward models on each rank between uses,
            on its device, or with `offload_frozen` in CPU memory. For a use, each rank gathers the
            whole network.
        rollout_batch_size: Most responses in progress at a time: when one ends, the next prompt
            takes its place. `None`: all at once.
        max_tokens_per_forward: Tokens, without padding, that reference, reward models and critic
            score in one forward; `None`: 2048 on a CPU and 16384 on a GPU.
    """

    frozen_dtype: DType | None = None
    offload_frozen: bool = False
    shard_frozen: bool = False
    rollout_batch_size: int | None = None
    max_tokens_per_forward: int | None = None

    def __post_init__(self) -> None:
        if self.frozen_dtype is not None:
            check_choice("frozen_dtype", self.frozen_dtype, DTYPES)
        check_fields(check_count, self, "rollout_batch_size", "max_tokens_per_forward")


@dataclass(frozen=True)
class MinibatchOptions:
    """Options of the updates of an iteration.

    Attributes:
        ppo_epochs: Passes over the rollouts of an iteration.
        minibatch_size: Rollouts per update and rank.
        micro_batch_size: Most rollouts per forward and backward; `None`: no limit. The gradient
            does not depend on it.
        micro_batch_tokens: Most tokens, without padding, per forward and backward. A longer rollout
            is computed by itself. The gradient does not depend on it. With neither limit, the
            device's memory sets one: a micro-batch takes about 1 GiB on a CPU, and on CUDA a
            quarter of the device's memory, but at most 16,384 tokens.
    """

    ppo_epochs: int = 1
    minibatch_size: int = 32
    micro_batch_size: int | None = None
    micro_batch_tokens: int | None = None

    def __post_init__(self) -> None:
        check_fields(check_count, self, *vars(self))

    def updates_per_iteration(self, n_rollouts: int) -> int:
        """Updates of a network in an iteration that learns from `n_rollouts` rollouts of a rank."""
        return self.ppo_epochs * max(n_rollouts // self.minibatch_size, 1)


@dataclass(frozen=True)
class CriticPretrainingOptions:
    """The phase at the start of PPO that trains only the critic (Section 5.3.3).

    It takes the place of the critic's warm-up. The default is as long as that warm-up would be in
    the paper: a tenth of 1000 updates, at four per iteration.

    Attributes:
        iterations: Longest length of the phase; 0: there is none.
        target_value_loss: The phase ends once `ppo/value_loss` of an iteration is at most this;
            `None`: after its iterations. The targets of the loss contain the critic's own values,
            so that with `lam` < 1 the loss on long responses is small from the start, whatever the
            critic knows. See `ppo/explained_variance` before you set it.
    """

    iterations: int = 25
    target_value_loss: float | None = None

    def __post_init__(self) -> None:
        check_count("iterations", self.iterations, 0)
        check_fields(check_not_negative, self, "target_value_loss")


class PPOOptions(NamedTuple):
    """All options of `PPO`. The defaults are PPO-max with the paper's values.

    Attributes:
        sampling: How responses are sampled.
        reward_shaping: From scores to the rewards of tokens.
        advantages: Generalized advantage estimation, or an estimator without a critic.
        loss: The losses of policy and critic.
        minibatches: How an iteration's rollouts become updates.
        critic_pretraining: The phase at the start that trains only the critic.
        memory: Bounds on the memory outside the update.
        responses_per_prompt: Responses to each prompt of an iteration.
    """

    sampling: SamplingOptions = SamplingOptions(max_new_tokens=512)
    reward_shaping: RewardShapingOptions = RewardShapingOptions()
    advantages: AdvantageOptions = AdvantageOptions()
    loss: PPOLossOptions = PPOLossOptions()
    minibatches: MinibatchOptions = MinibatchOptions()
    critic_pretraining: CriticPretrainingOptions = CriticPretrainingOptions()
    memory: MemoryOptions = MemoryOptions()
    responses_per_prompt: int = 1


def check_options(options: PPOOptions, shares_trunk: bool) -> None:
    """Raise ValueError where options of several groups do not fit together.

    Args:
        options: The options.
        shares_trunk: Whether the critic's trunk is the policy's, if there is a critic.
    """
    estimator = options.advantages.estimator
    if options.advantages.compares_responses and options.responses_per_prompt < 2:
        raise ValueError(
            f"responses_per_prompt: expected at least 2 with advantages.estimator: {estimator}, "
            f"which compares the responses to a prompt, got {options.responses_per_prompt}"
        )
    iterations = options.critic_pretraining.iterations
    if options.advantages.uses_critic and shares_trunk and iterations:
        raise ValueError(
            "critic_pretraining.iterations: expected 0 with critic_init: shared, got "
            f"{iterations}: the critic's trunk is the policy's"
        )
