"""Time and peak memory of phases, and what an out-of-memory error in one says."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from lit_rlhf.modules import PPOModule, RewardModule, SFTModule, phase_timer
from lit_rlhf.modules.phase_timer import GIB, PhaseTimer
from lit_rlhf.ppo import PPO
from tests.support.stages import demonstrations, fit_module, ppo_options, preferences, prompts

ADVICE: dict[str, tuple[str, tuple[str, ...]]] = {  # the method that fails, and what helps
    "rollout": ("rollout", ("lower memory.rollout_batch_size (now 4)",)),
    "score": ("score", ("set memory.max_tokens_per_forward (now None)",)),
    "estimate": ("estimate", ("set memory.max_tokens_per_forward (now None)",)),
    "update": (
        "policy_loss",
        (
            "set minibatches.micro_batch_size (now None)",
            "set minibatches.micro_batch_tokens (now None)",
            "set network.gradient_checkpointing: true",
        ),
    ),
}
SHAPE = (2, 3)


def timer_of_cpu() -> PhaseTimer:
    return PhaseTimer(LightningModule())


def test_phases_add_up_and_start_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 10.0, 11.0, 20.0, 24.0, 30.0, 32.0])
    peaks = iter([3 * GIB, GIB, 2 * GIB, GIB / 2])
    monkeypatch.setattr(phase_timer.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(phase_timer, "peak_bytes", lambda device: next(peaks))
    timer = timer_of_cpu()
    for phase in ("rollout", "update", "rollout"):
        with timer(phase, SHAPE, []):
            pass
    assert {key: float(value) for key, value in timer.pop_metrics(14).items()} == {
        "time/rollout": 6.0,
        "time/update": 1.0,
        "time/iteration": 7.0,
        "memory/rollout": 3.0,
        "memory/update": 1.0,
        "throughput/response_tokens_per_second": 2.0,
    }
    assert timer.pop_metrics(0, "tokens") == {}
    with timer("update", SHAPE, []):
        pass
    assert {key: float(value) for key, value in timer.pop_metrics(6, "tokens").items()} == {
        "time/update": 2.0,
        "time/iteration": 2.0,
        "memory/update": 0.5,
        "throughput/tokens_per_second": 3.0,
    }


@pytest.mark.skipif(not phase_timer.STATUS.exists(), reason="only Linux tells the peak of a phase")
def test_a_phases_peak_holds_what_was_freed_in_it_and_not_what_came_before() -> None:
    timer, size = timer_of_cpu(), 64 * 2**20
    with timer("small", SHAPE, []):
        pass
    with timer("large", SHAPE, []):
        block = torch.ones(size // 4)
        del block
    with timer("after", SHAPE, []):
        pass
    peaks = timer.peaks
    assert peaks["large"] - peaks["small"] == pytest.approx(size, rel=0.2)
    assert peaks["after"] - peaks["small"] == pytest.approx(0, abs=0.2 * size)


def test_unreset_mark_gives_processs_peak(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    if phase_timer.STATUS.exists():
        monkeypatch.setattr(phase_timer, "CLEAR_REFS", tmp_path)  # a folder cannot be written
        phase_timer.reset_peak(cpu)
        assert phase_timer.peak_bytes(cpu) > 2**20
    monkeypatch.setattr(phase_timer, "STATUS", tmp_path / "no status here")
    phase_timer.reset_peak(cpu)
    assert 2**20 < phase_timer.peak_bytes(cpu) < 2**45


def test_the_phases_that_hints_speak_of_are_those_of_ppo(root: Path, tmp_path: Path) -> None:
    run = fit_module(PPOModule(**ppo_options(root)), prompts(root), tmp_path)
    seen = {key.removeprefix("time/") for key in run.callback_metrics if key.startswith("time/")}
    assert {"rollout", "score", "estimate", "update"} <= seen
    peaks = [float(run.callback_metrics[f"memory/{p}"]) for p in seen - {"iteration"}]
    assert all(0.01 < peak < 100 for peak in peaks)


def too_much(*_: object, **__: object) -> Any:
    """More than any machine has: the CPU's allocator refuses, before it takes anything."""
    return torch.empty(10**15)


@pytest.mark.parametrize("phase", ADVICE)
def test_ppos_phases_are_named_with_their_sizes_and_settings(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    method, advice = ADVICE[phase]
    monkeypatch.setattr(PPO, method, too_much)
    module = PPOModule(**ppo_options(root, memory={"rollout_batch_size": 4}))
    with pytest.raises(torch.OutOfMemoryError) as error:
        fit_module(module, prompts(root), tmp_path)
    message = str(error.value)
    assert message.startswith(f"{phase}: out of memory with 8 sequences of ")
    for text in (*advice, "lower sampling.max_new_tokens (now 6)", "you tried to allocate 4000000"):
        assert text in message
    assert isinstance(error.value.__cause__, RuntimeError)


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_an_update_of_the_other_stages_is_named_too(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    kind, data = (SFTModule, demonstrations) if stage == "sft" else (RewardModule, preferences)
    monkeypatch.setattr(kind, "forward", too_much)
    options = {"micro_batch_size": 2, "network": {"gradient_checkpointing": True}}
    with pytest.raises(torch.OutOfMemoryError) as error:
        fit_module(kind(str(root / "policy"), **options), data(root), tmp_path)
    message = str(error.value)
    assert message.startswith("update: out of memory with 4 sequences of ")
    assert "lower micro_batch_size (now 2), or set micro_batch_tokens (now None)" in message
    assert "lower data.tokens_per_batch, or lower data.max_length" in message


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[alloc_cpu.cpp:127] DefaultCPUAllocator: not enough memory: you tried to"),
    ],
)
def test_every_kind_of_memory_error_is_recognized(error: Exception) -> None:
    memory_error = pytest.raises(torch.OutOfMemoryError, match=r"score: .* 2 sequences of 3 tokens")
    with memory_error, timer_of_cpu()("score", SHAPE, ["x"]):
        raise error


def test_other_errors_are_left_as_they_are() -> None:
    error = pytest.raises(RuntimeError, match=r"^shapes do not fit$")
    with error, timer_of_cpu()("score", SHAPE, ["x"]):
        raise RuntimeError("shapes do not fit")
