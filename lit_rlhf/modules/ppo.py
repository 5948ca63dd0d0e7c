"""PPO-max under a Trainer: optimizers, logging and checkpoints around `lit_rlhf.ppo.PPO`.

`PPOModule.training_step` is one iteration of Algorithm 1 of arXiv 2307.04964.

Notation: `B` responses, `T` tokens of the longest response.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar, cast, overload

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from lit_callbacks import log_text
from lit_rlhf.checks import check_count, check_positive
from lit_rlhf.data import PromptBatch, PromptDataModule, encode_prompts
from lit_rlhf.finite import NotFiniteError, join_names
from lit_rlhf.forward import (
    LanguageModel,
    count_tokens,
    find_ids_without_token,
    scalar_head_of,
)
from lit_rlhf.models import ModelOptions, separate_weights
from lit_rlhf.modules.option_names import merge_options
from lit_rlhf.modules.options import OptimizerOptions
from lit_rlhf.modules.phase_timer import PhaseTimer
from lit_rlhf.modules.ppo_checkpoint import complete_state, drop_frozen, name_state_as_saved
from lit_rlhf.modules.ppo_checks import (
    check_batch_size,
    check_max_steps,
    check_on_policy_sampling,
    is_trial,
    refuse_untrusted_rewards,
    warn_about_options,
)
from lit_rlhf.modules.resume import end_with_validation, weights_checksum
from lit_rlhf.modules.schedules import NO_BATCHES, build_schedule, training_batch_size
from lit_rlhf.modules.stage import MAX_SKIPPED_IN_A_ROW, StageModule, evaluation_prefix
from lit_rlhf.modules.updates import GuardedStepper
from lit_rlhf.ppo import (
    PPO,
    UPDATE_MEMORY,
    AdvantageOptions,
    Collected,
    CriticInit,
    CriticPretrainingOptions,
    Draws,
    MemoryOptions,
    MinibatchOptions,
    NetworkName,
    PPOLossOptions,
    PPOOptions,
    RewardShapingOptions,
    check_options,
    critic_source,
    iteration_draws,
    load_networks,
)
from lit_rlhf.rewards import (
    RewardObject,
    Rewards,
    plain_rewards,
    reward_key,
)
from lit_rlhf.rollout import (
    RolloutMetrics,
    Sampler,
    SamplingOptions,
    format_sample_table,
)
from lit_rlhf.stats import all_gather_rows, global_means

ValueT = TypeVar("ValueT")

SCORE_KEYS = ("rollout/score", "rollout/reward")
"""Metrics besides `RolloutMetrics` that an iteration logs even if it is skipped."""


class AlgorithmAttribute(Generic[ValueT]):
    """Forwards an attribute of a `PPOModule` to the attribute of the same name of its `ppo`.

    Callbacks and users read and set options and coefficients at the module. The algorithm has them.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, module: None, owner: type) -> Self: ...

    @overload
    def __get__(self, module: "PPOModule", owner: type) -> ValueT: ...

    def __get__(self, module: "PPOModule | None", owner: type) -> Self | ValueT:
        return self if module is None else cast(ValueT, getattr(module.ppo, self.name))

    def __set__(self, module: "PPOModule", value: ValueT) -> None:
        setattr(module.ppo, self.name, value)


@dataclass
class IterationRecord:
    """Random numbers, stepper and results of one iteration.

    Attributes:
        draws: Its random numbers on this rank.
        stepper: Steps the networks.
        metrics: Metrics to log, by key, 0-dim.
        scores: Scores of its responses, `[B]`; NaN until they are known.
        lengths: Tokens of its responses, `[B]`; 0 until they are known.
    """

    draws: Draws
    stepper: GuardedStepper
    metrics: dict[str, Tensor]
    scores: Tensor
    lengths: Tensor

    def add_responses(self, collected: Collected, measured: RolloutMetrics) -> None:
        """Set scores and lengths, and add metrics of the rollouts, once responses are known.

        Args:
            collected: The responses.
            measured: Their metrics, which are reduced over ranks here.
        """
        self.scores = collected.scores.total
        self.lengths = collected.rollouts.lengths
        self.metrics |= measured.compute()


class PPOModule(StageModule):
    """One iteration of PPO-max per `training_step`. The algorithm is `ppo`, a `lit_rlhf.ppo.PPO`.

    The defaults are PPO-max with the paper's values, as far as it states them (`docs/recipe.md`);
    the overlays in `configs/ablations` switch its tricks one by one.

    To change a phase, override a method of `PPO` and name that class as `ppo_class`.

    Attributes:
        ppo_class: Class of the algorithm.
        ppo: The algorithm. Its options and coefficients are attributes of the module, too.
        policy: The network that is trained. This and the other networks of `ppo.networks` are
            attributes of the module, so that a Trainer moves them and checkpoints hold them.
        reference: The frozen SFT model, if it is a network of its own.
        critic: The network of the values, if the estimator of advantages uses one.
        reward: The weighted sum of rewards.

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
        max_skipped_in_a_row: Number of updates of a network in a row, skipped because a number is
            not finite, at which training stops.
    """

    stage = "ppo"
    trained_names = ("policy", "critic")
    progress_metrics = ("rollout/score", "rollout/kl", "rollout/response_length")
    object_arguments = ("rewards", "gold_reward", "sampler")
    ppo_class: ClassVar[type[PPO]] = PPO
    ppo: PPO

    sampling = AlgorithmAttribute[SamplingOptions]()
    reward_shaping = AlgorithmAttribute[RewardShapingOptions]()
    advantages = AlgorithmAttribute[AdvantageOptions]()
    loss = AlgorithmAttribute[PPOLossOptions]()
    minibatches = AlgorithmAttribute[MinibatchOptions]()
    critic_pretraining = AlgorithmAttribute[CriticPretrainingOptions]()
    memory = AlgorithmAttribute[MemoryOptions]()
    responses_per_prompt = AlgorithmAttribute[int]()
    kl_coef = AlgorithmAttribute[Tensor]()
    iteration = AlgorithmAttribute[Tensor]()
    ppo_step = AlgorithmAttribute[Tensor]()

    def __init_subclass__(cls) -> None:
        """Refuse phases of the algorithm, which would have no effect here."""
        super().__init_subclass__()
        phases = {name for name, value in vars(PPO).items() if callable(value)}
        misplaced = sorted(name for name in phases - {*dir(PPOModule)} if name in vars(cls))
        if misplaced:
            raise TypeError(
                f"{cls.__name__}.{misplaced[0]}: expected on a subclass of lit_rlhf.ppo.PPO, which "
                f"is the ppo_class of {cls.__name__}: the phases of an iteration are methods of PPO"
            )

    def __init__(
        self,
        model_path: str,
        rewards: Rewards,
        *,
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
        super().__init__(model_path, output_dir, network, max_skipped_in_a_row)
        cls = type(self)
        gold_key = None if gold_reward is None else reward_key(gold_reward)
        self.save_hyperparameters({"rewards": plain_rewards(rewards), "gold_reward": gold_key})
        self.policy_optimizer = merge_options(cls, "policy_optimizer", policy_optimizer)
        self.critic_optimizer = merge_options(cls, "critic_optimizer", critic_optimizer)
        self.max_iterations = max_iterations
        self.sampled_texts = sampled_texts
        self.seed = seed
        self.critic_init = critic_init
        options = PPOOptions(
            sampling=merge_options(cls, "sampling", sampling),
            reward_shaping=merge_options(cls, "reward_shaping", reward_shaping),
            advantages=merge_options(cls, "advantages", advantages),
            loss=merge_options(cls, "loss", loss),
            minibatches=merge_options(cls, "minibatches", minibatches),
            critic_pretraining=merge_options(cls, "critic_pretraining", critic_pretraining),
            memory=merge_options(cls, "memory", memory),
            responses_per_prompt=responses_per_prompt,
        )
        # before the networks are loaded, which takes a while
        check_options(options, shares_trunk=critic_init == "shared")
        check_on_policy_sampling(options.sampling)
        networks = load_networks(
            model_path,
            rewards,
            options=options,
            network=self.network,
            tokenizer=self.tokenizer,
            critic_init=critic_init,
            seed=seed,
            gold_reward=gold_reward,
            reward_timeout=reward_timeout,
            sampler=sampler,
        )
        self.ppo = self.ppo_class(networks, options)
        warn_about_options(options, count_tokens(networks.policy))
        self._register_networks()
        self._note_inputs()
        self._evaluation: RolloutMetrics | None = None
        # Scores of the responses that the policy gave to held-out prompts before training, by set
        # and batch such as `val/0`. They never change, so each batch is sampled once.
        self._start_scores: dict[str, Tensor] = {}
        # Scores of the policy now and of the start, `[B, 2]` for each batch of this validation.
        self._paired_scores: list[Tensor] = []
        name_state_as_saved(self)

    def _register_networks(self) -> None:
        """Make the networks children of the module, by the names that checkpoints have."""
        networks = self.ppo.networks
        self.policy = networks.policy
        self.reference = networks.reference
        self.reward = networks.reward
        if self.ppo.shares_trunk:
            # its weights are the policy's, so that they are moved, trained and saved with them
            object.__setattr__(self, "critic", networks.critic)
        else:
            self.critic = networks.critic
        self.gold = networks.gold

    def _note_inputs(self) -> None:
        """Note what the run starts from, with checksums of folders that may be written anew."""
        self.inputs["rewards"] = [model.path for model in self.reward.models]
        # now, since a strategy may cast the weights later
        self.input_checksums["weights of the reward models"] = [
            weights_checksum(model.model) for model in self.reward.models
        ]
        if sources := self.reward.hash_sources():
            self.input_checksums["sources of the reward functions"] = sources
        if self.reference is not None:
            self.input_checksums["weights of the reference"] = weights_checksum(self.reference)

    @classmethod
    def trusted_arguments(
        cls, *, saved: Mapping[str, Any], given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Merge arguments as the base class does, and refuse reward functions of the checkpoint."""
        refuse_untrusted_rewards(saved=saved, given=given)
        return super().trusted_arguments(saved=saved, given=given)

    def setup(self, stage: str) -> None:
        """Check reward models' text, fields that reward functions need, and the run's length."""
        if self.encoder is not None:
            n_rollout = self.encoder.max_prompt_length + self.sampling.max_new_tokens
            # text for the ptx loss is as long as the encoder allows
            has_ptx = bool(getattr(self.datamodule, "ptx_sources", ()))
            n_ptx = self.encoder.max_length if has_ptx else 0
            self.ppo.set_longest_sequence(max(n_rollout, n_ptx))
        for source in self.reward.models:
            if self.encoder is not None:
                source.check_contract(self.encoder.contract)
        if isinstance(self.datamodule, PromptDataModule):
            for part, examples in self.datamodule.examples.items():
                if part == "ptx":
                    continue
                available = {name for example in examples for name in example.fields}
                self.reward.check_fields(available, f"the {part} records")
                if self.ppo.networks.gold is not None:
                    self.ppo.networks.gold.check_fields(available, f"the {part} records")
        if stage == "fit":
            check_max_steps(self.trainer)
            if isinstance(self.datamodule, PromptDataModule):
                check_batch_size(self.ppo, self.datamodule.batch_size)

    def on_train_start(self) -> None:
        """Say that the ptx loss has no text; stop at once if the resumed run is complete."""
        if self.loss.ptx_coef > 0 and getattr(self.datamodule, "ptx_sources", None) == []:
            rank_zero_info(
                "ppo: no data.ptx_sources, so there is no language-model loss (Eq. 17); "
                f"loss.ptx_coef = {self.loss.ptx_coef} has no effect"
            )
        if not (self.is_complete and end_with_validation(self.trainer)):
            self.stop_after_last_iteration()

    @property
    def is_complete(self) -> bool:
        """Whether `max_iterations` are done."""
        return self.max_iterations is not None and int(self.ppo.iteration) >= self.max_iterations

    def stop_after_last_iteration(self) -> None:
        """Ask the trainer to stop once `max_iterations` are done."""
        if self.is_complete:
            self.trainer.should_stop = True

    def on_validation_start(self) -> None:
        """Stop after this validation if it follows the last iteration of a resumed run."""
        self.stop_after_last_iteration()

    def training_step(self, batch: PromptBatch, batch_idx: int) -> dict[str, Tensor]:
        """One PPO iteration; returns the scores and lengths of the responses for callbacks."""
        prompts = self.ppo.repeat_prompts(batch)
        with self.run_iteration(len(prompts.texts)) as record:
            self.ppo.require_finite_policy()
            collected = self.ppo.collect(prompts, record.draws.rollout_seed, self.timer)
            record.add_responses(collected, self.ppo.measure(collected))
            lesson = self.ppo.learn_from(collected)
            record.metrics |= lesson.metrics
            self.ppo.adapt_kl_coef(
                kl=float(record.metrics["rollout/kl"]),
                n_rollouts=int(record.metrics["rollout/responses"]),
            )
            with self.timer("update", collected.rollouts.sequence_shape, UPDATE_MEMORY):
                record.metrics |= self.ppo.update(
                    lesson.experience, record.stepper, record.draws.generator, prompts.ptx
                )
        return {"scores": record.scores, "response_lengths": record.lengths}

    @contextmanager
    def run_iteration(self, n_responses: int) -> Iterator[IterationRecord]:
        """Count and log the iteration inside, which ends early where a number is not finite.

        Args:
            n_responses: Responses of the iteration on this rank.
        """
        ppo = self.ppo
        unknown = torch.full((n_responses,), torch.nan, device=self.device)
        trained = "policy" if self.critic is None else "policy and critic"
        record = IterationRecord(
            draws=iteration_draws(
                seed=self.seed, iteration=int(ppo.iteration), rank=self.global_rank
            ),
            stepper=self.make_stepper(self.place()),
            metrics={"ppo/kl_coef": ppo.kl_coef.clone()},
            scores=unknown,
            lengths=torch.zeros_like(unknown),
        )
        with self.guard.iteration(self.trainer, trained, self.place()):
            yield record
        if self.guard.skipped:
            # the learning rates follow the plan all the same
            for _ in range(ppo.count_updates(n_responses)):
                record.stepper.end_minibatch(trains_policy=not ppo.in_critic_pretraining())
            ppo.iteration += 1
            keys = [*RolloutMetrics.KEYS, *SCORE_KEYS]
            if self.critic is not None:
                keys.append("ppo/explained_variance")
            # Metrics that the iteration did not get to are logged as NaN. Only the mean of an empty
            # set is left out of the log.
            record.metrics = dict.fromkeys(keys, unknown[0]) | record.metrics
        self._log_iteration(record)

    def _log_iteration(self, record: IterationRecord) -> None:
        """Log the metrics of an iteration, averaged over ranks."""
        metrics = {
            **record.metrics,
            **self.timer.pop_metrics(int(record.lengths.sum())),
            "ppo/skipped_updates": self.guard.pop_count(),
        }
        self.log_dict(global_means(metrics, self.device), batch_size=len(record.lengths))
        # the x axis of loggers: Lightning's global step counts the steps of both optimizers
        self.log("step", self.ppo.iteration.float())
        self.stop_after_last_iteration()

    def place(self) -> str:
        """The iteration, for messages."""
        return f"iteration {int(self.ppo.iteration) + 1}"

    def make_stepper(
        self, place: str, grad_clips: Mapping[NetworkName, float | None] | None = None
    ) -> GuardedStepper:
        """Build the stepper of an iteration's networks.

        Args:
            place: Where in the run, for messages.
            grad_clips: Largest gradient norm by network; `None`: as in the options.
        """
        if grad_clips is None:
            grad_clips = {
                "policy": self.policy_optimizer.grad_clip,
                "critic": self.critic_optimizer.grad_clip,
            }
        return GuardedStepper(
            self.trained_networks(),
            module=self,
            guard=self.guard,
            grad_clips=grad_clips,
            place=place,
        )

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """One AdamW and schedule for the policy, and one for a critic with a trunk of its own."""
        iterations = self._plan_iterations()

        def updates_per_iteration() -> int:
            n_rollouts = training_batch_size(self.trainer) * self.responses_per_prompt
            return self.ppo.count_updates(n_rollouts)

        def critic_updates() -> float:
            return iterations * updates_per_iteration()

        def policy_updates() -> float:
            # without the iterations that pre-training took, or may take until it has ended
            pretraining = int(self.ppo.pretraining_length)
            if self.ppo.in_critic_pretraining():
                pretraining = self.critic_pretraining.iterations
            return max(iterations - pretraining, 1) * updates_per_iteration()

        policy = self.build_optimizer(self.policy, self.policy_optimizer)
        if self.critic is not None and self.ppo.shares_trunk:
            self._add_head_group(policy, self.critic)
        schedule = build_schedule(policy, self.policy_optimizer, policy_updates)
        if self.critic is None or self.ppo.shares_trunk:
            return [policy], [schedule]
        critic = self.build_optimizer(self.critic, self.critic_optimizer)
        # critic pre-training replaces the critic's warm-up (Section 5.3.3)
        warmup_ratio = 0.0 if self.critic_pretraining.iterations else None
        critic_schedule = build_schedule(
            critic, self.critic_optimizer, critic_updates, warmup_ratio=warmup_ratio
        )
        return [policy, critic], [schedule, critic_schedule]

    def _plan_iterations(self) -> float:
        """Iterations of the run; may be infinite. Refuses a critic pre-training that is longer."""
        # `setup` refuses max_steps, so that Lightning counts batches here
        iterations = float(self.trainer.estimated_stepping_batches)
        if self.max_iterations is not None:
            iterations = min(iterations, self.max_iterations)
        # Lightning has -1 for a run without batches
        if iterations < 1 and not is_trial(self.trainer):
            raise ValueError(NO_BATCHES)
        pretraining = self.critic_pretraining.iterations
        may_end_early = self.critic_pretraining.target_value_loss is not None
        if pretraining > iterations and not may_end_early and not is_trial(self.trainer):
            raise ValueError(
                f"critic_pretraining.iterations: expected at most the {iterations:.0f} iterations "
                f"of the run, got {pretraining}: the policy would not be trained. Lower it, or "
                "make the run longer"
            )
        if pretraining >= iterations and not is_trial(self.trainer):
            rank_zero_warn(
                f"critic_pretraining.iterations={pretraining}: the run has {iterations:.0f} "
                "iterations, so that the policy is not trained unless critic pre-training ends "
                "early; lower it, or make the run longer"
            )
        return iterations

    def _add_head_group(self, optimizer: Optimizer, critic: nn.Module) -> None:
        """Move the head of a critic on the policy's trunk to a group with the critic's options."""
        # the head is new, and so may need a larger learning rate than the trunk
        head = list(scalar_head_of(critic).parameters())
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if all(p is not h for h in head)]
        options = self.critic_optimizer
        settings = {"lr": options.learning_rate, "weight_decay": options.weight_decay}
        optimizer.add_param_group({"params": head, **settings})

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Generate and score responses to held-out prompts, with the same draws each time."""
        if batch_idx == 0:
            self._evaluation = RolloutMetrics()
            self._paired_scores = []
            try:
                self.ppo.require_finite_policy()
            except NotFiniteError as error:
                self._evaluation = None
                names = join_names(error.names)
                rank_zero_warn(f"no responses for evaluation: non-finite: {names}")
        if self._evaluation is None:
            return
        seed = self.seed + batch_idx
        collected = self.ppo.collect(batch, seed, PhaseTimer(self))
        self.ppo.measure(collected, self._evaluation)
        batch_name = f"{evaluation_prefix(self.trainer)}{batch_idx}"
        if batch_name not in self._start_scores:
            self._start_scores[batch_name] = self.ppo.score_start(batch, seed)
        start_scores = self._start_scores[batch_name]
        self._paired_scores.append(torch.stack([collected.scores.total, start_scores], dim=1))
        if batch_idx == 0:
            n_rows = self.sampled_texts
            records = self.ppo.describe_responses(collected)[:n_rows]
            table = format_sample_table(batch.texts[:n_rows], records)
            name = f"{evaluation_prefix(self.trainer)}samples"
            log_text(self.trainer, name, table, int(self.ppo.iteration))

    def evaluation_metrics(self) -> dict[str, Tensor]:
        """`rollout/*` of all responses; NaN if the policy could not be sampled from."""
        # The logger's x axis; Lightning's own count of batches is one behind at validation. Do not
        # average it over ranks: that would cut it to an integer after rounding.
        self.log("step", self.ppo.iteration.float())
        if self._evaluation is None:
            # not the last known values: a checkpoint might be judged by them
            nan = torch.tensor(torch.nan, device=self.device)
            return dict.fromkeys((*RolloutMetrics.KEYS, "rollout/score"), nan)
        scores, start_scores = all_gather_rows(torch.cat(self._paired_scores)).double().unbind(1)
        return {
            **self._evaluation.compute(),
            "rollout/start_score": start_scores.mean(),
            # a tie is half a win
            "rollout/win_rate": ((scores - start_scores).sign() / 2 + 0.5).mean(),
        }

    def sample(self, prompts: list[str]) -> list[dict[str, Any]]:
        """Sample one response per prompt, with the same random numbers at every call.

        Prompts have the form of the field `prompt` in a data file. See `PPO.sample_records` for
        what is returned.
        """
        if self.encoder is None:
            raise RuntimeError("sample: the trainer has no datamodule that has set up an encoder")
        batch = encode_prompts(prompts, self.encoder)
        batch = self.transfer_batch_to_device(batch, self.device, dataloader_idx=0)
        return self.ppo.sample_records(batch, self.seed, PhaseTimer(self))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave out the weights of reference and reward models, which do not change."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["state_dict"] = drop_frozen(checkpoint["state_dict"])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the weights of reference and reward models from their folders."""
        super().on_load_checkpoint(checkpoint)
        state = complete_state(self, checkpoint["state_dict"], self.resume.changed_names())
        separate_weights(self, state)
        checkpoint["state_dict"] = state

    def write_finished(self, folder: Path) -> None:
        """Write the policy, with the critic, if there is one, in a folder inside."""
        settings = generation_settings(self.policy, self.tokenizer, self.sampling.temperature)
        self.write_network(self.policy, folder, settings)
        if self.critic is None:
            return
        models = [model.path for model in self.reward.models]
        source = critic_source(self.critic_init, self.model_path, models)
        card = replace(self.model_card(), stage="critic", base_model=source)
        self.write_network(self.critic, folder / "critic", card=card)


def generation_settings(
    policy: LanguageModel, tokenizer: PreTrainedTokenizerBase, temperature: float
) -> dict[str, Any]:
    """Settings of a finished policy's `generation_config.json`: it samples as the rollouts did.

    Args:
        policy: The policy.
        tokenizer: Its tokenizer. Ids that it has no token for are suppressed.
        temperature: Temperature of the rollouts, above 0.
    """
    return {
        "temperature": temperature,
        "do_sample": True,
        "suppress_tokens": find_ids_without_token(policy, tokenizer) or None,
    }
