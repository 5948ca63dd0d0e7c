"""The report of a GPU's first run, with parts that stand in for those that need one.

The scripts of its parts are tried on the CPU; their numbers need a GPU.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import auto_cli, capture_parser

from benchmarks import gpu_report
from benchmarks.gpu import profile_decode, profile_iteration, varlen_smoke
from benchmarks.gpu.wheels import missing_packages
from benchmarks.gpu_report import BILLION, COMPARED, PARTS, Part, Result, run_part, write_report
from lit_rlhf.forward import attention
from lit_rlhf.rollout import decoder, graphs
from tests.support import recorded_graph

ROOT = Path(__file__).resolve().parents[2]
STUBS = (
    Part("fails", ("-c", "print('before'); raise SystemExit(3)"), 30),
    Part("hangs", ("-c", "import time; print('started'); time.sleep(60)"), 0.5),
    Part("two", ("-c", "print('never')"), 30, gpus=2),
    Part(
        "works",
        ("-c", "import os; print(os.environ['DS_ACCELERATOR'], 7 * 6)"),
        30,
        expected="cuda 41",
        measured=r"^cuda \d+",
    ),
)
SCRIPTS = [part for part in PARTS if "benchmarks." in part.arguments[1]]
PROFILES = [part for part in SCRIPTS if "profile" in part.arguments[1]]
TESTS = [part for part in PARTS if part.arguments[1] == "pytest"]
SMALLER = {
    "benchmarks.gpu.profile_decode": ("--rows", "[2]", "--steps", "1"),
    "benchmarks.gpu.profile_iteration": ("--iterations", "2"),
    "benchmarks.sft_reward": ("--updates", "1", "--wait", "0"),
    "benchmarks.ppo_iteration": ("--updates", "1", "--wait", "0"),
}
"""Arguments with which a part's script takes seconds on a CPU."""


def named(parts: list[Part]) -> Any:
    """Parameters of a test: the parts, with their names as ids."""
    return pytest.mark.parametrize("part", parts, ids=[part.name for part in parts])


def test_every_part_is_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    path = tmp_path / "runs" / "report.md"
    results = write_report(STUBS, path, n_gpus=1)
    skipped = "skipped: needs 2 GPUs, there are 1"
    assert [r.outcome for r in results] == ["failed (3)", "over its limit", skipped, "ok"]
    report = path.read_text("utf-8")
    assert "before" in report
    assert "cuda 42" in report
    assert "\nnever\n" not in report
    assert "| 30 | cuda 41 | cuda 42 |" in report
    assert "| 30 | no error | see below |" in report
    assert "- torch 2." in report
    assert (path.parent / "report_fails.log").read_text("utf-8") == "before\n"


def test_parts_are_files_of_the_project_and_say_what_is_expected() -> None:
    words = [a for part in PARTS for a in part.arguments if a.endswith(".py") or "benchmarks." in a]
    files = [word if word.endswith(".py") else f"{word.replace('.', '/')}.py" for word in words]
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert {part.call for part in PARTS} == {1, 2}
    assert all(part.expected for part in PARTS)


@named(list(PARTS))
def test_each_name_runs_its_part(
    part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Part] = []

    def record(parts: list[Part], path: Path, n_gpus: int) -> list[Result]:
        assert (path, n_gpus) == (tmp_path / "report.md", 1)
        started.extend(parts)
        return [Result(part, outcome="ok", seconds=1.0, output="") for part in parts]

    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(gpu_report, "write_report", record)
    options = ["--only", f"[{part.name}]", "--peer_python", sys.executable]
    auto_cli(gpu_report.gpu_report, as_positional=False, args=options)
    [one] = started
    assert one.name == part.name
    arguments = list(one.arguments[2:])
    if part.name in COMPARED:  # only the report's folder comes back from a machine
        assert arguments[arguments.index("--output") + 1] == str(tmp_path / part.name)
        assert arguments[arguments.index("--peer_python") + 1] == sys.executable
    if part in SCRIPTS:
        name = one.arguments[1]
        function = getattr(importlib.import_module(name), name.rpartition(".")[2])
        parser = capture_parser(lambda: auto_cli(function))
        parser.parse_args(arguments)


def test_figures_that_are_compared_are_found_in_what_parts_print() -> None:
    totals = profile_iteration.PhaseProfile(seconds=2.0, busy=1.5, kernels=9, rate=3e9, peak=1.0)
    last = type("Profiled", (), {"phases": lambda _: {"rollout": totals, "update": totals}})()
    lines = {
        "iteration": profile_iteration.describe_update("fused", last, 6e9),
        "decode": "fused, 16 rows: 1.79 ms a step, 3.5 x the weights; 1.0 CUDA graphs",
        "tests": "==== 1 failed, 31 passed, 2 skipped in 88.00s (0:01:28) ====",
        "billion": "PASSED multi_deepspeed_stage_2, offload=False: 40.2 GB, estimate 40.6 GB",
    }
    expected = {
        "iteration": ["fused: 4.00 s an iteration, update 2.00 s at 50% of torch.mm, idle 25%"],
        "decode": ["fused, 16 rows: 1.79 ms a step"],
        "tests": ["1 failed", "31 passed", "2 skipped"],
        "billion": ["40.2 GB, estimate 40.6 GB"],
    }
    parts = {part.name: part for part in PARTS}
    for name, line in lines.items():
        output = f"before\n{line}\nafter\n"
        result = Result(parts[name], outcome="ok", seconds=1.0, output=output)
        assert result.measured == expected[name]


@pytest.mark.slow
@named([part for part in SCRIPTS if part.arguments[1] in SMALLER])
def test_script_of_a_part_runs_on_a_cpu(
    part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # the benchmarks are no package
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    small = ("--device", "cpu", "--size", "tiny", *SMALLER[part.arguments[1]])
    if part in PROFILES:
        small = (*small, "--kernels", "[plain]")
    else:
        small = (*small, "--peer", "false", "--output", str(tmp_path / "results"))
    result = run_part(part._replace(arguments=(*part.arguments, *small), limit=300), n_gpus=1)
    assert result.outcome == "ok", result.output[-2000:]
    assert len(result.measured) == (part in PROFILES)


@pytest.mark.slow
@named(TESTS)
def test_part_that_runs_tests_selects_some(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    collect = ("--collect-only", "-q", "-n", "0")
    result = run_part(part._replace(arguments=(*part.arguments, *collect), gpus=0), n_gpus=0)
    assert result.outcome == "ok", result.output[-2000:]
    if BILLION in part.arguments:
        assert "1/" in result.output


def test_wheels_that_a_machine_lacks_are_named() -> None:
    here = {"trl": "1.12.0", "torch": "2.11.0", "docstring-parser": "0.18", "pydantic-core": "2"}
    there = "Docstring_Parser==0.17\npydantic @ file:///somewhere\n"
    assert missing_packages(here, there) == {"pydantic-core": "2", "trl": "1.12.0"}


@pytest.fixture
def _with_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch of CUDA in half precision, with its kernel and its graphs on the CPU."""
    users = ("lit_rlhf.forward.packing", "lit_rlhf.rollout.decoder", "benchmarks.gpu.varlen_smoke")
    for module in users:
        monkeypatch.setattr(
            f"{module}.varlen_obstacle", lambda x: "" if x.dtype == torch.bfloat16 else "a test"
        )
    monkeypatch.setattr(attention, "_find_kernel", lambda: recorded_graph.varlen_attn)
    monkeypatch.setattr(graphs, "capture_graph", recorded_graph.capture_graph)
    monkeypatch.setattr(graphs, "refuse_waits", recorded_graph.refuse_waits)
    monkeypatch.setattr(decoder, "CPU_RELEASE_INTERVAL", 8)


@pytest.mark.usefixtures("_with_kernel")
def test_all_comparisons_pass_with_a_right_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        varlen_smoke.varlen_smoke("cpu")
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("ok  ")]) == 2 * 5 + 1


@pytest.mark.usefixtures("_with_kernel")
def test_kernel_with_a_wrong_window_fails_the_comparison(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_more_key(*args: object, **kwargs: object) -> torch.Tensor:
        before, after = kwargs["window_size"]  # type: ignore[misc]
        kwargs["window_size"] = (before + (before >= 0), after)
        return recorded_graph.varlen_attn(*args, **kwargs)

    monkeypatch.setattr(attention, "_find_kernel", lambda: one_more_key)
    with pytest.raises(SystemExit) as ended:
        varlen_smoke.varlen_smoke("cpu")
    assert ended.value.code == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert len(failed) == 5
    assert all("window of 50" in line for line in failed)


@pytest.mark.slow
def test_decoding_is_profiled_by_kernels_and_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_decode, "memory_bandwidth", lambda _: 1e9)
    profile_decode.profile_decode(
        device="cpu", size="tiny", rows=(2, 3), steps=1, lora_rank=1, without_graphs=False
    )
    printed = capsys.readouterr().out
    assert "# plain: weights" in printed
    assert "plain, 2 rows: " in printed
    assert "plain, 3 rows: " in printed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode")
def test_each_phase_of_an_iteration_is_profiled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_iteration, "matmul_ceiling", lambda *_: 1e12)
    profile_iteration.profile_iteration(
        device="cpu", size="tiny", precision="fp32", kernels=("plain",), iterations=2
    )
    printed = capsys.readouterr().out
    assert "# plain: 2 iterations" in printed
    for phase in ("rollout", "score", "estimate", "update", "all"):
        assert f"\n{phase} " in printed
