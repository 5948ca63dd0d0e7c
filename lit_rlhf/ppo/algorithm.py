"""PPO-max: proximal policy optimization of a language model (Section 5 of arXiv 2307.04964).

`PPO` holds the networks, the options and the phases of one iteration of Algorithm 1, in reading
order: `rollout`, `score`, `estimate`, `shape_rewards`, `experience`, and the losses of an update.
It needs no Trainer. `lit_rlhf.modules.PPOModule` adds optimizers, logging and checkpoints.

Notation: `B` responses, `T` tokens of the longest response.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_rlhf import functional as F
from lit_rlhf.data import PromptBatch, TokenBatch
from lit_rlhf.forward import (
    LanguageModel,
    Offloaded,
    hidden_states,
    map_target_logits,
    response_values,
    stop_token_ids,
    target_logprobs,
    trunk_of,
)
from lit_rlhf.ppo.options import AdvantageOptions, PPOOptions, check_groups
from lit_rlhf.rewards import CallableReward, Scores, WeightedReward
from lit_rlhf.rollout import (
    Experience,
    RolloutBatch,
    RolloutMetrics,
    Sampler,
    TokenStatistics,
    generate_responses,
    score_rollouts,
)
from lit_rlhf.stats import FixedDtypeBuffers, RunningMoments, global_masked_moments, global_sum


class PPONetworks(NamedTuple):
    """The networks of PPO and what scores its responses.

    Policy and critic are trained, without dropout. The reference is the frozen SFT model; `None`:
    the policy without its LoRA adapters. The critic's trunk may be the policy's, see
    `add_value_head`; `None` where `advantages.estimator` uses none. `gold` is a judge whose scores
    are only logged. `sampler` draws the responses.
    """

    policy: LanguageModel
    reference: LanguageModel | Offloaded | None
    critic: LanguageModel | None
    reward: WeightedReward
    tokenizer: PreTrainedTokenizerBase
    gold: CallableReward | None = None
    sampler: Sampler = generate_responses


LossShare = tuple[Tensor, dict[str, Tensor]]
"""Share of a micro-batch in the loss of a minibatch, with its `ppo/*` metrics; all 0-dim.

Shares add up over micro-batches.
"""


class PPO(FixedDtypeBuffers):
    """The algorithm: networks, options and phases, without a Trainer.

    Override a phase to change it. The defaults of the options are PPO-max.
    """

    kl_coef: Tensor
    critic: LanguageModel | None

    def __init__(self, networks: PPONetworks, options: PPOOptions = PPOOptions()) -> None:
        super().__init__()
        self.assemble(networks, options)

    def assemble(self, networks: PPONetworks, options: PPOOptions) -> None:
        """Take networks and options. A class that is also another kind of module calls it."""
        check_groups(options)
        critic = networks.critic
        if (critic is not None) != options.advantages.uses_critic:
            raise ValueError(
                f"networks.critic: expected {'a' if critic is None else 'no'} critic with "
                f"advantages.estimator: {options.advantages.estimator}"
            )
        self.policy = networks.policy
        self.reference = networks.reference
        self.reward = networks.reward
        self.shares_trunk = critic is not None and trunk_of(critic) is trunk_of(self.policy)
        # whether the critic is a network of its own, with updates of its own
        self.separate_critic = critic is not None and not self.shares_trunk
        if self.shares_trunk:
            # its weights are the policy's, so that they are moved, trained and saved with them
            object.__setattr__(self, "critic", critic)
        else:
            self.critic = critic
        self.gold = networks.gold
        self.tokenizer = networks.tokenizer
        self.sampler = networks.sampler
        self.sampling = options.sampling
        self.reward_shaping = options.reward_shaping
        n_scores = sum(model.n_heads for model in self.reward.models)
        if self.reward_shaping.spread_coef and n_scores < 2:
            raise ValueError(
                f"reward_shaping.spread_coef={self.reward_shaping.spread_coef}: expected at least "
                f"two reward models, or heads of one, in rewards, got {n_scores}"
            )
        self.advantages = options.advantages
        self.loss = options.loss
        self.memory = options.memory
        self.responses_per_prompt = options.responses_per_prompt
        # State of the algorithm, so that checkpoints hold it.
        self.score_moments = RunningMoments()
        kl_coef = torch.tensor(self.reward_shaping.kl_coef, dtype=torch.float64)
        self.register_buffer("kl_coef", kl_coef)

    def repeat_prompts(self, batch: PromptBatch) -> PromptBatch:
        """Each prompt of a batch `responses_per_prompt` times, in adjacent rows."""
        n = self.responses_per_prompt
        if n == 1:
            return batch
        return batch.select([row for row in range(len(batch.texts)) for _ in range(n)])

    def rollout(self, batch: PromptBatch, seed: int) -> RolloutBatch:
        """Sample one response to each prompt from the policy."""
        return self.sampler(
            self.policy,
            batch.input_ids,
            batch.attention_mask,
            self.sampling,
            eos_token_ids=stop_token_ids(self.policy, self.tokenizer),
            pad_token_id=self.tokenizer.pad_token_id,
            seed=seed,
            batch_size=self.memory.rollout_batch_size,
        )

    def score(self, rollouts: RolloutBatch, batch: PromptBatch) -> Scores:
        """Score responses by the weighted sum of reward models and functions."""
        scores: Scores = self.reward(
            rollouts,
            batch.texts,
            max_tokens_per_forward=self.memory.max_tokens_per_forward,
            records=batch.fields,
            turns=batch.turns,
        )
        return scores

    def estimate(self, rollouts: RolloutBatch) -> TokenStatistics:
        """Log-probs of policy and reference and values of the critic, before the update."""
        return score_rollouts(
            self.policy,
            self.reference,
            self.critic,
            rollouts,
            temperature=self.sampling.temperature,
            max_tokens_per_forward=self.memory.max_tokens_per_forward,
        )

    def measure(
        self,
        batch: PromptBatch,
        rollouts: RolloutBatch,
        scores: Scores,
        estimates: TokenStatistics,
        metrics: RolloutMetrics | None = None,
    ) -> RolloutMetrics:
        """Add responses to `metrics` (or new ones), with each reward's score and the gold one."""
        metrics = metrics or RolloutMetrics()
        named = {"score": scores.total}
        named |= {f"score/{name}": raw for name, raw in scores.by_name.items()}
        if (spread := scores.spread()) is not None:
            named["score_spread"] = spread
        if self.gold is not None:
            named["gold"] = self.gold(rollouts, batch.texts, None, batch.fields)
        if (drawn := rollouts.sampler_logprobs) is not None:
            kl = F.kl_estimate(drawn, estimates.logprobs, "k3")
            named["sampler_kl"] = F.masked_mean(kl, rollouts.response_mask, 1)
        # of the prompts alone: they tell other data from a collapse
        named["prompt_length"] = rollouts.prompt_mask.sum(1)
        named["ref_prompt_entropy"] = estimates.ref_prompt_entropy
        metrics.update(
            logprobs=estimates.logprobs,
            ref_logprobs=estimates.ref_logprobs,
            entropy=estimates.entropy,
            response_mask=rollouts.response_mask,
            response_ids=rollouts.response_ids,
            terminated=rollouts.terminated,
            scores=named,
        )
        return metrics

    def shape_rewards(
        self, rollouts: RolloutBatch, scores: Scores, estimates: TokenStatistics
    ) -> Tensor:
        """Rewards `[B, T]`: the score at the last token, minus the KL penalty of each (Eq. 19)."""
        shaped = self.reparameterize(scores.total)
        # after Eq. 18, so that the penalty is in the units of the reward that is learned from
        buffer, cut_off = self.reward_shaping.overlong_buffer, ~rollouts.terminated
        if buffer is not None:
            cut_off = -F.soft_overlong_penalty(
                rollouts.lengths, longest=self.sampling.max_new_tokens, buffer=buffer
            )
        shaped = shaped - self.reward_shaping.missing_eos_penalty * cut_off
        if self.reward_shaping.spread_coef and (spread := scores.spread()) is not None:
            shaped = shaped - self.reward_shaping.spread_coef * spread
        return F.token_rewards(
            scores=shaped,
            logprobs=estimates.logprobs,
            ref_logprobs=estimates.ref_logprobs,
            mask=rollouts.response_mask,
            kl_coef=float(self.kl_coef),
            estimator=self.reward_shaping.kl_estimator,
        )

    def reparameterize(self, scores: Tensor) -> Tensor:
        """Normalize or scale raw scores `[B]` by the moments of all so far (Eq. 18), and clip."""
        self.score_moments.update(scores)
        moments, clip = self.score_moments, self.reward_shaping.clip
        if self.reward_shaping.normalization:
            return F.normalized_scores(scores, mean=moments.mean, std=moments.std, clip=clip)
        if self.reward_shaping.scaling:
            scores = F.scaled_scores(scores, moments.std)
        return scores if clip is None else F.clipped_scores(scores, clip)

    def adapt_kl_coef(self, kl: float, n_rollouts: int) -> None:
        """Move an adaptive KL coefficient so that the KL, in nats per response, meets its target.

        `n_rollouts` are the rollouts of the iteration on all ranks.
        """
        target, horizon = self.reward_shaping.kl_target, self.reward_shaping.kl_horizon
        if target is not None:
            coef = F.adaptive_kl_coef(
                float(self.kl_coef), kl=kl, target=target, horizon=horizon, n_samples=n_rollouts
            )
            self.kl_coef.fill_(coef)

    def experience(
        self, rollouts: RolloutBatch, rewards: Tensor, estimates: TokenStatistics
    ) -> Experience:
        """Advantages and returns of the rollouts (Eqs. 7-12), and the tokens to learn from."""
        options, mask = self.advantages, rollouts.response_mask
        learned = mask & rollouts.terminated[:, None] if options.truncation == "mask" else mask
        if self.critic is None:
            n = self.responses_per_prompt
            advantages = returns = critic_free_advantages(options, rewards, mask, learned, n)
        else:
            bootstrap = None
            if options.truncation == "bootstrap":
                # A response that ended has no next state; one that was cut off has V(s_{T+1}).
                bootstrap = estimates.next_values.masked_fill(rollouts.terminated, 0.0)
            lam: float | Tensor = options.lam
            if options.lam_alpha is not None:
                lam = F.length_adaptive_lam(rollouts.lengths, options.lam_alpha)
            advantages, returns = F.gae(
                values=estimates.values,
                rewards=rewards,
                mask=mask,
                gamma=options.gamma,
                lam=lam,
                bootstrap_values=bootstrap,
            )
            if options.critic_lam is not None:
                returns = F.gae(
                    values=estimates.values,
                    rewards=rewards,
                    mask=mask,
                    gamma=options.gamma,
                    lam=options.critic_lam,
                    bootstrap_values=bootstrap,
                ).returns
        importance, drawn = None, rollouts.sampler_logprobs
        if drawn is not None and (cap := self.loss.importance_cap) is not None:
            importance = F.truncated_importance(
                logprobs=estimates.logprobs, sampler_logprobs=drawn, mask=mask, cap=cap
            )
        from_reference = self.loss.old_policy == "reference"
        old_logprobs = estimates.ref_logprobs if from_reference else estimates.logprobs
        return Experience(
            rollouts,
            old_logprobs,
            estimates.values,
            advantages,
            returns,
            learned,
            estimates.policy_lower,
            estimates.critic_lower,
            estimates.ref_logprobs if self.loss.ref_kl_coef else None,
            importance=importance,
        )

    def select_prompts(self, experience: Experience, scores: Tensor) -> Experience:
        """Select the prompts to learn from, informative ones first (DAPO's dynamic sampling).

        Scores are the raw ones, `[B]`. All prompts without `advantages.learned_prompts`.
        """
        n_prompts, size = self.advantages.learned_prompts, self.responses_per_prompt
        if n_prompts is None:
            return experience
        informative = F.informative_groups(scores, size, experience.loss_mask.any(1))
        # stable, so that prompts are otherwise taken in the order of the batch
        order = (~informative).long().argsort(stable=True)[:n_prompts].sort().values
        rows = order[:, None] * size + torch.arange(size, device=order.device)
        return experience.select(rows.flatten())

    def count_learned(self, n_rollouts: int) -> int:
        """How many of an iteration's rollouts on a rank the update learns from."""
        n_prompts = self.advantages.learned_prompts
        return n_rollouts if n_prompts is None else n_prompts * self.responses_per_prompt

    def reparameterize_advantages(self, minibatch: Experience) -> Experience:
        """Whiten, clip and weigh the advantages of a minibatch, over all ranks (Section 5.3.1)."""
        advantages, mask = minibatch.advantages, minibatch.loss_mask
        if self.advantages.normalization:
            # over the tokens to learn from only: padding would change the moments
            moments = global_masked_moments(advantages, mask)
            advantages = F.masked_whiten(advantages, mask, moments=moments)
        if self.advantages.clip is not None:
            advantages = F.clipped_advantages(advantages, self.advantages.clip)
        if minibatch.importance is not None:
            # the surrogate is linear in the size of an advantage
            advantages = advantages * minibatch.importance
        minibatch = replace(minibatch, advantages=advantages)
        mean = self.loss.aggregation == "token_mean"
        return minibatch if mean else self.weigh_responses(minibatch)

    def weigh_responses(self, minibatch: Experience) -> Experience:
        """Give the responses of a minibatch the weights of `loss.aggregation`, over all ranks."""
        lengths = minibatch.loss_mask.sum(1)
        counts = torch.stack([lengths.sum(), (lengths > 0).sum()]).float()
        tokens, responses = global_sum(counts).unbind()
        weights = F.response_weights(
            lengths,
            tokens=tokens,
            responses=responses,
            longest=self.sampling.max_new_tokens,
            aggregation=self.loss.aggregation,
        )
        advantages = minibatch.advantages * weights.unsqueeze(1)
        return replace(minibatch, advantages=advantages, weights=weights)

    def critic_loss(
        self, experience: Experience, tokens: Tensor, hidden: Tensor | None = None
    ) -> LossShare:
        """Share of a micro-batch in the value loss (Eq. 16) of a minibatch of so many tokens.

        `hidden` are the critic's hidden states, `[B, P+T, H]`, if they are there already.
        """
        rollouts, mask = experience.rollouts, experience.loss_mask
        ids, real, lower = rollouts.sequence_ids, rollouts.sequence_mask, experience.critic_lower
        assert self.critic is not None
        values = response_values(self.critic, ids, real, mask.shape[1], lower=lower, hidden=hidden)
        loss, clip_fraction = F.value_loss(
            values=values,
            old_values=experience.old_values,
            returns=experience.returns,
            mask=mask,
            value_clip=self.loss.value_clip,
            denominator=tokens,
        )
        share = mask.sum() / tokens
        return loss, {"ppo/value_loss": loss, "ppo/value_clip_fraction": clip_fraction * share}

    def joint_loss(self, experience: Experience, tokens: Tensor) -> LossShare:
        """Share of a micro-batch in both losses, by one forward of the trunk that both share."""
        rollouts = experience.rollouts
        ids, mask = rollouts.sequence_ids, rollouts.sequence_mask
        hidden = hidden_states(self.policy, ids, mask, experience.critic_lower)
        policy_loss, metrics = self.policy_loss(experience, tokens, hidden)
        value_loss, of_critic = self.critic_loss(experience, tokens, hidden)
        return policy_loss + self.loss.value_coef * value_loss, {**metrics, **of_critic}

    def policy_loss(
        self, experience: Experience, tokens: Tensor, hidden: Tensor | None = None
    ) -> LossShare:
        """Share of a micro-batch in the policy's loss with its entropy bonus, over `tokens`.

        Those are the minibatch's, see `global_denominator`. `hidden` is as for `critic_loss`.
        """
        rollouts, mask = experience.rollouts, experience.loss_mask
        ids, real = rollouts.sequence_ids, rollouts.sequence_mask
        if hidden is None and experience.policy_lower is not None:
            hidden = hidden_states(self.policy, ids, real, experience.policy_lower)
        entropy_coef, temperature = self.loss.entropy_coef, self.sampling.temperature

        def read(logits: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
            if entropy_coef:
                return F.token_logprobs_and_entropy(logits, ids, temperature)
            return (F.token_logprobs(logits, ids, temperature),)

        targets = rollouts.to_sequence_mask(mask)
        logprobs, *entropy = map_target_logits(self.policy, ids, real, targets, read, hidden=hidden)
        # The last T columns of a sequence are its response.
        logprobs = logprobs[:, -mask.shape[1] :]
        terms = self.policy_objective(logprobs, experience, tokens)
        share = mask.sum() / tokens
        metrics = {
            "ppo/policy_loss": terms.loss,
            "ppo/clip_fraction": terms.clip_fraction * share,
            "ppo/approx_kl": terms.approx_kl * share,
            "ppo/ratio": terms.ratio_mean * share,
        }
        loss = terms.loss
        if entropy:
            metrics["ppo/entropy_loss"] = F.entropy_loss(
                entropy[0][:, -mask.shape[1] :],
                mask,
                clip=self.loss.entropy_clip,
                denominator=tokens,
            )
            loss = loss + entropy_coef * metrics["ppo/entropy_loss"]
        if experience.ref_logprobs is not None:
            metrics["ppo/ref_kl"] = F.reference_kl_loss(
                logprobs=logprobs,
                ref_logprobs=experience.ref_logprobs,
                mask=mask,
                weights=experience.weights,
                denominator=tokens,
            )
            loss = loss + self.loss.ref_kl_coef * metrics["ppo/ref_kl"]
        return loss, metrics

    def policy_objective(
        self, logprobs: Tensor, experience: Experience, tokens: Tensor
    ) -> F.PolicyLoss:
        """The objective that `loss.policy_objective` names (Eqs. 13-15); log-probs are `[B, T]`."""
        mask, loss = experience.loss_mask, self.loss
        match loss.policy_objective:
            case "clip":
                return F.surrogate_loss(
                    logprobs=logprobs,
                    old_logprobs=experience.old_logprobs,
                    advantages=experience.advantages,
                    mask=mask,
                    ratio_clip=loss.ratio_clip,
                    ratio_clip_high=loss.ratio_clip_high,
                    dual_clip=loss.dual_clip,
                    denominator=tokens,
                )
            case "unclipped":
                return F.surrogate_loss(
                    logprobs=logprobs,
                    old_logprobs=experience.old_logprobs,
                    advantages=experience.advantages,
                    mask=mask,
                    ratio_clip=None,
                    denominator=tokens,
                )
            case "kl_penalty":
                return F.kl_penalty_loss(
                    logprobs=logprobs,
                    old_logprobs=experience.old_logprobs,
                    advantages=experience.advantages,
                    mask=mask,
                    kl_penalty=loss.kl_penalty_coef,
                    denominator=tokens,
                )
            case "policy_gradient":
                return F.policy_gradient_loss(
                    logprobs=logprobs,
                    advantages=experience.advantages,
                    mask=mask,
                    denominator=tokens,
                )

    def ptx_loss(self, batch: TokenBatch, tokens: Tensor) -> Tensor:
        """Share of a micro-batch of text in the language-model loss over `tokens` (Eq. 17)."""
        logprobs = target_logprobs(
            self.policy, batch.input_ids, batch.attention_mask, batch.completion_mask
        )
        return F.language_model_loss(logprobs, batch.completion_mask, tokens)


def critic_free_advantages(
    options: AdvantageOptions, rewards: Tensor, mask: Tensor, loss_mask: Tensor, group_size: int
) -> Tensor:
    """Advantages `[B, T]` of this rank's rollouts, 0 outside the loss mask; a collective.

    Rewards and masks are `[B, T]`. The responses to a prompt are `group_size` adjacent rows, and
    all of them are on this rank. Whitening is over the tokens of all ranks.
    """
    if options.estimator == "reinforce_plus_plus":
        return F.reinforce_plus_plus_advantages(
            rewards,
            mask,
            gamma=options.gamma,
            loss_mask=loss_mask,
            moments=global_masked_moments,
        )
    # the response is one action, whose return has the KL penalties of all of its tokens
    returns, learned = F.masked_sum(rewards, mask, 1), loss_mask.any(1)
    if options.estimator == "rloo":
        advantages = F.leave_one_out_advantages(returns, group_size, learned)
    else:
        advantages = F.group_advantages(
            returns, group_size, learned, scale=options.estimator == "grpo"
        )
    return advantages.unsqueeze(1) * loss_mask
