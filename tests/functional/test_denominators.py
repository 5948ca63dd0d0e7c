"""What all losses share: denominators that add up, gradients, and masks that keep junk out."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from lit_rlhf.functional import kl_penalty_loss, policy_gradient_loss, surrogate_loss, value_loss
from lit_rlhf.functional.logprobs import language_model_loss
from lit_rlhf.functional.losses import entropy_loss
from tests.support.masks import length_mask

# a loss of a leaf, two constants, a mask and a denominator
Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | float | None], Tensor]

LOSSES: dict[str, Loss] = {
    "language_model": lambda x, old, target, mask, denominator: language_model_loss(
        x, mask, denominator
    ),
    "surrogate": lambda x, old, target, mask, denominator: (
        surrogate_loss(x, old, target, mask, denominator=denominator).loss
    ),
    "unclipped": lambda x, old, target, mask, denominator: (
        surrogate_loss(x, old, target, mask, ratio_clip=None, denominator=denominator).loss
    ),
    "kl_penalty": lambda x, old, target, mask, denominator: (
        kl_penalty_loss(x, old, target, mask, kl_penalty=0.3, denominator=denominator).loss
    ),
    "policy_gradient": lambda x, old, target, mask, denominator: (
        policy_gradient_loss(x, target, mask, denominator=denominator).loss
    ),
    "entropy": lambda x, old, target, mask, denominator: entropy_loss(
        x, mask, denominator=denominator
    ),
    "clipped_entropy": lambda x, old, target, mask, denominator: entropy_loss(
        x, mask, clip=0.5, denominator=denominator
    ),
    "value": lambda x, old, target, mask, denominator: (
        value_loss(x, old, target, mask, denominator=denominator).loss
    ),
}
LENGTHS = torch.tensor([1, 6, 2, 2, 5, 1, 3, 4])
over_losses = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, old, target = (torch.randn(8, 6, dtype=torch.float64) for _ in range(3))
    return x.requires_grad_(), old, target, length_mask(LENGTHS, 6)


@over_losses
def test_a_batch_of_eight_is_four_micro_batches_of_two(loss: Loss) -> None:
    x, old, target, mask = inputs()
    whole = loss(x, old, target, mask, None)
    expected, tokens = torch.autograd.grad(whole, x)[0], mask.sum()
    total = torch.zeros((), dtype=torch.float64)
    for rows in torch.arange(8).chunk(4):
        part = loss(x[rows], old[rows], target[rows], mask[rows], tokens)
        torch.autograd.backward(part)
        total += part.detach()
    torch.testing.assert_close(total, whole.detach())
    torch.testing.assert_close(x.grad, expected)


@over_losses
def test_a_number_and_a_tensor_are_the_same_denominator_and_keep_the_dtype(loss: Loss) -> None:
    x, old, target, mask = inputs()
    number, tensor = loss(x, old, target, mask, 0.5), loss(x, old, target, mask, torch.tensor(0.5))
    torch.testing.assert_close(number, tensor)
    torch.testing.assert_close(number, loss(x, old, target, mask, None) * LENGTHS.sum() / 0.5)
    assert {number.dtype, tensor.dtype, loss(x, old, target, mask, None).dtype} == {torch.float64}


@over_losses
@pytest.mark.parametrize("denominator", [None, 5.0, torch.tensor(0.0)])
def test_empty_mask_gives_zero_with_graph(loss: Loss, denominator: Tensor | float | None) -> None:
    x, old, target, _ = inputs()
    loss_value = loss(x, old, target, torch.zeros(8, 6, dtype=torch.bool), denominator)
    assert loss_value.item() == 0
    (grad,) = torch.autograd.grad(loss_value, x)
    assert (grad == 0).all()


@over_losses
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 999.0])
def test_junk_outside_the_mask_changes_nothing(loss: Loss, junk: float) -> None:
    *tensors, mask = inputs()
    results = []
    for filler in (0.0, junk):
        x, old, target = (tensor.detach().masked_fill(~mask, filler) for tensor in tensors)
        loss_value = loss(x.requires_grad_(), old, target, mask, None)
        results.append((loss_value.item(), torch.autograd.grad(loss_value, x)[0].tolist()))
    assert results[0] == results[1]


@over_losses
def test_only_the_trained_tensor_gets_a_gradient(loss: Loss) -> None:
    x, old, target, mask = inputs()
    loss_value = loss(x, old.requires_grad_(), target.requires_grad_(), mask, None)
    assert torch.autograd.grad(loss_value, [old, target], allow_unused=True) == (None, None)
    assert gradcheck(lambda y: loss(y, old.detach(), target.detach(), mask, None), (x,))
