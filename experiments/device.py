"""The name of the processor or GPU, beside which results are kept."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def device_name(device: str) -> str:
    """Model name of the processor or GPU.

    Args:
        device: `cpu` or `cuda`.
    """
    if device == "cuda":
        return torch.cuda.get_device_name()
    listed = Path("/proc/cpuinfo")  # on Linux
    for line in listed.read_text("utf-8").splitlines() if listed.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
