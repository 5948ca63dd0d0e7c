"""PPO's options for reference and reward model: kept in bfloat16, in CPU memory between uses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_rlhf.forward import Offloaded
from lit_rlhf.modules import PPOModule
from tests.support.stages import copy_state, fit_module, ppo_options, prompts

FROZEN = ("reference.", "reward.")


def trained(root: Path, folder: Path, **options: Any) -> tuple[PPOModule, dict[str, float]]:
    module = PPOModule(**ppo_options(root, **options))
    metrics = fit_module(module, prompts(root), folder).callback_metrics.items()
    skipped = ("time/", "throughput/", "memory/")
    return module, {k: float(v) for k, v in metrics if not k.startswith(skipped)}


@pytest.mark.parametrize("option", ["offload_frozen", "shard_frozen"])
def test_offloading_changes_nothing_but_the_place(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    visits: list[Tensor] = []

    def copy(tensor: Tensor, device: torch.device) -> Tensor:
        visits.append(tensor)
        return tensor.to(device, copy=True)

    monkeypatch.setattr("lit_rlhf.forward.networks.copy_to_device", copy)
    here, expected = trained(root, tmp_path / "here")
    assert visits == []
    away, logged = trained(root, tmp_path / "away", memory={option: True})
    assert logged == expected
    before = copy_state(here)
    assert all(torch.equal(value, before[key]) for key, value in copy_state(away).items())
    frozen = {key for key in before if key.startswith(FROZEN)}
    assert {key for key in before if key not in copy_state(away)} == frozen
    networks = [away.reference, *(source.model for source in away.reward.models)]
    assert all(isinstance(network, Offloaded) for network in networks)
    assert len(visits) == len(networks)  # each visits once in the one iteration, in one copy


def test_frozen_networks_in_bfloat16_beside_float32_ones(root: Path, tmp_path: Path) -> None:
    _, expected = trained(root, tmp_path / "float32")
    module, logged = trained(root, tmp_path / "bfloat16", memory={"frozen_dtype": "bfloat16"})
    types = {
        name: {p.dtype for p in network.parameters()}
        for name, network in module.named_children()
        if any(True for _ in network.parameters())
    }
    single, half = {torch.float32}, {torch.bfloat16}
    assert types == {"policy": single, "critic": single, "reference": half, "reward": half}
    # 8 bits of mantissa, in networks with weights ten times larger than usual
    assert logged["rollout/score"] == pytest.approx(expected["rollout/score"], abs=0.1)
    key = "rollout/ref_perplexity"
    assert expected[key] != logged[key] == pytest.approx(expected[key], rel=0.1)
