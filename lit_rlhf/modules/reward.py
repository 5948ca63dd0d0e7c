"""Reward modelling by pairwise and language-model loss (Section 3.1 of arXiv 2307.04964)."""

import zlib
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import cast

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn.functional import pad
from torchmetrics.functional.classification import binary_calibration_error

from lit_rlhf.checks import check_count, check_fields, check_not_negative, check_number
from lit_rlhf.data import PreferenceBatch, TokenBatch
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
from lit_rlhf.models import ModelOptions, load_lm_head, load_scalar_model
from lit_rlhf.modules.meta import check_meta, meta_weights
from lit_rlhf.modules.option_names import merge_options
from lit_rlhf.modules.options import OptimizerOptions
from lit_rlhf.modules.stage import MAX_SKIPPED_IN_A_ROW, StageModule
from lit_rlhf.modules.updates import Share, slice_batch, split_batch
from lit_rlhf.stats import all_gather_rows, global_denominator, global_sum


class RewardModule(StageModule):
    """A language model's trunk with a scalar head, trained on preferences (Eq. 2).

    The loss is the pairwise loss (Eq. 1) plus `lm_coef` times the language-model loss of the chosen
    responses, which keeps the trunk a language model. The score is read at the last token.

    Several `heads` are an ensemble on one trunk. Prompts are in as many folds, and each head does
    not learn from the pairs of another one. The pairwise loss is the mean over the heads' pairs.

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
        micro_batch_tokens: Most tokens, without padding, of the pairs per forward and backward;
            `None`: no limit, or on a CPU without `micro_batch_size` as many as take about 1 GiB. A
            longer pair is computed by itself.
        head_seed: Seed of the weights of a new scalar head; further heads have the next seeds.
        network: How the network is loaded.
        max_skipped_in_a_row: Number of updates in a row, skipped because a number is not finite, at
            which training stops.
        heads: Number of scalar heads, whose mean is the score. A reward model to go on with has as
            many; with 1 its heads become their mean.
        meta_rate: The rate eta of MetaRM with the pairs of `data.meta_sources`, by which weights
            are moved before the loss is computed, see `lit_rlhf.modules.meta`; 0 is off.
    """

    stage = "reward"
    progress_metrics = ("reward/loss", "reward/accuracy")

    def __init__(
        self,
        model_path: str,
        output_dir: str | None = None,
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
        self.lm_coef, self.meta_rate = lm_coef, meta_rate
        check_not_negative("center_coef", center_coef)
        check_not_negative("meta_rate", meta_rate)
        check_number(
            "label_smoothing", label_smoothing, "a number in [0, 0.5)", lambda e: 0 <= e < 0.5
        )
        self.label_smoothing, self.center_coef = label_smoothing, center_coef
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
        # Of the evaluation set: sums by batch, and the score difference and source of each pair,
        # since accuracy per source and calibration need them one by one.
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

    def forward(
        self, batch: PreferenceBatch, pairs: Tensor, tokens: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Share of a micro-batch in the means over all `pairs` and chosen `tokens` of a step.

        Returns metrics, 0-dim, which add up over micro-batches, and the differences of the scores
        (the heads' means), chosen minus rejected, `[B]` without a graph.
        """
        chosen, rejected = batch.chosen, batch.rejected
        # One forward for both sides: packed, the padding of the shorter side costs nothing.
        n_rows, length = chosen.input_ids.shape
        width = max(length, rejected.input_ids.shape[1])
        ids, mask = (
            torch.cat([pad(side, (0, width - side.shape[1])) for side in sides])
            for sides in (
                (chosen.input_ids, rejected.input_ids),
                (chosen.attention_mask, rejected.attention_mask),
            )
        )
        hidden = hidden_states(self.model, ids, mask)
        chosen_scores, rejected_scores = scores_from_hidden(self.model, hidden, mask).chunk(2)
        # as many heads learn from each pair, so that a share of the pairs is one of their losses
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
        return metrics, (chosen_scores - rejected_scores).detach().view(n_rows, -1).mean(1)

    def training_step(self, batch: PreferenceBatch, batch_idx: int) -> Tensor:
        """One update on a batch of pairs; returns the loss over all ranks, for callbacks."""
        pairs = global_denominator(len(batch.margin), self.device)
        tokens = global_denominator(batch.chosen.completion_mask.sum(), self.device)
        lengths = batch.chosen.attention_mask.sum(1) + batch.rejected.attention_mask.sum(1)
        limits = (self.micro_batch_size, self.micro_batch_tokens)

        def shares() -> Generator[Share, None, None]:
            with meta_weights(self, len(batch.margin), batch_idx) as meta:
                for rows, weight in split_batch(self.model, lengths, *limits):
                    metrics, _ = call(self.model, self, slice_batch(batch, rows), pairs, tokens)
                    yield weight, metrics["reward/loss"], metrics | meta
                    meta = {}

        clip, ids = self.optimizer.grad_clip, batch.chosen.input_ids
        with closing(shares()) as parts:  # an error leaves no moved weights behind
            means = self.supervised_update(parts, clip, ids, lengths, batch_idx)
        self.log_dict(means, batch_size=len(batch.margin))
        return means["reward/loss"]

    def validation_step(self, batch: PreferenceBatch, batch_idx: int) -> None:
        """Add a batch to the sums over the pairs of the set."""
        one = torch.ones((), device=self.device)
        tokens = batch.chosen.completion_mask.sum()
        with gathered(self.networks):
            sums, differences = self(batch, one, one)
        # There is no language-model loss without the output layer.
        lm_loss = sums.get("reward/lm_loss", torch.zeros_like(one))
        # float64, also in a module of bfloat16 weights: the sums of a set lose no batch
        values = [sums["reward/pairwise_loss"], lm_loss, tokens]
        self._sums.append(torch.stack([value.detach().double() for value in values]))
        self._pairs.append(torch.stack([differences.double(), batch.source.double()], dim=1))

    def evaluation_metrics(self) -> dict[str, Tensor]:
        """Losses, accuracy (and by source), margin and calibration error."""
        pairwise_loss, lm_loss, tokens = global_sum(torch.stack(self._sums).sum(0)).unbind()
        differences, sources = all_gather_rows(torch.cat(self._pairs)).unbind(1)
        self._sums, self._pairs = [], []
        hits = differences > 0
        metrics = {
            "reward/pairwise_loss": pairwise_loss / len(differences),
            "reward/accuracy": hits.float().mean(),
            "reward/margin": differences.mean(),
            "reward/calibration_error": binary_calibration_error(
                preference_probability(differences.abs()), hits.long()
            ),
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
        check_meta(self)
        optimizer = self.build_optimizer(self.networks, self.optimizer)
        return [optimizer], [self.build_schedule(optimizer, self.optimizer)]

    def write_finished(self, folder: Path) -> None:
        """Write the reward model, with its text contract, for PPO."""
        self.write_network(self.model, folder, lm_head=self.lm_head)


def learning_heads(batch: TokenBatch, heads: int) -> Tensor:
    """Which head learns from which dialogue, `[B, heads]` bool: all but that of the prompt's fold.

    It is the CRC-32 of the prompt's ids modulo `heads`: one for all of its pairs in any run.
    """
    is_prompt = batch.attention_mask & (batch.completion_mask.cumsum(1) == 0)
    rows = zip(batch.input_ids.cpu(), is_prompt.cpu(), strict=True)
    sums = [zlib.crc32(ids[kept].numpy().tobytes()) for ids, kept in rows]
    folds = torch.tensor(sums, device=batch.input_ids.device) % heads
    return folds.unsqueeze(1) != torch.arange(heads, device=folds.device)
