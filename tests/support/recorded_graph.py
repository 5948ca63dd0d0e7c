"""A CUDA graph on the CPU: operations are recorded once, and replayed in the same memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from lit_rlhf.rollout.graphs import CapturedGraph
from tests.support.varlen_reference import reference_varlen_attn

READS = ("_local_scalar_dense", "nonzero", "_unique2", "masked_select")


class RecordedGraph(TorchDispatchMode):
    """Records the operations inside, without an effect on tensors from outside.

    A replay runs no Python: neither numbers nor branches are computed again. Like CUDA, it refuses
    an operation that waits for the device.
    """

    active: RecordedGraph | None = None

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any], Any]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        if name in READS:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.is_write:
                base = value if value._base is None else value._base
                self._before.setdefault(id(base), (base, base.clone()))
        return self.record(func, args, kwargs or {})

    def record(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, result))
        return result

    def __enter__(self) -> RecordedGraph:
        RecordedGraph.active = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        RecordedGraph.active = None
        for tensor, before in self._before.values():
            tensor.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, recorded in self.calls:
            result = tree_leaves(func(*args, **kwargs))
            for old, new in zip(tree_leaves(recorded), result, strict=True):
                # views and operations in place are in the right memory already
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def capture_graph(function: Callable[[], None], pool: Any) -> CapturedGraph:
    """In place of `lit_rlhf.rollout.graphs.capture_graph`."""
    with RecordedGraph() as graph:
        function()
    return CapturedGraph(graph.replay, pool="pool")


class _RefuseReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().partition("::")[2].partition(".")[0] in READS:
            raise RuntimeError("called a synchronizing CUDA operation")
        return func(*args, **(kwargs or {}))


def refuse_waits() -> TorchDispatchMode:
    """In place of `lit_rlhf.rollout.graphs.refuse_waits`."""
    return _RefuseReads()


def varlen_attn(*args: Any, **kwargs: Any) -> Tensor:
    """In place of torch's kernel, which a graph holds as one operation."""
    graph = RecordedGraph.active
    with _disable_current_modes():
        if graph is None:
            return reference_varlen_attn(*args, **kwargs)
        return graph.record(reference_varlen_attn, args, kwargs)  # type: ignore[no-any-return]
