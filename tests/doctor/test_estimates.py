"""The doctor's numbers for memory and time, by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lit_rlhf.doctor import RunPlan, duration, memory
from lit_rlhf.doctor.case import Case
from lit_rlhf.doctor.distributions import surprise
from lit_rlhf.rollout import RolloutBatch, TokenStatistics
from tests.doctor.runs import findings, module_of
from tests.modules.stages import prompts, trainer


def case_of(root: Path, folder: Path, plan: RunPlan | None = None, **options: Any) -> Case:
    module, run = module_of(root, **options), trainer(folder)
    module.trainer = run
    return Case(module, prompts(root), run, plan or RunPlan())


def size(network: torch.nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def test_states_are_weights_gradients_and_two_moments(root: Path, tmp_path: Path) -> None:
    case = case_of(root, tmp_path)
    policy, critic = size(case.module.policy), size(case.module.critic)

    needs = memory.estimated_needs(case)

    assert needs.trained == 4 * 4 * (policy + critic)  # float32
    assert needs.frozen == 4 * (policy + critic)  # reference and reward model
    assert needs.host == 0


def test_lora_trains_adapters_alone_and_has_no_reference(root: Path, tmp_path: Path) -> None:
    case = case_of(root, tmp_path, network={"lora_rank": 2})
    networks = (case.module.policy, case.module.critic)
    learned = sum(p.numel() for n in networks for p in n.parameters() if p.requires_grad)
    fixed = sum(map(size, networks)) - learned

    needs = memory.estimated_needs(case)

    assert needs.trained == 16 * learned + 4 * fixed
    assert needs.frozen == 4 * size(case.module.reward)


def test_engines_share_states_and_cast_frozen_networks(root: Path, tmp_path: Path) -> None:
    plan = RunPlan(ranks=4, strategy="multi_deepspeed_stage_2", engines=True)
    case = case_of(root, tmp_path, plan)
    policy, critic = size(case.module.policy), size(case.module.critic)

    needs = memory.estimated_needs(case)

    assert needs.trained == sum(2 * n + int(18 * n / 4) for n in (policy, critic))
    assert needs.frozen == 2 * (policy + critic)


def test_offloaded_networks_take_no_room(root: Path, tmp_path: Path) -> None:
    plan = RunPlan(ranks=2, engines=True, offload_optimizer=True)
    case = case_of(root, tmp_path, plan, memory={"offload_frozen": True})
    policy, critic = size(case.module.policy), size(case.module.critic)

    needs = memory.estimated_needs(case)

    assert needs.frozen == 0
    assert needs.trained == 2 * (policy + critic)
    assert needs.host == 24 * (policy + critic)  # 16 bytes and half as much for buffers


@pytest.mark.parametrize(("free", "status"), [(1.05, "warning"), (1.2, "ok"), (0.99, "failure")])
def test_memory_that_is_tight(root: Path, tmp_path: Path, free: float, status: str) -> None:
    case = case_of(root, tmp_path)
    case.free_memory = int(free * memory.estimated_needs(case).peak)

    assert memory.memory(case).status == status


def test_what_helps_is_of_what_takes_the_most(root: Path, tmp_path: Path) -> None:
    case = case_of(root, tmp_path)
    big = {"trained": 8, "frozen": 4, "rollout": 1, "scoring": 1, "update": 1, "host": 0}

    states = memory.what_helps(case, memory.Needs(**big))
    update = memory.what_helps(case, memory.Needs(**{**big, "update": 20}))
    scoring = memory.what_helps(case, memory.Needs(**{**big, "scoring": 20}))

    assert "set memory.offload_frozen: true" in states
    assert "set minibatches.micro_batch_size (now None)" in update
    assert "set network.gradient_checkpointing: true" in update
    assert "set memory.rollout_batch_size (now None)" in scoring


def test_the_cpus_memory_is_what_is_available_within_the_containers_limit(
    tmp_path: Path,
) -> None:
    files = {name: tmp_path / name for name in ("meminfo", "statm", "limit")}
    files["meminfo"].write_text("MemTotal:  99 kB\nMemAvailable:   4096 kB\n")
    files["statm"].write_text("500 2 1 1 0 1 0\n")
    page = memory.os.sysconf("SC_PAGE_SIZE")
    with (
        patch.object(memory, "MEMORY", files["meminfo"]),
        patch.object(memory, "OWN_PAGES", files["statm"]),
        patch.object(memory, "CGROUP_LIMIT", files["limit"]),
    ):
        assert memory.host_memory() == 4096 * 1024 + 2 * page
        files["limit"].write_text("max\n")
        assert memory.host_memory() == 4096 * 1024 + 2 * page
        files["limit"].write_text("1000000\n")
        assert memory.host_memory() == 1_000_000


@pytest.mark.parametrize(
    ("trainer_settings", "plan", "expected"),
    [
        ({"max_epochs": 3}, RunPlan(), 3 * 4),  # 32 prompts an epoch in batches of 8
        ({"max_epochs": 3}, RunPlan(ranks=3), 3 * 1),
        ({"max_epochs": 3}, RunPlan(limit_train_batches=2), 3 * 2),
        ({"max_epochs": 3}, RunPlan(limit_train_batches=0.5), 3 * 2),
        # 2 epochs of 2 minibatches, both networks: 8 optimizer steps an iteration
        ({"max_epochs": -1, "max_steps": 40}, RunPlan(), 5),
        ({"max_epochs": 1, "max_steps": 12}, RunPlan(), 2),
        ({"max_epochs": -1}, RunPlan(), math.inf),
        ({"max_epochs": 3}, RunPlan(ranks=5), 0),
    ],
)
def test_the_number_of_iterations(
    root: Path,
    tmp_path: Path,
    trainer_settings: dict[str, Any],
    plan: RunPlan,
    expected: float,
) -> None:
    seen: list[float] = []
    original = duration.iterations

    def note(case: Case, updates: int) -> float:
        assert updates == 4
        seen.append(original(case, updates))
        return seen[-1]

    with patch.object(duration, "iterations", note):
        findings(root, tmp_path, plan=plan, data={"samples_per_epoch": 32}, **trainer_settings)

    assert seen == [expected]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.034, "0.034 s"), (9.94, "9.9 s"), (59, "59 s"), (90, "1.5 min"), (5400, "1.5 h")],
)
def test_times_are_for_people(seconds: float, text: str) -> None:
    assert duration.shown(seconds) == text


def test_an_update_counts_as_often_as_an_iteration_makes_it(root: Path, tmp_path: Path) -> None:
    case = case_of(root, tmp_path)
    case.timer.seconds = {"rollout": 5.0, "score": 1.0, "update": 0.5}
    with patch.object(duration, "updates_per_iteration", lambda case: 4):
        assert duration.iteration_seconds(case) == {"rollout": 5.0, "score": 1.0, "update": 2.0}


def test_truly_sampled_tokens_are_as_surprising_as_the_entropy_says() -> None:
    probabilities = torch.tensor([0.7, 0.2, 0.1])
    logprobs = probabilities.log()
    entropy = float(-(probabilities * logprobs).sum())
    # 70, 20 and 10 of 100 tokens: the frequencies are the probabilities; greedy: the first alone
    fair = torch.tensor([0] * 70 + [1] * 20 + [2] * 10)
    for tokens, expected in ((fair, 0.0), (fair * 0, float(logprobs[0]) + entropy)):
        mask = torch.ones(1, 100, dtype=torch.bool)
        rollouts = RolloutBatch(tokens[None], mask, tokens[None], mask, mask[:, 0])
        zeros = torch.zeros(1, 100)
        estimates = TokenStatistics(
            logprobs[tokens][None], zeros, zeros + entropy, zeros, zeros[:, 0]
        )

        excess, _ = surprise(rollouts, estimates)

        assert excess == pytest.approx(expected, abs=1e-6)
