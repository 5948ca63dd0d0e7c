"""The engines on a CUDA device."""

from pathlib import Path

import pytest
import torch

from tests.support.strategy_runs import outcome

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ENVIRONMENT = {"RUN_ON": "cuda", "DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": "0"}
STRATEGIES = [f"multi_deepspeed_stage_{name}" for name in ("1", "2", "2_offload")]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-4), ("bf16-mixed", 0.02)])
def test_cuda_follows_cpu(tmp_path: Path, strategy: str, precision: str, tolerance: float) -> None:
    scenarios = ["gan", "policy_and_critic"]
    expected = outcome(tmp_path / "cpu", "auto", 1, *scenarios)
    more = {"precision": precision, "environment": ENVIRONMENT}
    actual = outcome(tmp_path / "cuda", strategy, 1, *scenarios, **more)
    for scenario in scenarios:
        for key, value in expected[scenario]["state"].items():
            error = (actual[scenario]["state"][key].cpu().float() - value.float()).abs().max()
            assert error <= tolerance * value.abs().max(), (scenario, key)
