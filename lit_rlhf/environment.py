"""Prepares a process for the libraries that it will load: environment variables and their notes.

Scripts and notebooks call `set_environment` and `hide_loading_notes` before they import torch.
"""

import logging
import os
import sys
from collections.abc import Mapping
from typing import NamedTuple


class Variable(NamedTuple):
    """A setting of a library that can only be given before the library loads.

    Attributes:
        name: Name of the environment variable.
        value: Value that a command gives it.
        reason: Why this value and not the library's own.
        rivals: Other variables that decide the same. Where the user has set one, this variable is
            left alone.
    """

    name: str
    value: str
    reason: str
    rivals: tuple[str, ...] = ()


VARIABLES = (
    Variable(
        name="GOMP_SPINCOUNT",
        value="10000",
        reason=(
            "OpenMP's waiting threads then sleep after a thirtieth of the usual time in a loop: "
            "beside other processes the loop takes the cores of threads that compute"
        ),
        rivals=("OMP_WAIT_POLICY",),
    ),
    Variable(
        name="PYTORCH_ALLOC_CONF",
        value="expandable_segments:True",
        reason="packed forwards differ in size, so the blocks of CUDA's allocator have to grow",
        rivals=("PYTORCH_CUDA_ALLOC_CONF",),
    ),
    Variable(
        name="THP_MEM_ALLOC_ENABLE",
        value="1",
        reason=(
            "torch then asks Linux for huge pages for its large tensors in main memory, of which "
            "each new one otherwise costs a fault for every 4 KiB"
        ),
    ),
)
"""Read when torch and its OpenMP load."""


def choose_values(environment: Mapping[str, str]) -> dict[str, str]:
    """Choose values for the `VARIABLES` that an environment says nothing about.

    Args:
        environment: Environment variables of the process that will load torch, by name.
    """
    unset = [
        variable
        for variable in VARIABLES
        if environment.keys().isdisjoint((variable.name, *variable.rivals))
    ]
    return {variable.name: variable.value for variable in unset}


def set_environment() -> dict[str, str]:
    """Set `VARIABLES` that the user has not decided on; return the values that were set.

    Nothing is set once torch is loaded, because it would change nothing.
    """
    if "torch" in sys.modules:
        return {}
    values = choose_values(os.environ)
    os.environ.update(values)
    return values


def hide_loading_notes() -> None:
    """Hide what libraries log as they are imported and no user can do anything about."""
    # PEFT imports bitsandbytes wherever it is installed; without the package `kernels` it warns
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").addFilter(_says_more_than_the_accelerator)


def _says_more_than_the_accelerator(record: logging.LogRecord) -> bool:
    return "Setting accelerator to CPU" not in record.getMessage()  # from DeepSpeed 0.19.8
