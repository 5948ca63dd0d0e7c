"""The report of a GPU's first run, with parts that stand in for those that need one.

One part is tried on the CPU; its numbers need a GPU.
"""

from pathlib import Path

import pytest
import torch

from benchmarks.gpu import profile_decode, profile_iteration, varlen_smoke
from benchmarks.gpu.wheels import missing_packages
from benchmarks.gpu_report import PARTS, Part, write_report
from lit_rlhf.forward import attention
from lit_rlhf.rollout import decoder, graphs
from tests.support import recorded_graph

ROOT = Path(__file__).resolve().parents[2]
STUBS = (
    Part("fails", ("-c", "print('before'); raise SystemExit(3)"), 30),
    Part("hangs", ("-c", "import time; print('started'); time.sleep(60)"), 0.5),
    Part("two", ("-c", "print('never')"), 30, gpus=2),
    Part("works", ("-c", "import os; print(os.environ['DS_ACCELERATOR'], 7 * 6)"), 30),
)


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
    assert "- torch 2." in report
    assert (path.parent / "report_fails.log").read_text("utf-8") == "before\n"


def test_parts_are_files_of_the_project_and_say_what_is_expected() -> None:
    words = [a for part in PARTS for a in part.arguments if a.endswith(".py") or "benchmarks." in a]
    files = [word if word.endswith(".py") else f"{word.replace('.', '/')}.py" for word in words]
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert {part.call for part in PARTS} == {1, 2}
    assert all(part.expected for part in PARTS)


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
