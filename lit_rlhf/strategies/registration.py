"""The strategy's names in Lightning's registry."""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from lit_rlhf.strategies.multi_engine import MultiEngineDeepSpeedStrategy


def register_strategies() -> None:
    """Register `multi_deepspeed_stage_{1,2,2_offload,3}`; safe to call again.

    Stage 3 is registered to be refused with its reason, where Lightning would only call the name
    unknown.
    """
    for name, description, arguments in (
        ("stage_1", "ZeRO stage 1", {"stage": 1}),
        ("stage_2", "ZeRO stage 2", {"stage": 2}),
        ("stage_2_offload", "ZeRO stage 2, CPU offload", {"stage": 2, "offload_optimizer": True}),
        ("stage_3", "not supported: says why", {"stage": 3}),
    ):
        StrategyRegistry.register(
            f"multi_deepspeed_{name}",
            MultiEngineDeepSpeedStrategy,
            description=f"One DeepSpeed engine per optimizer: {description}",
            override=True,
            **arguments,
        )
