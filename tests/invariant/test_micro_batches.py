"""Micro-batches of two follow the trajectory of the whole batch, though their lengths differ."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lit_rlhf.forward import LanguageModel, hidden_states
from lit_rlhf.modules import micro_batches
from tests.invariant.trajectories import assert_same_trajectory, stage_run, trajectory
from tests.modules.stages import StepRecorder, fitted

STAGES = ("sft", "reward", "ppo")


@pytest.mark.parametrize("stage", STAGES)
def test_four_micro_batches_follow_the_whole_batch(root: Path, tmp_path: Path, stage: str) -> None:
    run = partial(trajectory, stage, root)
    whole, parts = run(tmp_path / "whole"), run(tmp_path / "parts", micro_batch_size=2)
    assert_same_trajectory(parts, whole)


@pytest.mark.parametrize("stage", STAGES)
def test_a_batch_with_much_to_keep_is_split_without_being_asked(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    run = partial(trajectory, stage, root)
    whole = run(tmp_path / "whole")
    rows: list[int] = []

    def forward(model: LanguageModel, ids: Tensor, mask: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            rows.append(len(ids))
        return hidden_states(model, ids, mask)

    for place in ("modules.reward", "forward.chunked_logits", "forward.outputs"):
        monkeypatch.setattr(f"lit_rlhf.{place}.hidden_states", forward)
    monkeypatch.setattr(micro_batches, "ACTIVATION_BYTES", 1)
    parts = run(tmp_path / "parts")

    assert set(rows) == {2 if stage == "reward" else 1}  # a pair is two rows
    assert_same_trajectory(parts, whole)


@pytest.mark.filterwarnings("ignore:critic_pretraining.iterations=1. the run has 1")
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
