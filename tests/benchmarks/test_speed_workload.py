"""Both sides do the same work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.speed.job import Job
from benchmarks.speed.ours import build_loader, build_module, run
from benchmarks.speed.workload import (
    BOS,
    EOS,
    PAD,
    SIZES,
    Workload,
    bias_lm_head,
    left_padded,
    policy_network,
    prompts,
    save_networks,
)

TINY = Workload(**SIZES["tiny"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("networks")
    save_networks(TINY, path)
    return path


def test_prompts_repeat_and_have_all_lengths() -> None:
    first, again = prompts(Workload(), 2), prompts(Workload(), 2)

    rows = [row for iteration in first for row in iteration]
    repeated = [row for iteration in again for row in iteration]
    assert len(first) == 2
    assert len(rows) == 256
    assert all(a.equal(b) for a, b in zip(rows, repeated, strict=True))
    assert {len(row) for row in rows} == set(range(16, 65))
    assert min(int(row.min()) for row in rows) >= 3


def test_both_sides_get_the_same_prompts() -> None:
    ours = list(build_loader(TINY, 2))
    peers = [left_padded(rows) for rows in prompts(TINY, 2)]

    for mine, theirs in zip(ours, peers, strict=True):
        assert mine.input_ids.equal(theirs)
        assert mine.attention_mask.equal(theirs != PAD)
        assert mine.ptx is None


@pytest.mark.parametrize("mode", ["ragged", "full"])
def test_responses_end_with_the_probability_asked_for(mode: str) -> None:
    work = Workload(mode="ragged" if mode == "ragged" else "full", layers=1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = policy_network(work)
        bias_lm_head(model, work)
        ids = torch.randint(3, work.vocab, (8, 64))
    with torch.no_grad():
        ends = model(ids).logits.softmax(-1)[..., [PAD, BOS, EOS]].mean((0, 1))

    assert ends[:2].max() < 1e-12
    if mode == "ragged":
        assert ends[2] == pytest.approx(1 / 32, rel=0.1)
    else:
        assert ends[2] < 1e-12


def test_job_survives_its_file(folder: Path, tmp_path: Path) -> None:
    job = Job(replace(TINY, mode="full"), str(folder), threads=torch.get_num_threads())
    job.save(tmp_path / "job.json")

    with torch.random.fork_rng():
        assert Job.load(tmp_path / "job.json") == job


def test_policy_and_reference_are_one_network_and_the_critic_another(folder: Path) -> None:
    module = build_module(Job(TINY, str(folder)))

    policy, reference = module.policy.state_dict(), module.reference.state_dict()
    assert policy.keys() == reference.keys()
    assert all(value.equal(reference[name]) for name, value in policy.items())
    assert not any(p.requires_grad for p in module.reference.parameters())
    assert all(p.requires_grad for p in module.policy.parameters())
    reward = module.reward.models[0].model.state_dict()
    assert not module.critic.state_dict()["score.weight"].equal(reward["score.weight"])


@pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode")
@pytest.mark.filterwarnings("ignore:GPU available but not used")
def test_our_side_runs_and_counts_its_work(folder: Path) -> None:
    job = Job(replace(TINY, mode="full"), str(folder), warmup=1, updates=1)

    laps = run(job)

    assert len(laps.records) == 2
    record = laps.records[1]
    assert record["prompts"] == [len(row) for row in prompts(job.work, 2)[1]]
    assert record["responses"] == [TINY.response] * TINY.batch
    assert set(record["phases"]) == {"rollout", "score", "update", "other"}
    assert sum(record["phases"].values()) == pytest.approx(record["seconds"])
    assert min(record["phases"].values()) >= 0
    assert laps.memory_before_mib > 0
