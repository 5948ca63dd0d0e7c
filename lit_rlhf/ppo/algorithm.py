"""PPO-max: proximal policy optimization of a language model (Section 5 of arXiv 2307.04964).

An iteration of Algorithm 1 has three steps, which are methods of `PPO`:

1. `collect` samples responses (`rollout`), scores them (`score`), and computes log-probs and values
   (`estimate`).
2. `learn_from` makes rewards (`shape_rewards`) and advantages (`experience`) of them.
3. `update` trains critic and policy on minibatches (`train_critic`, `train_policy`).

None of them needs a Trainer. `lit_rlhf.modules.PPOModule` adds optimizers, logging and checkpoints.

Notation: `B` responses, `P` tokens of the longest prompt, `T` tokens of the longest response.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_rlhf import functional as F
from lit_rlhf.data import PromptBatch, TokenBatch
from lit_rlhf.finite import require_finite, weight_sums
from lit_rlhf.forward import (
    Offloaded,
    call,
    hidden_states,
    ids_without_token,
    map_target_logits,
    response_values,
    rule_out_ids_without_token,
    set_longest_sequence,
    stop_token_ids,
    target_logprobs,
    trunk_of,
)
from lit_rlhf.micro_batches import LossShare, MicroBatch, slice_batch, split_batch
from lit_rlhf.ppo.networks import PPONetworks
from lit_rlhf.ppo.options import (
    AdvantageOptions,
    CriticPretrainingOptions,
    PPOOptions,
    check_options,
)
from lit_rlhf.ppo.stepping import (
    NetworkName,
    PhaseContext,
    Stepper,
    mean_of_minibatches,
    untimed,
)
from lit_rlhf.rank_zero import rank_zero_warn
from lit_rlhf.rewards import Scores
from lit_rlhf.rollout import (
    Experience,
    RolloutBatch,
    RolloutMetrics,
    TokenStatistics,
    build_response_records,
    generate_responses,
    iterate_minibatches,
    reference_model,
    score_rollouts,
)
from lit_rlhf.stats import (
    FixedDtypeBuffers,
    RunningMoments,
    fail_together,
    global_denominator,
    global_masked_moments,
    global_max,
    global_means,
    global_sum,
)

# Options that save memory, by phase: an error names them when the memory runs out there.
ROLLOUT_MEMORY = ("memory.rollout_batch_size", "sampling.max_new_tokens")
SCORING_MEMORY = ("memory.max_tokens_per_forward", "sampling.max_new_tokens")
UPDATE_MEMORY = (
    "minibatches.micro_batch_size",
    "minibatches.micro_batch_tokens",
    "sampling.max_new_tokens",
    "network.gradient_checkpointing",
)


class Collected(NamedTuple):
    """The responses of an iteration, before anything is learned from them.

    Attributes:
        prompts: The prompts, `B` rows.
        rollouts: The responses to them.
        scores: Their scores.
        estimates: Log-probs of policy and reference, and values of the critic.
    """

    prompts: PromptBatch
    rollouts: RolloutBatch
    scores: Scores
    estimates: TokenStatistics


class Lesson(NamedTuple):
    """The experience that an update learns from, and metrics of the whole rollout.

    Attributes:
        experience: The responses that the update learns from, with advantages and returns.
        metrics: Metrics of the rewards and values of all responses, by key, 0-dim.
    """

    experience: Experience
    metrics: dict[str, Tensor]


class WeightedExperience(NamedTuple):
    """A micro-batch of a minibatch.

    Attributes:
        experience: What to learn from.
        weight: Factor of its loss, see `MicroBatch`.
    """

    experience: Experience
    weight: float


class Draws(NamedTuple):
    """The random numbers of an iteration on a rank.

    Attributes:
        rollout_seed: Seed of the rollouts.
        generator: Generator of the minibatches.
    """

    rollout_seed: int
    generator: torch.Generator


class PPO(FixedDtypeBuffers):
    """The algorithm. Override a phase to change it. The defaults of the options are PPO-max.

    A PPO trains networks that it does not own: whoever built them moves and saves them. Its own
    state, and its state dict, are the buffers and moments below.

    Attributes:
        networks: The networks, with rewards, tokenizer and sampler.
        shares_trunk: Whether the critic's trunk is the policy's, so that one update trains both.
        separate_critic: Whether the critic is a network of its own, with updates of its own.
        score_moments: Running moments of all scores so far (Eq. 18).
        kl_coef: The coefficient of the KL penalty, float64.
        iteration: Iterations that have ended.
        ppo_step: Updates of the policy.
        pretraining_done: Whether critic pre-training has ended.
        pretraining_length: Iterations that it took, once it has ended.

    Each group of `PPOOptions` is an attribute of its name, too.

    Args:
        networks: The networks.
        options: The options.
    """

    kl_coef: Tensor
    iteration: Tensor
    ppo_step: Tensor
    pretraining_done: Tensor
    pretraining_length: Tensor

    def __init__(self, networks: PPONetworks, options: PPOOptions = PPOOptions()) -> None:
        super().__init__()
        critic = networks.critic
        if (critic is not None) != options.advantages.uses_critic:
            raise ValueError(
                f"networks.critic: expected {'a' if critic is None else 'no'} critic with "
                f"advantages.estimator: {options.advantages.estimator}"
            )
        self.shares_trunk = critic is not None and trunk_of(critic) is trunk_of(networks.policy)
        self.separate_critic = critic is not None and not self.shares_trunk
        check_options(options, self.shares_trunk)
        n_scores = sum(model.n_heads for model in networks.reward.models)
        if options.reward_shaping.spread_coef and n_scores < 2:
            raise ValueError(
                f"reward_shaping.spread_coef={options.reward_shaping.spread_coef}: expected at "
                f"least two reward models, or heads of one, in rewards, got {n_scores}"
            )
        # A tuple, whose networks do not become submodules.
        self.networks = networks
        language_models = (networks.policy, networks.reference)
        rule_out_ids_without_token(
            [network for network in language_models if network is not None], networks.tokenizer
        )
        self.sampling = options.sampling
        self.reward_shaping = options.reward_shaping
        self.advantages = options.advantages
        self.loss = options.loss
        self.minibatches = options.minibatches
        self.critic_pretraining = options.critic_pretraining
        if critic is None:
            self.critic_pretraining = CriticPretrainingOptions(iterations=0)
        self.memory = options.memory
        self.responses_per_prompt = options.responses_per_prompt
        self.score_moments = RunningMoments()
        kl_coef = torch.tensor(self.reward_shaping.kl_coef, dtype=torch.float64)
        self.register_buffer("kl_coef", kl_coef)
        self.register_buffer("iteration", torch.zeros((), dtype=torch.long))
        self.register_buffer("ppo_step", torch.zeros((), dtype=torch.long))
        no_pretraining = torch.tensor(self.critic_pretraining.iterations == 0)
        self.register_buffer("pretraining_done", no_pretraining)
        self.register_buffer("pretraining_length", torch.zeros((), dtype=torch.long))

    def set_longest_sequence(self, n_tokens: int) -> None:
        """Fix rotary factors that depend on the sequence for the longest of the run.

        Only networks with such factors (`longrope`, `dynamic`) change. They refuse sequences beyond
        their first training until this is called.

        Args:
            n_tokens: Tokens of the longest prompt with the longest response.
        """
        networks = self.networks
        for network in (networks.policy, networks.reference, networks.critic):
            if network is not None:
                inner = network.network if isinstance(network, Offloaded) else network
                set_longest_sequence(inner, n_tokens)
        networks.reward.set_longest_sequence(n_tokens)

    def collect(
        self, prompts: PromptBatch, seed: int, phase_context: PhaseContext = untimed
    ) -> Collected:
        """Sample a response to each prompt, score it, and compute its log-probs and values.

        Args:
            prompts: The prompts; see `repeat_prompts` for several responses to each.
            seed: Seed of the responses.
            phase_context: Wraps each of the three phases.
        """
        with phase_context("rollout", prompts.input_ids.shape, ROLLOUT_MEMORY):
            rollouts = self.rollout(prompts, seed)
        with phase_context("score", rollouts.sequence_shape, SCORING_MEMORY):
            scores = self.score(rollouts, prompts)
        with phase_context("estimate", rollouts.sequence_shape, SCORING_MEMORY):
            estimates = self.estimate(rollouts)
        return Collected(prompts=prompts, rollouts=rollouts, scores=scores, estimates=estimates)

    def learn_from(self, collected: Collected) -> Lesson:
        """Turn scores into rewards and advantages, and select what the update learns from.

        Raises:
            NotFiniteError: If a score, a log-prob or a value is not finite, on all ranks. Nothing
                has changed then: only an iteration that is learned from counts in running moments.
        """
        rollouts = collected.rollouts
        scores = collected.scores
        estimates = collected.estimates
        require_finite(
            {
                "rewards": scores.total,
                "log-probs of the policy": estimates.logprobs,
                "log-probs of the reference": estimates.ref_logprobs,
                "values of the critic": estimates.values,
            }
        )
        self.networks.reward.commit_moments(scores)
        rewards = self.shape_rewards(rollouts, scores, estimates)
        experience = self.experience(rollouts, rewards, estimates)
        metrics = self.measure_experience(rewards, scores, experience)
        return Lesson(experience=self.select_prompts(experience, scores.total), metrics=metrics)

    def update(
        self,
        experience: Experience,
        stepper: Stepper,
        generator: torch.Generator,
        ptx: TokenBatch | None = None,
    ) -> dict[str, Tensor]:
        """Train the critic and, after critic pre-training, the policy; this ends the iteration.

        Returns metrics `ppo/*`, means over minibatches; NaN where all updates were skipped. Without
        a token to learn from on any rank, there is no update and no metric of it.

        Args:
            experience: What to learn from.
            stepper: Makes the steps of the optimizers.
            generator: Draws the minibatches.
            ptx: Text for the language-model loss (Eq. 17), at least as many rows as there are
                responses; `None`: there is no such loss.
        """
        pretraining = self.in_critic_pretraining()
        history: list[dict[str, Tensor]] = []
        for _ in range(self.minibatches.ppo_epochs):
            size = self.minibatches.minibatch_size
            for rows in iterate_minibatches(len(experience), size=size, generator=generator):
                # copied once: otherwise each field would copy the rows, and wait for the device
                index = rows.to(experience.loss_mask.device)
                minibatch = experience.select(index)
                metrics: dict[str, Tensor] = {}
                if self.separate_critic:
                    metrics |= self.train_critic(minibatch, stepper)
                if not pretraining:
                    text = None if ptx is None else ptx.select(index)
                    metrics |= self.train_policy(minibatch, text, stepper)
                stepper.end_minibatch(trains_policy=not pretraining)
                history.append(metrics)
        means = mean_of_minibatches(history)
        if pretraining:
            value_loss = math.inf  # unless the critic has learned
            if "ppo/value_loss" in means:
                # over all ranks: they have to agree on when the phase ends
                on_all_ranks = global_means(means, experience.loss_mask.device)
                value_loss = float(on_all_ranks["ppo/value_loss"])
            self.watch_critic_pretraining(value_loss)
        elif "ppo/ratio" in history[0]:
            means["ppo/ratio_first"] = history[0]["ppo/ratio"]
        self.iteration += 1
        return means

    def require_finite_policy(self) -> None:
        """Raise NotFiniteError on all ranks unless the policy's weights are finite."""
        require_finite(weight_sums(self.networks.policy, "the policy"))

    def repeat_prompts(self, batch: PromptBatch) -> PromptBatch:
        """Each prompt of a batch `responses_per_prompt` times, in adjacent rows."""
        n_responses = self.responses_per_prompt
        if n_responses == 1:
            return batch
        return batch.select([row for row in range(len(batch.texts)) for _ in range(n_responses)])

    def rollout(self, batch: PromptBatch, seed: int) -> RolloutBatch:
        """Sample one response to each prompt from the policy."""
        networks = self.networks
        rollouts = networks.sampler(
            networks.policy,
            batch.input_ids,
            batch.attention_mask,
            self.sampling,
            eos_token_ids=stop_token_ids(networks.policy, networks.tokenizer),
            pad_token_id=networks.tokenizer.pad_token_id,
            seed=seed,
            batch_size=self.memory.rollout_batch_size,
        )
        ruled_out = ids_without_token(networks.policy)
        if ruled_out is not None and networks.sampler is not generate_responses:
            tokens = rollouts.response_ids[rollouts.response_mask]
            if bool((unknown := torch.isin(tokens, ruled_out)).any()):
                raise ValueError(
                    "sampler: expected ids that the tokenizer has tokens for, got "
                    f"{int(tokens[unknown][0])}, whose probability under the policy is 0 (see "
                    "lit_rlhf.forward.ids_without_token)"
                )
        return rollouts

    def score(self, rollouts: RolloutBatch, batch: PromptBatch) -> Scores:
        """Score responses by the weighted sum of reward models and functions."""
        scores: Scores = self.networks.reward(
            rollouts,
            batch.texts,
            max_tokens_per_forward=self.memory.max_tokens_per_forward,
            records=batch.fields,
            turns=batch.turns,
        )
        return scores

    @torch.no_grad()
    def score_start(self, batch: PromptBatch, seed: int) -> Tensor:
        """Scores `[B]` of the reference's responses: the policy gave these before training.

        Args:
            batch: The prompts.
            seed: Seed of the responses.
        """
        networks = self.networks
        # another sampler would take the weights with the adapters that are off here
        sampler = generate_responses if networks.reference is None else networks.sampler
        with reference_model(networks.policy, networks.reference, batch.input_ids.device) as model:
            # Swap the policy in this object and not in a copy: an override of `rollout` then
            # samples as in training, and what it stores on `self` stays.
            self.networks = networks._replace(policy=model, sampler=sampler)
            try:
                rollouts = self.rollout(batch, seed)
            finally:
                self.networks = networks
        return self.score(rollouts, batch).total

    def estimate(self, rollouts: RolloutBatch) -> TokenStatistics:
        """Log-probs of policy and reference and values of the critic, before the update."""
        return score_rollouts(
            policy=self.networks.policy,
            reference=self.networks.reference,
            critic=self.networks.critic,
            rollouts=rollouts,
            temperature=self.sampling.temperature,
            max_tokens_per_forward=self.memory.max_tokens_per_forward,
        )

    def measure(
        self, collected: Collected, metrics: RolloutMetrics | None = None
    ) -> RolloutMetrics:
        """Add responses to metrics of rollouts, with each reward's score and the gold one.

        Args:
            collected: The responses with scores and estimates.
            metrics: What they are added to; `None`: new metrics.
        """
        prompts = collected.prompts
        rollouts = collected.rollouts
        scores = collected.scores
        estimates = collected.estimates
        if metrics is None:
            metrics = RolloutMetrics()
        named = {"score": scores.total}
        named |= {f"score/{name}": raw for name, raw in scores.by_name.items()}
        votes = {f"score/{name}": mask for name, mask in scores.votes.items()}
        if (spread := scores.spread()) is not None:
            named["score_spread"] = spread
        if self.networks.gold is not None:
            with fail_together("score responses by the gold reward"):
                gold = self.networks.gold.vote(rollouts, prompts.texts, prompts.fields)
            named["gold"] = gold.scores
            votes["gold"] = gold.mask
        if rollouts.sampler_logprobs is not None:
            kl = F.kl_estimate(rollouts.sampler_logprobs, estimates.logprobs, "k3")
            named["sampler_kl"] = F.masked_mean(kl, rollouts.response_mask, 1)
        # These depend on the prompts alone: they tell other data from a collapse.
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
            votes=votes,
        )
        return metrics

    def describe_responses(self, collected: Collected) -> list[dict[str, Any]]:
        """Describe each response by plain values, see `build_response_records`."""
        return build_response_records(
            collected.rollouts,
            collected.scores.total,
            collected.estimates,
            self.networks.tokenizer,
        )

    @torch.no_grad()
    def sample_records(
        self, prompts: PromptBatch, seed: int, phase_context: PhaseContext = untimed
    ) -> list[dict[str, Any]]:
        """Sample a response to each prompt, and describe it as `describe_responses` does.

        The score is NaN if a reward function needs fields of records and no prompt of a rank has
        any.

        Args:
            prompts: The prompts.
            seed: Seed of the responses.
            phase_context: Wraps each phase, as in `collect`.
        """
        functions = self.networks.reward.functions
        needs_fields = any(getattr(function, "required_fields", ()) for function in functions)
        lacks_fields = global_max(int(not any(prompts.fields)))  # the same answer on all ranks
        if not (needs_fields and lacks_fields):
            return self.describe_responses(self.collect(prompts, seed, phase_context))
        rollouts = self.rollout(prompts, seed)
        unknown = torch.full(
            (len(rollouts.response_ids),), torch.nan, device=rollouts.response_ids.device
        )
        estimates = self.estimate(rollouts)
        collected = Collected(
            prompts=prompts, rollouts=rollouts, scores=Scores(unknown), estimates=estimates
        )
        return self.describe_responses(collected)

    def shape_rewards(
        self, rollouts: RolloutBatch, scores: Scores, estimates: TokenStatistics
    ) -> Tensor:
        """Rewards `[B, T]`: the score at the last token, minus the KL penalty of each (Eq. 19).

        Args:
            rollouts: The responses.
            scores: Their scores.
            estimates: Their log-probs under policy and reference.
        """
        options = self.reward_shaping
        shaped = self.reparameterize(scores.total)
        # after Eq. 18, so that the penalty is in the units of the reward that is learned from
        cut_off = ~rollouts.terminated
        if options.overlong_buffer is not None:
            cut_off = -F.soft_overlong_penalty(
                rollouts.lengths,
                longest=self.sampling.max_new_tokens,
                buffer=options.overlong_buffer,
            )
        shaped = shaped - options.missing_eos_penalty * cut_off
        if options.spread_coef and (spread := scores.spread()) is not None:
            shaped = shaped - options.spread_coef * spread
        return F.token_rewards(
            scores=shaped,
            logprobs=estimates.logprobs,
            ref_logprobs=estimates.ref_logprobs,
            mask=rollouts.response_mask,
            kl_coef=float(self.kl_coef),
            estimator=options.kl_estimator,
        )

    def reparameterize(self, scores: Tensor) -> Tensor:
        """Normalize or scale raw scores `[B]` by the moments of all so far (Eq. 18), and clip."""
        self.score_moments.update(scores)
        moments = self.score_moments
        clip = self.reward_shaping.clip
        if self.reward_shaping.normalization:
            return F.normalized_scores(scores, mean=moments.mean, std=moments.std, clip=clip)
        if self.reward_shaping.scaling:
            scores = F.scaled_scores(scores, moments.std)
        return scores if clip is None else F.clipped_scores(scores, clip)

    def adapt_kl_coef(self, kl: float, n_rollouts: int) -> None:
        """Move an adaptive KL coefficient so that the KL meets its target.

        During critic pre-training it stays, since the KL cannot follow it.

        Args:
            kl: KL of the iteration to the reference, in nats per response.
            n_rollouts: Rollouts of the iteration on all ranks.
        """
        target = self.reward_shaping.kl_target
        if target is None or self.in_critic_pretraining():
            return
        adapted = F.adaptive_kl_coef(
            float(self.kl_coef),
            kl=kl,
            target=target,
            horizon=self.reward_shaping.kl_horizon,
            n_samples=n_rollouts,
        )
        self.kl_coef.fill_(adapted)

    def experience(
        self, rollouts: RolloutBatch, rewards: Tensor, estimates: TokenStatistics
    ) -> Experience:
        """Advantages and returns of the rollouts (Eqs. 7-12), and the tokens to learn from.

        Args:
            rollouts: The responses.
            rewards: Rewards of their tokens, `[B, T]`.
            estimates: Their log-probs and values.
        """
        mask = rollouts.response_mask
        loss_mask = mask
        if self.advantages.truncation == "mask":
            loss_mask = mask & rollouts.terminated[:, None]
        if self.networks.critic is None:
            advantages = self.critic_free_advantages(rollouts, rewards, loss_mask)
            returns = advantages
        else:
            advantages, returns = self.generalized_advantages(rollouts, rewards, estimates)
        importance = None
        cap = self.loss.importance_cap
        if rollouts.sampler_logprobs is not None and cap is not None:
            importance = F.truncated_importance(
                logprobs=estimates.logprobs,
                sampler_logprobs=rollouts.sampler_logprobs,
                mask=mask,
                cap=cap,
            )
        from_reference = self.loss.old_policy == "reference"
        return Experience(
            rollouts=rollouts,
            old_logprobs=estimates.ref_logprobs if from_reference else estimates.logprobs,
            old_values=estimates.values,
            advantages=advantages,
            returns=returns,
            loss_mask=loss_mask,
            policy_lower=estimates.policy_lower,
            critic_lower=estimates.critic_lower,
            ref_logprobs=estimates.ref_logprobs if self.loss.ref_kl_coef else None,
            importance=importance,
        )

    def critic_free_advantages(
        self, rollouts: RolloutBatch, rewards: Tensor, loss_mask: Tensor
    ) -> Tensor:
        """Advantages `[B, T]` by the estimator of the options; 0 outside the loss mask.

        Args:
            rollouts: The responses. Those to one prompt are adjacent rows.
            rewards: Rewards of their tokens, `[B, T]`.
            loss_mask: Tokens to learn from, `[B, T]` bool.
        """
        return advantages_without_critic(
            self.advantages,
            rewards=rewards,
            mask=rollouts.response_mask,
            loss_mask=loss_mask,
            group_size=self.responses_per_prompt,
        )

    def generalized_advantages(
        self, rollouts: RolloutBatch, rewards: Tensor, estimates: TokenStatistics
    ) -> F.AdvantagesAndReturns:
        """Advantages and returns by the critic's values (Eqs. 7-12).

        Args:
            rollouts: The responses.
            rewards: Rewards of their tokens, `[B, T]`.
            estimates: The critic's values of them.
        """
        options = self.advantages
        bootstrap = None
        if options.truncation == "bootstrap":
            # A response that ended has no next state; one that was cut off has V(s_{T+1}).
            bootstrap = estimates.next_values.masked_fill(rollouts.terminated, 0.0)

        def gae(lam: float | Tensor) -> F.AdvantagesAndReturns:
            return F.gae(
                values=estimates.values,
                rewards=rewards,
                mask=rollouts.response_mask,
                gamma=options.gamma,
                lam=lam,
                bootstrap_values=bootstrap,
            )

        lam: float | Tensor = options.lam
        if options.lam_alpha is not None:
            lam = F.length_adaptive_lam(rollouts.lengths, options.lam_alpha)
        estimated = gae(lam)
        if options.critic_lam is None:
            return estimated
        return estimated._replace(returns=gae(options.critic_lam).returns)

    def measure_experience(
        self, rewards: Tensor, scores: Scores, experience: Experience
    ) -> dict[str, Tensor]:
        """Metrics of rewards and returns; warns if there is no token to learn from on any rank.

        Args:
            rewards: Rewards of tokens, `[B, T]`.
            scores: Scores of the responses.
            experience: Advantages and returns of all responses.
        """
        no_tokens = self.advantages.truncation == "mask" and not has_tokens(experience.loss_mask)
        if no_tokens:
            rank_zero_warn(
                "advantages.truncation: mask leaves nothing to learn from, because all responses "
                f"of an iteration ran to sampling.max_new_tokens={self.sampling.max_new_tokens}: "
                "raise it, or use truncation: terminal with a reward_shaping.missing_eos_penalty"
            )
        metrics = {
            "rollout/reward": rewards.sum() / global_denominator(len(rewards), rewards.device)
        }
        if self.responses_per_prompt > 1 and not no_tokens:
            informative = F.informative_groups(
                scores.total, self.responses_per_prompt, experience.loss_mask.any(1)
            )
            metrics["rollout/informative_share"] = informative.float().mean()
        if self.networks.critic is not None:
            metrics["ppo/explained_variance"] = F.explained_variance(
                experience.old_values,
                experience.returns,
                experience.rollouts.response_mask,
                moments=global_masked_moments,
            )
        return metrics

    def select_prompts(self, experience: Experience, scores: Tensor) -> Experience:
        """Select the prompts to learn from, informative ones first (DAPO's dynamic sampling).

        All prompts are selected without `advantages.learned_prompts`.

        Args:
            experience: All responses of the iteration.
            scores: Their raw scores, `[B]`.
        """
        n_prompts = self.advantages.learned_prompts
        group_size = self.responses_per_prompt
        if n_prompts is None:
            return experience
        informative = F.informative_groups(scores, group_size, experience.loss_mask.any(1))
        # stable, so that prompts are otherwise taken in the order of the batch
        order = (~informative).long().argsort(stable=True)[:n_prompts].sort().values
        rows = order[:, None] * group_size + torch.arange(group_size, device=order.device)
        return experience.select(rows.flatten())

    def count_learned(self, n_rollouts: int) -> int:
        """How many of an iteration's rollouts on a rank the update learns from."""
        n_prompts = self.advantages.learned_prompts
        return n_rollouts if n_prompts is None else n_prompts * self.responses_per_prompt

    def count_updates(self, n_rollouts: int) -> int:
        """Updates of a network in an iteration with `n_rollouts` rollouts on a rank."""
        return self.minibatches.updates_per_iteration(self.count_learned(n_rollouts))

    def reparameterize_advantages(self, minibatch: Experience) -> Experience:
        """Whiten, clip and weigh the advantages of a minibatch, over all ranks (Section 5.3.1)."""
        advantages = minibatch.advantages
        if self.advantages.normalization:
            # over the tokens to learn from only: padding would change the moments
            moments = global_masked_moments(advantages, minibatch.loss_mask)
            advantages = F.masked_whiten(advantages, minibatch.loss_mask, moments=moments)
        if self.advantages.clip is not None:
            advantages = F.clipped_advantages(advantages, self.advantages.clip)
        if minibatch.importance is not None:
            # the surrogate is linear in the size of an advantage
            advantages = advantages * minibatch.importance
        minibatch = replace(minibatch, advantages=advantages)
        if self.loss.aggregation == "token_mean":
            return minibatch
        return self.weigh_responses(minibatch)

    def weigh_responses(self, minibatch: Experience) -> Experience:
        """Give the responses of a minibatch the weights of `loss.aggregation`, over all ranks."""
        lengths = minibatch.loss_mask.sum(1)
        counts = torch.stack([lengths.sum(), (lengths > 0).sum()]).float()
        n_tokens, n_responses = global_sum(counts).unbind()
        weights = F.response_weights(
            lengths,
            tokens=n_tokens,
            responses=n_responses,
            longest=self.sampling.max_new_tokens,
            aggregation=self.loss.aggregation,
        )
        advantages = minibatch.advantages * weights.unsqueeze(1)
        return replace(minibatch, advantages=advantages, weights=weights)

    def train_critic(self, minibatch: Experience, stepper: Stepper) -> dict[str, Tensor]:
        """Make one update of the critic; its metrics are NaN if the update was skipped.

        There is no update, and are no metrics, without a token to learn from on any rank.

        Args:
            minibatch: What to learn from.
            stepper: Makes the step.
        """
        critic = self.networks.critic
        assert critic is not None
        if not has_tokens(minibatch.loss_mask):
            return {}
        # All micro-batches divide by the tokens of the whole minibatch on all ranks, so that a long
        # response weighs as much as in one large batch.
        tokens = global_denominator(minibatch.loss_mask.sum(), minibatch.loss_mask.device)

        def shares() -> Iterator[LossShare]:
            for part in self.split_experience(minibatch):
                share = call(critic, self.critic_loss, part.experience, tokens)
                yield share.scaled(part.weight)

        return self._step("critic", shares(), stepper)

    def train_policy(
        self, minibatch: Experience, ptx: TokenBatch | None, stepper: Stepper
    ) -> dict[str, Tensor]:
        """Make one update of the policy; its metrics are NaN if the update was skipped.

        It is the critic's update as well if both share a trunk. Without a token to learn from on
        any rank it learns from the text alone; without text, there is no update.

        Args:
            minibatch: What to learn from.
            ptx: Text for the language-model loss, with as many rows; `None`: no such loss.
            stepper: Makes the step.
        """
        policy = self.networks.policy
        loss_of = self.joint_loss if self.shares_trunk else self.policy_loss
        device = minibatch.loss_mask.device
        tokens = global_denominator(minibatch.loss_mask.sum(), device)
        learns_from_responses = has_tokens(minibatch.loss_mask)
        learns_from_text = ptx is not None and self.loss.ptx_coef > 0
        if not (learns_from_responses or learns_from_text):
            return {}

        def shares() -> Iterator[LossShare]:
            if learns_from_responses:
                for part in self.split_experience(self.reparameterize_advantages(minibatch)):
                    share = call(policy, loss_of, part.experience, tokens)
                    yield share.scaled(part.weight)
            # Its gradient is added to PPO's before the one step (Eq. 17).
            if ptx is not None and learns_from_text:
                text_tokens = global_denominator(ptx.completion_mask.sum(), device)
                for rows, weight in self.micro_batches(ptx.attention_mask.sum(1)):
                    loss = call(policy, self.ptx_loss, slice_batch(ptx, rows), text_tokens)
                    share = LossShare(self.loss.ptx_coef * loss, {"ppo/ptx_loss": loss})
                    yield share.scaled(weight)

        return self._step("policy", shares(), stepper)

    def _step(
        self, network: NetworkName, shares: Iterator[LossShare], stepper: Stepper
    ) -> dict[str, Tensor]:
        """Make one step of a network, and count it; the metrics are NaN if there was none."""
        update = stepper.update(network, shares)
        metrics = {**update.metrics, f"ppo/{network}_grad_norm": update.grad_norm}
        if not update.applied:
            return dict.fromkeys(metrics, torch.full_like(update.grad_norm, torch.nan))
        if network == "policy":
            self.ppo_step += 1
        return metrics

    def split_experience(self, minibatch: Experience) -> Iterator[WeightedExperience]:
        """Split a minibatch into micro-batches, each cut to its longest sequence."""
        index = torch.arange(len(minibatch), device=minibatch.loss_mask.device)
        for rows, weight in self.micro_batches(minibatch.rollouts.sequence_mask.sum(1)):
            yield WeightedExperience(minibatch.select(index[rows]), weight)

    def micro_batches(self, lengths: Tensor) -> list[MicroBatch]:
        """The micro-batches of rows with `lengths` `[B]` real tokens, by the options."""
        return split_batch(
            self.networks.policy,  # the critic's trunk has its size, too
            lengths,
            max_rows=self.minibatches.micro_batch_size,
            max_tokens=self.minibatches.micro_batch_tokens,
        )

    def in_critic_pretraining(self) -> bool:
        """Whether this iteration trains only the critic."""
        return not bool(self.pretraining_done)

    def watch_critic_pretraining(self, value_loss: float) -> None:
        """End critic pre-training after its iterations, or once the value loss is low enough."""
        target = self.critic_pretraining.target_value_loss
        n_iterations = int(self.iteration) + 1
        enough = n_iterations >= self.critic_pretraining.iterations
        if enough or (target is not None and value_loss <= target):
            self.pretraining_done.fill_(True)
            self.pretraining_length.fill_(n_iterations)

    def critic_loss(
        self, experience: Experience, tokens: Tensor, hidden: Tensor | None = None
    ) -> LossShare:
        """Share of a micro-batch in the value loss (Eq. 16).

        Args:
            experience: The micro-batch.
            tokens: Tokens of the whole minibatch, see `global_denominator`, 0-dim.
            hidden: The critic's hidden states, `[B, P+T, H]`; `None`: they are computed here.
        """
        critic = self.networks.critic
        assert critic is not None
        rollouts = experience.rollouts
        mask = experience.loss_mask
        values = response_values(
            critic,
            rollouts.sequence_ids,
            rollouts.sequence_mask,
            response_length=mask.shape[1],
            lower=experience.critic_lower,
            hidden=hidden,
        )
        value = F.value_loss(
            values=values,
            old_values=experience.old_values,
            returns=experience.returns,
            mask=mask,
            value_clip=self.loss.value_clip,
            denominator=tokens,
        )
        metrics = {
            "ppo/value_loss": value.loss,
            "ppo/value_clip_fraction": value.clip_fraction * (mask.sum() / tokens),
        }
        return LossShare(value.loss, metrics)

    def joint_loss(self, experience: Experience, tokens: Tensor) -> LossShare:
        """Share of a micro-batch in both losses, by one forward of the shared trunk.

        Args:
            experience: The micro-batch.
            tokens: Tokens of the whole minibatch, see `global_denominator`, 0-dim.
        """
        rollouts = experience.rollouts
        hidden = hidden_states(
            self.networks.policy,
            rollouts.sequence_ids,
            rollouts.sequence_mask,
            experience.critic_lower,
        )
        policy = self.policy_loss(experience, tokens, hidden)
        critic = self.critic_loss(experience, tokens, hidden)
        return LossShare(
            loss=policy.loss + self.loss.value_coef * critic.loss,
            metrics={**policy.metrics, **critic.metrics},
        )

    def policy_loss(
        self, experience: Experience, tokens: Tensor, hidden: Tensor | None = None
    ) -> LossShare:
        """Share of a micro-batch in the policy's loss with its entropy bonus.

        Args:
            experience: The micro-batch.
            tokens: Tokens of the whole minibatch, see `global_denominator`, 0-dim.
            hidden: The policy's hidden states, `[B, P+T, H]`; `None`: they are computed here.
        """
        policy = self.networks.policy
        rollouts = experience.rollouts
        mask = experience.loss_mask
        ids = rollouts.sequence_ids
        sequence_mask = rollouts.sequence_mask
        if hidden is None and experience.policy_lower is not None:
            hidden = hidden_states(policy, ids, sequence_mask, experience.policy_lower)
        entropy_coef = self.loss.entropy_coef
        temperature = self.sampling.temperature

        def read(logits: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
            if entropy_coef:
                return F.token_logprobs_and_entropy(logits, ids, temperature)
            return (F.token_logprobs(logits, ids, temperature),)

        logprobs, *entropy = map_target_logits(
            policy,
            ids,
            sequence_mask,
            target_mask=rollouts.to_sequence_mask(mask),
            function=read,
            hidden=hidden,
        )
        # The last T columns of a sequence are its response.
        logprobs = logprobs[:, -mask.shape[1] :]
        objective = self.policy_objective(logprobs, experience, tokens)
        loss = objective.loss
        share = mask.sum() / tokens
        metrics = {
            "ppo/policy_loss": objective.loss,
            "ppo/clip_fraction": objective.clip_fraction * share,
            "ppo/approx_kl": objective.approx_kl * share,
            "ppo/ratio": objective.ratio_mean * share,
        }
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
        return LossShare(loss, metrics)

    def policy_objective(
        self, logprobs: Tensor, experience: Experience, tokens: Tensor
    ) -> F.PolicyLoss:
        """The objective that `loss.policy_objective` names (Eqs. 13-15).

        Args:
            logprobs: Log-probs of the policy now, `[B, T]` nats.
            experience: The micro-batch.
            tokens: Tokens of the whole minibatch, see `global_denominator`, 0-dim.
        """
        options = self.loss
        mask = experience.loss_mask
        match options.policy_objective:
            case "clip":
                return F.surrogate_loss(
                    logprobs=logprobs,
                    old_logprobs=experience.old_logprobs,
                    advantages=experience.advantages,
                    mask=mask,
                    ratio_clip=options.ratio_clip,
                    ratio_clip_high=options.ratio_clip_high,
                    dual_clip=options.dual_clip,
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
                    kl_penalty=options.kl_penalty_coef,
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
        """Share of a micro-batch of text in the language-model loss (Eq. 17).

        `tokens` are the targets of the whole minibatch, see `global_denominator`, 0-dim.
        """
        logprobs = target_logprobs(
            self.networks.policy, batch.input_ids, batch.attention_mask, batch.completion_mask
        )
        return F.language_model_loss(logprobs, batch.completion_mask, tokens)


def has_tokens(loss_mask: Tensor) -> bool:
    """Whether a mask keeps a token on any rank, the same on all ranks; a collective.

    Args:
        loss_mask: Tokens to learn from on this rank, `[B, T]` bool.
    """
    return bool(global_sum(loss_mask.sum()))


def advantages_without_critic(
    options: AdvantageOptions,
    *,
    rewards: Tensor,
    mask: Tensor,
    loss_mask: Tensor,
    group_size: int,
) -> Tensor:
    """Advantages `[B, T]` of this rank's rollouts, 0 outside the loss mask; a collective.

    Args:
        options: Which estimator, and its discount.
        rewards: Rewards of tokens, `[B, T]`.
        mask: Response tokens, `[B, T]` bool.
        loss_mask: Tokens to learn from, `[B, T]` bool.
        group_size: Responses to a prompt. They are adjacent rows, and all of them are on this rank.
    """
    if options.estimator == "reinforce_plus_plus":
        # whitened over the tokens of all ranks
        return F.reinforce_plus_plus_advantages(
            rewards,
            mask,
            gamma=options.gamma,
            loss_mask=loss_mask,
            moments=global_masked_moments,
        )
    # the response is one action, whose return has the KL penalties of all of its tokens
    returns = F.masked_sum(rewards, mask, 1)
    learned = loss_mask.any(1)
    if options.estimator == "rloo":
        advantages = F.leave_one_out_advantages(returns, group_size, learned)
    else:
        advantages = F.group_advantages(
            returns, group_size, learned, scale=options.estimator == "grpo"
        )
    return advantages.unsqueeze(1) * loss_mask


def iteration_draws(*, seed: int, iteration: int, rank: int) -> Draws:
    """Derive the random numbers of an iteration on a rank.

    They depend on these arguments alone, so a run that resumes draws the same numbers.

    Args:
        seed: Seed of the run.
        iteration: Iterations before this one.
        rank: Rank of the process.
    """
    # Three small numbers to one: large primes keep neighbouring iterations and ranks apart.
    mixed = seed * 1_000_003 + iteration * 7_919 + rank * 104_729
    generator = torch.Generator().manual_seed(mixed % 2**64)
    rollout_seed = int(torch.randint(2**31, (), generator=generator))
    return Draws(rollout_seed=rollout_seed, generator=generator)
