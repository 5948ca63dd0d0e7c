"""Supervised fine-tuning on demonstrations (Section 5.1 of arXiv 2307.04964)."""

from collections.abc import Iterator
from pathlib import Path

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from lit_rlhf.checks import check_count, check_fields
from lit_rlhf.data import TokenBatch
from lit_rlhf.forward import call, gathered, map_target_logits
from lit_rlhf.functional import language_model_loss, masked_sum, token_logprobs
from lit_rlhf.micro_batches import LossShare, slice_batch, split_batch
from lit_rlhf.models import ModelOptions, load_causal_lm
from lit_rlhf.modules.option_names import merge_options
from lit_rlhf.modules.options import OptimizerOptions
from lit_rlhf.modules.stage import MAX_SKIPPED_IN_A_ROW, StageModule
from lit_rlhf.stats import global_denominator, global_sum


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
        self._evaluation: list[Tensor] = []

    def forward(self, batch: TokenBatch, denominator: Tensor) -> dict[str, Tensor]:
        """Share of a micro-batch in the means over the `denominator` tokens of a step, 0-dim."""

        def read(logits: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
            hits = (logits.detach().argmax(-1) == ids).float()
            return token_logprobs(logits, ids), hits

        mask = batch.completion_mask
        logprobs, hits = map_target_logits(
            self.model, batch.input_ids, batch.attention_mask, mask, read
        )
        return {
            "sft/loss": language_model_loss(logprobs, mask, denominator),
            "sft/token_accuracy": masked_sum(hits, mask) / denominator,
        }

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
        tokens = batch.completion_mask.sum()
        with gathered(self.model):
            sums = self(batch, torch.ones_like(tokens, dtype=torch.float32))
        # float64, even in a module of bfloat16 weights: the sums of a set lose no batch
        values = [sums["sft/loss"], sums["sft/token_accuracy"], tokens]
        self._evaluation.append(torch.stack([value.detach().double() for value in values]))

    def evaluation_metrics(self) -> dict[str, Tensor]:
        """Loss, perplexity and accuracy over all completion tokens."""
        loss, hits, tokens = global_sum(torch.stack(self._evaluation).sum(0)).unbind()
        self._evaluation = []
        return {
            "sft/loss": loss / tokens,
            "sft/perplexity": (loss / tokens).exp(),
            "sft/token_accuracy": hits / tokens,
        }

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW and its schedule."""
        optimizer = self.build_optimizer(self.model, self.optimizer)
        return [optimizer], [self.build_schedule(optimizer, self.optimizer)]

    def write_finished(self, folder: Path) -> None:
        """Write the model for the next stage."""
        self.write_network(self.model, folder)
