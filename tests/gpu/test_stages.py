"""The three lab stages in bf16 on one CUDA device, and fp32 there against the CPU."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny_runs import QUICKSTART, RUNS, fit, logged, overlay, write_moved_config
from tests.support.trajectories import Trajectory, trajectory

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytestmark = [pytest.mark.gpu, needs_cuda]

STAGES = ("sft", "reward", "ppo")
# the number of losses that each stage of the tiny lab logs
N_LOSSES = {"sft": ("sft/loss", 3), "reward": ("reward/loss", 2), "ppo": ("ppo/policy_loss", 2)}


def small(stage: str) -> dict[str, Any]:
    """An overlay: a few steps of a stage in bf16 on one GPU."""
    model: dict[str, Any] = {}
    if stage == "ppo":
        model = {"minibatches": {"minibatch_size": 8}, "sampling": {"max_new_tokens": 12}}
        model |= {"critic_pretraining": {"iterations": 1}}
    trainer = {"accelerator": "gpu", "devices": 1, "precision": "bf16-mixed", "max_epochs": 1}
    trainer |= {"limit_train_batches": 3, "limit_val_batches": 1, "log_every_n_steps": 1}
    parts = {"model": {"init_args": model}, "data": {"init_args": {"batch_size": 16}}}
    return {"trainer": trainer, **parts}


def test_lab_stages_run_in_bf16_one_after_the_other(world: Path, tmp_path: Path) -> None:
    for stage, name in (("sft", "sft"), ("reward", "reward"), ("ppo", "ppo_max")):
        # each stage starts from the folders that those before left here
        moves = {RUNS: tmp_path, f"{RUNS}/world": world / "world"}
        config = write_moved_config(QUICKSTART / f"{name}.yaml", tmp_path / "configs", moves)
        fit([config, overlay(tmp_path / "configs", stage, small(stage))])
        metrics = logged(tmp_path / "logs" / name)
        assert all(math.isfinite(value) for values in metrics.values() for value in values)
        key, n_losses = N_LOSSES[stage]
        assert len(metrics[key]) == n_losses
        assert (tmp_path / name / "model.safetensors").is_file()
        if stage == "ppo":
            assert metrics["ppo/ratio_first"] == pytest.approx([1.0, 1.0], abs=0.05)


@pytest.fixture(scope="module")
def without_tf32() -> Any:
    """Full float32 products, as the CPU has them."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.usefixtures("without_tf32")
def test_fp32_on_the_gpu_follows_the_cpu(root: Path, tmp_path: Path, stage: str) -> None:
    def run(accelerator: str) -> Trajectory:
        arguments = {"accelerator": accelerator, "devices": 1}
        return trajectory(stage, root, tmp_path / accelerator, trainer=arguments)

    on_gpu, on_cpu = run("gpu"), run("cpu")
    assert len(on_gpu.metrics) == len(on_cpu.metrics)
    losses = {key for metrics in on_cpu.metrics for key in metrics if key.endswith("loss")}
    assert len(losses) >= (2 if stage == "ppo" else 1)
    for gpu, cpu in zip(on_gpu.metrics, on_cpu.metrics, strict=True):
        assert gpu.keys() == cpu.keys()
        for key in losses & cpu.keys():
            assert gpu[key] == pytest.approx(cpu[key], rel=1e-3, abs=1e-3), key
