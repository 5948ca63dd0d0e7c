"""Reward modelling by pairwise and language-model loss (Section 3.1 of arXiv 2307.04964)."""

import zlib
from collections.abc import Generator
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import NamedTuple, cast

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn.functional import pad
from torchmetrics.functional.classification import binary_calibration_error

from lit_rlhf.checks import check_count, check_fields, check_not_negative, check_number
from lit_rlhf.data import PreferenceBatch, PreferenceDataModule, TokenBatch
from lit_rlhf.forward import (
    LanguageModel,
    call,
    gathered,
    hidden_states,
    scores_from_hidden,
    target_logprobs_from_hidden,
)
from lit_rlhf.functional import (
    language_model_loss,
    pairwise_reward_loss,
    preference_probability,
    reward_model_loss,
)
from lit_rlhf.micro_batches import LossShare, MicroBatch, slice_batch, split_batch
from lit_rlhf.models import ModelOptions, load_lm_head, load_scalar_model
from lit_rlhf.modules.meta_rm import check_meta_rate, difference_shares, meta_weights
from lit_rlhf.modules.option_names import merge_options
from lit_rlhf.modules.options import OptimizerOptions
from lit_rlhf.modules.stage import MAX_SKIPPED_IN_A_ROW, StageModule
from lit_rlhf.stats import all_gather_rows, global_denominator, global_sum
from lit_rlhf.strategies import backward


class ComparedPairs(NamedTuple):
    """What a reward model says of pairs of responses.

    Attributes:
        metrics: Share of the pairs in the means of a step, by key, 0-dim; they add up over
            micro-batches.
        differences: Score of the chosen response minus the score of the rejected one, each a mean
            over the heads, `[B]`, without a graph.
    """

    metrics: dict[str, Tensor]
    differences: Tensor


class RewardModule(StageModule):
    """A language model's trunk with a scalar head, trained on preferences (Eq. 2).

    The loss is the pairwise loss (Eq. 1) plus `lm_coef` times the language-model loss of the chosen
    responses, which keeps the trunk a language model. The score is read at the last token.

    Several `heads` are an ensemble on one trunk. Prompts are divided into as many folds, and each
    head skips the pairs of one fold. The pairwise loss is the mean over the heads' pairs.

    Args:
        model_path: Folder or hub id of a causal language model, usually the SFT model.
        output_dir: Folder for the finished model; `None` means `model/` in the run's log folder.
        lm_coef: beta_rm of Eq. 2; 0 trains on the pairwise loss only.
        label_smoothing: Share of labels that the loss takes as flipped, in [0, 0.5) (cDPO's form).
        center_coef: Weight of the squared sum of a pair's scores, which keeps them around 0; TRL's
            `center_rewards_coefficient`.
        optimizer: Optimizer and schedule. The defaults are the paper's for 7B: a learning rate of
            5e-6 after a warm-up over a tenth of the steps.
        micro_batch_size: Most pairs per forward and backward; `None`: no limit.
        micro_batch_tokens: Most tokens, without padding, of the pairs per forward and backward. A
            longer pair is computed by itself. With neither limit, the device's memory sets one: a
            micro-batch takes about 1 GiB on a CPU, and on CUDA a quarter of the device's memory,
            but at most 16,384 tokens.
        head_seed: Seed of the weights of a new scalar head; further heads have the next seeds.
        network: How the network is loaded.
        max_skipped_in_a_row: Number of updates in a row, skipped because a number is not finite, at
            which training stops.
        heads: Number of scalar heads, whose mean is the score. A reward model to continue from
            must have as many; with 1, its heads are averaged.
        meta_rate: The rate eta of MetaRM with the pairs of `data.meta_sources`, by which weights
            are moved before the loss is computed, see `lit_rlhf.modules.meta_rm`; 0 is off.
    """

    stage = "reward"
    progress_metrics = ("reward/loss", "reward/accuracy")

    def __init__(
        self,
        model_path: str,
        output_dir: str | None = None,
        *,
        lm_coef: float = 1.0,
        label_smoothing: float = 0.0,
        center_coef: float = 0.0,
        optimizer: OptimizerOptions = OptimizerOptions(learning_rate=5e-6),
        micro_batch_size: int | None = None,
        micro_batch_tokens: int | None = None,
        head_seed: int = 0,
        network: ModelOptions = ModelOptions(),
        max_skipped_in_a_row: int = MAX_SKIPPED_IN_A_ROW,
        heads: int = 1,
        meta_rate: float = 0.0,
    ) -> None:
        check_not_negative("lm_coef", lm_coef)
        super().__init__(model_path, output_dir, network, max_skipped_in_a_row)
        self.lm_coef = lm_coef
        self.meta_rate = meta_rate
        check_not_negative("center_coef", center_coef)
        check_not_negative("meta_rate", meta_rate)
        check_number(
            "label_smoothing", label_smoothing, "a number in [0, 0.5)", lambda e: 0 <= e < 0.5
        )
        self.label_smoothing = label_smoothing
        self.center_coef = center_coef
        self.optimizer = merge_options(type(self), "optimizer", optimizer)
        self.micro_batch_size = micro_batch_size
        self.micro_batch_tokens = micro_batch_tokens
        self.heads = heads
        check_fields(check_count, self, "heads", "micro_batch_size", "micro_batch_tokens")
        # One child holds all that is trained: a DeepSpeed engine wraps one child of the module.
        model = load_scalar_model(model_path, self.network, head_seed=head_seed, heads=heads)
        self.networks = nn.ModuleDict({"model": model})
        if lm_coef > 0:
            self.networks["lm_head"] = load_lm_head(model_path, self.network)
        # Of the evaluation set: sums by batch, and the differences of scores and lengths and the
        # source of each pair, since accuracy per source and calibration need them one by one.
        self._sums: list[Tensor] = []
        self._pairs: list[Tensor] = []

    @property
    def model(self) -> LanguageModel:
        """The trunk with its scalar head."""
        return cast(LanguageModel, self.networks["model"])

    @property
    def lm_head(self) -> nn.Module | None:
        """The output layer of the language-model loss; `None` if there is no such loss."""
        return self.networks["lm_head"] if self.lm_coef > 0 else None

    def forward(self, batch: PreferenceBatch, pairs: Tensor, tokens: Tensor) -> ComparedPairs:
        """Compare the responses of a micro-batch.

        Args:
            batch: The micro-batch, `B` pairs.
            pairs: Pairs of the whole batch, see `global_denominator`, 0-dim.
            tokens: Tokens of the chosen responses of the whole batch, likewise 0-dim.
        """
        chosen = batch.chosen
        rejected = batch.rejected
        # One forward for both sides: packed, the padding of the shorter side costs nothing.
        n_rows, length = chosen.input_ids.shape
        ids = _stack_padded(chosen.input_ids, rejected.input_ids)
        mask = _stack_padded(chosen.attention_mask, rejected.attention_mask)
        hidden = hidden_states(self.model, ids, mask)
        chosen_scores, rejected_scores = scores_from_hidden(self.model, hidden, mask).chunk(2)
        # every pair has equally many learning heads, so means of micro-batches weigh by pairs
        share = n_rows / pairs
        learning = learning_heads(chosen, self.heads) if self.heads > 1 else None
        pairwise = pairwise_reward_loss(
            chosen_scores,
            rejected_scores,
            margin=batch.margin,
            label_smoothing=self.label_smoothing,
            center_coef=self.center_coef,
            head_mask=learning,
        )
        metrics = {
            "reward/pairwise_loss": pairwise.loss * share,
            "reward/accuracy": pairwise.accuracy * share,
            "reward/margin": pairwise.margin * share,
        }
        lm_loss = hidden.new_zeros((), dtype=torch.float32)
        if self.lm_head is not None:
            # The hidden states of the chosen responses serve both heads.
            logprobs = target_logprobs_from_hidden(
                self.model,
                self.lm_head,
                hidden[:n_rows, :length],
                chosen.input_ids,
                chosen.completion_mask,
            )
            lm_loss = language_model_loss(logprobs, chosen.completion_mask, tokens)
            metrics["reward/lm_loss"] = lm_loss
        metrics["reward/loss"] = reward_model_loss(
            metrics["reward/pairwise_loss"], lm_loss, lm_coef=self.lm_coef
        )
        differences = (chosen_scores - rejected_scores).detach().view(n_rows, -1).mean(1)
        return ComparedPairs(metrics, differences)

    def meta_weights(
        self, n_pairs: int, batch_idx: int
    ) -> AbstractContextManager[dict[str, Tensor]]:
        """The weights that a batch learns at: with a `meta_rate`, MetaRM's.

        The context gives this rank's share of the metric `reward/difference_loss`, if there is one.
        """
        data = self.datamodule
        if not self.meta_rate or not isinstance(data, PreferenceDataModule):
            return nullcontext({})
        pairs = data.draw_meta_pairs(n_pairs, epoch=self.current_epoch, batch_idx=batch_idx)
        batch = move_data_to_device(pairs, self.device)
        lengths = _count_tokens(batch)
        optimizer = self.trained_networks()["model"].optimizer
        shares = difference_shares(
            self.model,
            batch,
            self.micro_batches(lengths),
            pairs=global_denominator(n_pairs, self.device),
        )
        return meta_weights(
            shares, self.meta_rate, optimizer, lambda loss: backward(self, loss, optimizer)
        )

    def micro_batches(self, lengths: Tensor) -> list[MicroBatch]:
        """The micro-batches of pairs with `lengths` `[B]` real tokens, by the options."""
        return split_batch(
            self.model,
            lengths,
            max_rows=self.micro_batch_size,
            max_tokens=self.micro_batch_tokens,
        )

    def training_step(self, batch: PreferenceBatch, batch_idx: int) -> Tensor:
        """One update on a batch of pairs; returns the loss over all ranks, for callbacks."""
        pairs = global_denominator(len(batch.margin), self.device)
        tokens = global_denominator(batch.chosen.completion_mask.sum(), self.device)
        lengths = _count_tokens(batch)

        def shares() -> Generator[LossShare, None, None]:
            with self.meta_weights(len(batch.margin), batch_idx) as meta:
                for rows, weight in self.micro_batches(lengths):
                    part = slice_batch(batch, rows)
                    metrics = call(self.model, self, part, pairs, tokens).metrics | meta
                    yield LossShare(metrics["reward/loss"], metrics).scaled(weight)
                    meta = {}  # it is of the whole batch, and enters the means once

        with closing(shares()) as parts:  # an error leaves no moved weights behind
            means = self.supervised_update(
                parts,
                max_norm=self.optimizer.grad_clip,
                shape=batch.chosen.input_ids.shape,
                n_tokens=int(lengths.sum()),
                batch_idx=batch_idx,
            )
        self.log_dict(means, batch_size=len(batch.margin))
        return means["reward/loss"]

    def validation_step(self, batch: PreferenceBatch, batch_idx: int) -> None:
        """Add a batch to the sums over the pairs of the set."""
        unit_share = torch.ones((), device=self.device)
        tokens = batch.chosen.completion_mask.sum()
        with gathered(self.networks):
            compared: ComparedPairs = self(batch, unit_share, unit_share)
        sums = compared.metrics
        # There is no language-model loss without the output layer.
        lm_loss = sums.get("reward/lm_loss", torch.zeros_like(unit_share))
        # float64, also in a module of bfloat16 weights: the sums of a set lose no batch
        values = [sums["reward/pairwise_loss"], lm_loss, tokens]
        self._sums.append(torch.stack([value.detach().double() for value in values]))
        longer = batch.chosen.completion_mask.sum(1) - batch.rejected.completion_mask.sum(1)
        columns = [compared.differences, batch.source, longer]
        self._pairs.append(torch.stack([column.double() for column in columns], dim=1))

    def evaluation_metrics(self) -> dict[str, Tensor]:
        """Losses, accuracy (and by source), margin, calibration error and the rule of length."""
        pairwise_loss, lm_loss, tokens = global_sum(torch.stack(self._sums).sum(0)).unbind()
        differences, sources, longer = all_gather_rows(torch.cat(self._pairs)).unbind(1)
        self._sums = []
        self._pairs = []
        hits = differences > 0
        metrics = {
            "reward/pairwise_loss": pairwise_loss / len(differences),
            "reward/accuracy": hits.float().mean(),
            "reward/margin": differences.mean(),
            "reward/calibration_error": binary_calibration_error(
                preference_probability(differences.abs()), hits.long()
            ),
            "reward/longer_accuracy": (longer.sign() / 2 + 0.5).mean(),
            "reward/pairs": differences.new_tensor(len(differences)),
        }
        lm_loss = lm_loss / tokens
        if self.lm_head is not None:
            metrics["reward/lm_loss"] = lm_loss
        metrics["reward/loss"] = reward_model_loss(
            metrics["reward/pairwise_loss"], lm_loss, lm_coef=self.lm_coef
        )
        names = getattr(self.datamodule, "source_names", [])
        for index, name in enumerate(names):
            if (sources == index).any():
                metrics[f"reward/accuracy/{name}"] = hits[sources == index].float().mean()
        return metrics

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW over trunk, scalar head and language-model head."""
        data = self.datamodule
        meta_sources = data.meta_sources if isinstance(data, PreferenceDataModule) else []
        check_meta_rate(
            self.meta_rate,
            len(meta_sources),
            strategy=self.trainer.strategy,
            weights=self.parameters(),
        )
        optimizer = self.build_optimizer(self.networks, self.optimizer)
        return [optimizer], [self.build_schedule(optimizer, self.optimizer)]

    def write_finished(self, folder: Path) -> None:
        """Write the reward model, with its text contract, for PPO."""
        self.write_network(self.model, folder, lm_head=self.lm_head)


def _stack_padded(first: Tensor, second: Tensor) -> Tensor:
    """The rows of two batches in one, padded on the right with zeros to the width of the wider."""
    width = max(first.shape[1], second.shape[1])
    return torch.cat([pad(side, (0, width - side.shape[1])) for side in (first, second)])


def _count_tokens(batch: PreferenceBatch) -> Tensor:
    """Number of real tokens of each pair, in both of its dialogues, `[B]`."""
    return batch.chosen.attention_mask.sum(1) + batch.rejected.attention_mask.sum(1)


def learning_heads(batch: TokenBatch, heads: int) -> Tensor:
    """Mask of the heads that learn from each dialogue, `[B, heads]` bool.

    Every head learns but one: the head with the number of the prompt's fold. The fold is the CRC-32
    of the prompt's ids modulo `heads`, so all pairs of a prompt have the same one in any run.
    """
    is_prompt = batch.attention_mask & (batch.completion_mask.cumsum(1) == 0)
    rows = zip(batch.input_ids.cpu(), is_prompt.cpu(), strict=True)
    sums = [zlib.crc32(ids[mask].numpy().tobytes()) for ids, mask in rows]
    folds = torch.tensor(sums, device=batch.input_ids.device) % heads
    return folds.unsqueeze(1) != torch.arange(heads, device=folds.device)
