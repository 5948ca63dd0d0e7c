import subprocess
import sys
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn
from torch.optim import SGD

from lit_rlhf.strategies import MultiEngineDeepSpeedStrategy, multi_engine
from lit_rlhf.strategies.engine_config import (
    OWNED_KEYS,
    deep_merge,
    engine_config,
    validate_overrides,
)

# an import of deepspeed fails after this, as where it is not installed
WITHOUT_DEEPSPEED = "import sys; sys.modules['deepspeed'] = None\n"


def python(code: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_importing_registers_without_importing_deepspeed() -> None:
    code = (
        "import sys, lit_rlhf.strategies\n"
        "from lightning.pytorch.strategies import StrategyRegistry as registry\n"
        "print('deepspeed' in sys.modules, [n for n in registry if n.startswith('multi_')])"
    )
    expected = [f"multi_deepspeed_stage_{name}" for name in ("1", "2", "2_offload", "3")]
    assert python(code).strip() == f"False {expected}"


@pytest.mark.slow
def test_importing_works_where_deepspeed_is_missing() -> None:
    assert python(WITHOUT_DEEPSPEED + "import lit_rlhf.strategies; print('done')") == "done\n"


def test_registering_again_is_harmless() -> None:
    multi_engine.register_strategies()
    assert StrategyRegistry["multi_deepspeed_stage_2"]["init_params"] == {"stage": 2}


def test_stage_3_and_a_stage_that_is_said_twice_are_refused() -> None:
    for make in (StrategyRegistry.get, lambda _: MultiEngineDeepSpeedStrategy(stage=3)):
        with pytest.raises(ValueError, match="ZeRO-3 partitions the weights themselves"):
            make("multi_deepspeed_stage_3")
    with pytest.raises(ValueError, match="key 'stage' of 'zero_optimization' is not accepted"):
        MultiEngineDeepSpeedStrategy(stage=2, config={"zero_optimization": {"stage": 1}})


class Pair(nn.Module):
    policy: nn.Sequential
    critic: nn.Linear

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        self.critic = nn.Linear(2, 1)
        self.offset = nn.Parameter(torch.zeros(2))


def test_each_optimizer_belongs_to_the_child_that_holds_its_parameters() -> None:
    module = Pair()
    optimizers = [SGD(module.critic.parameters(), lr=1), SGD(module.policy[1].parameters(), lr=1)]
    assert multi_engine.optimized_networks(module, optimizers) == ["critic", "policy"]


def test_optimizers_of_other_parameters_are_refused_by_name() -> None:
    module = Pair()
    policy, critic, layers = (
        [*part.parameters()] for part in (module.policy, module.critic, module.policy[0])
    )
    shared = Pair()
    shared.critic.weight = shared.policy[0].weight = nn.Parameter(torch.zeros(3, 2))
    for owner, parameters, message in (
        (module, [[*policy, *critic]], "got parameters of: critic, policy"),
        (module, [[*critic, module.offset]], "parameters of: critic, and 1 that are in no child"),
        (module, [layers, policy[2:]], "optimizer 1: 'policy' already has optimizer 0"),
        (shared, [[*shared.critic.parameters()]], "expected the parameters of exactly one direct"),
    ):
        with pytest.raises(ValueError, match=message):
            multi_engine.optimized_networks(owner, [SGD(own, lr=1) for own in parameters])


def test_casting_leaves_buffers_and_integers_alone() -> None:
    module = nn.BatchNorm1d(2)
    multi_engine.cast_parameters(module, torch.bfloat16)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert module.running_mean.dtype == torch.float32


def test_networks_that_share_weights_have_one_type() -> None:
    module = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("policy", "critic", "reward")})
    multi_engine.check_shared_weights(module, ["critic"])
    module["critic"].weight = module["policy"].weight
    for names in ([], ["policy", "critic"], ["reward"]):
        multi_engine.check_shared_weights(module, names)
    with pytest.raises(ValueError, match="expected both of policy and critic, which share weights"):
        multi_engine.check_shared_weights(module, ["critic"])


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


def config_of_small_network(overrides: dict[str, Any]) -> dict[str, Any]:
    """Engine config of a network of 1,000 weights, with a user's keys."""
    return engine_config(
        stage=2,
        offload_optimizer=False,
        dtype=torch.float32,
        device_type="cuda",
        numel=1000,
        overrides=overrides,
    )


def test_gradient_buckets_are_no_larger_than_the_network() -> None:
    config = config_of_small_network({})
    assert config["zero_optimization"]["reduce_bucket_size"] == 1000


def test_a_users_bucket_size_wins_over_the_strategys() -> None:
    config = config_of_small_network({"zero_optimization": {"reduce_bucket_size": 7}})
    assert config["zero_optimization"]["reduce_bucket_size"] == 7
    assert config["zero_optimization"]["stage"] == 2
