"""How PPO learns from an iteration's experience: losses, optimizers, critic pre-training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from lit_rlhf.data import TokenBatch
from lit_rlhf.forward import LanguageModel, map_target_logits, response_values, target_logprobs
from lit_rlhf.functional import (
    PolicyLoss,
    entropy_loss,
    kl_penalty_loss,
    language_model_loss,
    policy_gradient_loss,
    surrogate_loss,
    token_logprobs,
    token_logprobs_and_entropy,
    value_loss,
)
from lit_rlhf.modules.micro_batches import accumulate, micro_batches
from lit_rlhf.modules.stage import StageModule
from lit_rlhf.rollout import Experience, iterate_minibatches
from lit_rlhf.strategies import backward

PolicyObjective = Literal["clip", "kl_penalty", "unclipped", "policy_gradient"]


class PPOUpdate(StageModule):
    """The update of policy and critic; `PPOModule` adds the rollouts that feed it.

    Args:
        model_path: Folder or hub id of the SFT model.
        temperature: Of sampling, and so of every log-prob.
        policy_lr: Peak learning rate of the policy.
        critic_lr: Peak learning rate of the critic.
        weight_decay: AdamW's weight decay of both.
        lr_scheduler: Name of a transformers schedule, stepped once per iteration.
        warmup_ratio: Share of the iterations over which the learning rates rise.
        min_lr_ratio: Learning rate at the end over the peak, for schedules that have one.
        policy_grad_clip: Largest gradient norm (L2) of the policy; `None`: no clipping.
        critic_grad_clip: Largest gradient norm of the critic; `None`: no clipping.
        ppo_epochs: Passes over an iteration's experience.
        minibatch_size: Rollouts per optimizer step and rank.
        micro_batch_size: Rollouts per forward and backward; `None` takes the minibatch.
        critic_pretrain_iterations: Iterations at the start that train the critic alone.
        critic_pretrain_value_loss: End that phase early once `ppo/value_loss` is at most this.
        policy_objective: Clipped surrogate (Eq. 15), PPO-penalty (Eq. 14), unclipped surrogate
            (Eq. 13), or the plain policy gradient without importance sampling.
        ratio_clip: epsilon of the clipped surrogate.
        policy_kl_penalty: beta of PPO-penalty (Eq. 14).
        value_clip: epsilon of the clipped value loss (Eq. 16); `None`: no clipping.
        entropy_coef: Weight of the entropy bonus.
        entropy_clip: Bound of the entropy bonus (Appendix B.3), in nats; `None`: no bound.
        ptx_coef: Weight of the language-model loss on `data.ptx_sources` (Eq. 17).
        **stage_options: Arguments of `StageModule`.
    """

    policy: LanguageModel
    critic: LanguageModel
    iteration: Tensor
    ppo_step: Tensor
    pretraining_done: Tensor

    def __init__(
        self,
        model_path: str,
        temperature: float = 1.0,
        policy_lr: float = 5e-7,
        critic_lr: float = 1.65e-6,
        weight_decay: float = 0.0,
        lr_scheduler: str = "constant_with_warmup",
        warmup_ratio: float = 0.1,
        min_lr_ratio: float = 0.1,
        policy_grad_clip: float | None = 1.0,
        critic_grad_clip: float | None = 1.0,
        ppo_epochs: int = 1,
        minibatch_size: int = 32,
        micro_batch_size: int | None = None,
        critic_pretrain_iterations: int = 0,
        critic_pretrain_value_loss: float | None = None,
        policy_objective: PolicyObjective = "clip",
        ratio_clip: float = 0.2,
        policy_kl_penalty: float = 0.1,
        value_clip: float | None = 0.2,
        entropy_coef: float = 0.0,
        entropy_clip: float | None = None,
        ptx_coef: float = 0.0,
        **stage_options: Any,
    ) -> None:
        super().__init__(model_path, **stage_options)
        self.register_buffer("iteration", torch.zeros((), dtype=torch.long))
        self.register_buffer("ppo_step", torch.zeros((), dtype=torch.long))
        self.register_buffer("pretraining_done", torch.tensor(critic_pretrain_iterations == 0))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """One AdamW and schedule for the policy, one for the critic."""
        hparams = self.hparams
        policy = self.adamw(self.policy, hparams["policy_lr"])
        critic = self.adamw(self.critic, hparams["critic_lr"])
        skipped = hparams["critic_pretrain_iterations"]
        return [policy, critic], [self.scheduled(policy, skipped), self.scheduled(critic)]

    def in_critic_pretraining(self) -> bool:
        """Whether this iteration trains the critic alone."""
        return not bool(self.pretraining_done)

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
        (policy_optimizer, _), (critic_optimizer, _) = self.networks_in_training()
        pretraining = self.in_critic_pretraining()
        history: list[dict[str, Tensor]] = []
        for _ in range(self.hparams["ppo_epochs"]):
            for index in iterate_minibatches(
                len(experience), self.hparams["minibatch_size"], generator
            ):
                place = f"iteration {int(self.iteration) + 1}, minibatch {len(history) + 1}"
                metrics = self.train_critic(critic_optimizer, experience, index, place)
                if not pretraining:
                    metrics |= self.train_policy(policy_optimizer, experience, index, ptx, place)
                history.append(metrics)
        self.step_schedules()
        means = {key: torch.stack([m[key] for m in history]).nanmean() for key in history[0]}
        if pretraining:
            # over all ranks: they have to agree on when the phase ends
            self.watch_critic_pretraining(float(self.mean_over_ranks(means["ppo/value_loss"])))
        else:
            means["ppo/ratio_first"] = history[0]["ppo/ratio"]
        return means

    def step_schedules(self) -> None:
        """Move the learning rates on by an iteration, the policy's after critic pre-training."""
        (_, policy_schedule), (_, critic_schedule) = self.networks_in_training()
        self.step_schedule(critic_schedule)
        if not self.in_critic_pretraining():
            self.step_schedule(policy_schedule)

    def watch_critic_pretraining(self, value_loss: float) -> None:
        """End critic pre-training after its iterations, or once the value loss is low enough."""
        target = self.hparams["critic_pretrain_value_loss"]
        enough = int(self.iteration) + 1 >= self.hparams["critic_pretrain_iterations"]
        if enough or (target is not None and value_loss <= target):
            self.pretraining_done.fill_(True)

    def train_critic(
        self, optimizer: LightningOptimizer, experience: Experience, index: Tensor, place: str
    ) -> dict[str, Tensor]:
        """One step of the critic on the rollouts at `index`; metrics are NaN if it was skipped."""
        totals: dict[str, Tensor] = {}
        tokens = self.rank_share(experience.loss_mask[index].sum())
        for part in self.micro_experiences(experience, index):
            shares = self.critic_loss(part, tokens)
            backward(self, shares["ppo/value_loss"], optimizer)
            accumulate(totals, shares)
        bound = self.hparams["critic_grad_clip"]
        step = self.step_network("the critic", optimizer, bound, totals, place)
        totals["ppo/critic_grad_norm"] = step.grad_norm
        return totals if step.applied else dict.fromkeys(totals, torch.full_like(tokens, torch.nan))

    def train_policy(
        self,
        optimizer: LightningOptimizer,
        experience: Experience,
        index: Tensor,
        ptx: TokenBatch | None,
        place: str,
    ) -> dict[str, Tensor]:
        """One step of the policy on the rollouts at `index` and their ptx sequences; alike."""
        totals: dict[str, Tensor] = {}
        tokens = self.rank_share(experience.loss_mask[index].sum())
        for part in self.micro_experiences(experience, index):
            loss, shares = self.policy_loss(part, tokens)
            backward(self, loss, optimizer)
            accumulate(totals, shares)
        if ptx is not None and self.hparams["ptx_coef"] > 0:
            rows = TokenBatch(*(field[index] for field in ptx))
            tokens = self.rank_share(rows.completion_mask.sum())
            for text in micro_batches(rows, len(index), self.hparams["micro_batch_size"]):
                loss = self.ptx_loss(text, tokens)
                backward(self, self.hparams["ptx_coef"] * loss, optimizer)
                accumulate(totals, {"ppo/ptx_loss": loss})
        bound = self.hparams["policy_grad_clip"]
        step = self.step_network("the policy", optimizer, bound, totals, place)
        totals["ppo/policy_grad_norm"] = step.grad_norm
        self.ppo_step += int(step.applied)
        return totals if step.applied else dict.fromkeys(totals, torch.full_like(tokens, torch.nan))

    def micro_experiences(self, experience: Experience, index: Tensor) -> Iterator[Experience]:
        """The rollouts at `index` in micro-batches, each cut to its longest prompt and response."""
        size = self.hparams["micro_batch_size"] or len(index)
        for start in range(0, len(index), size):
            yield experience.select(index[start : start + size])

    def critic_loss(self, experience: Experience, tokens: Tensor) -> dict[str, Tensor]:
        """Share of a micro-batch in the value loss and its clip fraction over `tokens` (Eq. 16)."""
        rollouts, mask = experience.rollouts, experience.loss_mask
        values = response_values(
            self.critic, rollouts.sequence_ids, rollouts.sequence_mask, mask.shape[1]
        )
        loss, clip_fraction = value_loss(
            values,
            experience.old_values,
            experience.returns,
            mask,
            self.hparams["value_clip"],
            denominator=tokens,
        )
        return {
            "ppo/value_loss": loss,
            "ppo/value_clip_fraction": clip_fraction * mask.sum() / tokens,
        }

    def policy_loss(
        self, experience: Experience, tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Share of a micro-batch in the policy's loss over `tokens`, and in its metrics."""
        hparams, rollouts, mask = self.hparams, experience.rollouts, experience.loss_mask
        entropy_coef, temperature = hparams["entropy_coef"], hparams["temperature"]

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
        logprobs = logprobs[:, -mask.shape[1] :]
        terms = self.policy_objective(logprobs, experience, tokens)
        share = mask.sum() / tokens
        shares = {
            "ppo/policy_loss": terms.loss,
            "ppo/clip_fraction": terms.clip_fraction * share,
            "ppo/approx_kl": terms.approx_kl * share,
            "ppo/ratio": terms.ratio_mean * share,
        }
        loss = terms.loss
        if entropy:
            shares["ppo/entropy_loss"] = entropy_loss(
                entropy[0][:, -mask.shape[1] :], mask, hparams["entropy_clip"], denominator=tokens
            )
            loss = loss + entropy_coef * shares["ppo/entropy_loss"]
        return loss, shares

    def policy_objective(
        self, logprobs: Tensor, experience: Experience, tokens: Tensor
    ) -> PolicyLoss:
        """The objective that the options name, over `tokens`."""
        hparams, mask = self.hparams, experience.loss_mask
        surrogate = (logprobs, experience.old_logprobs, experience.advantages, mask)
        match hparams["policy_objective"]:
            case "clip":
                return surrogate_loss(*surrogate, hparams["ratio_clip"], denominator=tokens)
            case "unclipped":
                return surrogate_loss(*surrogate, None, denominator=tokens)
            case "kl_penalty":
                return kl_penalty_loss(*surrogate, hparams["policy_kl_penalty"], denominator=tokens)
            case "policy_gradient":
                return policy_gradient_loss(
                    logprobs, experience.advantages, mask, denominator=tokens
                )
            case other:
                raise ValueError(
                    f"policy_objective: expected one of {get_args(PolicyObjective)}, got {other!r}"
                )

    def ptx_loss(self, batch: TokenBatch, tokens: Tensor) -> Tensor:
        """Share of a micro-batch in the language-model loss over `tokens` (Eq. 17)."""
        logprobs = target_logprobs(
            self.policy, batch.input_ids, batch.attention_mask, batch.completion_mask
        )
        return language_model_loss(logprobs, batch.completion_mask, tokens)
