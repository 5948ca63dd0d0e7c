"""Supervised fine-tuning on demonstrations (Section 5.1 of arXiv 2307.04964)."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from lit_rlhf.checks import check_count, check_fields
from lit_rlhf.data import TokenBatch
from lit_rlhf.forward import call, gathered, map_target_logits, unwrap_model
from lit_rlhf.functional import (
    language_model_loss,
    masked_sum,
    ratio_error,
    token_logprobs,
)
from lit_rlhf.micro_batches import LossShare, slice_batch, split_batch
from lit_rlhf.models import ModelOptions, load_causal_lm
from lit_rlhf.modules.option_names import merge_options
from lit_rlhf.modules.options import OptimizerOptions
from lit_rlhf.modules.stage import MAX_SKIPPED_IN_A_ROW, StageModule
from lit_rlhf.stats import all_gather_rows, global_denominator, global_sum


class ScoredTokens(NamedTuple):
    """What a model says of the tokens that are trained on.

    Attributes:
        logprobs: Their log-probs, `[B, L]` nats; 0 elsewhere.
        hits: 1 where the model ranks the token first, `[B, L]`.
    """

    logprobs: Tensor
    hits: Tensor


class SFTModule(StageModule):
    """Next-token prediction on the completions of demonstrations.

    Args:
        model_path: Folder or hub id of a causal language model.
        output_dir: Folder for the finished model; `None` means `model/` in the run's log folder.
        optimizer: Optimizer and schedule. The defaults are the paper's for 7B: a learning rate of
            9.5e-6 that falls on a cosine to a tenth of it, without warm-up.
        micro_batch_size: Most sequences per forward and backward; `None`: no limit.
        micro_batch_tokens: Most tokens, without padding, per forward and backward. A longer
            sequence is computed by itself. With neither limit, the device's memory sets one: a
            micro-batch takes about 1 GiB on a CPU, and on CUDA a quarter of the device's memory,
            but at most 16,384 tokens.
        network: How the network is loaded.
        max_skipped_in_a_row: Number of updates in a row, skipped because a number is not finite, at
            which training stops.
    """

    stage = "sft"
    progress_metrics = ("sft/loss", "sft/token_accuracy")

    def __init__(
        self,
        model_path: str,
        output_dir: str | None = None,
        *,
        optimizer: OptimizerOptions = OptimizerOptions(
            learning_rate=9.5e-6, lr_scheduler="cosine_with_min_lr", warmup_ratio=0.0
        ),
        micro_batch_size: int | None = None,
        micro_batch_tokens: int | None = None,
        network: ModelOptions = ModelOptions(),
        max_skipped_in_a_row: int = MAX_SKIPPED_IN_A_ROW,
    ) -> None:
        super().__init__(model_path, output_dir, network, max_skipped_in_a_row)
        self.optimizer = merge_options(type(self), "optimizer", optimizer)
        self.micro_batch_size = micro_batch_size
        self.micro_batch_tokens = micro_batch_tokens
        check_fields(check_count, self, "micro_batch_size", "micro_batch_tokens")
        self.model = load_causal_lm(model_path, self.network)
        # Of the evaluation set: sums by batch, loss and tokens of each dialogue, and how often each
        # token is a target.
        self._evaluation: list[Tensor] = []
        self._dialogues: list[Tensor] = []
        self._frequencies: Tensor | None = None

    def forward(self, batch: TokenBatch, denominator: Tensor) -> dict[str, Tensor]:
        """Share of a micro-batch in the means over the `denominator` tokens of a step, 0-dim."""
        targets = self.score_tokens(batch)
        mask = batch.completion_mask
        return {
            "sft/loss": language_model_loss(targets.logprobs, mask, denominator),
            "sft/token_accuracy": masked_sum(targets.hits, mask) / denominator,
        }

    def score_tokens(self, batch: TokenBatch) -> ScoredTokens:
        """Log-probs of the tokens that are trained on, and whether the model ranks them first."""

        def read(logits: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
            hits = (logits.detach().argmax(-1) == ids).float()
            return token_logprobs(logits, ids), hits

        logprobs, hits = map_target_logits(
            self.model, batch.input_ids, batch.attention_mask, batch.completion_mask, read
        )
        return ScoredTokens(logprobs=logprobs, hits=hits)

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        """One update on a batch; returns the loss over all ranks, for callbacks."""
        denominator = global_denominator(batch.completion_mask.sum(), self.device)
        lengths = batch.attention_mask.sum(1)

        def shares() -> Iterator[LossShare]:
            parts = split_batch(
                self.model,
                lengths,
                max_rows=self.micro_batch_size,
                max_tokens=self.micro_batch_tokens,
            )
            for rows, weight in parts:
                metrics = call(self.model, self, slice_batch(batch, rows), denominator)
                yield LossShare(metrics["sft/loss"], metrics).scaled(weight)

        means = self.supervised_update(
            shares(),
            max_norm=self.optimizer.grad_clip,
            shape=batch.input_ids.shape,
            n_tokens=int(lengths.sum()),
            batch_idx=batch_idx,
        )
        # exp of the loss over all ranks, which is not the mean of the ranks' perplexities
        means["sft/perplexity"] = means["sft/loss"].exp()
        self.log_dict(means, batch_size=len(batch.input_ids))
        return means["sft/loss"]

    def validation_step(self, batch: TokenBatch, batch_idx: int) -> None:
        """Add a batch to the sums over the tokens of the set."""
        mask = batch.completion_mask
        tokens = mask.sum()
        with gathered(self.model):
            targets = self.score_tokens(batch)
        unit_share = torch.ones_like(tokens, dtype=torch.float32)
        loss = language_model_loss(targets.logprobs, mask, unit_share)
        # float64, even in a module of bfloat16 weights: the sums of a set lose no batch
        values = [loss, masked_sum(targets.hits, mask), tokens]
        self._evaluation.append(torch.stack([value.detach().double() for value in values]))
        dialogues = [-masked_sum(targets.logprobs.double(), mask, 1), mask.sum(1).double()]
        self._dialogues.append(torch.stack(dialogues, dim=1))
        n_tokens = unwrap_model(self.model).config.get_text_config().vocab_size
        counts = torch.bincount(batch.input_ids[mask].cpu(), minlength=n_tokens).double()
        self._frequencies = counts if self._frequencies is None else self._frequencies + counts

    def evaluation_metrics(self) -> dict[str, Tensor]:
        """Loss, perplexity and accuracy over all completion tokens, and of their frequencies."""
        loss, hits, tokens = global_sum(torch.stack(self._evaluation).sum(0)).unbind()
        dialogues = all_gather_rows(torch.cat(self._dialogues))
        assert self._frequencies is not None  # there was a batch
        shares = global_sum(self._frequencies) / tokens.cpu()
        self._evaluation = []
        self._dialogues = []
        self._frequencies = None
        metrics = {
            "sft/loss": loss / tokens,
            "sft/perplexity": (loss / tokens).exp(),
            "sft/token_accuracy": hits / tokens,
            "sft/frequency_loss": torch.special.entr(shares).sum(),
            "sft/frequency_accuracy": shares.max(),
        }
        error = ratio_error(dialogues[:, 0], dialogues[:, 1])
        if math.isfinite(error):  # not of a single dialogue
            metrics["sft/loss_error"] = loss.new_tensor(error)
        return metrics

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW and its schedule."""
        optimizer = self.build_optimizer(self.model, self.optimizer)
        return [optimizer], [self.build_schedule(optimizer, self.optimizer)]

    def write_finished(self, folder: Path) -> None:
        """Write the model for the next stage."""
        self.write_network(self.model, folder)
