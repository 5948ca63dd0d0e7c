"""Both sides do the same work."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.speed import workload
from benchmarks.speed.job import Job
from benchmarks.speed.ours import build_loader, run

TINY = workload.Workload(**workload.SIZES["tiny"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("networks")
    workload.save_networks(TINY, path)
    return path


def test_both_sides_get_the_same_prompts() -> None:
    ours = list(build_loader(TINY, 2))
    peers = [workload.left_padded(rows) for rows in workload.prompts(TINY, 2)]
    for mine, theirs in zip(ours, peers, strict=True):
        assert mine.input_ids.equal(theirs)
        assert mine.attention_mask.equal(theirs != workload.PAD)
        assert mine.ptx is None


@pytest.mark.parametrize("mode", ["ragged", "full"])
def test_responses_end_with_the_probability_asked_for(mode: Any) -> None:
    work = workload.Workload(mode=mode, layers=1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = workload.policy_network(work)
        workload.bias_lm_head(model, work)
        ids = torch.randint(3, work.vocab, (8, 64))
    with torch.no_grad():
        special = [workload.PAD, workload.BOS, workload.EOS]
        ends = model(ids).logits.softmax(-1)[..., special].mean((0, 1))
    assert ends[:2].max() < 1e-12
    if mode == "ragged":
        assert ends[2] == pytest.approx(1 / 32, rel=0.1)
    else:
        assert ends[2] < 1e-12


@pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode")
@pytest.mark.filterwarnings("ignore:GPU available but not used")
def test_our_side_runs_and_counts_its_work(folder: Path) -> None:
    job = Job(replace(TINY, mode="full"), str(folder), warmup=1, updates=1)
    laps = run(job)
    assert len(laps.records) == 2
    record = laps.records[1]
    assert record["prompts"] == [len(row) for row in workload.prompts(job.work, 2)[1]]
    assert record["responses"] == [TINY.response] * TINY.batch
    assert set(record["phases"]) == {"rollout", "score", "update", "other"}
    assert sum(record["phases"].values()) == pytest.approx(record["seconds"])
    assert min(record["phases"].values()) >= 0
    assert laps.memory_before_mib > 0
