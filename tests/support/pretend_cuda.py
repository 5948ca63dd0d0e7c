"""A CUDA device that the CPU pretends to be, and an audit of what happens on it.

Tensors on the pretend device say `device == cuda:0` and hold their numbers on the CPU. So code that
looks at the device takes its CUDA branches, and computes real numbers. Inside `PretendCuda`

- operations that CUDA refuses raise `Refused`: tensors of both devices in one operation, a
  generator or a NumPy array of the wrong device, collectives of host tensors as under NCCL, and
  attention that would fall back to the kernel with a quadratic matrix of scores;
- every point where the host waits for the device is counted with its phase and its line;
- kernels are counted by phase on request: ATen operations that are not views, which is how eager
  PyTorch launches them.

The backward runs in C++, whose gradients and saved tensors carry no mark, so that all tensors count
as on the device there.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, distributed, nn
from torch.autograd.graph import _engine_run_backward as run_engine
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_rlhf.rollout.graphs import CapturedGraph
from tests.support.host_tensors import COLLECTIVES
from tests.support.varlen_reference import reference_varlen_attn

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")

READS = {
    "__bool__", "__contains__", "__float__", "__format__", "__index__", "__int__", "__repr__",
    "allclose", "argwhere", "bincount", "equal", "is_nonzero", "item", "masked_select", "nonzero",
    "tolist", "unique", "unique_consecutive",
}  # fmt: skip
"""Functions that wait, for a number or for the size of their result."""
FROM_PYTHON = {"as_tensor", "new_tensor", "tensor"}
"""Functions that make a tensor of Python numbers: on the host first, then a blocking copy."""
WITHOUT_KERNEL = {"_unsafe_view", "detach", "empty", "empty_like", "empty_strided", "lift_fresh"}
"""ATen operations that launch nothing, besides views."""
MASKED_ATTENTION_KERNELS = 4
"""Attention with a bool mask: two to make a bias of it, one to align it, one to attend."""
VARLEN_ATTENTION_KERNELS = 2
"""`varlen_attn`: one to attend, one to zero a state of random numbers that it never draws."""


class Refused(RuntimeError):
    """CUDA would raise here, or compute in a way that this project does not want."""


class CudaTensor(Tensor):
    """A tensor on the pretend device."""

    device = property(lambda _: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda _: True)  # type: ignore[assignment]
    is_cpu = property(lambda _: False)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _OUTSIDE.call(func, args, dict(kwargs or {}))


class CudaParameter(CudaTensor, nn.Parameter):
    """A parameter on the pretend device."""


def is_on_device(tensor: Any) -> bool:
    return isinstance(tensor, CudaTensor)


def mark(tree: Any, *, on_device: bool = True) -> Any:
    """Mark all tensors of a tree, in place, as on the pretend device or not."""
    if isinstance(tree, Tensor):
        kind = nn.Parameter if type(tree) in (nn.Parameter, CudaParameter) else Tensor
        cuda = CudaParameter if kind is nn.Parameter else CudaTensor
        if type(tree) in (kind, cuda):
            tree.__class__ = cuda if on_device else kind
    elif isinstance(tree, list | tuple):
        for leaf in tree:
            mark(leaf, on_device=on_device)
    return tree


def mark_module(module: nn.Module) -> nn.Module:
    """Mark a module's weights and buffers as on the pretend device."""
    mark([*module.parameters(), *module.buffers()])
    return module


class PretendCuda(TorchFunctionMode):
    """The context in which the pretend device exists.

    It counts by phase, which `named` and `watch` set: waits by their cause, kernels, and casts of
    weights among them (which doubles the time; kernels of a CUDA graph count in `replay`), tensors
    computed on the host, and calls. `refused` lists every refusal, because a handler may swallow
    the error.
    """

    def __init__(self, *, count_kernels: bool = False) -> None:
        super().__init__()
        self.count_kernels = count_kernels
        self.phase = "start"
        self.waits: dict[str, Counter[str]] = {}
        self.kernels: Counter[str] = Counter()
        self.weight_casts: Counter[str] = Counter()
        self.host_tensors: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.refused: list[str] = []
        self.host_metrics: set[str] = set()
        self._counting = False
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if self is not _OUTSIDE:
            self._patch_torch(self._stack.enter_context(pytest.MonkeyPatch.context()))
            if self.count_kernels:
                self._stack.enter_context(_CountKernels(self))
        return cast(Self, super().__enter__())

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    @contextmanager
    def named(self, phase: str) -> Iterator[None]:
        """Count what happens inside under this name."""
        before, self.phase = self.phase, phase
        self.calls[phase] += 1
        try:
            yield
        finally:
            self.phase = before

    def watch(self, patch: pytest.MonkeyPatch, owner: Any, name: str, phase: str) -> None:
        """Give the calls of a function a name."""
        function = getattr(owner, name)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.named(phase):
                return function(*args, **kwargs)

        patch.setattr(owner, name, call)

    def n_waits(self, phase: str) -> int:
        """Number of waits in all calls of a phase."""
        return sum(self.waits.get(phase, {}).values())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, dict(kwargs or {}))

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a function of torch with CPU tensors, and mark where its result is."""
        name = func.__name__
        tensors = _tensors((*args, *kwargs.values()))
        if in_backward():
            mark(tensors)
        on_device = [tensor for tensor in tensors if is_on_device(tensor)]
        args, target = _device_of(name, args, kwargs)
        if in_backward():
            target = None if target is None else CUDA
        if not on_device and target is not CUDA:
            output = self._run(func, args, kwargs, counting=False)
            self.host_tensors[self.phase] += isinstance(output, Tensor)
            return output
        moves = ("copy_", "__set__", "_has_compatible_shallow_copy_type")  # the last: `Module.cpu`
        moved = name in moves or target is not None
        on_host = [tensor for tensor in tensors if not is_on_device(tensor)]
        self._check_operation(
            fn=func,
            name=name,
            args=args,
            kwargs=kwargs,
            on_device=on_device,
            on_host=on_host,
            moved=moved,
        )
        self._count_waits(name, args, kwargs, on_device, target)
        if name == "__reduce_ex__":  # a file holds tensors of torch's own type
            with torch._C.DisableTorchFunctionSubclass():
                args = (args[0].detach(), *args[1:])
        output = self._run(func, args, kwargs, counting=target is not CPU)
        if func is functional.scaled_dot_product_attention:  # whose strides CUDA has otherwise
            output = output.transpose(1, 2).contiguous().transpose(1, 2)
        if name == "__set__":  # setting `data` moves a parameter
            if func == Tensor.data.__set__:  # type: ignore[attr-defined]
                mark(args[0], on_device=is_on_device(args[1]))
            return output
        if target is not None and any(output is tensor for tensor in tensors):
            if is_on_device(output) == (target is CUDA):
                return output
            with torch._C.DisableTorchFunctionSubclass():
                output = output.clone()
        if name in ("__reduce_ex__", "tolist") or target is CPU:
            return output
        return mark(output)

    def _run(self, func: Callable[..., Any], args: Any, kwargs: Any, counting: bool) -> Any:
        before, self._counting = self._counting, counting
        try:
            with torch._C.DisableTorchFunctionSubclass():  # as torch's guide to subclasses does
                return func(*args, **kwargs)
        finally:
            self._counting = before

    def refuse(self, message: str) -> None:
        self.refused.append(f"{message} @ {find_site()}")
        raise Refused(self.refused[-1])

    def wait(self, what: str) -> None:
        """Count a point where the host waits for the device."""
        self.waits.setdefault(self.phase, Counter())[f"{what} @ {find_site()}"] += 1

    def _check_operation(
        self, fn: Any, name: str, args: Any, kwargs: Any, on_device: Any, on_host: Any, moved: bool
    ) -> None:
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type != "cuda":
            self.refuse(f"{name}: a generator of the CPU")
        if name in ("numpy", "__array__"):
            self.refuse(f"{name}: a tensor on the device")
        if fn is functional.scaled_dot_product_attention:
            self._check_attention(*args, **kwargs)
        # torch copies numbers and the indices of a tensor on the device to it
        free = 1 if name in ("stack", "cat", "concat") else 0
        mixed = [tensor for tensor in on_host if tensor.dim() + free > 0]
        indexed = name in ("__getitem__", "__setitem__") and is_on_device(args[0])
        if on_device and mixed and not moved and not indexed:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in mixed)
            self.refuse(f"{name}: tensors on the host of shape {shapes} beside those on the device")

    def _check_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        enable_gqa: bool = False,
        **_: Any,
    ) -> None:
        shared = enable_gqa and query.shape[1] != key.shape[1]
        if shared and (attn_mask is not None or query.dtype == torch.float32):
            self.refuse("scaled_dot_product_attention: the kernel that holds all scores")
        if attn_mask is not None:
            self.kernels[self.phase] += MASKED_ATTENTION_KERNELS - 1

    def _count_waits(self, name: str, args: Any, kwargs: Any, on_device: Any, target: Any) -> None:
        if on_device and (name in READS or (name == "where" and len(args) == 1)):
            self.wait(name)
        elif name == "__reduce_ex__" or (target is CPU and on_device):
            self.wait("copy to the host")
        elif name in FROM_PYTHON and (target is CUDA or name == "new_tensor"):
            if not on_device or name == "new_tensor":
                self.wait(f"{name} of Python numbers")
        elif target is CUDA and name in ("to", "cuda") and not is_on_device(args[0]):
            if not kwargs.get("non_blocking"):
                self.wait("copy to the device")
        elif name == "copy_" and is_on_device(args[0]) != is_on_device(args[1]):
            if not (kwargs.get("non_blocking") or True in args[2:]):
                self.wait("copy_ between devices")
        elif name == "repeat_interleave" and "output_size" not in kwargs:
            if any(isinstance(x, Tensor) for x in (*args[1:], kwargs.get("repeats"))):
                self.wait(name)
        elif name in ("__getitem__", "__setitem__"):
            self._count_index(name, args)

    def _count_index(self, name: str, args: Sequence[Any]) -> None:
        indices = args[1] if isinstance(args[1], tuple) else (args[1],)
        if name == "__setitem__" and isinstance(args[2], Tensor) and not is_on_device(args[2]):
            self.wait("copy to the device")
        # a number goes to the places of a mask without counting them
        counts = name == "__getitem__" or (isinstance(args[2], Tensor) and args[2].dim())
        for index in indices:
            if isinstance(index, list) or (isinstance(index, Tensor) and not is_on_device(index)):
                self.wait("an index on the host")
            elif counts and isinstance(index, Tensor) and index.dtype == torch.bool:
                self.wait("a mask as an index")

    def _patch_torch(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("torch.autocast", "torch.amp.autocast"):
            patch.setattr(name, _Autocast)
        for name in ("is_autocast_enabled", "get_autocast_dtype"):
            patch.setattr(torch, name, _of_pretend_autocast(getattr(torch, name)))
        patch.setattr("torch.cuda.synchronize", lambda *_: self.wait("synchronize"))
        patch.setattr("torch.cuda.reset_peak_memory_stats", lambda *_: None)
        patch.setattr("torch.cuda.max_memory_allocated", lambda *_: 0)
        patch.setattr("torch.cuda.get_rng_state", lambda *_: torch.get_rng_state())
        patch.setattr("torch.cuda.set_rng_state", lambda *_: None)
        patch.setattr("torch.cuda.is_bf16_supported", lambda *_, **__: True)
        patch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
        patch.setattr("torch.cuda.get_device_capability", lambda *_: (8, 0))
        properties = SimpleNamespace(total_memory=80 * 10**9)
        patch.setattr("torch.cuda.get_device_properties", lambda *_: properties)
        patch.setattr("lit_rlhf.forward.attention._find_kernel", lambda: self._varlen_attn)
        patch.setattr("lit_rlhf.rollout.graphs.capture_graph", self._capture_graph)
        patch.setattr("lit_rlhf.rollout.graphs.refuse_waits", self._refuse_waits)
        # C++ saves tensors without a mark in the forward, so that recomputed ones differ in device
        checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
        patch.setitem(checks, "default", lambda x: {"shape": x.shape, "dtype": x.dtype})
        # C++ groups gradients by the device that it sees
        patch.setattr("torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype", _one_group)
        patch.setattr("torch.autograd._engine_run_backward", self._in_mode(run_engine))
        patch.setattr(distributed, "get_backend", lambda *_: "nccl")
        for name in COLLECTIVES:
            patch.setattr(distributed, name, self._like_nccl(getattr(distributed, name)))
        patch.setattr(LightningModule, "log", self._watched_log(LightningModule.log))

    def _varlen_attn(self, *args: Any, **kwargs: Any) -> Tensor:
        """torch's kernel for rows back to back, which exists only for CUDA."""
        for tensor in _tensors((*args, *kwargs.values())):
            if not is_on_device(tensor):
                self.refuse("varlen_attn: a tensor on the host")
        self.kernels[self.phase] += VARLEN_ATTENTION_KERNELS
        before, self._counting = self._counting, False
        try:
            with torch._C.DisableTorchFunction():
                return cast(Tensor, mark(reference_varlen_attn(*args, **kwargs)))
        finally:
            self._counting = before

    @contextmanager
    def _refuse_waits(self) -> Iterator[None]:
        before = dict(self.waits.get(self.phase, {}))
        yield
        if self.waits.get(self.phase, {}) != before:
            raise RuntimeError("called a synchronizing CUDA operation")

    def _capture_graph(self, function: Callable[[], None], _: Any) -> CapturedGraph:
        """A graph that computes by calling the function, under another name."""

        def replay() -> None:
            with self.named("replay"):
                function()

        return CapturedGraph(replay, pool=None)

    def _in_mode(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The mode is off while it handles a function, but the backward calls Python again."""

        def call(*args: Any, **kwargs: Any) -> Any:
            TorchFunctionMode.__enter__(self)
            try:
                return function(*args, **kwargs)
            finally:
                TorchFunctionMode.__exit__(self, None, None, None)

        return call

    def _like_nccl(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(collective)
        def call(*args: Any, **kwargs: Any) -> Any:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and not is_on_device(leaf):
                    self.refuse(f"{collective.__name__}: No backend type associated with cpu")
            return collective(*args, **kwargs)

        return call

    def _watched_log(self, log: Callable[..., None]) -> Callable[..., None]:
        @wraps(log)
        def call(module: LightningModule, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(value, Tensor) and not is_on_device(value):
                self.host_metrics.add(name)
            log(module, name, value, *args, **kwargs)

        return call


class _Autocast(torch.autocast):
    """Autocast acts by where the numbers are, which is the CPU."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu", *args, **kwargs)


def _of_pretend_autocast(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A function that reads the state of autocast on a device, by where the numbers are."""

    def read_state(device_type: str = "cuda") -> Any:
        return read("cpu" if device_type == "cuda" else device_type)

    return read_state


class _CountKernels(TorchDispatchMode):
    def __init__(self, audit: PretendCuda) -> None:
        super().__init__()
        self.audit = audit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.audit._counting or in_backward():
            name = func.name().partition("::")[2].partition(".")[0]
            if not func.is_view and name not in WITHOUT_KERNEL:
                self.audit.kernels[self.audit.phase] += 1
            if name == "_to_copy" and isinstance(args[0], nn.Parameter):
                self.audit.weight_casts[self.audit.phase] += 1
        return func(*args, **(kwargs or {}))


_OUTSIDE = PretendCuda()  # marks results where no context is active, and counts for nobody


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def find_site() -> str:
    """The line of this project that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        for package in ("/lit_rlhf/", "/lit_callbacks/"):
            if package in path and "/tests/" not in path:
                return f"{path.rpartition(package)[2]}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


def _one_group(lists: list[list[Tensor]], *_: Any) -> dict[Any, Any]:
    return {(CUDA, lists[0][0].dtype): (lists, [])} if lists[0] else {}


def _tensors(leaves: Iterable[Any]) -> list[Tensor]:
    """The tensors among arguments, and in lists and tuples among them."""
    tensors: list[Tensor] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif isinstance(leaf, list | tuple):
            tensors += _tensors(leaf)
    return tensors


def _device_of(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Arguments for the CPU, and the device that they asked for."""
    requested: Any = kwargs.get("device")
    if requested is not None:
        kwargs["device"] = _place_of(requested)
    if name in ("cuda", "cpu"):
        requested, args = name, args[:1]
    elif name == "to":
        rest = []
        for arg in args[1:]:
            if isinstance(arg, Tensor):
                requested = arg.device
            elif isinstance(arg, torch.device | str):
                requested, arg = arg, _place_of(arg)
            rest.append(arg)
        args = (args[0], *rest)
    if requested is None:
        return args, None
    return args, {"cuda": CUDA, "cpu": CPU}.get(torch.device(requested).type)


def _place_of(device: Any) -> torch.device:
    """Where the numbers of a device are: nowhere for meta, where models are built first."""
    place = torch.device(device)
    return place if place.type == "meta" else CPU


class _PretendAccelerator(CPUAccelerator):
    def setup_device(self, device: torch.device) -> None:
        """There is none to set up."""


class PretendCudaStrategy(SingleDeviceStrategy):
    """Trains on the pretend device."""

    def __init__(self) -> None:
        super().__init__(device=CUDA, accelerator=_PretendAccelerator())

    def model_to_device(self) -> None:
        mark_module(self.model)
        self.lightning_module._device = CUDA  # type: ignore[union-attr]

    def teardown(self) -> None:
        """Networks stay: Lightning would move them to the CPU."""
