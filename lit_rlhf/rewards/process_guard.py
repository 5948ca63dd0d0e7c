"""Guards the settings of the process from reward functions.

A function that leaves autocast on, or changes a default of torch, would let the rest of the run
train another model without a word.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch


class ProcessSetting(NamedTuple):
    """A setting of the process that a reward function may not change.

    Attributes:
        read: Reads it.
        restore: Sets it to a value that was read.
    """

    read: Callable[[], Any]
    restore: Callable[[Any], object]


def _set_default_device(device: torch.device) -> None:
    # a default that is set, even to the CPU, costs time at each new tensor
    torch.set_default_device(None if device.type == "cpu" else device)


def _flag(owner: Any, name: str) -> ProcessSetting:  # noqa: ANN401  # a module of torch.backends
    """A flag of one of torch's backends, which is an attribute."""
    return ProcessSetting(
        read=lambda: getattr(owner, name),
        restore=lambda value: setattr(owner, name, value),
    )


class _Stream(NamedTuple):
    """A standard stream.

    Attributes:
        stream: The object that Python has for it.
        is_closed: Whether that is closed.
        file: Device and inode of its descriptor; `None` if the descriptor is closed. A file that is
            opened next would get the number, and the output of everybody else.
    """

    stream: Any
    is_closed: bool
    file: tuple[int, int] | None


def _stream(name: str, descriptor: int) -> ProcessSetting:
    """A standard stream, which can be put back if it was replaced, but not opened again."""

    def read() -> _Stream:
        stream = getattr(sys, name)
        try:
            status = os.fstat(descriptor)
        except OSError:
            file = None
        else:
            file = (status.st_dev, status.st_ino)
        return _Stream(stream, bool(getattr(stream, "closed", False)), file)

    return ProcessSetting(read=read, restore=lambda saved: setattr(sys, name, saved.stream))


def _handler(name: str) -> ProcessSetting:
    """The handler of a signal, which only the main thread can set."""
    number = signal.Signals[name]

    def restore(handler: Any) -> None:  # noqa: ANN401  # a function or a constant of `signal`
        # a handler that is not Python's is None
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(number, handler)

    return ProcessSetting(read=lambda: signal.getsignal(number), restore=restore)


def _flushes_denormals() -> bool:
    """Whether numbers that are too small for a normal exponent become 0; torch does not tell."""
    smallest = torch.tensor(5e-324, dtype=torch.float64, device="cpu")
    return not (smallest * 1.0).item()


def _read_matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # one of `_precision_owners` was given another
        return "mixed"


def _precision_owners() -> list[Any]:
    """What has a precision of float32 of its own in torch 2.9 and later, the whole before parts."""
    backends = torch.backends
    owners = [backends, backends.cuda.matmul, backends.cudnn, backends.mkldnn]
    for library in (backends.cudnn, backends.mkldnn):
        owners += [getattr(library, name, None) for name in ("matmul", "conv", "rnn")]
    return [owner for owner in owners if hasattr(owner, "fp32_precision")]


def _read_precisions() -> list[str]:
    return [owner.fp32_precision for owner in _precision_owners()]


def _set_precisions(precisions: list[str]) -> None:
    for owner, precision in zip(_precision_owners(), precisions, strict=True):
        owner.fp32_precision = precision


_SETTINGS = {
    "torch's gradient mode": ProcessSetting(torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's default dtype": ProcessSetting(torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": ProcessSetting(torch.get_default_device, _set_default_device),
    **{
        f"torch's autocast on {device}": ProcessSetting(
            partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)
        )
        for device in ("cpu", "cuda")
    },
    **{
        f"torch's autocast dtype on {device}": ProcessSetting(
            partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)
        )
        for device in ("cpu", "cuda")
    },
    "torch's deterministic mode": ProcessSetting(
        torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    ),
    "torch's matmul precision": ProcessSetting(
        _read_matmul_precision, torch.set_float32_matmul_precision
    ),
    "torch's number of threads": ProcessSetting(torch.get_num_threads, torch.set_num_threads),
    "torch's precision of float32": ProcessSetting(_read_precisions, _set_precisions),
    "torch's treatment of denormals": ProcessSetting(_flushes_denormals, torch.set_flush_denormal),
    "torch's anomaly mode": ProcessSetting(
        torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly
    ),
    **{
        f"torch's {kind} attention": ProcessSetting(
            getattr(torch.backends.cuda, f"{kind}_sdp_enabled"),
            getattr(torch.backends.cuda, f"enable_{kind}_sdp"),
        )
        for kind in ("flash", "mem_efficient", "math")
    },
    "cuDNN's switch": _flag(torch.backends.cudnn, "enabled"),
    "cuDNN's benchmark mode": _flag(torch.backends.cudnn, "benchmark"),
    "cuDNN's deterministic mode": _flag(torch.backends.cudnn, "deterministic"),
    "oneDNN's switch": _flag(torch.backends.mkldnn, "enabled"),
    **{
        f"sys.{name}": _stream(name, descriptor)
        for descriptor, name in enumerate(("stdin", "stdout", "stderr"))
    },
    "the current folder": ProcessSetting(os.getcwd, os.chdir),
    "NumPy's treatment of errors": ProcessSetting(np.geterr, lambda how: np.seterr(**how)),
    **{f"the handler of {name}": _handler(name) for name in ("SIGINT", "SIGTERM")},
}


@contextmanager
def guard_process(restore: bool = True) -> Iterator[list[str]]:
    """Find what the block changes in the process, and put it back at the end.

    Args:
        restore: Whether to put it back. Otherwise it is only named.

    Yields:
        Names of the settings that the block has changed; empty up to its end.
    """
    values_before = {name: setting.read() for name, setting in _SETTINGS.items()}
    changed: list[str] = []
    try:
        yield changed
    finally:
        changed += [
            name for name, setting in _SETTINGS.items() if setting.read() != values_before[name]
        ]
        for name in changed if restore else ():
            _SETTINGS[name].restore(values_before[name])


@contextmanager
def keep_random_numbers(seed: int | None = None) -> Iterator[None]:
    """Put torch's random numbers back at the end of the block, as if it had drawn none.

    Args:
        seed: Seed of the random numbers inside; `None`: they go on from those outside.
    """
    has_gpus = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # untyped there
    devices = list(range(torch.cuda.device_count())) if has_gpus else []
    with torch.random.fork_rng(devices=devices):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        if seed is not None and devices:
            torch.cuda.manual_seed_all(seed)
        yield
