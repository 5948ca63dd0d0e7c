"""DeepSpeed's configuration of one engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import torch

EnginePrecisionName = Literal["32-true", "bf16-mixed", "bf16-true"]

PRECISION_DTYPES: dict[str, torch.dtype] = {
    "32-true": torch.float32,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
}

OWNED_KEYS = {
    "gradient_clipping": "clipping is per network: pass max_norm to clipped_step",
    "gradient_accumulation_steps": "accumulation is the module's: several backwards, one step",
    "managed_gradient_accumulation": "the module decides when to step",
    "train_batch_size": "batches are the module's",
    "train_micro_batch_size_per_gpu": "batches are the module's",
    "optimizer": "optimizers come from configure_optimizers",
    "scheduler": "schedules come from configure_optimizers",
    "fp16": "fp16 is not supported: use precision bf16-mixed or 32-true",
    "bf16": "precision is the Trainer's, or a network's under fp32_networks",
}


def checked_stage(stage: int) -> int:
    """The ZeRO stage, 1 or 2.

    Raises:
        ValueError: For any other, with the reason.
    """
    if stage == 3:
        raise ValueError(
            "stage: expected 1 or 2, got 3. ZeRO-3 partitions the weights themselves, so that a "
            "network could only be called through its engine, which generation, scoring and saving "
            "do not. Use multi_deepspeed_stage_2_offload, LoRA or more ranks to save memory"
        )
    if stage not in (1, 2):
        raise ValueError(f"stage: expected 1 or 2, got {stage!r}")
    return stage


def checked_precision(precision: str) -> EnginePrecisionName:
    """The Trainer's precision.

    Raises:
        ValueError: For one that engines do not run in.
    """
    if precision not in PRECISION_DTYPES:
        raise ValueError(f"precision: expected one of {list(PRECISION_DTYPES)}, got {precision!r}")
    return cast("EnginePrecisionName", precision)


def checked_overrides(config: Mapping[str, Any]) -> dict[str, Any]:
    """A user's DeepSpeed keys.

    Raises:
        ValueError: For a key that the strategy or the module owns.
    """
    for key in config:
        if key in OWNED_KEYS:
            raise ValueError(f"config: {key!r} is not accepted: {OWNED_KEYS[key]}")
    if "stage" in config.get("zero_optimization", {}):
        # other settings follow from the stage, and would be those of another one
        raise ValueError(
            "config: 'stage' of 'zero_optimization' is not accepted: pass stage to the strategy"
        )
    return dict(config)


def merged(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `overrides`, which win; mappings merge key by key."""
    result = dict(base)
    for key, value in overrides.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = merged(old, value)
        result[key] = value
    return result


def engine_config(
    stage: int,
    offload_optimizer: bool,
    dtype: torch.dtype,
    device_type: str,
    numel: int,
    overrides: Mapping[str, Any],
) -> dict[str, Any]:
    """The configuration of an engine.

    Args:
        stage: ZeRO stage, 1 or 2.
        offload_optimizer: Keep master weights and moments, and step, in CPU memory.
        dtype: Of the network's weights; master weights and moments are always float32.
        device_type: `cuda` or `cpu`.
        numel: Number of elements that the engine trains.
        overrides: A user's DeepSpeed keys.
    """
    zero: dict[str, Any] = {
        "stage": stage,
        # only stage 2 can reduce during the backward when the module decides when to step
        "overlap_comm": stage == 2 and device_type == "cuda",
        "contiguous_gradients": True,
        # allocated in each backward: no larger than the network needs
        "reduce_bucket_size": min(max(numel, 1), 200_000_000),
        "allgather_bucket_size": 200_000_000,
    }
    if offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": device_type == "cuda"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # required, for DeepSpeed's throughput log alone
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # any number of backwards, then one step
        "gradient_clipping": 0.0,  # set step by step
        "zero_allow_untested_optimizer": True,
        # torch's optimizers also run offloaded, DeepSpeedCPUAdam needs a compiler at run time
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "timers": {"throughput": {"enabled": False}},  # it would synchronize in every forward
    }
    if dtype == torch.bfloat16:
        config["bf16"] = {"enabled": True}
        if stage == 2:
            # bf16 sums lose small micro-batches; stage 1 would take another, untested optimizer
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    return merged(config, overrides)
