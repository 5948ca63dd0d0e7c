"""Out-of-memory errors name the phase, the sizes and the setting to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_rlhf.modules import PPOModule, RewardModule, SFTModule
from lit_rlhf.modules.out_of_memory import explain_memory_errors
from tests.modules.stages import demonstrations, fitted, ppo_options, preferences, prompts

SHORTER = "or lower sampling.max_new_tokens (now 6)"
ROLLOUT = f"What helps: lower memory.rollout_batch_size (now 4), {SHORTER}. The"
SCORING = f"What helps: set memory.max_tokens_per_forward (now None), {SHORTER}. The"
PHASES = {
    "rollout": ("rollout", ROLLOUT),
    "score": ("score", SCORING),
    "estimate": ("estimate", SCORING),
    "update": (
        "policy_loss",
        "What helps: set minibatches.micro_batch_size (now None), or set "
        f"minibatches.micro_batch_tokens (now None), {SHORTER}, or "
        "set network.gradient_checkpointing: true. The",
    ),
}


def too_much(*_: object, **__: object) -> Any:
    """More than any machine has: the CPU's allocator refuses, before it takes anything."""
    return torch.empty(10**15)


@pytest.mark.parametrize("phase", PHASES)
def test_ppos_phases_are_named_with_their_sizes_and_settings(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    method, advice = PHASES[phase]
    monkeypatch.setattr(PPOModule, method, too_much)
    module = PPOModule(**ppo_options(root, memory={"rollout_batch_size": 4}))
    with pytest.raises(torch.OutOfMemoryError) as error:
        fitted(module, prompts(root), tmp_path)
    message = str(error.value)
    assert message.startswith(f"{phase}: out of memory with 8 sequences of ")
    assert advice in message
    assert "you tried to allocate 4000000000000000 bytes" in message
    assert isinstance(error.value.__cause__, RuntimeError)


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_an_update_of_the_other_stages_is_named_too(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    module_class, data = {
        "sft": (SFTModule, demonstrations),
        "reward": (RewardModule, preferences),
    }[stage]
    monkeypatch.setattr(module_class, "forward", too_much)
    module = module_class(
        str(root / "policy"), micro_batch_size=2, network={"gradient_checkpointing": True}
    )
    with pytest.raises(torch.OutOfMemoryError) as error:
        fitted(module, data(root), tmp_path)
    message = str(error.value)
    assert message.startswith("update: out of memory with 4 sequences of ")
    assert (
        "What helps: lower micro_batch_size (now 2), or set micro_batch_tokens (now None), or "
        "lower data.tokens_per_batch, or lower data.max_length. The allocator"
    ) in message


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
    with (
        pytest.raises(torch.OutOfMemoryError, match=r"score: .* 2 sequences of 3 tokens"),
        explain_memory_errors("score", torch.zeros(2, 3), ["lower x"]),
    ):
        raise error


def test_other_errors_are_left_as_they_are() -> None:
    error = RuntimeError("shapes do not fit")
    with (
        pytest.raises(RuntimeError, match=r"^shapes do not fit$"),
        explain_memory_errors("score", torch.zeros(2, 3), ["lower x"]),
    ):
        raise error
