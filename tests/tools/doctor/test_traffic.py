"""What the GPUs of a run send each other in an iteration, by hand."""

import pytest

from lit_rlhf.tools.doctor.memory import NetworkShape, PPOSizes
from lit_rlhf.tools.doctor.traffic import PhaseTraffic, ppo_traffic

SHAPE = NetworkShape(
    parameters=1000, layers=2, hidden=8, kv_width=8, vocabulary=50, matmul_width=64
)


def traffic_of(*, sharded: bool, shard_frozen: bool = False) -> dict[str, PhaseTraffic]:
    """Traffic of 5 updates with 3 micro-batches each."""
    sizes = PPOSizes(
        gpus=4,
        prompt_tokens=6,
        response_tokens=4,
        rollouts=8,
        rows=2,
        shard_frozen=shard_frozen,
        sharded=sharded,
    )
    return ppo_traffic(SHAPE, sizes, updates=5, micro_batches=3)


def test_fsdp_gathers_weights_for_each_pass_and_scatters_gradients() -> None:
    traffic = traffic_of(sharded=True)
    assert traffic["rollout"] == traffic["score"] == PhaseTraffic(gathered=2 * 1000)
    # policy, reference and critic
    assert traffic["estimate"] == PhaseTraffic(gathered=3 * 2 * 1000)
    # 30 backwards of policy and critic, of gradients in float32; weights come twice for each
    expected = PhaseTraffic(scattered=30 * 4 * 1000, gathered=2 * 30 * 2 * 1000)
    assert traffic["update"] == expected


@pytest.mark.parametrize("shard_frozen", [False, True])
def test_engines_sum_gradients_and_gather_weights_after_a_step(shard_frozen: bool) -> None:
    traffic = traffic_of(sharded=False, shard_frozen=shard_frozen)
    visit = PhaseTraffic(gathered=2 * 1000) if shard_frozen else PhaseTraffic()
    assert traffic["rollout"] == PhaseTraffic()
    assert traffic["score"] == traffic["estimate"] == visit
    # 30 backwards and 10 steps of policy and critic
    assert traffic["update"] == PhaseTraffic(summed=30 * 2 * 1000, gathered=10 * 2 * 1000)


def test_a_sum_goes_around_the_ring_twice() -> None:
    traffic = PhaseTraffic(summed=100, scattered=10, gathered=1)
    assert traffic.sent(4) == 3 / 4 * (2 * 100 + 10 + 1)
