"""Time and peak memory of phases, by hand and in a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lit_rlhf.modules import PPOModule, timing
from lit_rlhf.modules.timing import GIB, PhaseTimer
from tests.modules.stages import fitted, ppo_options, prompts


def test_phases_add_up_and_start_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 10.0, 11.0, 20.0, 24.0])
    peaks = iter([3 * GIB, GIB, 2 * GIB])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(timing, "peak_bytes", lambda device: next(peaks))
    timer = PhaseTimer()
    for phase in ("rollout", "update", "rollout"):
        with timer(phase):
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


@pytest.mark.skipif(not timing.STATUS.exists(), reason="only Linux tells the peak of a phase")
def test_a_phases_peak_holds_what_was_freed_in_it_and_not_what_came_before() -> None:
    timer, size = PhaseTimer(), 64 * 2**20
    with timer("small"):
        pass
    with timer("large"):
        block = torch.ones(size // 4)
        del block
    with timer("after"):
        pass
    peaks = timer.peaks
    assert peaks["large"] - peaks["small"] == pytest.approx(size, rel=0.2)
    assert peaks["after"] - peaks["small"] == pytest.approx(0, abs=0.2 * size)


def test_where_the_mark_cannot_be_reset_the_peak_is_the_processs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cpu = torch.device("cpu")
    if timing.STATUS.exists():
        monkeypatch.setattr(timing, "CLEAR_REFS", tmp_path)  # a folder cannot be written
        timing.reset_peak(cpu)
        assert timing.peak_bytes(cpu) > 2**20
    monkeypatch.setattr(timing, "STATUS", tmp_path / "no status here")
    timing.reset_peak(cpu)
    assert 2**20 < timing.peak_bytes(cpu) < 2**45


def test_the_phases_that_hints_speak_of_are_those_of_ppo(root: Path, tmp_path: Path) -> None:
    run = fitted(PPOModule(**ppo_options(root)), prompts(root), tmp_path)
    phases = {key.removeprefix("time/") for key in run.callback_metrics if key.startswith("time/")}
    assert {"rollout", "score", "estimate", "update"} <= phases
    assert all(
        0.01 < float(run.callback_metrics[f"memory/{p}"]) < 100 for p in phases - {"iteration"}
    )
