"""The estimate of memory, by hand, and what is said of it."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lit_rlhf.forward import cpu
from lit_rlhf.tools.doctor.checks import memory
from lit_rlhf.tools.doctor.memory import PPOMemory, estimate_memory, ppo_sizes
from lit_rlhf.tools.doctor.plan import RunPlan
from tests.support.doctor_runs import case_of, findings, module_of, not_ok, only_finding

RLOO: dict[str, Any] = {"responses_per_prompt": 2, "advantages": {"estimator": "rloo"}}


def size(network: torch.nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def estimated(*arguments: Any, **options: Any) -> tuple[int, int, PPOMemory]:
    """Numbers in the policy and in the critic, and the estimate."""
    case = case_of(*arguments, **options)
    return size(case.module.policy), size(case.module.critic), estimate_memory(case)


def test_sizes_of_a_run_come_each_from_its_own_setting(root: Path, tmp_path: Path) -> None:
    case = case_of(
        root,
        tmp_path,
        plan=RunPlan(ranks=6, nodes=2),
        memory={"rollout_batch_size": 3, "max_tokens_per_forward": 500},
        minibatches={"micro_batch_size": 2, "micro_batch_tokens": 70},
    )
    sizes = ppo_sizes(case)
    assert (sizes.gpus, sizes.nodes) == (6, 2)
    positions = case.module.policy.config.max_position_embeddings
    assert (sizes.prompt_tokens, sizes.response_tokens) == (positions, 24)
    assert (sizes.rollouts, sizes.rows) == (3, 2)
    assert (sizes.micro_batch_tokens, sizes.scored_tokens) == (70, 500)


@pytest.mark.parametrize(
    ("plan", "memory_options"),
    [
        ({"offload_optimizer": True}, {}),
        ({"sharded": True}, {}),
        ({}, {"offload_frozen": True}),
        ({}, {"shard_frozen": True}),
    ],
)
def test_each_way_to_save_memory_is_counted_by_its_own_setting(
    root: Path, tmp_path: Path, plan: dict[str, bool], memory_options: dict[str, bool]
) -> None:
    sizes = ppo_sizes(case_of(root, tmp_path, RunPlan(**plan), memory=memory_options))
    ways = ("offload_optimizer", "sharded", "offload_frozen", "shard_frozen")
    assert {way for way in ways if getattr(sizes, way)} == {*plan, *memory_options}


def test_too_little_memory_is_a_failure(root: Path, tmp_path: Path) -> None:
    with patch("lit_rlhf.tools.doctor.run.free_memory", lambda device: 2**20):
        finding = only_finding(findings(root, tmp_path), "memory", "failure")
    assert "What helps" in finding.change


def test_gradients_are_of_one_network_at_a_time(root: Path, tmp_path: Path) -> None:
    policy, critic, needs = estimated(root, tmp_path)
    assert needs.trained == 4 * 3 * (policy + critic)  # float32
    assert needs.gradients == 4 * max(policy, critic)  # one after the other
    assert needs.frozen == 4 * (policy + critic)  # reference and reward model
    assert needs.cpu == 0


def test_without_a_critic_there_are_no_states_of_one(root: Path, tmp_path: Path) -> None:
    case = case_of(root, tmp_path, **RLOO)
    needs = estimate_memory(case)
    assert needs.trained == 4 * 3 * size(case.module.policy)
    assert needs.gradients == 4 * size(case.module.policy)
    report = findings(root, tmp_path, module_of(root, **RLOO))
    assert set(not_ok(report).values()) <= {"warning"}
    assert "(policy 0" in report.findings["memory"].observation


@pytest.mark.parametrize("init", ["policy", "reward"])
def test_lora_holds_weights_below_adapters_once(root: Path, tmp_path: Path, init: str) -> None:
    case = case_of(root, tmp_path, network={"lora_rank": 2}, critic_init=init)
    policy, critic, reward = case.module.policy, case.module.critic, case.module.reward
    learned = sum(p.numel() for n in (policy, critic) for p in n.parameters() if p.requires_grad)
    every = {id(p): p.numel() for n in (policy, critic, reward) for p in n.parameters()}
    separate = sum(map(size, (policy, critic, reward)))
    needs = estimate_memory(case)
    assert case.module.reference is None
    assert needs.trained + needs.frozen == 8 * learned + 4 * sum(every.values())
    assert sum(every.values()) < separate - 0.3 * size(reward)


def test_engines_share_states_and_cast_frozen_networks(root: Path, tmp_path: Path) -> None:
    plan = RunPlan(ranks=4, engines=True)
    policy, critic, needs = estimated(root, tmp_path, plan)
    assert needs.trained == sum(2 * n + 12 * n // 4 for n in (policy, critic))
    assert needs.gradients == max(n + 4 * n for n in (policy, critic))  # a share and buckets
    assert needs.frozen == 2 * (policy + critic)


def test_sharded_networks_are_float32_and_spread_over_the_ranks(root: Path, tmp_path: Path) -> None:
    policy, critic, needs = estimated(root, tmp_path, RunPlan(ranks=4, sharded=True))
    # weights and two moments of Adam; the gradients of one network; bfloat16 where it is frozen
    assert needs.trained == sum(3 * (4 * n // 4) for n in (policy, critic))
    assert needs.gradients == max(4 * n // 4 for n in (policy, critic))
    assert needs.frozen == 2 * (policy + critic) // 4
    assert needs.cpu == 0


def test_offloaded_networks_take_no_room(root: Path, tmp_path: Path) -> None:
    plan = RunPlan(ranks=2, engines=True, offload_optimizer=True)
    policy, critic, needs = estimated(root, tmp_path, plan, memory={"offload_frozen": True})
    assert needs.frozen == 0
    assert needs.trained == 2 * (policy + critic)
    pinned = sum(1 << (4 * n - 1).bit_length() for n in (policy, critic))
    # 16 bytes and half as much for buffers; a copy of reference and reward model on each rank
    assert needs.cpu == 24 * (policy + critic) + 2 * pinned


def test_ranks_have_shares_of_frozen_networks(root: Path, tmp_path: Path) -> None:
    plan = RunPlan(ranks=4, engines=True)
    policy, critic, needs = estimated(root, tmp_path, plan, memory={"shard_frozen": True})
    assert needs.frozen == 4 * policy // 4 + 4 * critic // 4
    assert needs.cpu == 0


def test_a_gpu_that_is_not_there_has_an_a100s_memory(root: Path, tmp_path: Path) -> None:
    case = case_of(root, tmp_path, RunPlan(on_gpu=True))
    with (
        patch("torch.cuda.is_available", return_value=False),
        patch("lit_rlhf.tools.doctor.memory.tokens_within_memory", return_value=9) as tokens,
    ):
        sizes = ppo_sizes(case)
    assert (sizes.micro_batch_tokens, sizes.device.type, sizes.itemsize) == (9, "cuda", 4)
    assert tokens.call_args.args[1] == torch.device("cuda")
    assert tokens.call_args.kwargs == {"memory": 20 * 10**9, "itemsize": 4}


def test_a_gpu_that_is_there_has_its_own_memory(root: Path, tmp_path: Path) -> None:
    case = case_of(root, tmp_path, RunPlan(on_gpu=True))
    with (
        patch("torch.cuda.is_available", return_value=True),
        patch("torch.cuda.get_device_properties") as properties,
        patch("lit_rlhf.tools.doctor.memory.tokens_within_memory", return_value=9) as tokens,
    ):
        properties.return_value.total_memory = 40 * 10**9
        assert ppo_sizes(case).micro_batch_tokens == 9
    assert tokens.call_args.kwargs["memory"] == 10**10


def test_a_cpu_splits_an_update_by_itself(root: Path, tmp_path: Path) -> None:
    whole = estimate_memory(case_of(root, tmp_path, RunPlan(on_gpu=True)))
    split = case_of(root, tmp_path)
    of_users = case_of(root, tmp_path, minibatches={"micro_batch_size": 4})
    with patch("lit_rlhf.tools.doctor.memory.tokens_within_memory", lambda *_, **__: 8):
        assert estimate_memory(split).update < whole.update
        assert estimate_memory(of_users).update == whole.update


@pytest.mark.parametrize(("free", "status"), [(1.05, "warning"), (1.2, "ok"), (0.99, "failure")])
def test_memory_is_judged_by_its_share_of_the_peak(
    root: Path, tmp_path: Path, free: float, status: str
) -> None:
    case = case_of(root, tmp_path)
    case.free_memory = int(free * estimate_memory(case).peak)
    assert memory.check_memory(case).status == status


def test_what_helps_is_of_what_takes_the_most(root: Path, tmp_path: Path) -> None:
    case = case_of(root, tmp_path)
    big = {"trained": 8, "frozen": 4, "rollout": 1, "scoring": 1, "update": 1}
    rest = {"cpu": 0, "gradients": 0}
    sizes = {most: {**big, **rest, most: 20} for most in ("trained", "update", "scoring")}
    said = {k: memory.suggest_settings(case, PPOMemory(**v)) for k, v in sizes.items()}
    assert "set memory.offload_frozen: true" in said["trained"]
    assert "set minibatches.micro_batch_size (now None)" in said["update"]
    assert "set network.gradient_checkpointing: true" in said["update"]
    assert "set memory.rollout_batch_size (now None)" in said["scoring"]


def test_the_cpus_memory_is_what_is_available_within_the_containers_limit(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("meminfo", "statm", "limit")}
    files["meminfo"].write_text("MemTotal:  99 kB\nMemAvailable:   4096 kB\n")
    files["statm"].write_text("500 2 1 1 0 1 0\n")
    page = memory.os.sysconf("SC_PAGE_SIZE")
    with (
        patch.object(memory, "MEMORY", files["meminfo"]),
        patch.object(cpu, "OWN_PAGES", files["statm"]),
        patch.object(memory, "CGROUP_LIMIT", files["limit"]),
    ):
        assert memory.free_cpu_memory() == 4096 * 1024 + 2 * page
        for limit, free in (("max", 4096 * 1024 + 2 * page), ("1000000", 1_000_000)):
            files["limit"].write_text(f"{limit}\n")
            assert memory.free_cpu_memory() == free
