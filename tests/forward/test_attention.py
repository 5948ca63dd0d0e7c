"""Attention within rows, next to a float64 loop and to torch's own."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lit_rlhf.forward.attention import (
    MAX_BATCHED_LENGTH,
    AttentionInputs,
    attention,
    attention_implementation,
    cached_attention,
    causal_attention,
    causal_mask,
    supports_layouts,
)
from tests.support.pretend_cuda import PretendCuda, is_on_device, mark
from tests.support.tiny_models import tiny_causal_lm


def states(
    *, n_rows: int, n_heads: int, n_groups: int, n_queries: int, n_keys: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, tokens: int) -> Tensor:
        return torch.randn((n_rows, heads, tokens, 4), generator=generator).to(dtype)

    return draw(n_heads, n_queries), draw(n_groups, n_keys), draw(n_groups, n_keys)


def by_loop(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> Tensor:
    """One query after the other, in float64."""
    output = torch.zeros(query.shape, dtype=torch.float64)
    shared = query.shape[1] // key.shape[1]
    for row, head, place in torch.cartesian_prod(*(torch.arange(n) for n in query.shape[:3])):
        visible = [i for i in range(key.shape[2]) if bool(seen[row, 0, place, i])]
        keys, values = (x[row, head // shared, visible].double() for x in (key, value))
        scores = [float(query[row, head, place].double() @ k) * scale for k in keys]
        weights = [math.exp(score - max(scores)) for score in scores]
        total = sum(weights)
        for weight, vector in zip(weights, values, strict=True):
            output[row, head, place] += weight / total * vector
    return output


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("n_groups", [4, 2, 1])
@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
def test_causal_attention_is_the_mean_of_the_values_so_far(
    dtype: torch.dtype, close: float, n_groups: int, scale: float | None, train: bool
) -> None:
    query, key, value = states(
        n_rows=3, n_heads=4, n_groups=n_groups, n_queries=5, n_keys=5, dtype=dtype
    )
    with torch.set_grad_enabled(train):
        output = causal_attention(
            AttentionInputs(query, key, value, scale=scale, dropout=0.0, window=None)
        )
    assert output.dtype == dtype
    seen = torch.ones(5, 5).tril().bool().expand(3, 1, 5, 5)
    expected = by_loop(query, key, value, seen, 0.5 if scale is None else scale)
    torch.testing.assert_close(output.double(), expected, rtol=close, atol=close)


@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("n_groups", [4, 2])
def test_causal_attention_agrees_with_torchs_own(
    n_groups: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for short in (MAX_BATCHED_LENGTH, 0):
        monkeypatch.setattr("lit_rlhf.forward.attention.MAX_BATCHED_LENGTH", short)
        leaves = [
            x.requires_grad_()
            for x in states(
                n_rows=3, n_heads=4, n_groups=n_groups, n_queries=9, n_keys=9, dtype=torch.float64
            )
        ]
        output = causal_attention(AttentionInputs(*leaves, scale=None, dropout=0.0, window=window))
        output.pow(3).sum().backward()
        results.append([output, *(leaf.grad for leaf in leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_dropout_is_left_to_torch() -> None:
    torch.manual_seed(0)
    query, key, value = states(
        n_rows=2, n_heads=2, n_groups=2, n_queries=6, n_keys=6, dtype=torch.float32
    )
    with_dropout = causal_attention(
        AttentionInputs(query, key, value, scale=None, dropout=0.5, window=None)
    )
    without = causal_attention(
        AttentionInputs(query, key, value, scale=None, dropout=0.0, window=None)
    )
    assert not torch.allclose(with_dropout, without)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_groups", [4, 2])
def test_the_next_token_attends_to_a_part_of_a_cache(n_groups: int, dtype: torch.dtype) -> None:
    query, keys, values = states(
        n_rows=5, n_heads=4, n_groups=n_groups, n_queries=1, n_keys=12, dtype=dtype
    )
    key, value = keys[:3, :, :7], values[:3, :, :7]
    seen = (torch.arange(7) < torch.tensor([[7], [2], [5]]))[:, None, None]
    output = cached_attention(
        AttentionInputs(query[:3], key, value, scale=None, dropout=0.0, window=None), seen
    )
    expected = functional.scaled_dot_product_attention(
        query[:3].float(), key.float(), value.float(), attn_mask=seen, enable_gqa=True
    )
    torch.testing.assert_close(output.float(), expected, rtol=1e-2, atol=1e-2)
    assert output.dtype == dtype
    with PretendCuda():  # whose kernels give the heads of a row in another order
        inputs = AttentionInputs(
            *mark([query[:3], key, value]), scale=None, dropout=0.0, window=None
        )
        output = mark(cached_attention(inputs, mark(seen)), on_device=False)
    torch.testing.assert_close(output.float(), expected, rtol=1e-2, atol=1e-2)


class LargestFloat32(TorchDispatchMode):
    """Notes the size of the largest float32 tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # torch's signature
        result = func(*args, **(kwargs or {}))
        for output in result if isinstance(result, tuple) else (result,):
            if isinstance(output, Tensor) and output.dtype == torch.float32:
                self.numel = max(self.numel, output.numel())
        return result


@pytest.mark.parametrize("n_groups", [4, 2])
def test_cached_attention_copies_no_half_precision_cache_to_float32(n_groups: int) -> None:
    query, key, value = states(
        n_rows=3, n_heads=4, n_groups=n_groups, n_queries=1, n_keys=12, dtype=torch.bfloat16
    )
    seen = torch.ones((3, 1, 1, 12), dtype=torch.bool)
    with torch.no_grad(), LargestFloat32() as largest:
        # under autocast, queries come in float32
        cached_attention(
            AttentionInputs(query.float(), key, value, scale=None, dropout=0.0, window=None), seen
        )
    assert largest.numel < key.numel()


@pytest.mark.parametrize(
    ("dtype", "window"), [(torch.float32, None), (torch.float32, 3), (torch.bfloat16, 3)]
)
def test_grouped_heads_on_a_gpu_avoid_all_scores(dtype: torch.dtype, window: int | None) -> None:
    inputs = AttentionInputs(
        *states(n_rows=2, n_heads=4, n_groups=2, n_queries=9, n_keys=9, dtype=dtype),
        scale=None,
        dropout=0.0,
        window=window,
    )
    expected = causal_attention(inputs)
    with PretendCuda():  # refuses that kernel
        output = causal_attention(
            AttentionInputs(*mark(list(inputs[:3])), scale=None, dropout=0.0, window=window)
        )
    assert is_on_device(output)
    # bf16 may round to the number beside: a difference of one eps
    close = 1e-5 if dtype == torch.float32 else 3 * torch.finfo(dtype).eps
    torch.testing.assert_close(mark(output, on_device=False), expected, rtol=close, atol=close)


def test_a_window_of_two_sees_a_token_and_the_one_before_it() -> None:
    mask = causal_mask(3, 2, torch.device("cpu"))
    assert mask.int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]


def test_transformers_still_has_the_private_names_that_are_read() -> None:
    model = tiny_causal_lm()
    assert supports_layouts(model.base_model)
    assert attention_implementation(model.base_model) == "sdpa"


def test_a_layout_gets_all_settings_of_the_layer() -> None:
    (query, key, value), given = (
        states(n_rows=1, n_heads=2, n_groups=1, n_queries=3, n_keys=4, dtype=torch.float32),
        list[AttentionInputs](),
    )
    layout = SimpleNamespace(attend=lambda _, inputs: given.append(inputs) or inputs.query)
    output, _ = attention(
        nn.Identity(), query, key, value, None, dropout=0.25, scaling=0.5, sliding_window=3,
        layout=layout,
    )  # fmt: skip
    assert output is query
    assert given == [AttentionInputs(query, key, value, scale=0.5, dropout=0.25, window=3)]
