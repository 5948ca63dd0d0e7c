from typing import Any

import pytest
import torch

from lit_rlhf.functional import Moments, masked_moments, masked_sum, masked_whiten, merged_moments
from lit_rlhf.functional.masking import masked_average, masked_mean, safe_std

NAN = float("nan")
# kept: 1, 2, 3, 10; their mean is 4 and their squared differences add up to 9 + 4 + 1 + 36 = 50
VALUES = torch.tensor([[1.0, 2.0, NAN], [3.0, 10.0, 999.0]])
MASK = torch.tensor([[True, True, False], [True, True, False]])


def test_sum_and_mean_skip_what_is_masked() -> None:
    assert (masked_sum(VALUES, MASK), masked_mean(VALUES, MASK)) == (16, 4)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert masked_sum(VALUES, mask, dim=1).tolist() == [3, 3]
    assert masked_mean(VALUES, mask, dim=1).tolist() == [1.5, 3]
    assert masked_mean(VALUES, mask, dim=0).tolist() == [2, 2, 0]


def test_no_gradient_comes_from_outside_the_mask() -> None:
    values = VALUES.clone().requires_grad_()
    torch.autograd.backward(masked_mean(values, MASK))
    torch.testing.assert_close(values.grad, torch.tensor([[0.25, 0.25, 0.0], [0.25, 0.25, 0.0]]))


def test_moments_are_float64_and_population() -> None:
    moments = masked_moments(VALUES, MASK)
    assert [float(x) for x in moments] == [4, 12.5, 4]
    assert {x.dtype for x in moments} == {torch.float64}
    # the spread of values far from zero is kept
    far = torch.tensor([10_000.0, 10_000.5, 10_001.0], dtype=torch.float32)
    assert float(masked_moments(far, far > 0).var) == pytest.approx(0.5 / 3, rel=1e-12)


def test_merged_moments_are_those_of_the_union() -> None:
    parts = (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0]))
    merged = merged_moments(*(masked_moments(part, torch.ones_like(part).bool()) for part in parts))
    assert [float(x) for x in merged] == pytest.approx([4, 12.5, 4], rel=1e-14)


@pytest.mark.parametrize("mask", [MASK, VALUES == 10])
@pytest.mark.parametrize("empty_first", [True, False])
def test_merging_with_an_empty_set_changes_nothing(empty_first: bool, mask: torch.Tensor) -> None:
    empty = masked_moments(torch.zeros(2), torch.zeros(2, dtype=torch.bool))
    other = masked_moments(VALUES, mask)
    assert merged_moments(*((empty, other) if empty_first else (other, empty))) == other
    assert [float(x) for x in merged_moments(empty, empty)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (VALUES, [[x / 12.5**0.5 for x in row] for row in ([-3.0, -2.0, 0.0], [-1.0, 6.0, 0.0])]),
        # small values reach unit variance
        (torch.tensor([1e-6, -1e-6]), [1.0, -1.0]),
        # float32 has no 2 ** 24 + 1, the mean of these two
        (torch.tensor([2.0**24, 2.0**24 + 2]), [-1.0, 1.0]),
    ],
)
def test_whitening_by_hand(values: torch.Tensor, expected: list[Any]) -> None:
    mask = MASK if values.dim() == 2 else torch.tensor([True, True])
    torch.testing.assert_close(masked_whiten(values, mask), torch.tensor(expected))


def test_whitening_masked_equals_whitening_trimmed() -> None:
    values = torch.randn(2, 4)
    padded = torch.cat([values, torch.full((2, 3), 999.0)], dim=1)
    mask = torch.cat([torch.ones(2, 4), torch.zeros(2, 3)], dim=1).bool()
    trimmed = masked_whiten(values, torch.ones(2, 4, dtype=torch.bool))
    torch.testing.assert_close(masked_whiten(padded, mask)[:, :4], trimmed, rtol=0, atol=0)
    assert (masked_whiten(padded, mask)[:, 4:] == 0).all()


def test_whitening_by_given_moments() -> None:
    moments = Moments(*(torch.tensor(x, dtype=torch.float64) for x in (2.0, 4.0, 100.0)))
    whitened = masked_whiten(VALUES, MASK, moments=moments)
    assert whitened.tolist() == [[-0.5, 0.0, 0.0], [0.5, 4.0, 0.0]]


def test_tensors_beside_moments_or_a_denominator_are_checked() -> None:
    with pytest.raises(ValueError, match=r"^values: "):
        masked_average(MASK, MASK, denominator=2.0)
    for name, values, mask in (("values", MASK, MASK), ("mask", VALUES, VALUES)):
        with pytest.raises(ValueError, match=f"^{name}: "):
            masked_whiten(values, mask, masked_moments(VALUES, MASK))


def test_whitening_equal_values_gives_zeros_and_not_noise() -> None:
    values = torch.ones(2, 3, dtype=torch.float64)
    # the moments of equal numbers can be off by a rounding error, here one unit in the last place
    off = torch.tensor([1 + 2**-52, 2**-104, 6.0], dtype=torch.float64)
    for moments in (None, Moments(*off.unbind())):
        whitened = masked_whiten(values, torch.ones(2, 3, dtype=torch.bool), moments=moments)
        torch.testing.assert_close(whitened, torch.zeros_like(values), rtol=0, atol=1e-12)


@pytest.mark.parametrize("junk", [NAN, float("inf"), 1e38])
def test_junk_outside_the_mask_reaches_no_gradient(junk: float) -> None:
    values = VALUES.masked_fill(~MASK, junk).requires_grad_()
    total = masked_mean(values, MASK) + masked_whiten(values, MASK).square().sum()
    (grad,) = torch.autograd.grad(total, values)
    assert torch.isfinite(grad).all()
    assert (grad[~MASK] == 0).all()


def test_the_statistics_of_whitening_are_constants() -> None:
    values = VALUES.clone().requires_grad_()
    (grad,) = torch.autograd.grad(masked_whiten(values, MASK).sum(), values)
    torch.testing.assert_close(grad, MASK / 12.5**0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_whitening_keeps_the_dtype(dtype: torch.dtype) -> None:
    assert masked_whiten(VALUES.to(dtype), MASK).dtype == dtype


def test_empty_masks_give_zeros() -> None:
    nothing = torch.zeros_like(MASK)
    assert masked_mean(VALUES, nothing) == 0
    assert [float(x) for x in masked_moments(VALUES, nothing)] == [0, 0, 0]
    assert (masked_whiten(VALUES, nothing) == 0).all()


def test_a_standard_deviation_up_to_a_hundred_millionth_counts_as_0() -> None:
    stds = torch.tensor([0.0, 0.75e-8, 1e-8, 1.25e-8, 3.0], dtype=torch.float64)
    assert safe_std(stds).tolist() == [1.0, 1.0, 1.0, 1.25e-8, 3.0]


def test_a_denominator_is_a_constant_and_changes_no_dtype() -> None:
    values, mask = torch.ones(2, requires_grad=True), torch.tensor([True, True])
    denominator = torch.tensor(4.0, dtype=torch.float64, requires_grad=True)
    average = masked_average(values, mask, denominator)
    assert average.dtype == torch.float32
    grads = torch.autograd.grad(average, [values, denominator], allow_unused=True)
    assert grads[0] is not None
    assert not isinstance(grads[1], torch.Tensor)
