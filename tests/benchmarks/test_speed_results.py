"""From updates to figures, tables and the page that quotes them."""

import json
from typing import Any

import pytest
import torch

from benchmarks.speed import report
from benchmarks.speed.job import Job
from benchmarks.speed.ours_supervised import build_batches, lengths
from benchmarks.speed.workload import SIZES, Workload, completions, prompts

TINY = Workload(**SIZES["tiny"])
CEILINGS: dict[str, Any] = {"device": "a processor", "bytes_per_second": 1e9, "peak_bf16": None}
CEILINGS |= {"flops_fp32": 1e6, "flops_fp32_onednn": 2e6, "flops_bf16": 2e6}


def run_of(side: str, *seconds: float, foreign: float = 0.0, memory: float = 100.0) -> Any:
    def update(value: float) -> dict[str, Any]:
        phases = {"rollout": value / 2, "update": value / 4, "other": value / 4}
        counts = {"prompt_tokens": 30, "response_tokens": 70}
        counts |= {"flops": {"rollout": 1e5, "score": 2e5, "update": 3e5}}
        return {"seconds": value, "foreign_cores": foreign, "phases": phases, **counts}

    kind = {"side": side, "case": "ragged", "precision": "fp32", "versions": {"torch": "2.13.0"}}
    memories = {"memory_before_mib": 50.0, "peak_memory_mib": memory}
    return {**kind, **memories, "updates": [*map(update, seconds)]}


def test_summary_takes_medians_over_quiet_updates() -> None:
    runs = [run_of("TRL", 2.0, 4.0), run_of("TRL", 100.0, foreign=1.0), run_of("TRL", 3.0)]
    row = report.summarize(runs, CEILINGS, quiet_cores=0.05)
    assert (row["seconds"], row["seconds_min"], row["seconds_max"]) == (3.0, 2.0, 4.0)
    assert (row["updates"], row["updates_dropped"]) == (3, 1)
    assert row["phases"] == {"rollout": 1.5, "update": 0.75, "other": 0.75}
    assert row["useful_gflops"] == pytest.approx(6e5 / 3 / 1e9)
    assert row["ceiling_fraction"] == pytest.approx(0.2)
    assert row["real_tokens"] == 100
    bf16 = [run | {"precision": "bf16-mixed"} for run in runs]
    assert report.summarize(bf16, CEILINGS, 0.05)["ceiling_fraction"] == pytest.approx(0.1)


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_supervised_batches_hold_the_tokens_that_the_peer_gets(stage: Any) -> None:
    job = Job(TINY, stage=stage, warmup=0, updates=2)
    n_responses = 1 if stage == "sft" else 2
    questions, answers = prompts(TINY, 2), completions(TINY, 2, n_responses)
    for batch, rows, responses in zip(build_batches(job), questions, answers, strict=True):
        expected_prompts = [len(row) for row in rows] * n_responses
        expected = [len(r[side]) for side in range(n_responses) for r in responses]
        assert lengths(batch) == (expected_prompts, expected)
        first = batch if stage == "sft" else batch.chosen
        together = torch.cat([rows[0], responses[0][0]])
        assert first.input_ids[0, : len(together)].equal(together)


def test_page_and_tables_agree_with_the_results() -> None:
    page = report.PAGE.read_text("utf-8")
    assert "| PPO, full | fp32 |" in page
    assert report.fill_page(page, report.RESULTS) == page, "run python -m benchmarks.speed.report"
    for file in report.RESULTS.glob("*.md"):
        if (file.with_suffix(".json")).is_file():
            result = json.loads(file.with_suffix(".json").read_text("utf-8"))
            tables = report.scaling_tables if "sweeps" in result else report.comparison_tables
            assert file.read_text("utf-8") == tables(result)
