"""From updates to figures, tables and the page that quotes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import scaling as scaling_script
from benchmarks.speed import comparison
from benchmarks.speed.job import Job
from benchmarks.speed.ours_supervised import build_batches, lengths
from benchmarks.speed.report import (
    PAGE,
    RESULTS,
    comparison_tables,
    count_work,
    fill_page,
    scaling_tables,
    summarize,
)
from benchmarks.speed.workload import SIZES, Workload, completions, prompts

TINY = Workload(**SIZES["tiny"])
CEILINGS: dict[str, Any] = {
    "device": "a processor",
    "flops_fp32": 1e6,
    "flops_fp32_onednn": 2e6,
    "flops_bf16": 2e6,
    "bytes_per_second": 1e9,
    "peak_bf16": None,
}


def run_of(side: str, *seconds: float, foreign: float = 0.0, memory: float = 100.0) -> Any:
    return {
        "side": side,
        "case": "ragged",
        "precision": "fp32",
        "versions": {"torch": "2.13.0"},
        "memory_before_mib": 50.0,
        "peak_memory_mib": memory,
        "updates": [
            {
                "seconds": value,
                "foreign_cores": foreign,
                "phases": {"rollout": value / 2, "update": value / 4, "other": value / 4},
                "prompt_tokens": 30,
                "response_tokens": 70,
                "flops": {"rollout": 1e5, "score": 2e5, "update": 3e5},
            }
            for value in seconds
        ],
    }


def test_summary_takes_medians_over_quiet_updates() -> None:
    runs = [run_of("TRL", 2.0, 4.0), run_of("TRL", 100.0, foreign=1.0), run_of("TRL", 3.0)]

    row = summarize(runs, CEILINGS, quiet_cores=0.05)

    assert (row["seconds"], row["seconds_min"], row["seconds_max"]) == (3.0, 2.0, 4.0)
    assert (row["updates"], row["updates_dropped"]) == (3, 1)
    assert row["phases"] == {"rollout": 1.5, "update": 0.75, "other": 0.75}
    assert row["useful_gflops"] == pytest.approx(6e5 / 3 / 1e9)
    assert row["ceiling_fraction"] == pytest.approx(0.2)
    assert row["real_tokens"] == 100
    bf16 = [run | {"precision": "bf16-mixed"} for run in runs]
    assert summarize(bf16, CEILINGS, 0.05)["ceiling_fraction"] == pytest.approx(0.1)


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


def test_interrupted_benchmark_continues_with_the_turns_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: list[str] = []

    def run_job(side: comparison.Side, job: Job) -> dict[str, Any]:
        if len(taken) == 3:
            raise KeyboardInterrupt
        taken.append(side.name)
        return CEILINGS if side is comparison.CEILINGS else run_of(side.name, 1.0 + len(taken))

    monkeypatch.setattr(comparison, "wait_until_quiet", lambda _: 0.0)
    monkeypatch.setattr(comparison, "save_networks", lambda *_: None)
    monkeypatch.setattr(comparison, "label_run", lambda run, *_: run)
    monkeypatch.setattr(comparison, "run_job", run_job)
    sides = [comparison.Side(name, "peer") for name in ("lit_rlhf", "TRL")]
    output = str(tmp_path / "speed")
    arguments: Any = ({("ragged", "fp32"): Job(TINY)}, sides, 2, 0.0, 0.05, output, "small")

    with pytest.raises(KeyboardInterrupt):
        comparison.compare_sides(*arguments)
    before = len((tmp_path / "speed.json.partial").read_text("utf-8").splitlines())
    taken.append("the interruption")
    comparison.compare_sides(*arguments)

    name = comparison.CEILINGS.name
    assert taken == [name, "lit_rlhf", "TRL", "the interruption", name, "lit_rlhf", "TRL"]
    assert before == 1 + 3  # the settings, and a line for each turn
    result = json.loads((tmp_path / "speed.json").read_text("utf-8"))
    seconds = [run["updates"][0]["seconds"] for run in result["runs"]]
    assert seconds == [3.0, 7.0, 4.0, 8.0]
    assert result["size"] == "small"
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["speed.json", "speed.md"]
    assert "round 2 of 2: ragged fp32 TRL" in capsys.readouterr().err


def test_page_and_tables_agree_with_the_results() -> None:
    page = PAGE.read_text("utf-8")
    assert "| PPO, full | fp32 |" in page
    assert fill_page(page, RESULTS) == page, "run python -m benchmarks.speed.report"
    for file in RESULTS.glob("*.md"):
        if (file.with_suffix(".json")).is_file():
            result = json.loads(file.with_suffix(".json").read_text("utf-8"))
            tables = scaling_tables if "sweeps" in result else comparison_tables
            assert file.read_text("utf-8") == tables(result)


def test_scaling_fits_a_line_to_every_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Workload] = []

    def run_in_turns(jobs: Any, sides: Any, *_: Any) -> Any:
        """Costs 1 s, 1 ms per response token and 1 ns per 100 operations of the update."""
        [side] = sides
        results = {}
        for labels, job in jobs.items():
            measured.append(job.work)
            responses = [job.work.response // 2] * job.work.batch
            update = {
                "prompts": [1] * job.work.batch,
                "responses": responses,
                "foreign_cores": 0.0,
                "phases": {},
            }
            flops = sum(count_work(update | {"seconds": 1.0}, job)["flops"].values())
            update["seconds"] = 1.0 + flops * 1e-11
            run = {
                "precision": "fp32",
                "versions": {"torch": "2.13.0"},
                "memory_before_mib": 1.0,
                "peak_memory_mib": 2.0,
                "updates": [update],
            }
            results[(*labels, side.name)] = [run]
        return CEILINGS, results

    monkeypatch.setattr(scaling_script, "run_in_turns", run_in_turns)
    monkeypatch.setattr(scaling_script, "save_networks", lambda *_: None)

    scaling_script.scaling(str(tmp_path / "scaling"))

    result = json.loads((tmp_path / "scaling.json").read_text("utf-8"))
    assert len(measured) == len(set(measured)) == 4 + 3 + 2 + 2  # the default is in every sweep
    fits = {one["size"]: one for one in result["sweeps"]}
    assert list(fits) == ["batch", "response", "hidden", "vocab"]
    for size in ("hidden", "vocab"):
        assert fits[size]["slope"] == pytest.approx(0.01)  # per GFLOP
        assert fits[size]["fixed"] == pytest.approx(1.0)
    assert fits["batch"]["r_squared"] == pytest.approx(1.0)
    assert fits["response"]["r_squared"] > 0.99  # attention grows with the square
    assert (tmp_path / "scaling.png").stat().st_size > 0
    assert (tmp_path / "scaling.md").read_text("utf-8") == scaling_tables(result)
