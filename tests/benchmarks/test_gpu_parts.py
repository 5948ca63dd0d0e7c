"""The parts of the GPU's report, tried on the CPU; their numbers need a GPU."""

import pytest
import torch

from benchmarks.gpu import varlen_smoke
from lit_rlhf.forward import attention
from lit_rlhf.rollout import decoder, graphs
from tests.support import recorded_graph


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
def test_wrong_kernel(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
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
