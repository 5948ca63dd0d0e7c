from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry

import lit_rlhf.strategies
from lit_rlhf.strategies import MultiEngineDeepSpeedStrategy
from lit_rlhf.strategies.engine_config import (
    OWNED_KEYS,
    checked_overrides,
    checked_precision,
    engine_config,
    merged,
)

# an import of deepspeed fails after this, as where it is not installed
WITHOUT_DEEPSPEED = "import sys; sys.modules['deepspeed'] = None\n"


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_registers_without_importing_deepspeed() -> None:
    code = (
        "import sys, lit_rlhf.strategies\n"
        "from lightning.pytorch.strategies import StrategyRegistry as registry\n"
        "print('deepspeed' in sys.modules, [n for n in registry if n.startswith('multi_')])"
    )
    expected = [f"multi_deepspeed_stage_{name}" for name in ("1", "2", "2_offload", "3")]
    assert python(code).strip() == f"False {expected}"


def test_importing_works_where_deepspeed_is_missing() -> None:
    assert python(WITHOUT_DEEPSPEED + "import lit_rlhf.strategies; print('done')") == "done\n"


def test_registering_again_is_harmless() -> None:
    lit_rlhf.strategies.registration.register_strategies()
    assert StrategyRegistry["multi_deepspeed_stage_2"]["init_params"] == {"stage": 2}


def test_stage_3_is_refused_with_its_reason() -> None:
    with pytest.raises(ValueError, match="ZeRO-3 partitions the weights themselves"):
        StrategyRegistry.get("multi_deepspeed_stage_3")
    with pytest.raises(ValueError, match="ZeRO-3 partitions the weights themselves"):
        MultiEngineDeepSpeedStrategy(stage=3)


def test_the_stage_is_said_in_one_place() -> None:
    with pytest.raises(ValueError, match="config: 'stage' of 'zero_optimization' is not accepted"):
        MultiEngineDeepSpeedStrategy(stage=2, config={"zero_optimization": {"stage": 1}})


@pytest.mark.parametrize("key", sorted(OWNED_KEYS))
def test_a_deepspeed_key_that_is_not_the_users_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f"config: '{key}' is not accepted"):
        checked_overrides({key: 1})


def test_other_deepspeed_keys_win_over_the_strategys_key_by_key() -> None:
    base = {"zero_optimization": {"stage": 2, "overlap_comm": True}, "a": 1}
    result = merged(base, {"zero_optimization": {"overlap_comm": False}, "b": 2})
    assert result == {"zero_optimization": {"stage": 2, "overlap_comm": False}, "a": 1, "b": 2}
    assert base["zero_optimization"] == {"stage": 2, "overlap_comm": True}


def test_gradient_buckets_are_no_larger_than_the_network() -> None:
    config = engine_config(2, False, torch.float32, "cuda", 1000, {})
    assert config["zero_optimization"]["reduce_bucket_size"] == 1000


@pytest.mark.parametrize("precision", ["16-mixed", "16-true", "64-true"])
def test_other_precisions_are_refused(precision: str) -> None:
    with pytest.raises(ValueError, match="precision: expected one of"):
        checked_precision(precision)
