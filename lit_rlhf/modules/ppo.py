"""PPO-max: proximal policy optimization of a language model (Section 5 of arXiv 2307.04964).

`PPOModule.training_step` is one iteration of Algorithm 1. Its phases are methods in reading order:
`rollout`, `score`, `estimate`, `shape_rewards`, `experience` and `update`. All but `update`, which
steps the optimizers of a Trainer, can be called on a module that is not in training.

Notation: `B` responses, `T` tokens of the longest response.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from lit_callbacks import write_text
from lit_rlhf.checks import check_choice, check_count, check_positive
from lit_rlhf.data import PromptBatch, PromptDataModule, TokenBatch, encode_prompts
from lit_rlhf.forward import (
    LanguageModel,
    Offloaded,
    disable_dropout,
    freeze,
    map_target_logits,
    response_values,
    target_logprobs,
)
from lit_rlhf.functional import (
    PolicyLoss,
    adaptive_kl_coef,
    clipped_advantages,
    clipped_scores,
    entropy_loss,
    explained_variance,
    gae,
    kl_penalty_loss,
    language_model_loss,
    masked_whiten,
    normalized_scores,
    policy_gradient_loss,
    scaled_scores,
    surrogate_loss,
    token_logprobs,
    token_logprobs_and_entropy,
    token_rewards,
    value_loss,
)
from lit_rlhf.models import (
    ModelOptions,
    build_random_scalar_model,
    load_causal_lm,
    load_scalar_model,
    separate_weights,
    stop_token_ids,
)
from lit_rlhf.modules.guarded_step import find_non_finite, join_names
from lit_rlhf.modules.micro_batches import MicroBatch, accumulate, scaled, slice_batch
from lit_rlhf.modules.option_names import merge_options
from lit_rlhf.modules.options import (
    AdvantageOptions,
    CriticInit,
    CriticPretrainingOptions,
    MemoryOptions,
    MinibatchOptions,
    OptimizerOptions,
    PPOLossOptions,
    RewardShapingOptions,
)
from lit_rlhf.modules.resuming import weights_checksum
from lit_rlhf.modules.schedules import build_schedule
from lit_rlhf.modules.stage import MAX_SKIPPED_IN_A_ROW, StageModule
from lit_rlhf.modules.timing import PhaseTimer
from lit_rlhf.rewards import (
    FunctionReward,
    ModelReward,
    RewardObject,
    Rewards,
    WeightedReward,
    plain_rewards,
    reward_key,
    untrusted_rewards,
)
from lit_rlhf.rollout import (
    Experience,
    RolloutBatch,
    RolloutMetrics,
    SamplingOptions,
    TokenStatistics,
    build_response_records,
    check_minibatch_size,
    format_sample_table,
    generate_responses,
    iterate_minibatches,
    score_rollouts,
)
from lit_rlhf.stats import (
    RunningMoments,
    global_masked_moments,
    global_sum,
    world_size,
)
from lit_rlhf.strategies import backward

# metrics beside those of `RolloutMetrics` that an iteration logs even if it is skipped
OF_AN_ITERATION = ("rollout/score", "rollout/reward", "ppo/explained_variance")
FROZEN = ("reference.", "reward.functions.")  # keys of the state dict that checkpoints leave out
# what to change when a phase runs out of memory
ROLLOUT_MEMORY = ("memory.rollout_batch_size", "sampling.max_new_tokens")
SCORING_MEMORY = ("memory.max_tokens_per_forward", "sampling.max_new_tokens")
UPDATE_MEMORY = (
    "minibatches.micro_batch_size",
    "minibatches.micro_batch_tokens",
    "sampling.max_new_tokens",
    "network.gradient_checkpointing",
)


class ScoredResponses(NamedTuple):
    """`B` responses with all that is computed of them before the update.

    Attributes:
        rollouts: Prompts and responses.
        scores: Raw scores, `[B]`.
        estimates: Log-probs of policy and reference, entropies and values of the critic.
    """

    rollouts: RolloutBatch
    scores: Tensor
    estimates: TokenStatistics


class LossShare(NamedTuple):
    """Share of a micro-batch in the loss of a minibatch; shares add up over micro-batches.

    Attributes:
        loss: What the gradient is taken of, 0-dim.
        metrics: `ppo/*` metrics, 0-dim.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


class PPOModule(StageModule):
    """One iteration of PPO-max per `training_step`: rollout, score, estimate, shape, update.

    Each phase is a method of that name; override one to change it. The defaults are PPO-max with
    the paper's values, as far as it states them (`docs/recipe.md`); the overlays in
    `configs/ablations` switch its tricks one by one.

    Args:
        model_path: Folder or hub id of the SFT model: the policy's start and the reference.
        rewards: Weight by source; a source is a reward model's folder or `package.module:function`,
            and in Python also a callable or a loaded reward model. A mapping instead of a weight
            describes a ready-made rule (`docs/rewards.md`). A list, or a single source, has weight
            1.
        gold_reward: `package.module:function`, or in Python a callable; logged as `rollout/gold`
            and never trained on.
        reward_timeout: Seconds that a reward function may take for an iteration's responses;
            `None`: as long as it likes.
        critic_init: The critic's start: the first reward model, the policy, or random weights.
        sampling: How responses are sampled.
        responses_per_prompt: Responses to each prompt of an iteration in training. An iteration has
            `data.batch_size` prompts and so many times as many rollouts; the ptx example of a
            prompt goes with each of its responses. In evaluation a prompt gets one response.
        reward_shaping: From scores to the rewards of tokens.
        advantages: Generalized advantage estimation.
        loss: The losses of policy and critic.
        minibatches: How an iteration's rollouts become updates.
        policy_optimizer: The policy's optimizer and schedule.
        critic_optimizer: The critic's.
        critic_pretraining: The phase at the start that trains the critic alone.
        max_iterations: Length of the run, critic pre-training included; `None`: as many batches as
            `trainer.max_epochs` gives. `trainer.max_steps` would count the steps of both optimizers
            and is refused.
        memory: What bounds the memory outside the update.
        network: How policy and critic are loaded, and the others where `memory` does not differ.
        output_dir: Folder for the finished policy, with the critic in `critic/`; `None` means
            `model/` in the run's log folder.
        sampled_texts: Held-out prompts whose responses are logged as text at validation.
        seed: Of rollouts and minibatches. The draws of an iteration depend on it, the iteration and
            the rank alone, so a resumed run repeats them.
        max_skipped_in_a_row: Updates of a network in a row that may be skipped, as a number is not
            finite, until training stops.

    Raises:
        ValueError: If an option is out of its range.
        TypeError: If a keyword argument is no option.
    """

    stage = "ppo"
    progress_metrics = ("rollout/score", "rollout/kl", "rollout/response_length")
    object_arguments = ("rewards", "gold_reward")
    kl_coef: Tensor
    iteration: Tensor
    ppo_step: Tensor
    pretraining_done: Tensor
    pretraining_length: Tensor

    def __init__(
        self,
        model_path: str,
        rewards: Rewards,
        gold_reward: str | RewardObject | None = None,
        reward_timeout: float | None = None,
        critic_init: CriticInit = "reward",
        sampling: SamplingOptions = SamplingOptions(max_new_tokens=512),
        responses_per_prompt: int = 1,
        reward_shaping: RewardShapingOptions = RewardShapingOptions(),
        advantages: AdvantageOptions = AdvantageOptions(),
        loss: PPOLossOptions = PPOLossOptions(),
        minibatches: MinibatchOptions = MinibatchOptions(),
        policy_optimizer: OptimizerOptions = OptimizerOptions(learning_rate=5e-7),
        critic_optimizer: OptimizerOptions = OptimizerOptions(learning_rate=1.65e-6),
        critic_pretraining: CriticPretrainingOptions = CriticPretrainingOptions(),
        max_iterations: int | None = None,
        memory: MemoryOptions = MemoryOptions(),
        network: ModelOptions = ModelOptions(),
        output_dir: str | None = None,
        sampled_texts: int = 4,
        seed: int = 0,
        max_skipped_in_a_row: int = MAX_SKIPPED_IN_A_ROW,
    ) -> None:
        check_count("sampled_texts", sampled_texts, 0)
        check_count("responses_per_prompt", responses_per_prompt)
        if reward_timeout is not None:
            check_positive("reward_timeout", reward_timeout)
        if max_iterations is not None:
            check_count("max_iterations", max_iterations)
        super().__init__(model_path, output_dir, network, max_skipped_in_a_row)
        cls = type(self)
        gold_key = None if gold_reward is None else reward_key(gold_reward)
        self.save_hyperparameters({"rewards": plain_rewards(rewards), "gold_reward": gold_key})
        self.max_iterations = max_iterations
        self.sampling = merge_options(cls, "sampling", sampling)
        self.responses_per_prompt = responses_per_prompt
        self.reward_shaping = merge_options(cls, "reward_shaping", reward_shaping)
        self.advantages = merge_options(cls, "advantages", advantages)
        self.loss = merge_options(cls, "loss", loss)
        self.minibatches = merge_options(cls, "minibatches", minibatches)
        self.policy_optimizer = merge_options(cls, "policy_optimizer", policy_optimizer)
        self.critic_optimizer = merge_options(cls, "critic_optimizer", critic_optimizer)
        self.critic_pretraining = merge_options(cls, "critic_pretraining", critic_pretraining)
        self.memory = merge_options(cls, "memory", memory)
        check_sampling(self.sampling)
        check_kl_estimator(self.reward_shaping)
        self.sampled_texts = sampled_texts
        self.seed = seed
        # Without dropout the log-probs of rollout, scoring and update are those of one policy, and
        # the first ratio is 1.
        self.policy = disable_dropout(load_causal_lm(model_path, self.network))
        check_entropy_clip(self.loss, self.policy.config.vocab_size)
        offload, shard = self.memory.offload_frozen, self.memory.shard_frozen
        frozen = replace(
            self.network,
            dtype=self.memory.frozen_dtype or self.network.dtype,
            # the scales of 4-bit weights do not come and go with them
            load_in_4bit=self.network.load_in_4bit and not (offload or shard),
        )
        self.reference = load_reference(model_path, frozen, offload, shard)
        self.reward = WeightedReward(
            rewards, frozen, self.tokenizer, reward_timeout, offload, shard
        )
        self.critic_init = critic_init
        self.critic = disable_dropout(
            load_critic(
                critic_init, model_path, self.policy, self.reward.models, self.network, seed
            )
        )
        self.gold = None
        if gold_reward is not None:
            self.gold = FunctionReward(gold_reward, self.tokenizer, reward_timeout)
        self._evaluation: RolloutMetrics | None = None
        # Now, since a strategy may cast the weights later.
        self._input_checksums: dict[str, object] = {
            "weights of the reward models": [weights_checksum(m.model) for m in self.reward.models]
        }
        if self.reference is not None:
            self._input_checksums["weights of the reference"] = weights_checksum(self.reference)
        # Buffers, so that checkpoints hold them.
        self.score_moments = RunningMoments()
        kl_coef = torch.tensor(self.reward_shaping.kl_coef, dtype=torch.float64)
        self.register_buffer("kl_coef", kl_coef)
        self.register_buffer("iteration", torch.zeros((), dtype=torch.long))
        self.register_buffer("ppo_step", torch.zeros((), dtype=torch.long))
        no_pretraining = torch.tensor(self.critic_pretraining.iterations == 0)
        self.register_buffer("pretraining_done", no_pretraining)
        self.register_buffer("pretraining_length", torch.zeros((), dtype=torch.long))

    @property
    def inputs(self) -> dict[str, list[str]]:
        """Folders or hub ids of the SFT model and the reward models."""
        return {**super().inputs, "rewards": [model.path for model in self.reward.models]}

    @classmethod
    def trusted_arguments(
        cls, saved: Mapping[str, Any], given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Merge arguments as the base class does, and refuse reward functions of the checkpoint."""
        gold = saved.get("gold_reward")
        named = {
            "rewards": untrusted_rewards(saved.get("rewards", {})),
            "gold_reward": untrusted_rewards({} if gold is None else {gold: 1.0}),
        }
        for option, names in named.items():
            if names and option not in given:
                raise ValueError(
                    f"{option}: the checkpoint names {', '.join(names)}, which would be imported "
                    "or sent all responses, or was a Python object, which it does not hold. If "
                    f"you trust it, give {option} yourself: "
                    f"load_from_checkpoint(path, {option}={saved[option]!r}), with the object in "
                    "place of its name if there was one"
                )
        return super().trusted_arguments(saved, given)

    def setup(self, stage: str) -> None:
        """Check the reward models' text, the fields that reward functions need, the run's length.

        Raises:
            ValueError: If a reward model reads other text than the policy writes, no record has a
                field that a reward function needs, or `trainer.max_steps` is set.
        """
        for source in self.reward.models:
            if self.encoder is not None:
                source.check_contract(self.encoder.contract)
        if isinstance(self.datamodule, PromptDataModule):
            for part, examples in self.datamodule.examples.items():
                available = {name for example in examples for name in example.fields}
                self.reward.check_fields(available, f"the {part} records")
                if self.gold is not None:
                    self.gold.check_fields(available, f"the {part} records")
        if stage == "fit" and self.trainer.max_steps != -1 and not self.is_trial:
            raise ValueError(
                f"trainer.max_steps: expected -1 (off), got {self.trainer.max_steps}: it would "
                "count the updates of policy and critic together; set "
                "model.max_iterations, the number of PPO iterations"
            )

    @property
    def is_trial(self) -> bool:
        """Whether this is a trial of `fast_dev_run` or the Tuner, which set `max_steps` for it."""
        return self.fast_dev_run or isinstance(self.trainer.logger, DummyLogger)

    def on_fit_start(self) -> None:
        """Refuse sizes that do not divide before the first rollout.

        Raises:
            ValueError: If the minibatch size does not divide the rollouts of an iteration.
        """
        super().on_fit_start()
        if isinstance(self.datamodule, PromptDataModule):
            rollouts = self.datamodule.batch_size * self.responses_per_prompt
            check_minibatch_size(rollouts, self.minibatches.minibatch_size)

    def on_train_start(self) -> None:
        """Tell of a missing ptx loss; stop at once if a checkpoint is at the end of the run."""
        super().on_train_start()
        if self.loss.ptx_coef > 0 and getattr(self.datamodule, "ptx_sources", None) == []:
            rank_zero_info(
                "ppo: no data.ptx_sources, so there is no language-model loss (Eq. 17); "
                f"loss.ptx_coef = {self.loss.ptx_coef} has no effect"
            )
        self.stop_after_last_iteration()

    def on_train_batch_end(self, *_: object) -> None:
        """Stop after `max_iterations`."""
        super().on_train_batch_end()
        self.stop_after_last_iteration()

    def stop_after_last_iteration(self) -> None:
        """Ask the trainer to stop once `max_iterations` are done."""
        if self.max_iterations is not None and int(self.iteration) >= self.max_iterations:
            self.trainer.should_stop = True

    def training_step(self, batch: PromptBatch, batch_idx: int) -> dict[str, Tensor]:
        """One PPO iteration; returns the scores and lengths of the responses for callbacks."""
        batch = self.repeat_prompts(batch)
        if not self.check_policy():
            return self.skip_iteration(len(batch.texts))
        generator = self.generator()
        seed = int(torch.randint(2**31, (), generator=generator))
        rollouts, scores, estimates = self.score_responses(batch, seed, self.timer)
        metrics = self.summarize_rollouts(rollouts, batch, scores, estimates)
        metrics["ppo/kl_coef"] = self.kl_coef.clone()
        metrics = dict.fromkeys(OF_AN_ITERATION, scores.new_tensor(torch.nan)) | metrics
        if self.check_rollouts(scores, estimates):
            # Only iterations that are learned from count in the running moments of rewards.
            self.reward.commit_moments()
            rewards = self.shape_rewards(rollouts, scores, estimates)
            experience = self.experience(rollouts, rewards, estimates)
            self.check_loss_mask(experience)
            metrics["rollout/reward"] = rewards.sum() / self.global_denominator(len(rewards))
            metrics["ppo/explained_variance"] = explained_variance(
                estimates.values, experience.returns, rollouts.response_mask, global_masked_moments
            )
            self.adapt_kl_coef(float(metrics["rollout/kl"]), len(scores) * world_size())
            with self.phase("update", rollouts.sequence_ids, UPDATE_MEMORY):
                metrics |= self.update(experience, batch.ptx, generator)
        else:
            # As after any skipped update, the learning rates go on: see `step_schedule`.
            self.step_schedules(self.updates_per_iteration(len(scores)))
        metrics |= self.timer.pop_metrics(int(rollouts.response_mask.sum()))
        self.end_iteration(metrics, len(scores))
        return {"scores": scores, "response_lengths": rollouts.response_mask.sum(1)}

    def repeat_prompts(self, batch: PromptBatch) -> PromptBatch:
        """Each prompt of a batch `responses_per_prompt` times, in adjacent rows."""
        n = self.responses_per_prompt
        if n == 1:
            return batch
        return batch.select([row for row in range(len(batch.texts)) for _ in range(n)])

    def skip_iteration(self, n_rollouts: int) -> dict[str, Tensor]:
        """Log an iteration without responses: what cannot be measured is NaN.

        Callbacks so see that something is wrong, and one of them may restore the policy.
        """
        unknown = torch.full((n_rollouts,), torch.nan, device=self.device)
        metrics = dict.fromkeys((*RolloutMetrics.KEYS, *OF_AN_ITERATION), unknown[0])
        metrics["ppo/kl_coef"] = self.kl_coef.clone()
        # As after any skipped update, the learning rates go on: see `step_schedule`.
        self.step_schedules(self.updates_per_iteration(n_rollouts))
        self.end_iteration(metrics, n_rollouts)
        return {"scores": unknown, "response_lengths": torch.zeros_like(unknown)}

    def end_iteration(self, metrics: dict[str, Tensor], n_rollouts: int) -> None:
        """Count the iteration and log its metrics, averaged over ranks."""
        metrics["ppo/skipped_updates"] = self.guard.pop_count()
        self.iteration += 1
        self.log_dict(self.global_means(metrics), batch_size=n_rollouts)
        # the x axis of loggers: Lightning's global step counts the steps of both optimizers
        self.log("step", self.iteration.float())

    def check_policy(self) -> bool:
        """Whether the policy's weights are finite on all ranks; if not, the iteration is skipped.

        No response can be sampled with a NaN among them.

        Raises:
            TooManySkippedUpdates: If too many iterations in a row were skipped.
        """
        sums = self.policy_sums()
        # Finite weights alone do not end a row of skipped iterations: `check_rollouts` does.
        if not find_non_finite(sums):
            return True
        place = f"iteration {int(self.iteration) + 1}"
        return self.guard.check(self.trainer, "policy and critic", sums, place)

    def policy_sums(self) -> dict[str, Tensor]:
        """Sum of each weight of the policy; it is not finite if a number of the weight is not."""
        # Unlike `isfinite`, a sum takes no memory.
        return {
            f"weights of the policy ({name})": weight.detach().sum(dtype=torch.float32)
            for name, weight in self.policy.named_parameters()
        }

    def generator(self) -> torch.Generator:
        """Random generator of this iteration on this rank, for rollouts and minibatches.

        It depends on `seed`, the iteration and the rank alone, so that a run that resumes from a
        checkpoint draws the same numbers.
        """
        seed = torch.tensor([self.seed, int(self.iteration), self.global_rank])
        # Three small numbers to one: large primes keep neighbouring iterations and ranks apart.
        mixed = int((seed * torch.tensor([1_000_003, 7_919, 104_729])).sum())
        return torch.Generator().manual_seed(mixed)

    def score_responses(
        self, batch: PromptBatch, seed: int, timer: PhaseTimer | None = None
    ) -> ScoredResponses:
        """The first three phases: sample responses, score them, and estimate log-probs and values.

        Args:
            batch: Prompts.
            seed: Seed of the responses.
            timer: Timer of the phases; `None`: they are not part of a training step.
        """
        timer = timer or PhaseTimer()
        with self.phase("rollout", batch.input_ids, ROLLOUT_MEMORY, timer):
            rollouts = self.rollout(batch, seed)
        with self.phase("score", rollouts.sequence_ids, SCORING_MEMORY, timer):
            scores = self.score(rollouts, batch)
        with self.phase("estimate", rollouts.sequence_ids, SCORING_MEMORY, timer):
            estimates = self.estimate(rollouts)
        return ScoredResponses(rollouts, scores, estimates)

    def rollout(self, batch: PromptBatch, seed: int) -> RolloutBatch:
        """Sample one response to each prompt from the policy."""
        return generate_responses(
            self.policy,
            batch.input_ids,
            batch.attention_mask,
            self.sampling,
            eos_token_ids=stop_token_ids(self.policy, self.tokenizer),
            pad_token_id=self.tokenizer.pad_token_id,
            seed=seed,
            batch_size=self.memory.rollout_batch_size,
        )

    def score(self, rollouts: RolloutBatch, batch: PromptBatch) -> Tensor:
        """Raw scores `[B]`: the weighted sum of reward models and functions."""
        limit = self.memory.max_tokens_per_forward
        scores: Tensor = self.reward(rollouts, batch.texts, limit, batch.fields, batch.turns)
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

    def summarize_rollouts(
        self, rollouts: RolloutBatch, batch: PromptBatch, scores: Tensor, estimates: TokenStatistics
    ) -> dict[str, Tensor]:
        """The `rollout/*` metrics of all ranks, with each reward's score and the gold reward."""
        metrics = RolloutMetrics()
        self.add_rollouts(metrics, rollouts, batch, scores, estimates)
        return metrics.compute()

    def add_rollouts(
        self,
        metrics: RolloutMetrics,
        rollouts: RolloutBatch,
        batch: PromptBatch,
        scores: Tensor,
        estimates: TokenStatistics,
    ) -> None:
        """Add the responses that were scored last to `metrics`."""
        named = {f"score/{name}": raw for name, raw in self.reward.raw_scores.items()}
        if self.gold is not None:
            named["gold"] = self.gold(rollouts, batch.texts, None, batch.fields)
        metrics.update(
            estimates.logprobs,
            estimates.ref_logprobs,
            estimates.entropy,
            rollouts.response_mask,
            rollouts.response_ids,
            rollouts.terminated,
            {"score": scores, **named},
        )

    def check_rollouts(self, scores: Tensor, estimates: TokenStatistics) -> bool:
        """Whether scores and estimates are finite on all ranks; if not, the iteration is skipped.

        A skipped iteration leaves running moments, KL coefficient and weights as they were.

        Raises:
            TooManySkippedUpdates: If too many iterations in a row were skipped.
        """
        quantities = {
            "rewards": scores,
            "log-probs of the policy": estimates.logprobs,
            "log-probs of the reference": estimates.ref_logprobs,
            "values of the critic": estimates.values,
        }
        place = f"iteration {int(self.iteration) + 1}"
        return self.guard.check(self.trainer, "policy and critic", quantities, place)

    def shape_rewards(
        self, rollouts: RolloutBatch, scores: Tensor, estimates: TokenStatistics
    ) -> Tensor:
        """Rewards `[B, T]`: the score at the last token, minus the KL penalty of each (Eq. 19)."""
        scores = self.reparameterize(scores)
        # after Eq. 18, so that the penalty is in the units of the reward that is learned from
        scores = scores - self.reward_shaping.missing_eos_penalty * (~rollouts.terminated)
        return token_rewards(
            scores,
            estimates.logprobs,
            estimates.ref_logprobs,
            rollouts.response_mask,
            float(self.kl_coef),
            self.reward_shaping.kl_estimator,
        ).rewards

    def reparameterize(self, scores: Tensor) -> Tensor:
        """Normalize or scale raw scores `[B]` by the moments of all scores so far, and clip them.

        The moments include those of `scores` (Eq. 18).
        """
        self.score_moments.update(scores)
        moments, clip = self.score_moments, self.reward_shaping.clip
        if self.reward_shaping.normalization:
            return normalized_scores(scores, moments.mean, moments.std, clip)
        if self.reward_shaping.scaling:
            scores = scaled_scores(scores, moments.std)
        return scores if clip is None else clipped_scores(scores, clip)

    def experience(
        self, rollouts: RolloutBatch, rewards: Tensor, estimates: TokenStatistics
    ) -> Experience:
        """Advantages and returns of the rollouts (Eqs. 7-12), and the tokens to learn from."""
        options, mask = self.advantages, rollouts.response_mask
        bootstrap = None
        if options.truncation == "bootstrap":
            # A response that ended has no next state; one that was cut off goes on from V(s_{T+1}).
            bootstrap = estimates.next_values.masked_fill(rollouts.terminated, 0.0)
        advantages, returns = gae(
            estimates.values, rewards, mask, options.gamma, options.lam, bootstrap
        )
        if options.truncation == "mask":
            mask = mask & rollouts.terminated[:, None]
        from_reference = self.loss.old_policy == "reference"
        old_logprobs = estimates.ref_logprobs if from_reference else estimates.logprobs
        return Experience(rollouts, old_logprobs, estimates.values, advantages, returns, mask)

    def check_loss_mask(self, experience: Experience) -> None:
        """Warn if the truncation rule leaves no token to learn from on any rank."""
        if self.advantages.truncation != "mask":
            return
        if int(global_sum(experience.loss_mask.sum())) == 0:
            rank_zero_warn(
                "advantages.truncation: mask leaves nothing to learn from, as all responses of an "
                f"iteration ran to sampling.max_new_tokens={self.sampling.max_new_tokens}: raise "
                "it, or use truncation: terminal with a reward_shaping.missing_eos_penalty"
            )

    def reparameterize_advantages(self, minibatch: Experience) -> Experience:
        """Whiten and clip the advantages of a minibatch, over all ranks (Section 5.3.1)."""
        advantages, mask = minibatch.advantages, minibatch.loss_mask
        if self.advantages.normalization:
            # over the tokens to learn from only: padding would change the moments
            moments = global_masked_moments(advantages, mask)
            advantages = masked_whiten(advantages, mask, moments=moments)
        if self.advantages.clip is not None:
            advantages = clipped_advantages(advantages, self.advantages.clip)
        return replace(minibatch, advantages=advantages)

    def adapt_kl_coef(self, kl: float, n_rollouts: int) -> None:
        """Move an adaptive KL coefficient so that the KL approaches its target.

        Args:
            kl: Mean KL of the iteration to the reference, in nats per response.
            n_rollouts: Number of rollouts of the iteration, on all ranks.
        """
        target, horizon = self.reward_shaping.kl_target, self.reward_shaping.kl_horizon
        # While the critic alone is trained, the KL cannot follow the coefficient.
        if target is not None and not self.in_critic_pretraining():
            self.kl_coef.fill_(
                adaptive_kl_coef(float(self.kl_coef), kl, target, horizon, n_rollouts)
            )

    def update(
        self, experience: Experience, ptx: TokenBatch | None, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Train the critic and, after critic pre-training, the policy on an iteration's experience.

        Args:
            experience: `B` scored rollouts.
            ptx: `B` sequences for the language-model loss.
            generator: Draws the minibatches.

        Returns:
            Means over the minibatches of the `ppo/*` metrics, 0-dim; NaN where all were skipped.
        """
        pretraining = self.in_critic_pretraining()
        size = self.minibatches.minibatch_size
        history: list[dict[str, Tensor]] = []
        for _ in range(self.minibatches.ppo_epochs):
            for index in iterate_minibatches(len(experience), size, generator):
                index = index.to(self.device)  # once: each field would copy it, and wait
                minibatch = experience.select(index)
                texts = None if ptx is None else TokenBatch(*(field[index] for field in ptx))
                place = f"iteration {int(self.iteration) + 1}, minibatch {len(history) + 1}"
                metrics = self.train_critic(minibatch, place)
                if not pretraining:
                    metrics |= self.train_policy(minibatch, texts, place)
                self.step_schedules()
                history.append(metrics)
        # Skipped updates have NaN for all metrics.
        means = {key: torch.stack([m[key] for m in history]).nanmean() for key in history[0]}
        if pretraining:
            # over all ranks: they have to agree on when the phase ends
            self.watch_critic_pretraining(float(self.global_means(means)["ppo/value_loss"]))
        else:
            means["ppo/ratio_first"] = history[0]["ppo/ratio"]
        return means

    def train_critic(self, minibatch: Experience, place: str) -> dict[str, Tensor]:
        """Make one update of the critic.

        Args:
            minibatch: Rollouts of this rank.
            place: Where in the run it is, for warnings.

        Returns:
            The critic's metrics, all NaN if the update was skipped.
        """
        _, critic = self.trained_networks()
        totals: dict[str, Tensor] = {}
        # All micro-batches divide by the tokens of the whole minibatch on all ranks, so that a long
        # response weighs as much as in one large batch.
        tokens = self.global_denominator(minibatch.loss_mask.sum())
        for part, weight in self.split_experience(minibatch):
            loss, metrics = self.critic_loss(part, tokens)
            backward(self, weight * loss, critic.optimizer)
            accumulate(totals, scaled(metrics, weight))
        clip = self.critic_optimizer.grad_clip
        step = self.guard.step(self.trainer, "the critic", critic.optimizer, clip, totals, place)
        totals["ppo/critic_grad_norm"] = step.grad_norm
        return totals if step.applied else dict.fromkeys(totals, torch.full_like(tokens, torch.nan))

    def train_policy(
        self, minibatch: Experience, ptx: TokenBatch | None, place: str
    ) -> dict[str, Tensor]:
        """Make one update of the policy, on rollouts and text together (PPO-ptx).

        Args:
            minibatch: Rollouts of this rank.
            ptx: Sequences for the language-model loss, as many.
            place: Where in the run it is, for warnings.

        Returns:
            The policy's metrics, all NaN if the update was skipped.
        """
        policy, _ = self.trained_networks()
        totals: dict[str, Tensor] = {}
        tokens = self.global_denominator(minibatch.loss_mask.sum())
        for part, weight in self.split_experience(self.reparameterize_advantages(minibatch)):
            loss, metrics = self.policy_loss(part, tokens)
            backward(self, weight * loss, policy.optimizer)
            accumulate(totals, scaled(metrics, weight))
        # Its gradient is added to that of PPO before the one step (Eq. 17).
        if ptx is not None and self.loss.ptx_coef > 0:
            text_tokens = self.global_denominator(ptx.completion_mask.sum())
            for rows, weight in self.split_update(ptx.attention_mask.sum(1)):
                ptx_loss = weight * self.ptx_loss(slice_batch(ptx, rows), text_tokens)
                backward(self, self.loss.ptx_coef * ptx_loss, policy.optimizer)
                accumulate(totals, {"ppo/ptx_loss": ptx_loss})
        clip = self.policy_optimizer.grad_clip
        step = self.guard.step(self.trainer, "the policy", policy.optimizer, clip, totals, place)
        totals["ppo/policy_grad_norm"] = step.grad_norm
        self.ppo_step += int(step.applied)
        return totals if step.applied else dict.fromkeys(totals, torch.full_like(tokens, torch.nan))

    def split_experience(self, minibatch: Experience) -> Iterator[tuple[Experience, float]]:
        """A minibatch in micro-batches, each cut to its longest prompt and response.

        Yields:
            A micro-batch and the weight of its loss, see `MicroBatch`.
        """
        index = torch.arange(len(minibatch), device=self.device)
        for rows, weight in self.split_update(minibatch.rollouts.sequence_mask.sum(1)):
            yield minibatch.select(index[rows]), weight

    def split_update(self, lengths: Tensor) -> list[MicroBatch]:
        """The micro-batches of rows with `lengths` `[B]` real tokens, by the module's options."""
        options = self.minibatches
        # the critic may be another network, but its trunk is of the policy's size
        return self.micro_batches(
            self.policy, lengths, options.micro_batch_size, options.micro_batch_tokens
        )

    def critic_loss(self, experience: Experience, tokens: Tensor) -> LossShare:
        """Share of a micro-batch in the value loss (Eq. 16).

        Args:
            experience: Rollouts of the micro-batch.
            tokens: Tokens of the minibatch that the sums are divided by, see `global_denominator`.
        """
        rollouts, mask = experience.rollouts, experience.loss_mask
        values = response_values(
            self.critic, rollouts.sequence_ids, rollouts.sequence_mask, mask.shape[1]
        )
        loss, clip_fraction = value_loss(
            values,
            experience.old_values,
            experience.returns,
            mask,
            self.loss.value_clip,
            denominator=tokens,
        )
        share = mask.sum() / tokens
        return LossShare(
            loss,
            {"ppo/value_loss": loss, "ppo/value_clip_fraction": clip_fraction * share},
        )

    def policy_loss(self, experience: Experience, tokens: Tensor) -> LossShare:
        """Share of a micro-batch in the loss of the policy, with the entropy bonus.

        Args:
            experience: Rollouts of the micro-batch.
            tokens: Tokens of the minibatch that the sums are divided by, see `global_denominator`.
        """
        rollouts, mask = experience.rollouts, experience.loss_mask
        entropy_coef, temperature = self.loss.entropy_coef, self.sampling.temperature

        def read(logits: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
            if entropy_coef:
                return token_logprobs_and_entropy(logits, ids, temperature)
            return (token_logprobs(logits, ids, temperature),)

        logprobs, *entropy = map_target_logits(
            self.policy,
            rollouts.sequence_ids,
            rollouts.sequence_mask,
            rollouts.to_sequence_mask(mask),
            read,
        )
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
            metrics["ppo/entropy_loss"] = entropy_loss(
                entropy[0][:, -mask.shape[1] :], mask, self.loss.entropy_clip, denominator=tokens
            )
            loss = loss + entropy_coef * metrics["ppo/entropy_loss"]
        return LossShare(loss, metrics)

    def policy_objective(
        self, logprobs: Tensor, experience: Experience, tokens: Tensor
    ) -> PolicyLoss:
        """The objective that `loss.policy_objective` names (Eqs. 13-15).

        Args:
            logprobs: Log-probs of the policy that is trained, `[B, T]`, nats.
            experience: Rollouts of the micro-batch.
            tokens: Tokens of the minibatch that the sums are divided by.
        """
        mask = experience.loss_mask
        surrogate = (logprobs, experience.old_logprobs, experience.advantages, mask)
        match self.loss.policy_objective:
            case "clip":
                return surrogate_loss(
                    *surrogate,
                    self.loss.ratio_clip,
                    denominator=tokens,
                    ratio_clip_high=self.loss.ratio_clip_high,
                    dual_clip=self.loss.dual_clip,
                )
            case "unclipped":
                return surrogate_loss(*surrogate, None, denominator=tokens)
            case "kl_penalty":
                return kl_penalty_loss(*surrogate, self.loss.kl_penalty_coef, denominator=tokens)
            case "policy_gradient":
                return policy_gradient_loss(
                    logprobs, experience.advantages, mask, denominator=tokens
                )

    def ptx_loss(self, batch: TokenBatch, tokens: Tensor) -> Tensor:
        """Share of a micro-batch of text in the language-model loss over `tokens` (Eq. 17)."""
        logprobs = target_logprobs(
            self.policy, batch.input_ids, batch.attention_mask, batch.completion_mask
        )
        return language_model_loss(logprobs, batch.completion_mask, tokens)

    def in_critic_pretraining(self) -> bool:
        """Whether this iteration trains the critic alone."""
        return not bool(self.pretraining_done)

    def watch_critic_pretraining(self, value_loss: float) -> None:
        """End critic pre-training after its iterations, or once the value loss is low enough."""
        target = self.critic_pretraining.target_value_loss
        enough = int(self.iteration) + 1 >= self.critic_pretraining.iterations
        if enough or (target is not None and value_loss <= target):
            self.pretraining_done.fill_(True)
            self.pretraining_length.fill_(int(self.iteration) + 1)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """One AdamW and schedule for the policy, one for the critic."""
        policy = self.build_optimizer(self.policy, self.policy_optimizer)
        critic = self.build_optimizer(self.critic, self.critic_optimizer)
        iterations, pretraining = self.planned_iterations(), self.critic_pretraining
        if pretraining.iterations >= iterations and not self.is_trial:
            rank_zero_warn(
                f"critic_pretraining.iterations={pretraining.iterations}: the run has "
                f"{iterations:.0f} iterations, so that the policy is not trained unless critic "
                "pre-training ends early; lower it, or make the run longer"
            )

        def policy_updates() -> float:
            own = max(iterations - self.longest_pretraining(), 1)
            return own * self.updates_per_iteration(self.rollouts_per_iteration())

        def critic_updates() -> float:
            return iterations * self.updates_per_iteration(self.rollouts_per_iteration())

        return [policy, critic], [
            build_schedule(policy, self.policy_optimizer, policy_updates),
            # critic pre-training replaces its warm-up (Section 5.3.3)
            build_schedule(
                critic,
                self.critic_optimizer,
                critic_updates,
                0.0 if pretraining.iterations else None,
            ),
        ]

    def planned_iterations(self) -> float:
        """Iterations of the run by `max_iterations` and the Trainer's limits; inf without any."""
        limit = math.inf if self.max_iterations is None else self.max_iterations
        # max_steps is refused, so that Lightning counts batches here
        return min(float(self.trainer.estimated_stepping_batches), limit)

    def longest_pretraining(self) -> int:
        """Iterations of critic pre-training: those that it took, or may take until it has ended."""
        if bool(self.pretraining_done):
            return int(self.pretraining_length)
        return self.critic_pretraining.iterations

    def rollouts_per_iteration(self) -> int:
        """Rollouts of this rank in an iteration, by the batch size of the training loader.

        Raises:
            ValueError: If the loader does not tell.
        """
        if self.trainer.train_dataloader is None:
            # `estimated_stepping_batches` does so only where it needs the loader's length
            self.trainer.fit_loop.setup_data()
        sampler = getattr(self.trainer.train_dataloader, "batch_sampler", None)
        size = getattr(sampler, "batch_size", None)
        if size is None:
            raise ValueError(
                "lr_scheduler: the number of updates follows from the batch size of the training "
                "loader, expected it as loader.batch_sampler.batch_size, got none; use "
                "lr_scheduler: constant for both networks"
            )
        return int(size) * self.responses_per_prompt

    def updates_per_iteration(self, n_rollouts: int) -> int:
        """Updates of a network in an iteration.

        Args:
            n_rollouts: Rollouts of this rank.
        """
        per_epoch = max(n_rollouts // self.minibatches.minibatch_size, 1)
        return self.minibatches.ppo_epochs * per_epoch

    def step_schedules(self, n_updates: int = 1) -> None:
        """Step the learning rates by updates, the policy's after critic pre-training only."""
        policy, critic = self.trained_networks()
        for _ in range(n_updates):
            self.step_schedule(critic.schedule)
            if not self.in_critic_pretraining():
                self.step_schedule(policy.schedule)

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Generate and score responses to held-out prompts, with the same draws each time."""
        self._evaluation_step(batch, batch_idx, "val/")

    def on_validation_epoch_start(self) -> None:
        """Check the weights of the policy."""
        self._check_evaluation()

    def on_validation_epoch_end(self) -> None:
        """Log `val/rollout/*` on all responses."""
        self._log_evaluation("val/")

    def test_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Generate and score responses to the test prompts."""
        self._evaluation_step(batch, batch_idx, "test/")

    def on_test_epoch_start(self) -> None:
        """Check the weights of the policy."""
        self._check_evaluation()

    def on_test_epoch_end(self) -> None:
        """Log `test/rollout/*` on all responses."""
        self._log_evaluation("test/")

    def _check_evaluation(self) -> None:
        found = find_non_finite(self.policy_sums())
        self._evaluation = None if found else RolloutMetrics()
        if found:
            rank_zero_warn(f"no responses for evaluation: not finite were {join_names(found)}")

    def _log_evaluation(self, prefix: str) -> None:
        if self._evaluation is None:
            # instead of the last known values, by which a checkpoint might be kept
            nan = torch.tensor(torch.nan, device=self.device)
            metrics = dict.fromkeys((*RolloutMetrics.KEYS, "rollout/score"), nan)
        else:
            metrics = self._evaluation.compute()
        self.log_evaluation(metrics, prefix)
        # The logger's x axis; Lightning's own count of batches is one behind at validation. It is
        # not averaged over ranks, as it would be cut to an integer after rounding.
        self.log("step", self.iteration.float())

    def _evaluation_step(self, batch: PromptBatch, batch_idx: int, prefix: str) -> None:
        if self._evaluation is None:
            return
        rollouts, scores, estimates = self.score_responses(batch, self.seed + batch_idx)
        self.add_rollouts(self._evaluation, rollouts, batch, scores, estimates)
        if batch_idx == 0:
            records = build_response_records(rollouts, scores, estimates, self.tokenizer)
            n_rows = self.sampled_texts
            table = format_sample_table(batch.texts[:n_rows], records[:n_rows])
            write_text(self.trainer, f"{prefix}samples", table, int(self.iteration))

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> list[dict[str, Any]]:
        """Responses to a batch of prompts: the rendered prompt and `build_response_records`."""
        records = self._sample_records(batch, seed=self.seed + batch_idx)
        return [
            {"prompt": prompt, **record}
            for prompt, record in zip(batch.texts, records, strict=True)
        ]

    def sample(self, prompts: list[str]) -> list[dict[str, Any]]:
        """Sample one response per prompt, with the same random numbers at every call.

        Args:
            prompts: Prompts as in the field `prompt` of a data file. They are rendered as those of
                the datamodule.

        Returns:
            One record per prompt, see `build_response_records`. The score is NaN if a reward
            function needs fields of records, which plain text does not have.

        Raises:
            RuntimeError: If the trainer has no datamodule with an encoder, or it is not set up yet.
            ValueError: If there is no prompt, or one cannot be used.
        """
        if self.encoder is None:
            raise RuntimeError("sample: the trainer has no datamodule that has set up an encoder")
        batch = encode_prompts(prompts, self.encoder)
        batch = self.transfer_batch_to_device(batch, self.device, dataloader_idx=0)
        return self._sample_records(batch, seed=self.seed)

    @torch.no_grad()
    def _sample_records(self, batch: PromptBatch, seed: int) -> list[dict[str, Any]]:
        if self.reward.needs_records and not any(batch.fields):
            rollouts = self.rollout(batch, seed)
            scores = torch.full((len(batch.texts),), torch.nan, device=self.device)
            estimates = self.estimate(rollouts)
        else:
            rollouts, scores, estimates = self.score_responses(batch, seed)
        return build_response_records(rollouts, scores, estimates, self.tokenizer)

    def input_checksums(self) -> Mapping[str, object]:
        """Checksums of reference and reward models, whose folders may be written anew."""
        return self._input_checksums

    def apply_changes(self, names: set[str]) -> None:
        """Apply a new KL coefficient as well, which is part of a checkpoint's state."""
        super().apply_changes(names)
        if "reward_shaping.kl_coef" in names:
            self.kl_coef.fill_(self.reward_shaping.kl_coef)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave out the weights of reference and reward models, which do not change."""
        super().on_save_checkpoint(checkpoint)
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {k: v for k, v in state.items() if not k.startswith(FROZEN)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the weights of reference and reward models from their folders."""
        super().on_load_checkpoint(checkpoint)
        # The state dict is loaded strictly, so all keys have to be there.
        state = self.state_dict()
        taken: tuple[str, ...] = FROZEN
        saved = checkpoint["state_dict"]
        if any(change.name == "rewards" for change in self._changes):
            # Running moments are of a reward: those of other rewards start anew.
            taken = (*FROZEN, "reward.moments.")
            saved = {k: v for k, v in saved.items() if not k.startswith(taken)}
        own = {k: v for k, v in state.items() if k.startswith(taken)}
        checkpoint["state_dict"] = own | saved
        separate_weights(self, checkpoint["state_dict"])

    def write_finished(self, folder: Path) -> None:
        """Write the policy, with the critic in a folder inside."""
        self.write_network(self.policy, folder, generation_settings(self.sampling.temperature))
        models = [model.path for model in self.reward.models]
        source = critic_source(self.critic_init, self.model_path, models)
        card = replace(self.card(), stage="critic", base_model=source)
        self.write_network(self.critic, folder / "critic", card=card)


def load_reference(
    model_path: str, options: ModelOptions, offload: bool = False, shard: bool = False
) -> LanguageModel | Offloaded | None:
    """The frozen SFT model; `None` with LoRA, where the policy without its adapters is that model.

    Args:
        model_path: Folder or hub id of the SFT model.
        options: How it is loaded. Gradient checkpointing is left off, as it is not trained.
        offload: Keep it in CPU memory between uses.
        shard: Keep an equal share of it on each rank between uses.
    """
    if options.lora_rank > 0:
        return None
    model = freeze(load_causal_lm(model_path, replace(options, gradient_checkpointing=False)))
    return Offloaded(model, offload, shard) if offload or shard else model


def load_critic(
    init: CriticInit,
    model_path: str,
    policy: LanguageModel,
    rewards: Sequence[ModelReward],
    options: ModelOptions,
    seed: int,
) -> LanguageModel:
    """The critic that PPO starts from.

    Args:
        init: `reward`: the first reward model; `policy`: the SFT model with a new head; `random`:
            random weights in the shape of the SFT model.
        model_path: Folder or hub id of the SFT model.
        policy: The policy, loaded with the same options.
        rewards: The reward models in their order.
        options: How the critic is loaded. With LoRA it has its frozen weights in common with the
            policy or the reward model that it starts from.
        seed: Seed of new weights.

    Raises:
        ValueError: If `init` is unknown, or `reward` and no source is a reward model.
    """
    source = critic_source(init, model_path, [model.path for model in rewards])
    if init == "reward" and rewards[0].own_text is not None:
        raise ValueError(
            "critic_init: expected 'policy' or 'random', got 'reward': reward model "
            f"{source!r} has another tokenizer than the policy, whose token ids the critic reads"
        )
    if init == "random":
        if options.load_in_4bit:
            raise ValueError(
                "critic_init: expected 'policy' or 'reward' with network.load_in_4bit, got "
                "'random': 4-bit weights come from a folder"
            )
        return build_random_scalar_model(source, options, seed)
    base: LanguageModel | None = None
    if options.lora_rank > 0:
        base = policy if init == "policy" else rewards[0].find_base(options)
    seed = seed if init == "policy" else 0
    return load_scalar_model(source, options, head_seed=seed, base=base)


def critic_source(init: CriticInit, model_path: str, models: Sequence[str]) -> str:
    """Folder or hub id of the model that gives the critic its shape, see `load_critic`.

    Args:
        init: What the critic starts from.
        model_path: Folder or hub id of the SFT model.
        models: Folders or hub ids of the reward models in their order.

    Raises:
        ValueError: If `init` is unknown, or `reward` and no source is a reward model.
    """
    if init in ("random", "policy"):
        return model_path
    check_choice("critic_init", init, get_args(CriticInit))
    if models and models[0].startswith("<"):
        raise ValueError(
            "critic_init: 'reward' needs a reward model that was loaded from a folder, got "
            f"{models[0]}; save it with save_pretrained and load it from there, or use "
            "critic_init: policy"
        )
    if not models:
        raise ValueError(
            "critic_init: 'reward' needs a reward model among `rewards`, which holds functions and "
            "rules only; use critic_init: policy"
        )
    return models[0]


def check_sampling(sampling: SamplingOptions) -> None:
    """Warn about options that make samples differ from the distribution of the policy.

    Raises:
        ValueError: If responses are greedy.
    """
    if not sampling.do_sample:
        raise ValueError(
            "sampling.do_sample: expected true, got false: PPO learns from samples of the policy, "
            "and a greedy response is not a sample"
        )
    off_policy = [f"{name}={getattr(sampling, name)}" for name in sampling.off_policy_options]
    if off_policy:
        rank_zero_warn(
            f"{', '.join(off_policy)}: rollouts are sampled from a changed distribution while "
            "log-probs are the policy's own, so the policy gradient is biased (off-policy samples "
            "with no correction). Leave these options of sampling at their defaults."
        )


def check_kl_estimator(options: RewardShapingOptions) -> None:
    """Warn about an estimator whose gradient is not that of KL."""
    if options.kl_estimator != "k1" and options.kl_coef > 0:
        rank_zero_warn(
            f"reward_shaping.kl_estimator={options.kl_estimator}: as a reward it does not penalize "
            "KL. The policy gradient weighs log-probs with the estimate, and only with k1 this is "
            "the gradient of KL(policy || reference). With k2 and k3 it is about 0 near the "
            "reference. Use k1 in rewards."
        )


def check_entropy_clip(options: PPOLossOptions, vocab_size: int) -> None:
    """Warn about a bound on the entropy bonus that no distribution reaches."""
    clip, largest = options.entropy_clip, math.log(vocab_size)
    if options.entropy_coef > 0 and clip is not None and clip >= largest:
        rank_zero_warn(
            f"loss.entropy_clip={clip}: the entropy of a token is at most {largest:.1f} nats (the "
            f"log of {vocab_size} tokens), so that the bound never acts. It is per token: lower it "
            "to about the entropy of the SFT model (`rollout/entropy`)."
        )


def generation_settings(temperature: float) -> dict[str, Any]:
    """Settings of a finished policy's `generation_config.json`: it samples as the rollouts did."""
    return {"temperature": temperature, "do_sample": True}
