import pytest
import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision

from lit_rlhf.strategies import MultiEngineDeepSpeedStrategy
from lit_rlhf.strategies.engine_config import (
    OWNED_KEYS,
    deep_merge,
    engine_config,
    validate_overrides,
)


def test_keys_that_are_set_elsewhere_and_other_precisions_are_refused() -> None:
    for key in OWNED_KEYS:
        with pytest.raises(ValueError, match=f"config: key '{key}' is not accepted"):
            validate_overrides({key: 1})
    for plugin in (DeepSpeedPrecision("16-mixed"), DeepSpeedPrecision("16-true")):
        with pytest.raises(ValueError, match="precision: expected one of"):
            MultiEngineDeepSpeedStrategy(precision_plugin=plugin)


def test_other_deepspeed_keys_win_over_the_strategys_key_by_key() -> None:
    base = {"zero_optimization": {"stage": 2, "overlap_comm": True}, "a": 1}
    result = deep_merge(base, {"zero_optimization": {"overlap_comm": False}, "b": 2})
    assert result == {"zero_optimization": {"stage": 2, "overlap_comm": False}, "a": 1, "b": 2}
    assert base["zero_optimization"] == {"stage": 2, "overlap_comm": True}


def test_gradient_buckets_are_no_larger_than_the_network() -> None:
    config = engine_config(2, False, torch.float32, "cuda", 1000, {})
    assert config["zero_optimization"]["reduce_bucket_size"] == 1000
