"""Hints on what would make a run faster, for reports made by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_callbacks import Phase, PhaseReport
from lit_rlhf.modules import PPOModule, hints
from tests.modules.stages import ppo_options

SMALL = {
    "memory.rollout_batch_size": 8,
    "minibatches.micro_batch_size": 2,
    "network.gradient_checkpointing": True,
}
PEAK = "peak memory is 30 of 80 GiB"


def told(
    module: Any,
    seconds: dict[str, float],
    memory: float | None,
    cut: float = 0.0,
    peak: float = 30.0,
) -> list[str]:
    """All hints, for a fit of 100 seconds on a device with so much memory."""
    report = PhaseReport(100.0, 10, {name: Phase(s, peak=peak) for name, s in seconds.items()})
    run: Any = SimpleNamespace(
        callback_metrics={"rollout/truncation_rate": torch.tensor(cut)}, precision="32-true"
    )
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(hints, "device_memory", lambda device: memory)
        return [text for hint in hints.HINTS if (text := hint(report, run, module))]


@pytest.fixture(scope="module")
def module(root: Path) -> PPOModule:
    rewards = {str(root / "reward"): 1.0, "brevity": {"rule": "length", "longest": 3}}
    return PPOModule(**ppo_options(root, rewards=rewards, **SMALL))


def test_hints_say_what_to_change(module: PPOModule) -> None:
    assert told(module, {"rollout": 70.0, "update": 20.0}, None, cut=0.45) == [
        "rollout takes 70% of the time, and 45% of the responses run to "
        "sampling.max_new_tokens (6): lower it, or raise reward_shaping.missing_eos_penalty so "
        "that responses end"
    ]
    assert told(module, {"validation": 40.0}, None) == [
        "validation takes 40% of the time: raise trainer.val_check_interval, or lower "
        "trainer.limit_val_batches"
    ]
    assert told(module, {"other": 50.0}, None) == [
        "50% of the time is outside the phases, in data loading, logging, checkpoints and "
        "callbacks: raise data.num_workers, or log, save and sample less often"
    ]


def test_slow_reward_functions_are_named(root: Path) -> None:
    rules = {name: {"rule": "length", "longest": 3} for name in ("brevity", "other_rule")}
    rewards = {str(root / "reward"): 1.0, **rules}
    stage = PPOModule(**ppo_options(root, rewards=rewards))
    stage.reward.seconds = {"reward": 50.0, "brevity": 18.0, "other_rule": 2.0}
    assert told(stage, {"score": 70.0}, None) == [
        "reward functions take 20% of the time, one after the other, most of it brevity: see "
        "whether it can be faster"
    ]
    stage.reward.seconds["brevity"] = 1.0
    assert told(stage, {"score": 70.0}, None) == []


def test_hints_of_a_gpu_with_room(module: PPOModule) -> None:
    assert told(module, {"rollout": 55.0, "update": 40.0}, 80.0) == [
        f"rollout takes 55% of the time: raise memory.rollout_batch_size (now 8); {PEAK}",
        "everything is computed in float32: add configs/overlays/bf16.yaml",
        "gradient checkpointing costs about a third of the update: try without it "
        f"(network.gradient_checkpointing: false); {PEAK}",
        f"update takes 40% of the time: raise minibatches.micro_batch_size (now 2); {PEAK}",
    ]


def test_there_is_no_hint_to_use_memory_that_is_not_there(module: PPOModule) -> None:
    assert told(module, {"rollout": 55.0, "update": 40.0}, 80.0, peak=50.0) == [
        "everything is computed in float32: add configs/overlays/bf16.yaml"
    ]
    assert told(module, {"rollout": 55.0, "update": 40.0}, None) == []


def test_a_fit_in_which_all_is_well_gets_no_hint(root: Path) -> None:
    plain = PPOModule(**ppo_options(root))
    assert told(plain, {"rollout": 45.0, "score": 25.0, "update": 29.0, "other": 1.0}, None) == []
