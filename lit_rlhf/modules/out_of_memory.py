"""Out-of-memory errors that name the phase, the sizes and the settings to change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter

import torch
from torch import Tensor

# Messages of errors that are plain RuntimeErrors: of the CPU's allocator, of CUDA's libraries.
PHRASES = ("DefaultCPUAllocator", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


@contextmanager
def explain_memory_errors(phase: str, ids: Tensor, changes: Sequence[str]) -> Iterator[None]:
    """Add phase, sizes and advice to an out-of-memory error of the block.

    Args:
        phase: Name of the phase that the block runs, for instance `rollout`.
        ids: The sequences that it processes, `[B, L]`.
        changes: What helps, see `suggest_change`; empty strings are left out.

    Raises:
        torch.OutOfMemoryError: In place of the error of the device or of the CPU's allocator.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(
            f"{phase}: out of memory with {ids.shape[0]} sequences of {ids.shape[1]} tokens on "
            f"this rank. What helps: {', or '.join(filter(None, changes))}. The allocator said: "
            f"{error}"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory of the device or of the host ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(phrase in str(error) for phrase in PHRASES)


def suggest_change(name: str, module: object) -> str:
    """How to change a setting so that less memory is needed; empty if that is done already.

    Args:
        name: Dotted name of an option of the module, or of another setting.
        module: The module, which has the option as an attribute.
    """
    try:
        value = attrgetter(name)(module)
    except AttributeError:
        return f"lower {name}"
    if isinstance(value, bool):
        return "" if value else f"set {name}: true"
    return f"set {name} (now None)" if value is None else f"lower {name} (now {value})"
