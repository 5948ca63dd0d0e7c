"""Micro-batches of two follow the trajectory of the whole batch, though their lengths differ."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from lit_rlhf.data import PreferenceBatch, TokenBatch
from lit_rlhf.modules.micro_batches import accumulate, slice_batch, split_batch
from tests.invariant.trajectories import assert_same_trajectory, stage_run, trajectory
from tests.modules.stages import StepRecorder, fitted

STAGES = ("sft", "reward", "ppo")


@pytest.mark.parametrize("stage", STAGES)
def test_four_micro_batches_follow_the_whole_batch(root: Path, tmp_path: Path, stage: str) -> None:
    run = partial(trajectory, stage, root)
    whole, parts = run(tmp_path / "whole"), run(tmp_path / "parts", micro_batch_size=2)
    assert_same_trajectory(parts, whole)


@pytest.mark.parametrize("stage", STAGES)
def test_an_uneven_last_micro_batch_counts_its_own_rows(
    root: Path, tmp_path: Path, stage: str
) -> None:
    whole, parts = StepRecorder(), StepRecorder()
    for recorder, size in ((whole, None), (parts, 3)):
        optimizer = "critic_optimizer" if stage == "ppo" else "optimizer"
        unclipped = {optimizer: {"grad_clip": None}}
        module, data = stage_run(stage, root, micro_batch_size=size, **unclipped)
        fitted(module, data, tmp_path / str(size), callbacks=[recorder])
    network = "critic" if stage == "ppo" else next(iter(whole.steps))
    for name, gradient in whole.steps[network][0].items():
        torch.testing.assert_close(parts.steps[network][0][name], gradient, rtol=1e-3, atol=1e-5)


def token_batch() -> TokenBatch:
    ids = torch.arange(10).view(5, 2)
    return TokenBatch(ids, ids >= 0, ids > 3)


def test_nested_batches_are_cut_alike() -> None:
    tokens = token_batch()
    batch = PreferenceBatch(tokens, tokens, torch.arange(5.0), torch.arange(5))
    part = slice_batch(batch, slice(1, 3))
    assert part.chosen.input_ids.tolist() == [[2, 3], [4, 5]]
    assert part.rejected.completion_mask.tolist() == [[False, False], [True, True]]
    assert part.margin.tolist() == [1.0, 2.0]


def test_a_micro_batch_needs_a_row() -> None:
    with pytest.raises(ValueError, match="micro_batch_size: expected at least 1 row, got 0"):
        list(split_batch(token_batch(), 5, 0))


def test_shares_add_up_without_their_graphs() -> None:
    totals: dict[str, torch.Tensor] = {}
    for value in (1.0, 2.5):
        accumulate(totals, {"loss": torch.tensor(value, requires_grad=True)})
    assert float(totals["loss"]) == 3.5
    assert not totals["loss"].requires_grad
