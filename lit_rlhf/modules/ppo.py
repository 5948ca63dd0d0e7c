"""PPO-max under a Trainer: optimizers, logging and checkpoints around `lit_rlhf.ppo.PPO`.

`PPOModule.training_step` is one iteration of Algorithm 1 of arXiv 2307.04964. Its phases are the
methods of `PPO`, and `update`, which steps the optimizers.

Notation: `B` responses, `T` tokens of the longest response.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from lit_callbacks import log_text
from lit_rlhf.checks import check_count, check_positive
from lit_rlhf.data import PromptBatch, PromptDataModule, TokenBatch, encode_prompts
from lit_rlhf.forward import (
    LanguageModel,
    Offloaded,
    call,
    disable_dropout,
    scalar_head_of,
    share_lower_layers,
)
from lit_rlhf.functional import explained_variance, informative_groups
from lit_rlhf.models import ModelOptions, load_causal_lm, separate_weights
from lit_rlhf.modules.finished import is_dry_run, model_card
from lit_rlhf.modules.option_names import merge_options
from lit_rlhf.modules.options import CriticPretrainingOptions, MinibatchOptions, OptimizerOptions
from lit_rlhf.modules.phases import PhaseTimer
from lit_rlhf.modules.resuming import fill_buffers, weights_checksum
from lit_rlhf.modules.schedules import build_schedule, training_batch_size
from lit_rlhf.modules.stage import MAX_SKIPPED_IN_A_ROW, StageModule, evaluation_prefix
from lit_rlhf.modules.updates import (
    Share,
    find_non_finite,
    join_names,
    slice_batch,
    split_batch,
    step_schedule,
    trained_networks,
    weight_sums,
)
from lit_rlhf.ppo import (
    PPO,
    AdvantageOptions,
    CriticInit,
    MemoryOptions,
    PPOLossOptions,
    PPONetworks,
    PPOOptions,
    RewardShapingOptions,
    check_groups,
    critic_source,
    load_critic,
    load_reference,
)
from lit_rlhf.rewards import (
    CallableReward,
    RewardObject,
    Rewards,
    Scores,
    WeightedReward,
    plain_rewards,
    reward_key,
    untrusted_rewards,
)
from lit_rlhf.rollout import (
    Experience,
    RolloutBatch,
    RolloutMetrics,
    Sampler,
    SamplingOptions,
    TokenStatistics,
    build_response_records,
    check_minibatch_size,
    format_sample_table,
    generate_responses,
    iterate_minibatches,
)
from lit_rlhf.stats import (
    global_denominator,
    global_masked_moments,
    global_means,
    global_sum,
    world_size,
)

# metrics beside the ones of `RolloutMetrics` that an iteration logs even if it is skipped
OF_AN_ITERATION = ("rollout/score", "rollout/reward")
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


class PPOModule(PPO, StageModule):
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
        critic_init: The critic's start: the first reward model, the policy, random weights, or the
            folder of an earlier run's critic; or `shared`, a new head on the policy's trunk, which
            both losses then train in one update, with the head at the learning rate and weight
            decay of `critic_optimizer`.
        sampling: How responses are sampled.
        sampler: What samples them, such as `lit_rlhf.rollout.VLLMSampler`; `None`: lit_rlhf itself.
        responses_per_prompt: Responses to each prompt of an iteration in training. An iteration has
            `data.batch_size * responses_per_prompt` rollouts; the ptx example of a prompt goes
            with each of its responses. In evaluation a prompt gets one response.
        reward_shaping: From scores to the rewards of tokens.
        advantages: Generalized advantage estimation, or an estimator without a critic, for which
            `critic_init`, `critic_optimizer` and `critic_pretraining` have no effect.
        loss: The losses of policy and critic.
        minibatches: How an iteration's rollouts become updates.
        policy_optimizer: The policy's optimizer and schedule.
        critic_optimizer: The critic's.
        critic_pretraining: The phase at the start that trains only the critic.
        max_iterations: Length of the run, critic pre-training included; `None`: as many batches as
            `trainer.max_epochs` gives. `trainer.max_steps` would count the steps of both optimizers
            and is refused.
        memory: What bounds the memory outside the update.
        network: How policy and critic are loaded, and the others where `memory` does not differ.
        output_dir: Folder for the finished policy, with the critic in `critic/`; `None` means
            `model/` in the run's log folder.
        sampled_texts: Held-out prompts whose responses are logged as text at validation.
        seed: Seed of rollouts and minibatches. The draws of an iteration depend only on it, the
            iteration and the rank, so a resumed run repeats them.
        max_skipped_in_a_row: Updates of a network in a row that may be skipped, as a number is not
            finite, until training stops.
    """

    stage = "ppo"
    progress_metrics = ("rollout/score", "rollout/kl", "rollout/response_length")
    object_arguments = ("rewards", "gold_reward", "sampler")
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
        critic_init: CriticInit | str = "reward",
        sampling: SamplingOptions = SamplingOptions(max_new_tokens=512),
        sampler: Sampler | None = None,
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
        # Past `PPO`, which takes the networks that are loaded below. It has to be a `super`, by
        # which Lightning finds the arguments of constructors.
        super(PPO, self).__init__(model_path, output_dir, network, max_skipped_in_a_row)
        cls = type(self)
        gold_key = None if gold_reward is None else reward_key(gold_reward)
        self.save_hyperparameters({"rewards": plain_rewards(rewards), "gold_reward": gold_key})
        self.max_iterations = max_iterations
        self.minibatches = merge_options(cls, "minibatches", minibatches)
        self.policy_optimizer = merge_options(cls, "policy_optimizer", policy_optimizer)
        self.critic_optimizer = merge_options(cls, "critic_optimizer", critic_optimizer)
        self.critic_pretraining = merge_options(cls, "critic_pretraining", critic_pretraining)
        self.sampled_texts = sampled_texts
        self.seed = seed
        self.critic_init = critic_init
        advantages = merge_options(cls, "advantages", advantages)
        if not advantages.uses_critic:
            self.critic_pretraining = CriticPretrainingOptions(iterations=0)
        elif critic_init == "shared" and self.critic_pretraining.iterations:
            raise ValueError(
                "critic_pretraining.iterations: expected 0 with critic_init: shared, got "
                f"{self.critic_pretraining.iterations}: the critic's trunk is the policy's"
            )
        options = PPOOptions(
            merge_options(cls, "sampling", sampling),
            merge_options(cls, "reward_shaping", reward_shaping),
            advantages,
            merge_options(cls, "loss", loss),
            merge_options(cls, "memory", memory),
            responses_per_prompt,
        )
        check_groups(options)
        check_on_policy_sampling(options.sampling)
        # Without dropout, rollout, scoring and update compute the log-probs of one policy, and
        # the first ratio is 1.
        policy = disable_dropout(load_causal_lm(model_path, self.network))
        warn_about_options(options, policy.config.vocab_size)
        offload, shard = options.memory.offload_frozen, options.memory.shard_frozen
        frozen = replace(
            self.network,
            dtype=options.memory.frozen_dtype or self.network.dtype,
            # the scales of 4-bit weights do not come and go with them
            load_in_4bit=self.network.load_in_4bit and not (offload or shard),
        )
        reference = load_reference(model_path, frozen, offload, shard)
        if reference is not None and not isinstance(reference, Offloaded):
            share_lower_layers(reference, policy)
        ensemble = options.reward_shaping.ensemble
        reward = WeightedReward(
            rewards,
            frozen,
            self.tokenizer,
            timeout=reward_timeout,
            offload=offload,
            shard=shard,
            ensemble=ensemble,
        )
        critic = None
        if advantages.uses_critic:
            critic = load_critic(critic_init, model_path, policy, reward.models, self.network, seed)
            disable_dropout(critic)
        gold = None
        if gold_reward is not None:
            gold = CallableReward(gold_reward, self.tokenizer, timeout=reward_timeout)
        scored_by = (reward, self.tokenizer, gold)
        networks = PPONetworks(policy, reference, critic, *scored_by, sampler or generate_responses)
        self.assemble(networks, options)
        self._evaluation: RolloutMetrics | None = None
        self.inputs["rewards"] = [model.path for model in self.reward.models]
        # Of folders that may be written anew; now, since a strategy may cast the weights later.
        self.input_checksums["weights of the reward models"] = [
            weights_checksum(model.model) for model in self.reward.models
        ]
        if sources := self.reward.hash_sources():
            self.input_checksums["sources of the reward functions"] = sources
        if self.reference is not None:
            self.input_checksums["weights of the reference"] = weights_checksum(self.reference)
        # Buffers, so that checkpoints hold them.
        self.register_buffer("iteration", torch.zeros((), dtype=torch.long))
        self.register_buffer("ppo_step", torch.zeros((), dtype=torch.long))
        no_pretraining = torch.tensor(self.critic_pretraining.iterations == 0)
        self.register_buffer("pretraining_done", no_pretraining)
        self.register_buffer("pretraining_length", torch.zeros((), dtype=torch.long))

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
        """Check reward models' text, fields that reward functions need, and the run's length."""
        for source in self.reward.models:
            if self.encoder is not None:
                source.check_contract(self.encoder.contract)
        if isinstance(self.datamodule, PromptDataModule):
            of_prompts = {p: of for p, of in self.datamodule.examples.items() if p != "ptx"}
            for part, examples in of_prompts.items():
                available = {name for example in examples for name in example.fields}
                self.reward.check_fields(available, f"the {part} records")
                if self.gold is not None:
                    self.gold.check_fields(available, f"the {part} records")
        if stage == "fit" and self.trainer.max_steps != -1 and not is_trial(self.trainer):
            raise ValueError(
                f"trainer.max_steps: expected -1 (off), got {self.trainer.max_steps}: it would "
                "count the updates of policy and critic together; set "
                "model.max_iterations, the number of PPO iterations"
            )
        if stage == "fit" and isinstance(self.datamodule, PromptDataModule):
            n_prompts, learned = self.datamodule.batch_size, self.advantages.learned_prompts
            if learned is not None and learned > n_prompts:
                raise ValueError(
                    f"advantages.learned_prompts: expected at most data.batch_size={n_prompts}, "
                    f"got {learned}"
                )
            rollouts = self.count_learned(n_prompts * self.responses_per_prompt)
            check_minibatch_size(rollouts, self.minibatches.minibatch_size)

    def on_train_start(self) -> None:
        """Tell of a missing ptx loss; stop at once if a checkpoint is at the end of the run."""
        if self.loss.ptx_coef > 0 and getattr(self.datamodule, "ptx_sources", None) == []:
            rank_zero_info(
                "ppo: no data.ptx_sources, so there is no language-model loss (Eq. 17); "
                f"loss.ptx_coef = {self.loss.ptx_coef} has no effect"
            )
        self.stop_after_last_iteration()

    def stop_after_last_iteration(self) -> None:
        """Ask the trainer to stop once `max_iterations` are done."""
        if self.max_iterations is not None and int(self.iteration) >= self.max_iterations:
            self.trainer.should_stop = True

    def training_step(self, batch: PromptBatch, batch_idx: int) -> dict[str, Tensor]:
        """One PPO iteration; returns the scores and lengths of the responses for callbacks."""
        batch = self.repeat_prompts(batch)
        scores = torch.full((len(batch.texts),), torch.nan, device=self.device)
        lengths = torch.zeros_like(scores)
        metrics = dict.fromkeys((*RolloutMetrics.KEYS, *OF_AN_ITERATION), scores[0])
        metrics["ppo/kl_coef"] = self.kl_coef.clone()
        trained = "policy"
        if self.critic is not None:
            trained, metrics["ppo/explained_variance"] = "policy and critic", scores[0]
        with self.guard.iteration(self.trainer, trained, self.place()):
            self.guard.require_finite(weight_sums(self.policy, "the policy"))
            seed, generator = iteration_draws(self.seed, int(self.iteration), self.global_rank)
            rollouts, scored, estimates = self.score_responses(batch, seed, self.timer)
            scores = scored.total
            lengths = rollouts.lengths
            metrics |= self.measure(batch, rollouts, scored, estimates).compute()
            self.guard.require_finite(
                {
                    "rewards": scores,
                    "log-probs of the policy": estimates.logprobs,
                    "log-probs of the reference": estimates.ref_logprobs,
                    "values of the critic": estimates.values,
                }
            )
            # Only iterations that are learned from count in the running moments of rewards.
            self.reward.commit_moments(scored)
            rewards = self.shape_rewards(rollouts, scored, estimates)
            experience = self.experience(rollouts, rewards, estimates)
            metrics |= self.measure_experience(rewards, scores, experience)
            experience = self.select_prompts(experience, scores)
            if not self.in_critic_pretraining():  # during it, the KL cannot follow the coefficient
                self.adapt_kl_coef(float(metrics["rollout/kl"]), len(scores) * world_size())
            with self.timer("update", rollouts.sequence_ids, UPDATE_MEMORY):
                metrics |= self.update(experience, batch.ptx, generator)
        if self.guard.skipped:  # the learning rates follow the plan all the same
            learned = self.count_learned(len(scores))
            self.step_schedules(self.minibatches.updates_per_iteration(learned))
        self.end_iteration(metrics, lengths)
        return {"scores": scores, "response_lengths": lengths}

    def place(self) -> str:
        """The iteration, for messages."""
        return f"iteration {int(self.iteration) + 1}"

    def score_responses(
        self, batch: PromptBatch, seed: int, timer: PhaseTimer | None = None
    ) -> tuple[RolloutBatch, Scores, TokenStatistics]:
        """The first three phases: sample responses, score them, and estimate log-probs and values.

        Without a timer, they are not part of a training step.
        """
        timer = timer or PhaseTimer(self)
        with timer("rollout", batch.input_ids, ROLLOUT_MEMORY):
            rollouts = self.rollout(batch, seed)
        with timer("score", rollouts.sequence_ids, SCORING_MEMORY):
            scores = self.score(rollouts, batch)
        with timer("estimate", rollouts.sequence_ids, SCORING_MEMORY):
            estimates = self.estimate(rollouts)
        return rollouts, scores, estimates

    def measure_experience(
        self, rewards: Tensor, scores: Tensor, experience: Experience
    ) -> dict[str, Tensor]:
        """Metrics of rewards and returns; warns if there is no token to learn from on any rank."""
        if self.advantages.truncation == "mask" and not global_sum(experience.loss_mask.sum()):
            rank_zero_warn(
                "advantages.truncation: mask leaves nothing to learn from, as all responses of an "
                f"iteration ran to sampling.max_new_tokens={self.sampling.max_new_tokens}: raise "
                "it, or use truncation: terminal with a reward_shaping.missing_eos_penalty"
            )
        count = global_denominator(len(rewards), self.device)
        metrics = {"rollout/reward": rewards.sum() / count}
        if self.responses_per_prompt > 1:
            learned = experience.loss_mask.any(1)
            informative = informative_groups(scores, self.responses_per_prompt, learned)
            metrics["rollout/informative_share"] = informative.float().mean()
        if self.critic is not None:
            mask = experience.rollouts.response_mask
            metrics["ppo/explained_variance"] = explained_variance(
                experience.old_values, experience.returns, mask, moments=global_masked_moments
            )
        return metrics

    def end_iteration(self, metrics: dict[str, Tensor], lengths: Tensor) -> None:
        """Count the iteration and log its metrics, averaged over ranks."""
        metrics |= self.timer.pop_metrics(int(lengths.sum()))
        metrics["ppo/skipped_updates"] = self.guard.pop_count()
        self.iteration += 1
        self.log_dict(global_means(metrics, self.device), batch_size=len(lengths))
        # the x axis of loggers: Lightning's global step counts the steps of both optimizers
        self.log("step", self.iteration.float())
        self.stop_after_last_iteration()

    def update(
        self, experience: Experience, ptx: TokenBatch | None, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Train the critic and, after critic pre-training, the policy on an iteration's experience.

        `ptx` are as many sequences for the language-model loss. Metrics `ppo/*` are means over
        minibatches; NaN where all were skipped.
        """
        pretraining = self.in_critic_pretraining()
        size = self.minibatches.minibatch_size
        history: list[dict[str, Tensor]] = []
        for _ in range(self.minibatches.ppo_epochs):
            for index in iterate_minibatches(len(experience), size, generator):
                index = index.to(self.device)  # once: each field would copy it, and wait
                minibatch = experience.select(index)
                texts = None if ptx is None else TokenBatch(*(field[index] for field in ptx))
                place = f"{self.place()}, minibatch {len(history) + 1}"
                metrics = {}
                if self.separate_critic:
                    metrics = self.train_critic(minibatch, self.critic_optimizer.grad_clip, place)
                if not pretraining:
                    clip = self.policy_optimizer.grad_clip
                    metrics |= self.train_policy(minibatch, texts, clip, place)
                self.step_schedules()
                history.append(metrics)
        # Skipped updates have NaN for all metrics.
        means = {key: torch.stack([m[key] for m in history]).nanmean() for key in history[0]}
        if pretraining:
            # over all ranks: they have to agree on when the phase ends
            self.watch_critic_pretraining(float(global_means(means, self.device)["ppo/value_loss"]))
        else:
            means["ppo/ratio_first"] = history[0]["ppo/ratio"]
        return means

    def train_critic(
        self, minibatch: Experience, max_norm: float | None, place: str
    ) -> dict[str, Tensor]:
        """Make one update of the critic; its metrics are NaN if the update was skipped."""
        # All micro-batches divide by the tokens of the whole minibatch on all ranks, so that a long
        # response weighs as much as in one large batch.
        tokens = global_denominator(minibatch.loss_mask.sum(), self.device)
        critic = cast(LanguageModel, self.critic)
        shares = (
            (weight, *call(critic, self.critic_loss, part, tokens))
            for part, weight in self.split_experience(minibatch)
        )
        return self.update_network("critic", shares, max_norm, place)

    def train_policy(
        self, minibatch: Experience, ptx: TokenBatch | None, max_norm: float | None, place: str
    ) -> dict[str, Tensor]:
        """Make one update of the policy, on rollouts and `ptx`, as many sequences of text.

        It is the critic's update as well if both share a trunk.
        """
        loss_of = self.joint_loss if self.shares_trunk else self.policy_loss
        tokens = global_denominator(minibatch.loss_mask.sum(), self.device)

        def shares() -> Iterator[Share]:
            for part, weight in self.split_experience(self.reparameterize_advantages(minibatch)):
                yield weight, *call(self.policy, loss_of, part, tokens)
            # Its gradient is added to PPO's before the one step (Eq. 17).
            if ptx is not None and self.loss.ptx_coef > 0:
                text_tokens = global_denominator(ptx.completion_mask.sum(), self.device)
                for rows, weight in self.micro_batches(ptx.attention_mask.sum(1)):
                    loss = call(self.policy, self.ptx_loss, slice_batch(ptx, rows), text_tokens)
                    yield weight, self.loss.ptx_coef * loss, {"ppo/ptx_loss": loss}

        return self.update_network("policy", shares(), max_norm, place)

    def update_network(
        self, name: str, shares: Iterable[Share], max_norm: float | None, place: str
    ) -> dict[str, Tensor]:
        """Accumulate a network's gradient over micro-batches, and make one step with it."""
        policy, *critic = trained_networks(self)
        optimizer, _ = policy if name == "policy" else critic[0]
        metrics, norm, applied = self.guard.update(
            self, f"the {name}", optimizer, shares, max_norm, place
        )
        self.ppo_step += int(applied and name == "policy")
        metrics[f"ppo/{name}_grad_norm"] = norm
        return metrics if applied else dict.fromkeys(metrics, torch.full_like(norm, torch.nan))

    def split_experience(self, minibatch: Experience) -> Iterator[tuple[Experience, float]]:
        """Split a minibatch into micro-batches with weights, each cut to its longest sequence."""
        index = torch.arange(len(minibatch), device=self.device)
        for rows, weight in self.micro_batches(minibatch.rollouts.sequence_mask.sum(1)):
            yield minibatch.select(index[rows]), weight

    def micro_batches(self, lengths: Tensor) -> list[tuple[slice, float]]:
        """The micro-batches of rows with `lengths` `[B]` real tokens, by the module's options."""
        options = self.minibatches
        # the critic may be another network, but its trunk has the policy's size
        return split_batch(
            self.policy, lengths, options.micro_batch_size, options.micro_batch_tokens
        )

    def in_critic_pretraining(self) -> bool:
        """Whether this iteration trains only the critic."""
        return not bool(self.pretraining_done)

    def watch_critic_pretraining(self, value_loss: float) -> None:
        """End critic pre-training after its iterations, or once the value loss is low enough."""
        target = self.critic_pretraining.target_value_loss
        enough = int(self.iteration) + 1 >= self.critic_pretraining.iterations
        if enough or (target is not None and value_loss <= target):
            self.pretraining_done.fill_(True)
            self.pretraining_length.fill_(int(self.iteration) + 1)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """One AdamW and schedule for the policy, and one for a critic with a trunk of its own."""
        policy = self.build_optimizer(self.policy, self.policy_optimizer)
        if self.critic is not None and self.shares_trunk:
            # the head is new, and so may need a larger learning rate than the trunk
            head = list(scalar_head_of(self.critic).parameters())
            for group in policy.param_groups:
                group["params"] = [p for p in group["params"] if all(p is not h for h in head)]
            options = self.critic_optimizer
            settings = {"lr": options.learning_rate, "weight_decay": options.weight_decay}
            policy.add_param_group({"params": head, **settings})
        pretraining = self.critic_pretraining.iterations
        limit = math.inf if self.max_iterations is None else self.max_iterations
        # max_steps is refused, so that Lightning counts batches here
        iterations = min(float(self.trainer.estimated_stepping_batches), limit)
        if pretraining >= iterations and not is_trial(self.trainer):
            rank_zero_warn(
                f"critic_pretraining.iterations={pretraining}: the run has {iterations:.0f} "
                "iterations, so that the policy is not trained unless critic pre-training ends "
                "early; lower it, or make the run longer"
            )

        def critic_updates(iterations: float = iterations) -> float:
            rollouts = training_batch_size(self.trainer) * self.responses_per_prompt
            rollouts = self.count_learned(rollouts)
            return iterations * self.minibatches.updates_per_iteration(rollouts)

        def policy_updates() -> float:
            # those that pre-training took, or may take until it has ended
            done = bool(self.pretraining_done)
            phase = int(self.pretraining_length) if done else pretraining
            return critic_updates(max(iterations - phase, 1))

        schedule = build_schedule(policy, self.policy_optimizer, policy_updates)
        if self.critic is None or self.shares_trunk:
            return [policy], [schedule]
        critic = self.build_optimizer(self.critic, self.critic_optimizer)
        return [policy, critic], [
            schedule,
            # critic pre-training replaces its warm-up (Section 5.3.3)
            build_schedule(
                critic, self.critic_optimizer, critic_updates, 0.0 if pretraining else None
            ),
        ]

    def step_schedules(self, n_updates: int = 1) -> None:
        """Step the learning rates by updates, the policy's after critic pre-training only."""
        (_, of_policy), *critic = trained_networks(self)
        for _ in range(n_updates):
            for _, schedule in critic:
                step_schedule(schedule)
            if not self.in_critic_pretraining():
                step_schedule(of_policy)

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Generate and score responses to held-out prompts, with the same draws each time."""
        if batch_idx == 0:
            found = find_non_finite(weight_sums(self.policy, "the policy"))
            self._evaluation = None if found else RolloutMetrics()
            if found:
                rank_zero_warn(f"no responses for evaluation: non-finite: {join_names(found)}")
        if self._evaluation is None:
            return
        rollouts, scores, estimates = self.score_responses(batch, self.seed + batch_idx)
        self.measure(batch, rollouts, scores, estimates, self._evaluation)
        if batch_idx == 0:
            records = build_response_records(rollouts, scores.total, estimates, self.tokenizer)
            n_rows = self.sampled_texts
            table = format_sample_table(batch.texts[:n_rows], records[:n_rows])
            name = f"{evaluation_prefix(self.trainer)}samples"
            log_text(self.trainer, name, table, int(self.iteration))

    def evaluation_metrics(self) -> dict[str, Tensor]:
        """`rollout/*` of all responses; NaN if the policy could not be sampled from."""
        # The logger's x axis; Lightning's own count of batches is one behind at validation. It is
        # not averaged over ranks, as it would be cut to an integer after rounding.
        self.log("step", self.iteration.float())
        if self._evaluation is None:
            # instead of the last known values, by which a checkpoint might be kept
            nan = torch.tensor(torch.nan, device=self.device)
            return dict.fromkeys((*RolloutMetrics.KEYS, "rollout/score"), nan)
        return self._evaluation.compute()

    def sample(self, prompts: list[str]) -> list[dict[str, Any]]:
        """Sample one response per prompt, with the same random numbers at every call.

        Prompts are as in the field `prompt` of a data file, and records those of
        `build_response_records`. The score is NaN if a reward function needs fields of records,
        which plain text does not have.
        """
        if self.encoder is None:
            raise RuntimeError("sample: the trainer has no datamodule that has set up an encoder")
        batch = encode_prompts(prompts, self.encoder)
        batch = self.transfer_batch_to_device(batch, self.device, dataloader_idx=0)
        return self.sample_records(batch, seed=self.seed)

    @torch.no_grad()
    def sample_records(self, batch: PromptBatch, seed: int) -> list[dict[str, Any]]:
        """Sample one response per prompt of a batch; see `sample` for the records."""
        needed = [getattr(function, "required_fields", ()) for function in self.reward.functions]
        if any(needed) and not any(batch.fields):
            rollouts = self.rollout(batch, seed)
            scores = torch.full((len(batch.texts),), torch.nan, device=self.device)
            estimates = self.estimate(rollouts)
        else:
            rollouts, scored, estimates = self.score_responses(batch, seed)
            scores = scored.total
        return build_response_records(rollouts, scores, estimates, self.tokenizer)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave out the weights of reference and reward models, which do not change."""
        super().on_save_checkpoint(checkpoint)
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {k: v for k, v in state.items() if not k.startswith(FROZEN)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the weights of reference and reward models from their folders."""
        super().on_load_checkpoint(checkpoint)
        taken: tuple[str, ...] = FROZEN
        changed = self.resume.changed_names()
        if changed & {"rewards", "reward_shaping.ensemble", "weights of the reward models"}:
            # Running moments belong to a reward, or a head of it: for others they start anew.
            taken = (*taken, "reward.moments.")
        if "reward_shaping.kl_coef" in changed:
            taken = (*taken, "kl_coef")
        saved = {k: v for k, v in checkpoint["state_dict"].items() if not k.startswith(taken)}
        # The state dict is loaded strictly, so all keys have to be there.
        own = {k: v for k, v in self.state_dict().items() if k.startswith(taken)}
        checkpoint["state_dict"] = own | fill_buffers(self, saved)
        separate_weights(self, checkpoint["state_dict"])

    def write_finished(self, folder: Path) -> None:
        """Write the policy, with the critic, if there is one, in a folder inside."""
        self.write_network(self.policy, folder, generation_settings(self.sampling.temperature))
        if self.critic is None:
            return
        models = [model.path for model in self.reward.models]
        source = critic_source(self.critic_init, self.model_path, models)
        card = replace(model_card(self), stage="critic", base_model=source)
        self.write_network(self.critic, folder / "critic", card=card)


def iteration_draws(seed: int, iteration: int, rank: int) -> tuple[int, torch.Generator]:
    """Seed of an iteration's rollouts on a rank, and generator of its minibatches.

    They depend on nothing else, so that a run that resumes from a checkpoint draws the same.
    """
    # Three small numbers to one: large primes keep neighbouring iterations and ranks apart.
    mixed = seed * 1_000_003 + iteration * 7_919 + rank * 104_729
    generator = torch.Generator().manual_seed(mixed % 2**64)
    return int(torch.randint(2**31, (), generator=generator)), generator


def is_trial(trainer: Trainer) -> bool:
    """Whether this is a trial of `fast_dev_run` or the Tuner, which set `max_steps` for it."""
    return is_dry_run(trainer) or isinstance(trainer.logger, DummyLogger)


def check_on_policy_sampling(sampling: SamplingOptions) -> None:
    """Refuse greedy responses, and warn of samples that do not come from the policy as scored."""
    if not sampling.do_sample:
        raise ValueError(
            "sampling.do_sample: expected true, got false: PPO learns from samples of the policy, "
            "and a greedy response is not a sample"
        )
    off_policy = [f"{name}={getattr(sampling, name)}" for name in sampling.off_policy_options]
    if off_policy:
        rank_zero_warn(
            f"{', '.join(off_policy)}: rollouts are sampled from a changed distribution. Weights "
            "(loss.importance_cap) correct the tokens that it draws; about those that it never "
            "draws nothing is learned. Leave these options of sampling at their defaults."
        )


def warn_about_options(options: PPOOptions, vocab_size: int) -> None:
    """Warn about an estimator without KL's gradient, and a bound on entropy that never acts."""
    shaping, loss = options.reward_shaping, options.loss
    if shaping.kl_estimator != "k1" and shaping.kl_coef > 0:
        rank_zero_warn(
            f"reward_shaping.kl_estimator={shaping.kl_estimator}: as a reward it does not penalize "
            "KL. The policy gradient weighs log-probs with the estimate, and only with k1 this is "
            "the gradient of KL(policy || reference). With k2 and k3 it is about 0 near the "
            "reference. Use k1 in rewards."
        )
    clip, largest = loss.entropy_clip, math.log(vocab_size)
    if loss.entropy_coef > 0 and clip is not None and clip >= largest:
        rank_zero_warn(
            f"loss.entropy_clip={clip}: the entropy of a token is at most {largest:.1f} nats (the "
            f"log of {vocab_size} tokens), so that the bound never acts. It is per token: lower it "
            "to about the entropy of the SFT model (`rollout/entropy`)."
        )


def generation_settings(temperature: float) -> dict[str, Any]:
    """Settings of a finished policy's `generation_config.json`: it samples as the rollouts did."""
    return {"temperature": temperature, "do_sample": True}
