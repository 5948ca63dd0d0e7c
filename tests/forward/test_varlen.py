"""One kernel for all rows gives what groups of rows give; the kernel itself needs a GPU."""

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_rlhf.forward import PackedLayout, attention, optimize_forward, target_logprobs
from lit_rlhf.forward.attention import (
    AttentionInputs,
    RowOffsets,
    varlen_attention,
    varlen_obstacle,
)
from tests.support.pretend_cuda import CUDA, PretendCuda, is_on_device, mark, mark_module
from tests.support.tiny_models import tiny_causal_lm
from tests.support.varlen_reference import reference_varlen_attn

LENGTHS = [9, 1, 0, 4, 12]


def states(n_heads: int, n_key_heads: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key and value as decoders make them: `[1, heads, N, D]`, by token in memory."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn((1, sum(LENGTHS), heads, 8), generator=generator).to(dtype).transpose(1, 2)
        for heads in (n_heads, n_key_heads, n_key_heads)
    ]


def attend(leaves: list[Tensor], device: torch.device, **settings: object) -> Tensor:
    layout = PackedLayout(LENGTHS, device)
    return layout.attend(nn.Identity(), AttentionInputs(*leaves, **settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("n_key_heads", [4, 2])
def test_values_and_gradients_are_those_of_groups(
    n_key_heads: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, results = {"scale": 0.5, "dropout": 0.0, "window": window}, []
    for obstacle in ("a test", ""):
        monkeypatch.setattr("lit_rlhf.forward.packing.varlen_obstacle", lambda _: obstacle)  # noqa: B023
        monkeypatch.setattr(attention, "_find_kernel", lambda: reference_varlen_attn)
        leaves = [x.requires_grad_() for x in states(4, n_key_heads, torch.float64)]
        output = attend(leaves, torch.device("cpu"), **settings)
        output.pow(3).sum().backward()
        results.append([output, *(leaf.grad for leaf in leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_on_gpu_is_varlen(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[int]] = []

    def counted(audit: PretendCuda, *, cu_seq_q: Tensor, **kwargs: Any) -> Tensor:
        calls.append(cu_seq_q.cpu().tolist())
        return kernel(audit, cu_seq_q=cu_seq_q, **kwargs)

    kernel = PretendCuda._varlen_attn
    monkeypatch.setattr(PretendCuda, "_varlen_attn", counted)
    mask = torch.arange(12) < torch.tensor(LENGTHS)[[0, 1, 3, 4], None]
    ids = torch.randint(4, 288, mask.shape, generator=torch.Generator().manual_seed(1))
    targets = mask.clone()
    targets[:, 0] = False
    results = []
    for on_gpu in (False, True):
        model = tiny_causal_lm().requires_grad_(True)
        model = optimize_forward(model if autocast else model.to(torch.bfloat16))
        tensors = [ids, mask, targets]
        if on_gpu:
            mark_module(model)
            mark(tensors)
        with PretendCuda(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logprobs = target_logprobs(model, *tensors)
            logprobs.sum().backward()
        assert is_on_device(logprobs) == on_gpu
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results.append(mark([logprobs.detach(), *gradients], on_device=False))
        mark(tensors, on_device=False)
    # bf16 moves either by up to 0.022 from the result in float32, so the two by up to twice that
    for one, other in zip(*results, strict=True):
        assert float((one - other).float().norm() / one.float().norm()) < 0.045
    # in both layers
    assert calls == [[0, 9, 10, 14, 26, 26]] * 2


@pytest.mark.parametrize(
    ("dtype", "size", "expected"),
    [
        (torch.bfloat16, 8, True),
        (torch.float16, 256, True),
        (torch.float32, 8, False),
        (torch.bfloat16, 12, False),
        (torch.bfloat16, 264, False),
    ],
)
def test_kernel_takes_flash_attentions_cases(dtype: torch.dtype, size: int, expected: bool) -> None:
    value = torch.zeros((1, 2, 3, size), dtype=dtype)
    assert varlen_obstacle(value)  # on a CPU
    with PretendCuda(), pytest.MonkeyPatch.context() as patch:
        assert (varlen_obstacle(mark(value)) == "") == expected
        patch.setattr("torch.cuda.get_device_capability", lambda *_: (7, 5))
        assert varlen_obstacle(value)
        patch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))
        assert (varlen_obstacle(value) == "") == expected
        patch.setattr(attention, "_find_kernel", lambda: None)  # an older torch
        assert varlen_obstacle(value)
        assert ("has no such kernel" in varlen_obstacle(value)) == expected


def test_dropout_is_left_to_the_groups() -> None:
    with PretendCuda(count_kernels=True) as audit:
        leaves = mark(states(2, 1, torch.bfloat16))
        attend(leaves, CUDA, scale=None, dropout=0.5, window=None)
        many = audit.kernels.pop("start")
        attend(leaves, CUDA, scale=None, dropout=0.0, window=None)
    assert audit.kernels["start"] < many / 4


def test_torch_has_the_arguments_that_are_given() -> None:
    names = inspect.signature(reference_varlen_attn).parameters.keys()
    kernel = attention._find_kernel()
    assert kernel is not None
    assert names <= inspect.signature(kernel).parameters.keys()
    assert names == inspect.signature(attention.flash_attention_rows).parameters.keys()


@pytest.mark.parametrize("kernel", ["installed", "operator"])
@pytest.mark.parametrize("window", [None, 3])
def test_operators_of_torch_have_the_shapes_and_gradients_expected(
    kernel: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "operator":
        # the signature of torch 2.11
        older = SimpleNamespace(varlen_attn=lambda query, *, window_size=(-1, -1): 1 / 0)
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", older)
        find = attention._find_kernel.__wrapped__
        assert find() is attention.flash_attention_rows
        monkeypatch.setattr(attention, "_find_kernel", find)
    meta: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
    shapes = ((sum(LENGTHS), n_heads, 64) for n_heads in (8, 2, 2))
    query, key, value = (torch.empty(shape, requires_grad=True, **meta) for shape in shapes)
    rows = PackedLayout(LENGTHS, torch.device("meta")).rows
    output = varlen_attention(
        AttentionInputs(query, key, value, scale=0.5, dropout=0.0, window=window), rows, rows
    )
    assert output.shape == query.shape
    if kernel == "operator":  # what the backward masks with, as unsigned numbers
        saved: Any = output.grad_fn
        before = (-1 if window is None else window - 1) % 2**64
        assert (saved._saved_window_size_left, saved._saved_window_size_right) == (before, 0)
        assert saved._saved_is_causal == (window is None)
    output.float().sum().backward()
    assert [x.grad.shape for x in (query, key, value)] == [x.shape for x in (query, key, value)]
    # a decoding step: one query per row, slots of 50 keys each
    slots = RowOffsets(torch.empty(4, dtype=torch.int32, device="meta"), 50)
    used = torch.empty(3, dtype=torch.int32, device="meta")
    one, cached = (torch.empty((n, h, 64), **meta) for n, h in ((3, 8), (150, 2)))  # type: ignore[call-overload]
    with torch.no_grad():
        step = AttentionInputs(one, cached, cached, scale=None, dropout=0.0, window=window)
        assert varlen_attention(step, slots._replace(longest=1), slots, used).shape == one.shape
