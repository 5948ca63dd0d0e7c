"""What all stages share: random generators, optimizers, schedules, repeated micro-batches."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from lit_rlhf.modules import OptimizerOptions, RewardModule, SFTModule
from lit_rlhf.modules.stage import random_state, restore_random_state
from tests.modules.stages import StepRecorder, demonstrations, fitted, preferences


def stage(name: str, root: Path, **options: Any) -> tuple[LightningModule, LightningDataModule]:
    """A module of a stage, and its data in batches of four rows."""
    if name == "sft":
        return SFTModule(str(root / "policy"), **options), demonstrations(root)
    return RewardModule(str(root / "policy"), **options), preferences(root)


def test_every_global_generator_goes_on_where_it_stood(tmp_path: Path) -> None:
    device = torch.device("cpu")

    def draws() -> list[float]:
        numpy = [np.random.random(), np.random.normal()]  # noqa: NPY002
        return [random.random(), random.gauss(0, 1), *numpy, float(torch.rand(()))]

    draws()
    torch.save(random_state(device), tmp_path / "state.ckpt")
    expected = draws()
    state = torch.load(tmp_path / "state.ckpt", weights_only=True)
    restore_random_state(state, device)
    assert draws() == expected
    restore_random_state({}, device)  # a checkpoint of another project has none
    assert draws() != expected


@pytest.mark.parametrize("name", ["sft", "reward"])
def test_a_micro_batch_that_only_keeps_step_with_other_ranks_does_not_count(
    root: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reduce = SingleDeviceStrategy.reduce
    results = []
    for more in (0, 2):

        def parts_of_the_longest_rank(
            self: SingleDeviceStrategy, tensor: Any, *arguments: Any, more: int = more, **named: Any
        ) -> Any:
            reduced = reduce(self, tensor, *arguments, **named)
            return reduced + more if "max" in (*arguments, *named.values()) else reduced

        monkeypatch.setattr(SingleDeviceStrategy, "reduce", parts_of_the_longest_rank)
        recorder = StepRecorder()
        module, data = stage(name, root, micro_batch_size=3)
        run = fitted(module, data, tmp_path / str(more), callbacks=[recorder])
        (steps,) = recorder.steps.values()
        metrics = {
            key: float(value)
            for key, value in run.callback_metrics.items()
            if key.startswith(f"{name}/")
        }
        results.append((steps, metrics))
    (plain, expected), (repeated, metrics) = results
    assert metrics == pytest.approx(expected, rel=1e-6)
    for one, other in zip(repeated, plain, strict=True):
        for key, gradient in other.items():
            torch.testing.assert_close(one[key], gradient, rtol=1e-6, atol=1e-9)


def test_only_what_is_trained_is_given_to_the_optimizer(root: Path) -> None:
    module, _ = stage("sft", root, network={"lora_rank": 2})
    assert isinstance(module, SFTModule)
    optimizer = module.build_optimizer(module.model, OptimizerOptions(learning_rate=1e-3))
    given: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(p.requires_grad for p in given)
    n_trained = sum(p.requires_grad for p in module.parameters())
    assert 0 < n_trained == len(given) < len(list(module.parameters()))


def test_the_warmup_is_rounded_up_and_the_schedule_ends_at_its_smallest_rate(
    root: Path, tmp_path: Path
) -> None:
    optimizer = {
        "learning_rate": 1e-3,
        "lr_scheduler": "cosine_with_min_lr",
        "warmup_ratio": 0.15,  # 1.5 of ten steps
        "min_lr_ratio": 0.3,
    }
    module, data = stage("sft", root, optimizer=optimizer)
    rates: list[float] = []

    class Rates(StepRecorder):
        def on_train_batch_start(self, trainer: Any, *_: object) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    run = fitted(module, data, tmp_path, max_epochs=5, callbacks=[Rates()])
    assert rates[:3] == pytest.approx([0.0, 0.5e-3, 1e-3])
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.3e-3)
