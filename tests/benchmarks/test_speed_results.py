"""From updates to figures, tables and the page that quotes them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import scaling as scaling_script
from benchmarks.scaling import fit_line, resize
from benchmarks.speed import comparison
from benchmarks.speed.comparison import Side, our_sides, peer_side
from benchmarks.speed.job import Job
from benchmarks.speed.ours_supervised import build_batches, lengths
from benchmarks.speed.report import (
    PAGE,
    RESULTS,
    comparison_tables,
    count_work,
    fill_page,
    ratios,
    scaling_tables,
    summarize,
)
from benchmarks.speed.workload import EOS, SIZES, Workload, completions, prompts, response_lengths

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


def test_on_a_gpu_utilization_and_bandwidth_are_reported() -> None:
    run = run_of("TRL", 4.0)
    run["updates"][0]["generation_bytes"] = 1e9

    row = summarize([run], CEILINGS | {"peak_bf16": 1e6}, 0.05)

    assert row["training_mfu"] == pytest.approx(3e5 / 1.0 / 1e6)
    assert row["generation_tokens_per_second"] == 35
    assert row["generation_bound_fraction"] == 0.5


def test_later_tree_is_compared_with_the_first_and_both_with_the_peer() -> None:
    seconds = {"lit_rlhf a": 2.0, "lit_rlhf b": 1.0, "TRL": 6.0}
    runs = [
        run_of(side, value, memory=100 if side == "TRL" else 50) | {"precision": precision}
        for precision in ("fp32", "bf16-mixed")
        for side, value in seconds.items()
    ]

    found = ratios([summarize([run], CEILINGS, 0.05) for run in runs])

    trees = [r for r in found if r["other"] == "lit_rlhf a"]
    assert [(r["side"], r["precision"], r["other_precision"], r["speed"]) for r in trees] == [
        ("lit_rlhf b", precision, precision, 2.0) for precision in ("fp32", "bf16-mixed")
    ]
    peers = [r for r in found if r["other"] == "TRL"]
    assert len(peers) == 2 * 2 * 2  # trees times precisions of either side
    assert len(found) == len(trees) + len(peers)
    assert (peers[0]["speed"], peers[0]["memory"]) == (3.0, 0.5)
    assert peers[0]["speed_at_equal_work"] == pytest.approx(3)


def source_tree(folder: Path, seconds: float) -> Path:
    """A source tree whose own benchmark says what it imported."""
    module = folder / "benchmarks" / "speed" / "ours.py"
    module.parent.mkdir(parents=True)
    for package in (folder / "benchmarks", module.parent):
        (package / "__init__.py").touch()
    (folder / "lit_rlhf.py").write_text(f"SECONDS = {seconds}")
    module.write_text(
        "import json, sys, lit_rlhf\n"
        "result = {'versions': {}, 'updates': [{'seconds': lit_rlhf.SECONDS}]}\n"
        "open(sys.argv[2], 'w').write(json.dumps(result))\n"
    )
    return folder


def test_every_tree_runs_its_own_code(tmp_path: Path) -> None:
    trees = [str(source_tree(tmp_path / name, value)) for name, value in (("a", 2.0), ("b", 1.0))]
    (tmp_path / "job").mkdir()
    job = Job(TINY, str(tmp_path / "job"))

    sides = our_sides("benchmarks.speed.ours", trees)
    results = [comparison.run_job(side, job) for side in sides]

    assert [side.name for side in sides] == ["lit_rlhf a", "lit_rlhf b"]
    assert [result["updates"][0]["seconds"] for result in results] == [2.0, 1.0]
    assert [result["versions"] for result in results] == [{"commit": "unknown"}] * 2
    assert our_sides("benchmarks.speed.ours") == [Side("lit_rlhf", "benchmarks.speed.ours")]


def test_folders_that_are_not_two_source_trees_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trees: expected source trees with benchmarks\.speed"):
        our_sides("benchmarks.speed.ours", [str(tmp_path)])
    trees = [str(source_tree(tmp_path / name / "x", 1.0)) for name in ("a", "b")]
    with pytest.raises(ValueError, match="trees: expected folders with different names"):
        our_sides("benchmarks.speed.ours", trees)


def test_fit_line_by_hand() -> None:
    # mean (2, 2): slope 1/2, residuals -1/2, 1, -1/2: 1 - 1.5 / 2
    assert fit_line([1.0, 2.0, 3.0], [1.0, 3.0, 2.0]) == pytest.approx((1.0, 0.5, 0.25))


def test_fit_line_needs_three_points() -> None:
    with pytest.raises(ValueError, match="at least 3 points, got 2"):
        fit_line([1.0, 2.0], [1.0, 2.0])


def test_changed_size_takes_what_belongs_to_it() -> None:
    assert resize(Workload(), "hidden", 256) == Workload()
    assert resize(Workload(), "hidden", 512).heads == 16
    assert resize(Workload(), "response", 64) == Workload()
    assert resize(Workload(), "response", 128).eos_probability == 1 / 64
    assert resize(Workload(), "vocab", 1024) == replace(Workload(), vocab=1024)


def test_completions_end_as_often_as_responses_do() -> None:
    work = replace(Workload(), batch=400)
    found = [len(answer) for [answer] in completions(work, 1, 1)[0]]

    # mean of min(geometric(1/32), 64): 32 * (1 - (31/32)^64)
    assert sum(found) / len(found) == pytest.approx(27.8, rel=0.1)
    assert max(found) == 64
    full = completions(replace(work, mode="full"), 1, 2)[0]
    assert {len(answer) for pair in full for answer in pair} == {64}


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


def test_without_an_interpreter_the_peers_environment_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "peer"
    commands: list[list[str]] = []

    def ran(command: list[str], check: bool) -> None:
        assert check
        commands.append(command)
        folder.mkdir(exist_ok=True)

    monkeypatch.setattr(comparison, "PEER_FOLDER", folder)
    monkeypatch.setattr(comparison.subprocess, "run", ran)

    first, second = (peer_side("peer", None).python for _ in range(2))

    python = str(folder / "bin" / "python")
    assert (first, second) == (python, python)
    assert [command[1:3] for command in commands] == [["-m", "venv"], ["-m", "pip"]]
    assert commands[1][0] == python
    assert commands[1][3:] == ["install", *comparison.PEER_PACKAGES]


def test_turn_is_taken_again_until_an_update_was_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([run_of("TRL", 9.0, foreign=1.0), run_of("TRL", 3.0), run_of("TRL", 4.0)])
    monkeypatch.setattr(comparison, "wait_until_quiet", lambda _: 0.0)
    monkeypatch.setattr(comparison, "run_job", lambda *_: next(answers))

    result = comparison.take_turn(comparison.Side("TRL", "peer"), Job(TINY), wait=0.0)

    assert result["updates"][0]["seconds"] == 3.0


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


def test_process_that_fails_is_shown(tmp_path: Path) -> None:
    side = comparison.Side("nobody", "benchmarks.speed.nobody")

    with pytest.raises(RuntimeError, match=r"(?s)nobody: .* failed.*No module named"):
        comparison.run_job(side, Job(TINY, str(tmp_path)))


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


def test_lengths_of_the_peers_responses() -> None:
    responses = torch.tensor([[5, EOS, 7], [EOS, EOS, 4], [5, 6, 7]])

    assert response_lengths(responses, ends=True) == [2, 1, 3]
    assert response_lengths(responses, ends=False) == [3, 3, 3]
