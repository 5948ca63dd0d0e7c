"""Out-of-memory errors that say what did not fit and which setting to change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter

import torch
from torch import Tensor

# What torch says where it has no class for it: the CPU's allocator, and CUDA's libraries.
PHRASES = ("DefaultCPUAllocator", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


@contextmanager
def explained_memory_errors(phase: str, ids: Tensor, changes: Sequence[str]) -> Iterator[None]:
    """Name phase, sizes and settings in an out-of-memory error of the block.

    Args:
        phase: What the block does, for instance `rollout`.
        ids: The sequences that it handles, `[B, L]`.
        changes: What to change, in words.

    Raises:
        torch.OutOfMemoryError: From the error of the device or of the CPU's allocator.
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
    """Whether memory of the device or of the host ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(phrase in str(error) for phrase in PHRASES)


def suggest_change(name: str, options: object) -> str:
    """What to do with a setting to save memory, in words; empty if it is done already.

    Args:
        name: Dotted name of an option, or of a setting elsewhere.
        options: Whose attribute it is, a module's; a setting elsewhere has no value there.
    """
    try:
        value = attrgetter(name)(options)
    except AttributeError:
        return f"lower {name}"
    if isinstance(value, bool):
        return "" if value else f"set {name}: true"
    return f"set {name} (now None)" if value is None else f"lower {name} (now {value})"
