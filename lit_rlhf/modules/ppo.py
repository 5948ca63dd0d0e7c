"""PPO-max: proximal policy optimization of a language model that does not collapse (Section 5)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from lit_rlhf.data import PromptBatch, encode_prompts
from lit_rlhf.forward import disable_dropout
from lit_rlhf.functional import (
    KLEstimator,
    adaptive_kl_coef,
    clipped_advantages,
    clipped_scores,
    explained_variance,
    gae,
    masked_whiten,
    normalized_scores,
    scaled_scores,
    token_rewards,
)
from lit_rlhf.models import load_causal_lm
from lit_rlhf.modules.ppo_models import CriticInit, initial_critic, reference_policy
from lit_rlhf.modules.ppo_options import check_options, generation_settings
from lit_rlhf.modules.ppo_update import PPOUpdate
from lit_rlhf.modules.timing import PhaseTimer
from lit_rlhf.rewards import FunctionReward, WeightedReward
from lit_rlhf.rollout import (
    Experience,
    RolloutBatch,
    SamplingOptions,
    TokenStatistics,
    build_response_records,
    format_sample_table,
    generate_responses,
    rollout_metrics,
    score_rollouts,
)
from lit_rlhf.stats import FixedDtypeBuffers, RunningMoments, global_masked_moments

Truncation = Literal["terminal", "bootstrap", "mask"]
OldPolicy = Literal["rollout", "reference"]
FROZEN = ("reference.", "reward.functions.")  # keys of the state dict that checkpoints leave out
# what to change when a phase needs too much memory
ROLLOUT_MEMORY = ("rollout_batch_size", "max_new_tokens")
SCORING_MEMORY = ("scoring_tokens", "max_new_tokens")
UPDATE_MEMORY = ("micro_batch_size", "max_new_tokens", "gradient_checkpointing")


class PPOModule(FixedDtypeBuffers, PPOUpdate):
    """One iteration of PPO-max per `training_step`: rollout, score, estimate, shape, update.

    Each phase is a method of that name; override one to change it. The defaults are PPO-max with
    the paper's values; the overlays in `configs/ablations` switch its tricks one by one.

    Args:
        model_path: Folder or hub id of the SFT model: the policy's start and the reference.
        rewards: Weight by source; a source is a reward model's folder or `package.module:function`.
            A mapping instead of a weight describes a ready-made rule (`docs/rewards.md`).
        gold_reward: `package.module:function`, logged as `rollout/gold` and never trained on.
        reward_timeout: Seconds that a reward function may take for an iteration's responses;
            `None`: as long as it likes.
        critic_init: The critic's start: the first reward model, the policy, or random weights.
        max_new_tokens: Longest response, in tokens.
        temperature: Of sampling, and so of every log-prob.
        top_p: Nucleus sampling's mass. Below 1 the samples are off-policy.
        top_k: Sample among this many tokens only; 0 is all. Above 0 the samples are off-policy.
        repetition_penalty: transformers' penalty. Other than 1 the samples are off-policy.
        rollout_batch_size: Most rollouts in progress at a time: one that ends makes room for the
            next prompt. `None` takes all.
        scoring_tokens: Real tokens that reference, reward models and critic read at once; `None`:
            2048 on a CPU and 16384 on a GPU.
        reward_scaling: Divide scores by their running standard deviation.
        reward_normalization: Subtract their running mean and divide by it (Eq. 18).
        reward_clip: Bound on the size of the score after that; `None`: no clipping.
        kl_coef: Weight of the per-token KL penalty (Eqs. 3, 19).
        kl_estimator: How a token's KL is estimated.
        kl_target: KL (nats per response) that an adaptive coefficient aims at; `None`: fixed.
        kl_horizon: Rollouts over which the adaptive coefficient adapts.
        missing_eos_penalty: Subtracted from the reward of a response that was cut off.
        truncation: Value after the last token of a response that was cut off: zero
            (`terminal`), the critic's (`bootstrap`), or do not learn from it (`mask`).
        gamma: Discount.
        lam: lambda of GAE (Eqs. 7-12).
        advantage_normalization: Whiten advantages over all ranks' tokens.
        advantage_clip: Bound on the size of an advantage; `None`: no clipping.
        old_policy: What the ratio is taken against: the policy that sampled, or the reference
            (Section 5.3.2).
        frozen_dtype: Type of the weights of reference and reward models; `None`: `dtype`.
        offload_frozen: Keep reference and reward models in CPU memory between uses.
        sampled_texts: Held-out prompts whose responses are logged as text at validation.
        seed: Of rollouts and minibatches. The draws of an iteration depend on it, the iteration and
            the rank alone, so a resumed run repeats them.
        **update_options: Arguments of `PPOUpdate` and `StageModule`.

    Raises:
        ValueError: For options that are out of range.
    """

    stage = "ppo"
    kl_coef: Tensor

    def __init__(
        self,
        model_path: str,
        rewards: dict[str, float | dict[str, Any]],
        gold_reward: str | None = None,
        reward_timeout: float | None = None,
        critic_init: CriticInit = "reward",
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        repetition_penalty: float = 1.0,
        rollout_batch_size: int | None = None,
        scoring_tokens: int | None = None,
        reward_scaling: bool = False,
        reward_normalization: bool = True,
        reward_clip: float | None = 0.8,
        kl_coef: float = 0.05,
        kl_estimator: KLEstimator = "k1",
        kl_target: float | None = None,
        kl_horizon: int = 10000,
        missing_eos_penalty: float = 0.0,
        truncation: Truncation = "terminal",
        gamma: float = 1.0,
        lam: float = 0.95,
        advantage_normalization: bool = True,
        advantage_clip: float | None = None,
        old_policy: OldPolicy = "rollout",
        frozen_dtype: str | None = None,
        offload_frozen: bool = False,
        sampled_texts: int = 4,
        seed: int = 0,
        **update_options: Any,
    ) -> None:
        super().__init__(model_path, temperature=temperature, **update_options)
        check_options(self.hparams)
        self.sampling = SamplingOptions(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            repetition_penalty=repetition_penalty,
        )
        self.policy = disable_dropout(load_causal_lm(model_path, self.options))
        frozen = replace(self.options, dtype=frozen_dtype or self.options.dtype)
        self.reference = reference_policy(model_path, frozen, offload_frozen)
        self.reward = WeightedReward(
            rewards, frozen, self.tokenizer, reward_timeout, offload_frozen
        )
        self.critic = disable_dropout(
            initial_critic(critic_init, model_path, self.reward.models, self.options, seed)
        )
        self.gold = None
        if gold_reward is not None:
            self.gold = FunctionReward(gold_reward, self.tokenizer, reward_timeout)
        self.score_moments = RunningMoments()
        self.register_buffer("kl_coef", torch.tensor(kl_coef, dtype=torch.float64))

    def setup(self, stage: str) -> None:
        """Check that the reward models read text as the policy writes it."""
        for source in self.reward.models:
            if self.encoder is not None:
                source.check_contract(self.encoder.contract)

    def training_step(self, batch: PromptBatch, batch_idx: int) -> dict[str, Tensor]:
        """One PPO iteration; returns the responses' scores and lengths for callbacks."""
        generator = self.generator()
        seed = int(torch.randint(2**31, (), generator=generator))
        rollouts, scores, estimates = self.scored_rollouts(batch, seed, self.timer)
        metrics = self.rollout_summary(rollouts, batch.texts, scores, estimates)
        metrics["ppo/kl_coef"] = self.kl_coef.clone()
        if self.rollouts_are_finite(scores, estimates):
            self.reward.commit_moments()
            rewards = self.shape_rewards(rollouts, scores, estimates)
            experience = self.experience(rollouts, rewards, estimates)
            metrics["rollout/reward"] = rewards.sum(1).mean()
            metrics["ppo/explained_variance"] = explained_variance(
                estimates.values, experience.returns, rollouts.response_mask
            )
            self.adapt_kl_coef(float(metrics["rollout/kl"]), len(scores) * self.trainer.world_size)
            with (
                self.timer("update"),
                self.memory_for("update", rollouts.sequence_ids, *UPDATE_MEMORY),
            ):
                metrics |= self.update(experience, batch.ptx, generator)
        else:
            self.step_schedules()
        metrics["ppo/skipped_updates"] = self.skipped.pop_count()
        metrics |= self.timer.metrics(int(rollouts.response_mask.sum()))
        self.iteration += 1
        self.log_metrics(metrics, len(scores))
        self.log("step", self.iteration.float())
        return {"scores": scores, "response_lengths": rollouts.response_mask.sum(1)}

    def scored_rollouts(
        self, batch: PromptBatch, seed: int, timer: PhaseTimer
    ) -> tuple[RolloutBatch, Tensor, TokenStatistics]:
        """Responses to the prompts, their raw rewards, and what the networks make of them."""
        with timer("rollout"), self.memory_for("rollout", batch.input_ids, *ROLLOUT_MEMORY):
            rollouts = self.rollout(batch, seed)
        ids = rollouts.sequence_ids
        with timer("score"), self.memory_for("score", ids, *SCORING_MEMORY):
            scores = self.score(rollouts, batch.texts)
        with timer("estimate"), self.memory_for("estimate", ids, *SCORING_MEMORY):
            estimates = self.estimate(rollouts)
        return rollouts, scores, estimates

    def rollouts_are_finite(self, scores: Tensor, estimates: TokenStatistics) -> bool:
        """Whether there is no NaN and no infinity on any rank; an iteration with one is skipped.

        Running moments, KL coefficient and weights are then as before.

        Raises:
            TooManySkippedUpdates: If it is the last in a row that may be.
        """
        why = self.non_finite(
            {
                "rewards": scores,
                "log-probs of the policy": estimates.logprobs,
                "log-probs of the reference": estimates.ref_logprobs,
                "values of the critic": estimates.values,
            }
        )
        self.count_update("policy and critic", why, f"iteration {int(self.iteration) + 1}")
        return not why

    def generator(self) -> torch.Generator:
        """Random draws of this iteration on this rank."""
        seed = torch.tensor([self.hparams["seed"], int(self.iteration), self.global_rank])
        # Three small numbers to one: large primes keep neighbouring iterations and ranks apart.
        mixed = int((seed * torch.tensor([1_000_003, 7_919, 104_729])).sum())
        return torch.Generator().manual_seed(mixed)

    def rollout(self, batch: PromptBatch, seed: int) -> RolloutBatch:
        """Sample one response to each prompt from the policy."""
        return generate_responses(
            self.policy,
            batch.input_ids,
            batch.attention_mask,
            self.sampling,
            eos_token_ids=[self.tokenizer.eos_token_id],
            pad_token_id=self.tokenizer.pad_token_id,
            seed=seed,
            batch_size=self.hparams["rollout_batch_size"],
        )

    def score(self, rollouts: RolloutBatch, prompts: list[str]) -> Tensor:
        """Raw rewards `[B]`: the weighted sum of the sources."""
        scores: Tensor = self.reward(rollouts, prompts, self.hparams["scoring_tokens"])
        return scores

    def estimate(self, rollouts: RolloutBatch) -> TokenStatistics:
        """Log-probs of policy and reference and the critic's values, before the update."""
        return score_rollouts(
            self.policy,
            self.reference,
            self.critic,
            rollouts,
            temperature=self.sampling.temperature,
            max_tokens_per_forward=self.hparams["scoring_tokens"],
        )

    def rollout_summary(
        self, rollouts: RolloutBatch, prompts: list[str], scores: Tensor, estimates: TokenStatistics
    ) -> dict[str, Tensor]:
        """The `rollout/*` metrics, with each source's score and the gold reward if there is one."""
        metrics = rollout_metrics(
            estimates.logprobs,
            estimates.ref_logprobs,
            estimates.entropy,
            rollouts.response_mask,
            rollouts.response_ids,
            rollouts.terminated,
            scores,
        )
        metrics |= self.reward.compute_metrics()
        if self.gold is not None:
            metrics["rollout/gold"] = self.gold(rollouts, prompts, None).mean()
        return metrics

    def reparameterize(self, scores: Tensor) -> Tensor:
        """Scale or normalize raw scores `[B]` by the moments of all so far, and clip (Eq. 18)."""
        self.score_moments.update(scores)
        moments, clip = self.score_moments, self.hparams["reward_clip"]
        if self.hparams["reward_normalization"]:
            return normalized_scores(scores, moments.mean, moments.std, clip)
        if self.hparams["reward_scaling"]:
            scores = scaled_scores(scores, moments.std)
        return scores if clip is None else clipped_scores(scores, clip)

    def shape_rewards(
        self, rollouts: RolloutBatch, scores: Tensor, estimates: TokenStatistics
    ) -> Tensor:
        """Rewards `[B, T]`: the score at the last token, minus the KL penalty at each (Eq. 19)."""
        scores = self.reparameterize(scores)
        scores = scores - self.hparams["missing_eos_penalty"] * (~rollouts.terminated)
        return token_rewards(
            scores,
            estimates.logprobs,
            estimates.ref_logprobs,
            rollouts.response_mask,
            float(self.kl_coef),
            self.hparams["kl_estimator"],
        ).rewards

    def experience(
        self, rollouts: RolloutBatch, rewards: Tensor, estimates: TokenStatistics
    ) -> Experience:
        """Advantages and returns of the rollouts, under the truncation rule."""
        hparams, mask = self.hparams, rollouts.response_mask
        bootstrap = None
        if hparams["truncation"] == "bootstrap":
            bootstrap = estimates.next_values.masked_fill(rollouts.terminated, 0.0)
        advantages, returns = gae(
            estimates.values, rewards, mask, hparams["gamma"], hparams["lam"], bootstrap
        )
        if hparams["truncation"] == "mask":
            mask = mask & rollouts.terminated[:, None]
        if hparams["advantage_normalization"]:
            moments = global_masked_moments(advantages, mask)
            advantages = masked_whiten(advantages, mask, moments=moments)
        if hparams["advantage_clip"] is not None:
            advantages = clipped_advantages(advantages, hparams["advantage_clip"])
        from_reference = hparams["old_policy"] == "reference"
        old_logprobs = estimates.ref_logprobs if from_reference else estimates.logprobs
        return Experience(rollouts, old_logprobs, estimates.values, advantages, returns, mask)

    def adapt_kl_coef(self, kl: float, n_rollouts: int) -> None:
        """Move the KL coefficient so that `kl` (nats per response) comes closer to its target."""
        target = self.hparams["kl_target"]
        if target is not None and not self.in_critic_pretraining():
            self.kl_coef.fill_(
                adaptive_kl_coef(
                    float(self.kl_coef), kl, target, self.hparams["kl_horizon"], n_rollouts
                )
            )

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Generate and score responses to held-out prompts, with the same draws each time."""
        self._evaluation_step(batch, batch_idx, "val/")

    def test_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Log `test/rollout/*` on responses to the test prompts."""
        self._evaluation_step(batch, batch_idx, "test/")

    def _evaluation_step(self, batch: PromptBatch, batch_idx: int, prefix: str) -> None:
        seed = self.hparams["seed"] + batch_idx
        rollouts, scores, estimates = self.scored_rollouts(batch, seed, PhaseTimer())
        metrics = self.rollout_summary(rollouts, batch.texts, scores, estimates)
        self.log_metrics(metrics, len(scores), prefix)
        # The logger's x axis; Lightning's own count of batches is one behind at validation.
        self.log("step", self.iteration.float(), batch_size=len(scores))
        if batch_idx == 0:
            records = build_response_records(rollouts, scores, estimates, self.tokenizer)
            n_rows = self.hparams["sampled_texts"]
            table = format_sample_table(batch.texts[:n_rows], records[:n_rows])
            self.log_text(f"{prefix}samples", table, int(self.iteration))

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> list[dict[str, Any]]:
        """Rendered prompts with their `build_response_records`."""
        records = self._answers(batch, seed=self.hparams["seed"] + batch_idx)
        return [
            {"prompt": prompt, **record}
            for prompt, record in zip(batch.texts, records, strict=True)
        ]

    def sample(self, prompts: list[str]) -> list[dict[str, Any]]:
        """One record per prompt (see `build_response_records`), with the same draws at every call.

        Args:
            prompts: As in the field `prompt` of a data file; they are rendered as the datamodule
                renders its own.

        Raises:
            RuntimeError: Without a datamodule of this project, after its setup.
            ValueError: If there is no prompt, or one cannot be used.
        """
        if self.encoder is None:
            raise RuntimeError("sample: the trainer has no datamodule that has set up an encoder")
        batch = encode_prompts(prompts, self.encoder)
        batch = self.transfer_batch_to_device(batch, self.device, dataloader_idx=0)
        return self._answers(batch, seed=self.hparams["seed"])

    @torch.no_grad()
    def _answers(self, batch: PromptBatch, seed: int) -> list[dict[str, Any]]:
        rollouts, scores, estimates = self.scored_rollouts(batch, seed, PhaseTimer())
        return build_response_records(rollouts, scores, estimates, self.tokenizer)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave the frozen reference and reward models out: their folders hold them."""
        super().on_save_checkpoint(checkpoint)
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {k: v for k, v in state.items() if not k.startswith(FROZEN)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put them back, as loaded from their folders."""
        super().on_load_checkpoint(checkpoint)
        own = {k: v for k, v in self.state_dict().items() if k.startswith(FROZEN)}
        checkpoint["state_dict"] = own | checkpoint["state_dict"]

    def on_train_end(self) -> None:
        """Leave the finished policy, and the critic beside it."""
        self.save_finished(self.policy, self.finished_dir, generation_settings(self.hparams))
        self.save_finished(self.critic, self.finished_dir / "critic")
