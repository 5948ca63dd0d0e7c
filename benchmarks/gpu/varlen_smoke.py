"""Check the kernels of rollouts on a CUDA device: `python -m benchmarks.gpu.varlen_smoke`.

Compares `torch.nn.attention.varlen` with the attention that other devices and dtypes take, in
packed forwards and backwards and in decoding, and steps that are replayed with steps that are not.
Exits with 1 if a comparison fails.
"""

from __future__ import annotations

import sys
from typing import Literal, NamedTuple
from unittest.mock import patch

import torch
from jsonargparse import auto_cli
from torch import Tensor, nn

from benchmarks.speed.workload import SIZES, Workload, policy_network
from lit_rlhf.forward import (
    AttentionInputs,
    PackedLayout,
    RowOffsets,
    cached_attention,
    disable_dropout,
    optimize_forward,
    varlen_attention,
    varlen_obstacle,
)
from lit_rlhf.rollout import SamplingOptions, generate_responses

LENGTHS = (300, 1, 77, 512, 130)
HEADS = 8
KEY_HEADS = 2
HEAD_SIZE = 64
CAPACITY = 600
TOLERANCE = 0.02
"""Largest error relative to the norm: bfloat16 rounds by 0.4 %."""


class Check(NamedTuple):
    """A comparison: what its error is, and whether it is small enough."""

    name: str
    error: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance; it is not if it is NaN."""
        return self.error <= TOLERANCE


def varlen_smoke(device: Literal["cpu", "cuda"] = "cuda") -> None:
    """Run all comparisons and print a line for each.

    Args:
        device: `cpu` only tries the script; there is no kernel for it.
    """
    place = torch.device(device)
    is_supported = device == "cpu" or torch.cuda.is_available()
    query = torch.zeros(HEAD_SIZE, dtype=torch.bfloat16, device=place) if is_supported else None
    if query is None or varlen_obstacle(query):
        sys.exit("varlen_attn: needs a CUDA device from Ampere on")
    passed = True
    for check in run_checks(place):
        print(f"{'ok  ' if check.passed else 'FAIL'} {check.name}: error {check.error:.4f}")
        passed &= check.passed
    sys.exit(0 if passed else 1)


def run_checks(device: torch.device) -> list[Check]:
    """Run all comparisons on a device."""
    checks = []
    for window in (None, 50):
        suffix = "" if window is None else f", window of {window}"
        checks += compare_packed(device, window, suffix)
        checks.append(Check(f"decoding{suffix}", compare_decode(device, window)))
    return [*checks, Check("replayed steps", compare_replay(device))]


def compare_packed(device: torch.device, window: int | None, suffix: str) -> list[Check]:
    """Compare packed rows in one kernel with groups of rows in float32: output and gradients.

    Args:
        device: Where to compute.
        window: Length of the attention window in tokens; `None`: all earlier tokens.
        suffix: End of the checks' names.
    """
    shapes = [(1, heads, sum(LENGTHS), HEAD_SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    leaves = [_random(shape, device).requires_grad_() for shape in shapes]
    results = []
    for states in (leaves, [leaf.detach().float().requires_grad_() for leaf in leaves]):
        layout = PackedLayout(LENGTHS, device)
        query, key, value = states
        inputs = AttentionInputs(query, key, value, scale=None, dropout=0.0, window=window)
        output = layout.attend(nn.Identity(), inputs)
        output.float().pow(2).sum().backward()  # type: ignore[no-untyped-call]
        results.append([output, *(state.grad for state in states)])
    names = ("output", "gradient of queries", "gradient of keys", "gradient of values")
    return [
        Check(f"packed {name}{suffix}", _error(one, other))
        for name, one, other in zip(names, *results, strict=True)
    ]


def compare_decode(device: torch.device, window: int | None) -> float:
    """Compare attention to a cache by the kernel with attention under a mask in float32.

    Args:
        device: Where to compute.
        window: Length of the attention window in tokens; `None`: all earlier tokens.

    Returns:
        The largest error.
    """
    n = len(LENGTHS)
    query = _random((n, HEADS, HEAD_SIZE), device)
    keys, values = (_random((n, CAPACITY, KEY_HEADS, HEAD_SIZE), device) for _ in range(2))
    lengths = torch.tensor(LENGTHS, device=device)
    offsets = torch.arange(n + 1, dtype=torch.int32, device=device)
    query_rows = RowOffsets(offsets, 1)
    key_rows = RowOffsets(offsets * CAPACITY, CAPACITY)
    settings = {"scale": None, "dropout": 0.0, "window": window}
    with torch.no_grad():
        flat = AttentionInputs(query, keys.flatten(0, 1), values.flatten(0, 1), **settings)  # type: ignore[arg-type]
        varlen_output = varlen_attention(flat, query_rows, key_rows, lengths.int())
        columns = torch.arange(CAPACITY, device=device)
        mask = columns < lengths[:, None]
        if window is not None:
            mask &= columns >= lengths[:, None] - window
        by_head = [states.float().transpose(1, 2) for states in (keys, values)]
        masked = AttentionInputs(query.float()[:, :, None], *by_head, **settings)  # type: ignore[arg-type]
        cached_output = cached_attention(masked, mask[:, None, None])
    return _error(varlen_output, cached_output[:, :, 0])


def compare_replay(device: torch.device) -> float:
    """Compare decoding steps that are replayed from a CUDA graph with steps that are not.

    Args:
        device: Where to compute.

    Returns:
        Share of tokens that differ, in [0, 1].
    """
    work = Workload(**SIZES["tiny"])
    torch.manual_seed(0)
    network = policy_network(work, torch.bfloat16).to(device).requires_grad_(False)  # type: ignore[arg-type]
    model = disable_dropout(optimize_forward(network))
    ids = torch.randint(3, work.vocab, (6, 9), generator=torch.Generator().manual_seed(0))
    ids, mask = ids.to(device), torch.ones_like(ids, dtype=torch.bool, device=device)

    def sample() -> Tensor:
        options = SamplingOptions(max_new_tokens=40)
        # every eighth token ends a response, so that the number of rows changes
        return generate_responses(
            model, ids, mask, options, eos_token_ids=range(8), pad_token_id=0, seed=3, batch_size=4
        ).response_ids

    replayed = sample()
    with patch("lit_rlhf.rollout.graphs.capture_graph", side_effect=RuntimeError("to compare")):
        called = sample()
    if replayed.shape != called.shape:
        return 1.0
    return float((replayed != called).float().mean())


def _random(shape: tuple[int, ...], device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, torch.bfloat16)


def _error(actual: Tensor | None, expected: Tensor | None) -> float:
    assert actual is not None
    assert expected is not None
    difference = (actual.detach().double() - expected.detach().double()).norm()
    return float(difference / expected.detach().double().norm())


if __name__ == "__main__":
    auto_cli(varlen_smoke)
