"""Roughly how long stages take here, from the size of the model and the speed of the processor."""

from collections.abc import Mapping
from time import perf_counter
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM

from lit_rlhf.models import ModelOptions, read_config

_SIZE = 512  # rows and columns of the measured products
_PRODUCTS = 20
_EFFICIENCY = 0.5  # a training step's speed as a share of matrix products alone
_SAMPLING = 4.0  # times as long per token as a forward of whole sequences


class Work(NamedTuple):
    """Tokens that pass through a network in a stage.

    Attributes:
        learned: Tokens that a network learns from, forwards and backwards.
        scored: Tokens of forwards without gradients.
        sampled: Tokens of sequences that are sampled.
        has_adapters: Whether LoRA adapters learn in place of the weights.
    """

    learned: float
    scored: float = 0.0
    sampled: float = 0.0
    has_adapters: bool = False

    def operations(self, n_weights: int) -> float:
        """Multiplications and additions in networks of `n_weights` weights."""
        # Two for each weight and token forwards. Backwards two for the gradient of the activations,
        # and two for the gradient of the weights, which adapters do without.
        learning = 4 if self.has_adapters else 6
        return n_weights * (
            learning * self.learned + 2 * self.scored + 2 * _SAMPLING * self.sampled
        )


def describe_time(model: str, work: Mapping[str, Work]) -> str:
    """Say how long each stage takes here, within a factor of two or three.

    Args:
        model: Folder or hub id of the model; only its config is read.
        work: What is to be done, by the stage's name in the sentence.
    """
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            read_config(model, ModelOptions())
        )
    speed = _measure_speed() * _EFFICIENCY
    times = {
        name: _round_time(stage_work.operations(network.num_parameters()) / speed)
        for name, stage_work in work.items()
    }
    return f"Time here, roughly: {', '.join(f'{name} {time}' for name, time in times.items())}"


def _measure_speed() -> float:
    """Operations a second in products of matrices, on the device that the stages use."""
    is_cuda = torch.cuda.is_available()
    dtype = torch.bfloat16 if is_cuda else torch.float32
    matrix = torch.ones(_SIZE, _SIZE, device="cuda" if is_cuda else "cpu", dtype=dtype)
    matrix @ matrix  # the first one takes longer
    start = perf_counter()
    for _ in range(_PRODUCTS):
        product = matrix @ matrix
    float(product[0, 0])  # waits for the device
    return 2.0 * _SIZE**3 * _PRODUCTS / (perf_counter() - start)


def _round_time(seconds: float) -> str:
    """A duration in words, in one unit."""
    if seconds < 60:
        return "under a minute"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"
