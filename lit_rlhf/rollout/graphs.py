"""CUDA graphs of a decoding step, which replay all of its kernels with a single launch."""

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from lit_rlhf.rank_zero import rank_zero_info

_NEVER_WAITS: WeakSet[nn.Module] = WeakSet()
"""Networks of which one call did not wait for the device."""

_WARM: WeakKeyDictionary[nn.Module, set[Hashable]] = WeakKeyDictionary()
"""By network, the calls that this process has made: libraries are set up for the same ones."""

_NOT_CAPTURABLE: WeakSet[nn.Module] = WeakSet()
"""Networks of which a call waited, or a capture failed."""

_LOGGED: WeakSet[nn.Module] = WeakSet()
"""Networks of which the log says how they decode."""

CAPTURE_MEMORY = 2**31
"""Free bytes of a device that a capture is left: torch gives back no cached memory during it."""


class RowGraphs:
    """Replays a function that works on tensors in place, with one graph for each number of rows.

    A graph reads and writes the memory that the function used at capture, with the host's numbers
    of then. So whatever changes from call to call must be in tensors that stay where they are.

    The function takes a number of rows and works on the device. It is called again after an error,
    and so changes its state at the end, after everything that may raise. If it waits for the
    device, this and later rollouts of its network call it without a graph.

    Args:
        function: The function.
        network: The network that it calls.
        settings: What its kernels depend on beside the number of rows. A size that was called with
            the same settings before, in this process, is captured at once. `None`: the first call
            of each size is never captured.
    """

    def __init__(
        self, function: Callable[[int], None], network: nn.Module, settings: Hashable = None
    ) -> None:
        self.function = function
        self.network = network
        self.settings = settings
        self._pool: Any = None
        self._next: dict[int, Callable[[], None]] = {}

    def run(self, n_rows: int) -> None:
        """Run the function once for this number of rows."""
        if n_rows in self._next:
            self._next[n_rows]()
        elif self._is_warm(n_rows):
            self._capture(n_rows)
        else:
            self._warm_up(n_rows)

    def _is_warm(self, n_rows: int) -> bool:
        """Whether the function can be captured before its first call of this size."""
        return (
            self.settings is not None
            and (self.settings, n_rows) in _WARM.get(self.network, ())
            and self.network in _NEVER_WAITS
            and self.network not in _NOT_CAPTURABLE
        )

    def _warm_up(self, n_rows: int) -> None:
        """The first call of a size: libraries allocate their workspaces outside of the graph.

        So autocast makes its copies of the weights, and torch.compile compiles.
        """
        self.function(n_rows)
        _WARM.setdefault(self.network, set()).add((self.settings, n_rows))
        following: Callable[[int], None] = self._look_for_waits
        if self.network in _NOT_CAPTURABLE:
            following = self.function
        elif self.network in _NEVER_WAITS:
            following = self._capture
        self._next[n_rows] = partial(following, n_rows)

    def _look_for_waits(self, n_rows: int) -> None:
        """A call in which a wait for the device is an error, once for each network.

        It would be one in a capture, too, but torch's allocator (read in 2.13) takes one that fails
        for still under way, and no longer reuses memory that several streams have used.
        """
        try:
            with refuse_waits():
                self.function(n_rows)
            _NEVER_WAITS.add(self.network)
            self._next[n_rows] = partial(self._capture, n_rows)
        except RuntimeError as error:
            self._give_up(n_rows, error)

    def _capture(self, n_rows: int) -> None:
        """Capture the function, which does not run it, and replay it."""
        try:
            graph = capture_graph(partial(self.function, n_rows), self._pool)
        except RuntimeError as error:
            self._give_up(n_rows, error)
        else:
            log_once(self.network, "decodes with CUDA graphs")
            self._pool = graph.pool
            self._next[n_rows] = graph.replay
            graph.replay()

    def _give_up(self, n_rows: int, error: RuntimeError) -> None:
        """Call the function from now on."""
        _NOT_CAPTURABLE.add(self.network)
        _LOGGED.discard(self.network)
        log_once(
            self.network,
            "decodes without CUDA graphs: a step that may not wait for the device raised "
            f"{str(error).splitlines()[0]!r}",
        )
        self._next[n_rows] = partial(self.function, n_rows)
        self.function(n_rows)


@contextmanager
def refuse_waits() -> Iterator[None]:
    """Let operations that wait for the device raise a RuntimeError. torch knows most of them."""
    original_mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # torch (2.13) calls the mode a prototype that does not find all operations
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(original_mode)


def log_once(network: nn.Module, how: str) -> None:
    """Log how a network decodes, unless the log says it already."""
    if network not in _LOGGED:
        _LOGGED.add(network)
        rank_zero_info(f"{type(network).__name__}: {how}")


class CapturedGraph(NamedTuple):
    """A CUDA graph of a function.

    Attributes:
        replay: Runs the kernels of the function again.
        pool: torch's name of the memory that the graph uses.
    """

    replay: Callable[[], None]
    pool: Any


def capture_graph(function: Callable[[], None], pool: Any) -> CapturedGraph:  # noqa: ANN401
    """Capture a function as a CUDA graph, which does not run it.

    `torch.cuda.graph` would empty torch's cache each time, which the update then fills again.

    Args:
        function: What to capture.
        pool: Memory of an earlier graph to share, because the two never run at once; `None`: new
            memory.
    """
    graph = torch.cuda.CUDAGraph()
    random_generator = torch.cuda.default_generators[torch.cuda.current_device()]
    random_state = random_generator.clone_state()
    torch.cuda.synchronize()
    if torch.cuda.mem_get_info()[0] < CAPTURE_MEMORY:
        torch.cuda.empty_cache()
    with torch.cuda.stream(_capture_stream(torch.cuda.current_device())):
        # thread_local: NCCL's watchdog queries events from its own thread, which would end a
        # global capture
        graph.capture_begin(pool or torch.cuda.graph_pool_handle(), "thread_local")
        try:
            function()
        except BaseException:
            with suppress(RuntimeError):  # which says only that there was an error
                graph.capture_end()
            # a capture that fails leaves its random state recording, and unusable (torch 2.11)
            random_generator.graphsafe_set_state(random_state)
            raise
        graph.capture_end()
    return CapturedGraph(graph.replay, graph.pool())


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One stream per device: captures that share a pool have to be on the same."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
