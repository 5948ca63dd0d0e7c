"""Decoding steps that are captured and replayed give what steps of Python give."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from lit_rlhf.rollout import RolloutBatch, SamplingOptions, decoder, graphs
from lit_rlhf.rollout.decoder import Decoder
from lit_rlhf.rollout.graphs import RowGraphs
from tests.support import recorded_graph
from tests.support.decoding import make_prompts, sample_responses
from tests.support.tiny_models import optimized_causal_lm


class Captures:
    """Counts captures and replays by number of rows."""

    def __init__(self) -> None:
        self.captured: list[int] = []
        self.replayed: list[int] = []

    def capture(self, function: Any, pool: Any) -> graphs.CapturedGraph:
        (n_rows,) = function.args
        assert (pool is None) == (not self.captured)
        self.captured.append(n_rows)
        graph = recorded_graph.capture_graph(function, pool)

        def counted() -> None:
            self.replayed.append(n_rows)
            graph.replay()

        return graph._replace(replay=counted)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[Captures]:
    """The branch of CUDA in half precision, on the CPU in float32."""
    counted = Captures()
    for module in ("lit_rlhf.forward.packing", "lit_rlhf.rollout.decoder"):
        monkeypatch.setattr(f"{module}.varlen_obstacle", lambda _: "")
    find_kernel = "lit_rlhf.forward.attention._find_kernel"
    monkeypatch.setattr(find_kernel, lambda: recorded_graph.varlen_attn)
    monkeypatch.setattr(graphs, "capture_graph", counted.capture)
    monkeypatch.setattr(graphs, "refuse_waits", recorded_graph.refuse_waits)
    monkeypatch.setattr(decoder, "CPU_RELEASE_INTERVAL", 8)
    yield counted
    for networks in (graphs._NOT_CAPTURABLE, graphs._NEVER_WAITS, graphs._LOGGED, graphs._WARM):
        networks.clear()


def sample(family: str, options: SamplingOptions, n_slots: int) -> RolloutBatch:
    model, (ids, mask) = optimized_causal_lm(family), make_prompts()
    return sample_responses(model, ids, mask, options, seed=3, batch_size=n_slots)


@pytest.mark.parametrize(
    ("family", "settings", "n_slots"),
    [
        ("llama", {}, 6),
        ("llama", {"repetition_penalty": 1.3, "min_new_tokens": 5, "top_k": 40, "top_p": 0.9}, 4),
        ("mistral", {}, 5),
        ("gpt2", {"do_sample": False}, 6),
        ("opt", {}, 3),
    ],
)
def test_replayed_steps_sample_the_same_tokens(
    family: str, settings: dict[str, Any], n_slots: int, request: pytest.FixtureRequest
) -> None:
    options = SamplingOptions(max_new_tokens=30, **settings)
    expected, captures = sample(family, options, n_slots), request.getfixturevalue("captures")
    rollouts = sample(family, options, n_slots)
    assert torch.equal(rollouts.response_ids, expected.response_ids)
    assert torch.equal(rollouts.response_mask, expected.response_mask)
    for one, other in zip(rollouts.statistics, expected.statistics, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    # one graph for each power of two and for all slots, each of them after a step without it
    assert len(set(captures.captured)) == len(captures.captured) <= 4
    assert set(captures.captured) <= {1, 2, 4, n_slots}
    assert len(captures.replayed) > 25


@pytest.mark.parametrize("torch_notices", [True, False])
def test_a_network_that_cannot_be_captured_decodes_without_graphs(
    captures: Captures, caplog: pytest.LogCaptureFixture, torch_notices: bool
) -> None:
    model, (ids, mask) = optimized_causal_lm(), make_prompts()
    options = SamplingOptions(max_new_tokens=12)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            captures.captured.clear()
            expected = sample_responses(model, ids, mask, options, seed=3, batch_size=4)
    messages = [line for line in caplog.messages if "graphs" in line]
    assert messages == ["LlamaModel: decodes with CUDA graphs"]
    caplog.clear()
    assert captures.replayed
    captures.captured.clear()
    captures.replayed.clear()
    if torch_notices:  # else it is as if torch did not see the wait
        graphs._NEVER_WAITS.clear()

    def wait(*_: object) -> None:
        assert ids.sum().item() > 0

    model.base_model.layers[0].register_forward_hook(wait)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            rollouts = sample_responses(model, ids, mask, options, seed=3, batch_size=4)
            assert torch.equal(rollouts.response_ids, expected.response_ids)
    assert (captures.captured, captures.replayed) == ([] if torch_notices else [4], [])
    lines = [line for line in caplog.messages if "CUDA graphs" in line]
    raised = "called a synchronizing CUDA operation"
    if not torch_notices:
        raised = "operation not permitted when stream is capturing"
    assert lines == [
        "LlamaModel: decodes without CUDA graphs: a step that may not wait for the device "
        f"raised {raised!r}"
    ]


def test_size_is_captured_after_call_without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, int]] = []

    def capture(function: Any, pool: Any) -> graphs.CapturedGraph:
        events.append(("capture", function.args[0]))
        return graphs.CapturedGraph(lambda: events.append(("replay", function.args[0])), pool)

    monkeypatch.setattr(graphs, "capture_graph", capture)
    monkeypatch.setattr(graphs, "refuse_waits", recorded_graph.refuse_waits)
    rows = RowGraphs(lambda n_rows: events.append(("call", n_rows)), nn.Identity())
    for n_rows in (4, 4, 4, 4, 2, 4, 2):
        rows.run(n_rows)
    assert events == [
        ("call", 4), ("call", 4), ("capture", 4), ("replay", 4), ("replay", 4), ("call", 2),
        ("replay", 4), ("capture", 2), ("replay", 2),
    ]  # fmt: skip


def test_size_that_the_process_has_run_is_captured_at_once(
    captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (ids, mask) = optimized_causal_lm(), make_prompts()
    called: list[int] = []
    decode = Decoder._decode

    def counted(self: Decoder, n: int) -> None:
        called.append(n)
        decode(self, n)

    monkeypatch.setattr(Decoder, "_decode", counted)

    def calls_before_capture(options: SamplingOptions) -> int:
        """Number of steps that a rollout makes without a graph."""
        called.clear()
        captures.captured.clear()
        rollouts.append(sample_responses(model, ids, mask, options, seed=3, batch_size=4))
        assert len(captures.captured) > 1
        return len(called) - len(captures.captured)  # a capture calls the function, too

    rollouts: list[RolloutBatch] = []
    options = SamplingOptions(max_new_tokens=30)
    assert calls_before_capture(options) == len(captures.captured) + 1  # one looks for waits
    assert calls_before_capture(options) == 0
    assert torch.equal(rollouts[0].response_ids, rollouts[1].response_ids)
    assert torch.equal(rollouts[0].response_mask, rollouts[1].response_mask)
    # other options launch other kernels
    assert calls_before_capture(replace(options, top_k=40)) == len(captures.captured)
    # what torch.compile does at a call is not known before
    model.base_model.layers[0].compile(backend="eager")
    assert calls_before_capture(options) == len(captures.captured)


def fake_cuda(monkeypatch: pytest.MonkeyPatch, free: int) -> list[object]:
    """The calls of a capture, without a device."""
    calls: list[object] = []
    graph = SimpleNamespace(
        capture_begin=lambda pool, mode: calls.extend((pool, mode)),
        capture_end=partial(calls.append, "end"),
        replay=partial(calls.append, "replay"),
        pool=lambda: "its pool",
    )
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(f"torch.cuda.{name}", partial(calls.append, name))
    generator = SimpleNamespace(
        clone_state=lambda: "random state",
        graphsafe_set_state=lambda state: calls.append(f"{state} restored"),
    )
    monkeypatch.setattr("torch.cuda.default_generators", (generator,))
    monkeypatch.setattr("torch.cuda.CUDAGraph", lambda: graph)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (free, 80 << 30))
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: "new pool")
    monkeypatch.setattr(graphs, "_capture_stream", lambda device: device)

    @contextmanager
    def stream(_: int) -> Iterator[None]:
        calls.append("stream")
        yield
        calls.append("restored")

    monkeypatch.setattr("torch.cuda.stream", stream)
    return calls


@pytest.mark.parametrize("free", [8 << 30, 1 << 30])
def test_capture_leaves_cache_of_torch_as_it_is(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_cuda(monkeypatch, free)
    graph = graphs.capture_graph(partial(calls.append, "function"), None)
    graph.replay()
    emptied = [] if free > graphs.CAPTURE_MEMORY else ["empty_cache"]
    assert calls == [
        *("synchronize", *emptied, "stream", "new pool", "thread_local", "function", "end"),
        *("restored", "replay"),
    ]
    calls.clear()
    graphs.capture_graph(lambda: None, graph.pool)
    assert "its pool" in calls


def test_the_error_of_a_failed_capture_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_cuda(monkeypatch, 8 << 30)
    fail = Mock(side_effect=[RuntimeError("waits"), RuntimeError("capture was invalidated")])
    monkeypatch.setattr(torch.cuda.CUDAGraph(), "capture_end", fail)
    with pytest.raises(RuntimeError, match="waits"):
        graphs.capture_graph(fail, None)
    assert "random state restored" in calls  # later random numbers need it
