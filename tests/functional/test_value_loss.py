import pytest
import torch
from torch import Tensor

from lit_rlhf.functional import explained_variance, value_loss
from tests.support.masks import length_mask

ALL = torch.ones(1, 1, dtype=torch.bool)


def one(value: float) -> Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("value", "target", "loss", "slope", "clip_fraction"),
    [
        # old value 1, clip 0.2: inside, 0.5 (V - R)^2 with slope V - R
        (1.1, 2.0, 0.405, -0.9, 0.0),
        (0.9, 0.0, 0.405, 0.9, 0.0),
        # moved too far towards the target: held at 1.2 and 0.8, no gradient
        (1.5, 2.0, 0.32, 0.0, 1.0),
        (0.5, 0.0, 0.32, 0.0, 1.0),
        # moved too far away from it: the larger error counts, its gradient leads back
        (0.5, 2.0, 1.125, -1.5, 0.0),
        (1.5, 0.0, 1.125, 1.5, 0.0),
    ],
)
def test_clipped_value_loss_by_hand(
    value: float, target: float, loss: float, slope: float, clip_fraction: float
) -> None:
    values = one(value).requires_grad_()
    actual, clipped = value_loss(values, one(1.0), one(target), ALL, value_clip=0.2)
    assert actual.item() == pytest.approx(loss, rel=1e-12)
    (grad,) = torch.autograd.grad(actual, values)
    assert (grad.item(), clipped.item()) == (pytest.approx(slope, rel=1e-12), clip_fraction)


def test_unclipped_value_loss_by_hand() -> None:
    values = torch.tensor([[3.0, 1.0, 999.0]], requires_grad=True)
    targets, mask = torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([[True, True, False]])
    actual, clipped = value_loss(values, torch.zeros(1, 3), targets, mask, value_clip=None)
    assert actual.item() == 1.25  # 0.5 (4 + 1) / 2
    (grad,) = torch.autograd.grad(actual, values)
    assert (grad.tolist(), clipped.item()) == ([[1.0, -0.5, 0.0]], 0)


def test_rounding_is_not_a_clip() -> None:
    # old + (value - old) is often not quite the value
    values, old, returns = (torch.randn(10, 50) for _ in range(3))
    mask = torch.ones(10, 50, dtype=torch.bool)
    assert value_loss(values, old, returns, mask, value_clip=20.0).clip_fraction.item() == 0


@pytest.mark.parametrize(
    ("values", "returns", "expected"),
    [
        # returns 0, 2, 4 vary by 8/3; what is left of them is 0, 1, -1, which varies by 2/3
        ([0.0, 1.0, 5.0], [0.0, 2.0, 4.0], 0.75),
        ([0.0, 2.0, 4.0], [0.0, 2.0, 4.0], 1.0),
        ([7.0, 9.0, 11.0], [0.0, 2.0, 4.0], 1.0),  # an offset is no error of explained variance
        ([9.0, 9.0, 9.0], [0.0, 2.0, 4.0], 0.0),  # a constant explains nothing
        ([0.0, -2.0, -4.0], [0.0, 2.0, 4.0], -3.0),  # and what is wrong less
        ([0.125, 0.375], [0.0, 0.5], 0.75),  # returns that hardly vary
        # in float32 a large return swallows a small value: the returns have a variance of 1
        # and what is left of them, 0.5 and 1.5 more, has one of 0.25
        ([-0.5, 0.5], [2.0**24, 2.0**24 + 2], 0.75),
        ([0.0, 2.0], [2.0**24, 2.0**24 + 2], 1.0),
    ],
)
def test_explained_variance_by_hand(
    values: list[float], returns: list[float], expected: float
) -> None:
    mask = torch.tensor([[*[True] * len(values), False]])
    explained = explained_variance(
        torch.tensor([[*values, -999.0]]), torch.tensor([[*returns, 999.0]]), mask
    )
    assert (explained.item(), explained.dtype) == (expected, torch.float32)


@pytest.mark.parametrize("n_tokens", [0, 1, 3])
def test_explained_variance_without_variance_is_0(n_tokens: int) -> None:
    mask = length_mask(torch.tensor([n_tokens]), 3)
    assert explained_variance(torch.randn(1, 3), torch.ones(1, 3), mask).item() == 0.0


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "fraction"),
    # half way between the value and the bound both errors are equal, and a gradient stays
    [(-1.0, 1.0, -2.0, 0.25, 1.0), (2.0, 0.0, 1.5, 1.0, 0.0)],
)
def test_clipped_values_have_left_the_interval_around_the_old_value(
    value: float, old: float, target: float, clip: float, fraction: float
) -> None:
    _, clipped = value_loss(one(value), one(old), one(target), ALL, value_clip=clip)
    assert clipped.item() == fraction
