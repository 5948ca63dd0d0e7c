"""Micro-batches follow the trajectory of the whole batch, however it is split."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_rlhf import micro_batches
from lit_rlhf.forward import LanguageModel, hidden_states
from lit_rlhf.micro_batches import MicroBatch
from tests.support.pretend_cuda import PretendCuda, PretendCudaStrategy
from tests.support.stages import StepRecorder, fit_module
from tests.support.trajectories import (
    Trajectory,
    assert_same_trajectory,
    stage_run,
    trajectory,
)

STAGES = ("sft", "reward", "ppo")
TOKENS = 100


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec")
@pytest.mark.parametrize(
    ("device", "limit", "nothing", "strategy"),
    [
        (nullcontext, "ACTIVATION_BYTES", 1, lambda: "auto"),
        (PretendCuda, "CUDA_MEMORY_SHARE", 0.0, PretendCudaStrategy),
    ],
    ids=["cpu", "cuda"],
)
@pytest.mark.parametrize("stage", STAGES)
def test_a_batch_with_much_to_keep_is_split_without_being_asked(
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    device: Callable[[], AbstractContextManager[Any]],
    limit: str,
    nothing: float,
    strategy: Callable[[], Any],
) -> None:
    def run(folder: Path) -> Trajectory:
        place = {"accelerator": "auto", "strategy": strategy()}
        return trajectory(stage, root, folder, trainer=place)

    rows: list[int] = []

    def forward(model: LanguageModel, ids: Tensor, mask: Tensor, *lower: Tensor | None) -> Tensor:
        if torch.is_grad_enabled():
            rows.append(len(ids))
        return hidden_states(model, ids, mask, *lower)

    for user in ("modules.reward", "forward.outputs"):
        monkeypatch.setattr(f"lit_rlhf.{user}.hidden_states", forward)
    with device():
        whole = run(tmp_path / "whole")
        assert 1 not in rows
        rows.clear()
        monkeypatch.setattr(micro_batches, limit, nothing)
        parts = run(tmp_path / "parts")

        assert set(rows) == {2 if stage == "reward" else 1}  # a pair is two rows
        assert_same_trajectory(parts, whole)


@pytest.mark.filterwarnings("ignore:critic_pretraining.iterations=1. the run has 1")
@pytest.mark.parametrize("stage", STAGES)
def test_uneven_micro_batches_count_their_own_rows_and_tokens(
    root: Path, tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: dict[int | None, list[int]] = {}  # in the last update, by the limit of rows or tokens
    split = micro_batches.split_batch

    def watched(
        model: LanguageModel, lengths: Tensor, max_rows: int | None, max_tokens: int | None
    ) -> list[MicroBatch]:
        parts = split(model, lengths, max_rows, max_tokens)
        sizes[max_rows or max_tokens] = [rows.stop - rows.start for rows, _ in parts]
        return parts

    for user in ("modules.sft", "modules.reward", "ppo.algorithm"):
        monkeypatch.setattr(f"lit_rlhf.{user}.split_batch", watched)
    whole, *others = (StepRecorder() for _ in range(3))
    limits: list[dict[str, int]] = [{}, {"micro_batch_size": 3}, {"micro_batch_tokens": TOKENS}]
    for recorder, limit in zip((whole, *others), limits, strict=True):
        unclipped = {"critic_optimizer" if stage == "ppo" else "optimizer": {"grad_clip": None}}
        module, data = stage_run(stage, root, **limit, **unclipped)
        fit_module(module, data, tmp_path / str(limit), callbacks=[recorder])
    assert (sizes[None], sizes[3]) == ([8], [3, 3, 2])
    assert len(set(sizes[TOKENS])) > 1
    network = "critic" if stage == "ppo" else next(iter(whole.steps))
    for name, gradient in whole.steps[network][0].items():
        for parts in others:
            actual = parts.steps[network][0][name]
            torch.testing.assert_close(actual, gradient, rtol=1e-3, atol=1e-5)
