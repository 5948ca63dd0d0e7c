"""DeepSpeed's configuration of one engine."""

from collections.abc import Mapping
from typing import Any

import torch

PRECISION_DTYPES: dict[str, torch.dtype] = {
    "32-true": torch.float32,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
}
"""Type of an engine's weights by the Trainer's precision; master weights are always float32."""

OWNED_KEYS = {
    "gradient_clipping": "each network is clipped by itself: pass max_norm to clipped_step",
    "gradient_accumulation_steps": "the module accumulates: several backwards, then one step",
    "managed_gradient_accumulation": "the module decides when to step",
    "train_batch_size": "the datamodule decides on batches",
    "train_micro_batch_size_per_gpu": "the datamodule decides on batches",
    "optimizer": "optimizers come from configure_optimizers",
    "scheduler": "schedules come from configure_optimizers",
    "fp16": "fp16 is not supported: use trainer.precision bf16-mixed or 32-true",
    "bf16": "set trainer.precision, and fp32_networks for networks that stay in float32",
}
"""DeepSpeed keys that users cannot set, with what decides instead."""


def validate_stage(stage: int) -> int:
    """Return the ZeRO stage if it is 1 or 2."""
    if stage == 3:
        raise ValueError(
            "stage: expected 1 or 2, got 3. ZeRO-3 partitions the weights themselves, so that a "
            "network can only be called through its engine, which generation, scoring and saving "
            "do not do. To save memory use multi_deepspeed_stage_2_offload, LoRA or more ranks"
        )
    if stage not in (1, 2):
        raise ValueError(f"stage: expected 1 or 2, got {stage!r}")
    return stage


def validate_overrides(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a user's DeepSpeed keys, and refuse keys that the strategy or the module decides."""
    for key in config:
        if key in OWNED_KEYS:
            raise ValueError(f"config: key {key!r} is not accepted: {OWNED_KEYS[key]}")
    if "stage" in config.get("zero_optimization", {}):
        # the strategy's other settings depend on the stage
        raise ValueError(
            "config: key 'stage' of 'zero_optimization' is not accepted: pass stage to the strategy"
        )
    return dict(config)


def deep_merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings; nested ones are merged key by key.

    Args:
        base: One mapping.
        overrides: The other, which wins.
    """
    merged = dict(base)
    for key, value in overrides.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = deep_merge(old, value)
        merged[key] = value
    return merged


def engine_config(
    *,
    stage: int,
    offload_optimizer: bool,
    dtype: torch.dtype,
    device_type: str,
    numel: int,
    overrides: Mapping[str, Any],
) -> dict[str, Any]:
    """DeepSpeed's configuration of an engine.

    Args:
        stage: ZeRO stage, 1 or 2.
        offload_optimizer: Whether master weights and moments are in CPU memory, and step there.
            They are always float32.
        dtype: Type of the network's weights, float32 or bfloat16.
        device_type: `cuda` or `cpu`.
        numel: Number of weights that the engine trains.
        overrides: A user's keys, which win.
    """
    zero: dict[str, Any] = {
        "stage": stage,
        # DeepSpeed 0.19.8 refuses it at stage 1 without managed gradient accumulation
        "overlap_comm": stage == 2 and device_type == "cuda",
        "contiguous_gradients": True,
        # Each backward allocates a whole bucket, so make it no larger than the network needs. The
        # 200 million elements are the default of Lightning's own DeepSpeed strategy.
        "reduce_bucket_size": min(max(numel, 1), 200_000_000),
        "allgather_bucket_size": 200_000_000,
    }
    if offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": device_type == "cuda"}
    config: dict[str, Any] = {
        # DeepSpeed insists on a batch size, but only its throughput log uses it
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # Since 0.19.8 an engine takes any number of backwards, and every `step` is a real one.
        # Before, it counted backwards and stepped at multiples of `gradient_accumulation_steps`.
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,  # off; `EngineOptimizer.clip_next_step` sets it for each step
        "zero_allow_untested_optimizer": True,  # otherwise ZeRO takes only Adam and a few others
        # otherwise offloading insists on DeepSpeedCPUAdam, which is compiled at run time
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        # the throughput timer would synchronize the device in every forward
        "timers": {"throughput": {"enabled": False}},
    }
    if dtype == torch.bfloat16:
        config["bf16"] = {"enabled": True}
        if stage == 2:
            # A bfloat16 sum has 8 bits of mantissa and loses what small micro-batches add. At stage
            # 1 DeepSpeed 0.19.8 answers this key with another class (BF16_Optimizer), which lacks
            # the attributes that `engine_optimizer` uses.
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    return deep_merge(config, overrides)
