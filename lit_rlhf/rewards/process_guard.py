"""Guards the settings of the process from reward functions.

A function that leaves autocast on, or changes a default of torch, would let the rest of the run
train another model without a word.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

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
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    "torch's number of threads": ProcessSetting(torch.get_num_threads, torch.set_num_threads),
    "cuDNN's benchmark mode": _flag(torch.backends.cudnn, "benchmark"),
    "cuDNN's deterministic mode": _flag(torch.backends.cudnn, "deterministic"),
    "oneDNN's switch": _flag(torch.backends.mkldnn, "enabled"),
    "the current folder": ProcessSetting(os.getcwd, os.chdir),
}


@contextmanager
def guard_process(restore: bool = True) -> Iterator[list[str]]:
    """Find what the block changes in the process, and put it back at the end.

    Args:
        restore: Whether to put it back. Otherwise it is only named.

    Yields:
        Names of the settings that the block has changed; empty up to its end.
    """
    before = {name: setting.read() for name, setting in _SETTINGS.items()}
    changed: list[str] = []
    try:
        yield changed
    finally:
        changed += [name for name, setting in _SETTINGS.items() if setting.read() != before[name]]
        for name in changed if restore else ():
            _SETTINGS[name].restore(before[name])


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
