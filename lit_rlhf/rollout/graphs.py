"""CUDA graphs of a decoding step, which replay all of its kernels with a single launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

_NOT_CAPTURABLE: WeakSet[nn.Module] = WeakSet()
"""Networks whose capture failed once."""


class RowGraphs:
    """Replays a function that works on tensors in place, with one graph for each number of rows.

    A graph reads and writes the memory that the function used at capture, with the numbers that the
    host had then. So whatever changes from call to call must be in tensors that stay where they
    are.

    Args:
        function: Takes a number of rows; everything it does is on the device.
        network: The network that it runs. Where a capture fails, for instance as the network's code
            depends on data, this and later rollouts call the function.
    """

    def __init__(self, function: Callable[[int], None], network: nn.Module) -> None:
        self.function = function
        self.network = network
        self._pool: Any = None
        self._replays: dict[int, Callable[[], None]] = {}

    def run(self, n_rows: int) -> None:
        """Run the function once for this number of rows."""
        replay = self._replays.get(n_rows)
        if replay is None:
            # the first call of a size is a warm-up: libraries allocate their workspaces, and
            # autocast makes its copies of the weights, outside of the graph
            self.function(n_rows)
            captures = self.network not in _NOT_CAPTURABLE
            self._replays[n_rows] = partial(self._capture if captures else self.function, n_rows)
        else:
            replay()

    def _capture(self, n_rows: int) -> None:
        """Capture the function, which does not run it, and replay it."""
        function = partial(self.function, n_rows)
        try:
            replay, self._pool = capture_graph(function, self._pool)
        except RuntimeError as error:
            _NOT_CAPTURABLE.add(self.network)
            rank_zero_info(
                f"{type(self.network).__name__}: decodes without CUDA graphs, as capturing a step "
                f"raised {str(error).splitlines()[0]!r}"
            )
            replay = function
        self._replays[n_rows] = replay
        replay()


def capture_graph(function: Callable[[], None], pool: Any) -> tuple[Callable[[], None], Any]:  # noqa: ANN401
    """Capture a function as a CUDA graph; how to replay it, and the pool of its memory.

    Args:
        function: What to capture.
        pool: Memory of an earlier graph to share, as the two never run at once; `None` for none.

    Raises:
        RuntimeError: If the function waits for the device, or does what a graph cannot hold.
    """
    stream, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    try:
        # thread_local: NCCL's watchdog queries events from a thread of its own, which would end a
        # global capture
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            function()
    finally:
        # after an error, torch 2.13 leaves the stream of the capture as the current one
        torch.cuda.set_stream(stream)
    return graph.replay, graph.pool()
