"""Policy losses by hand: both sides of the clip, both signs of the advantage."""

import math

import pytest
import torch

from lit_rlhf.functional import (
    entropy_loss,
    kl_penalty_loss,
    policy_gradient_loss,
    surrogate_loss,
    truncated_importance,
)

OLD = -2.0
ONE = torch.ones(1, 1, dtype=torch.bool)


@pytest.mark.parametrize(
    ("ratio", "advantage", "clip", "options", "loss", "derivative", "clipped"),
    [
        (1.1, 2.0, 0.2, {}, -2.2, -2.2, 0.0),  # inside
        (0.9, -2.0, 0.2, {}, 1.8, 1.8, 0.0),
        (1.5, 2.0, 0.2, {}, -2.4, 0.0, 1.0),  # gone far enough in the good direction: clipped
        (0.5, -2.0, 0.2, {}, 1.6, 0.0, 1.0),
        (0.5, 2.0, 0.2, {}, -1.0, -1.0, 0.0),  # in the bad direction: the way back stays open
        (1.5, -2.0, 0.2, {}, 3.0, 3.0, 0.0),
        (1.5, 2.0, 0.4, {}, -2.8, 0.0, 1.0),  # the bound is the argument
        (1.7, 2.0, 0.75, {}, -3.4, -3.4, 0.0),
        (1.5, 2.0, None, {}, -3.0, -3.0, 0.0),  # none
        (0.5, -2.0, None, {}, 1.0, 1.0, 0.0),
        (1.25, 1.0, 0.2, {"ratio_clip_high": 0.28}, -1.25, -1.25, 0.0),  # wider above
        (1.5, 1.0, 0.2, {"ratio_clip_high": 0.28}, -1.28, 0.0, 1.0),
        (0.5, -1.0, 0.2, {"ratio_clip_high": 0.28}, 0.8, 0.0, 1.0),
        (2.0, -0.5, None, {"dual_clip": 1.5}, 0.75, 0.0, 1.0),  # beyond 1.5 times the advantage
        (1.25, -0.5, None, {"dual_clip": 1.5}, 0.625, 0.625, 0.0),
        (0.5, 0.5, None, {"dual_clip": 1.5}, -0.25, -0.25, 0.0),  # has no such bound
    ],
)
def test_surrogate_by_hand(
    ratio: float,
    advantage: float,
    clip: float | None,
    options: dict[str, float],
    loss: float,
    derivative: float,
    clipped: float,
) -> None:
    logprobs = torch.tensor([[OLD + math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    old = torch.full_like(logprobs, OLD).detach()
    output = surrogate_loss(
        logprobs, old, torch.full_like(old, advantage), ONE, ratio_clip=clip, **options
    )
    torch.autograd.backward(output.loss)
    assert output.loss.item() == pytest.approx(loss, rel=1e-12)
    assert logprobs.grad.item() == pytest.approx(derivative, rel=1e-12)
    assert output.clip_fraction.item() == clipped
    assert output.ratio_mean.item() == pytest.approx(ratio, rel=1e-12)
    # samples of the old policy: k3 of log old - log new
    kl = ratio - 1.0 - math.log(ratio)
    assert output.approx_kl.item() == pytest.approx(kl, rel=1e-9)


def test_dual_clip_bounds_the_loss_at_negative_advantages() -> None:
    # the fixture of NeMo-RL (test_clipped_pg_loss_dual_clip): (-0.5 + 1 + 12) / 3
    old = torch.tensor([[-1.0, -1.0, -3.0]], dtype=torch.float64)
    logprobs = (old + torch.tensor([[0.5, 1.0, 10.0]], dtype=torch.float64).log()).requires_grad_()
    advantages = torch.tensor([[1.0, -1.0, -4.0]], dtype=torch.float64)
    mask = torch.ones(1, 3, dtype=torch.bool)
    output = surrogate_loss(logprobs, old, advantages, mask, ratio_clip=0.2, dual_clip=3.0)
    assert output.loss.item() == pytest.approx(4.1667, rel=1e-4)
    assert output.clip_fraction.item() == pytest.approx(1 / 3)
    torch.autograd.backward(output.loss)
    assert (3 * logprobs.grad[0]).tolist() == pytest.approx([-0.5, 1.0, 0.0])  # none beyond it
    plain = surrogate_loss(logprobs, old, advantages, mask, ratio_clip=0.2)
    assert plain.loss.item() == pytest.approx((-0.5 + 1 + 40) / 3)


def test_dual_clip_at_its_bound_is_no_clip() -> None:
    zeros, ratios = torch.zeros(1, 1).double(), torch.tensor([[1.5]], dtype=torch.float64)
    output = surrogate_loss(ratios.log(), zeros, zeros - 0.5, ONE, ratio_clip=None, dual_clip=1.5)
    assert (output.loss.item(), output.clip_fraction.item()) == (pytest.approx(0.75, rel=1e-12), 0)


def test_an_old_policy_that_is_this_policy_gives_the_policy_gradient() -> None:
    logprobs, advantages = torch.randn(2, 3).abs().neg(), torch.randn(2, 3)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    leaf = logprobs.requires_grad_()
    first = surrogate_loss(leaf, leaf, advantages, mask)
    assert (first.ratio_mean.item(), first.approx_kl.item()) == (1.0, 0.0)
    for loss in (first.loss, policy_gradient_loss(leaf, advantages, mask).loss):
        (grad,) = torch.autograd.grad(loss, leaf)
        torch.testing.assert_close(grad, -advantages * mask / 4)


def test_metrics_are_means_over_the_mask_whatever_the_denominator() -> None:
    ratios = torch.tensor([[1.5, 1.0, 999.0], [0.5, 1.1, 999.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, True, False]])
    zeros, ones = torch.zeros_like(ratios), torch.ones_like(ratios)
    output = surrogate_loss(ratios.log().requires_grad_(), zeros, ones, mask, denominator=100)
    assert output.clip_fraction.item() == 0.25
    assert output.ratio_mean.item() == pytest.approx(4.1 / 4, rel=1e-12)
    assert output.loss.item() == pytest.approx(-(1.2 + 1.0 + 0.5 + 1.1) / 100, rel=1e-12)
    assert not any(metric.requires_grad for metric in output[1:])


def test_a_ratio_beyond_the_float_range_leaves_no_nan_gradient() -> None:
    logprobs = torch.tensor([[-1.0]], requires_grad=True)
    loss = surrogate_loss(logprobs, torch.tensor([[-500.0]]), torch.ones(1, 1), ONE).loss
    torch.autograd.backward(loss)
    assert logprobs.grad.item() == 0.0


def test_kl_penalty_by_hand() -> None:
    logprobs = torch.tensor([[math.log(1.5)]], dtype=torch.float64, requires_grad=True)
    zeros = torch.zeros(1, 1, dtype=torch.float64)
    output = kl_penalty_loss(logprobs, zeros, zeros + 2.0, ONE, kl_penalty=0.3)
    kl = 1.5 - 1.0 - math.log(1.5)
    assert output.loss.item() == pytest.approx(-2.0 * 1.5 + 0.3 * kl, rel=1e-12)
    assert output.clip_fraction.item() == 0.0
    torch.autograd.backward(output.loss)
    assert logprobs.grad.item() == pytest.approx(-3.0 + 0.3 * (1.5 - 1.0), rel=1e-12)


def test_the_kl_penalty_has_the_gradient_of_the_exact_kl() -> None:
    # over all tokens, weighted by the old policy that samples them
    old = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    logits = torch.tensor([0.1, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    torch.autograd.backward((old * (old.log() - logits.log_softmax(0))).sum())
    exact, logits.grad = logits.grad, None
    logprobs, total = logits.log_softmax(0), torch.zeros((), dtype=torch.float64)
    for token, weight in enumerate(old.tolist()):
        one = slice(token, token + 1)
        now, before = logprobs[one].view(1, 1), old[one].log().view(1, 1)
        output = kl_penalty_loss(now, before, torch.zeros(1, 1).double(), ONE, kl_penalty=1.0)
        total = total + weight * output.loss
    torch.autograd.backward(total)
    torch.testing.assert_close(logits.grad, exact, rtol=1e-9, atol=1e-12)


def test_policy_gradient_by_hand() -> None:
    logprobs = torch.tensor([[-1.0, -3.0]], requires_grad=True)
    advantages = torch.tensor([[2.0, -0.5]])
    output = policy_gradient_loss(logprobs, advantages, torch.ones(1, 2, dtype=torch.bool))
    assert output.loss.item() == pytest.approx((2.0 - 1.5) / 2)
    assert [x.item() for x in output[1:]] == [0.0, 0.0, 1.0]


def test_the_entropy_bonus_is_minus_the_mean_of_entropies_up_to_the_clip() -> None:
    entropy = torch.tensor([[1.0, 2.0, 999.0], [6.0, 999.0, 999.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert entropy_loss(entropy, mask).item() == -3.0
    assert entropy_loss(entropy, mask, denominator=18).item() == -0.5
    loss = entropy_loss(entropy, mask, clip=3.0)
    assert loss.item() == pytest.approx(-(1 + 2 + 3) / 3)
    torch.autograd.backward(loss)
    assert entropy.grad[mask].tolist() == pytest.approx([-1 / 3, -1 / 3, 0.0])


@pytest.mark.parametrize(("log_ratio", "bound"), [(79.0, 79.0), (81.0, 80.0), (300.0, 80.0)])
def test_a_ratio_ends_at_exp_80(log_ratio: float, bound: float) -> None:
    # in float32 exp overflows at 88.7
    logprobs = torch.tensor([[log_ratio]])
    zeros = torch.zeros_like(logprobs)
    output = surrogate_loss(logprobs, zeros, torch.ones_like(zeros), ONE, ratio_clip=None)
    assert output.ratio_mean.item() == pytest.approx(math.exp(bound), rel=1e-5)


def test_truncated_importance_weighs_what_another_sampler_drew() -> None:
    policy, sampler = [0.5, 0.02, 0.9, 0.3], [0.25, 0.2, 0.2, 0.0]
    logprobs = torch.tensor([policy], dtype=torch.float64).log().requires_grad_()
    sampler_logprobs = torch.tensor([sampler], dtype=torch.float64).log()
    mask = torch.tensor([[True, True, True, False]])  # outside it, -inf does no harm
    weights = truncated_importance(logprobs, sampler_logprobs, mask, cap=3.0)
    assert weights[0].tolist() == pytest.approx([2.0, 0.1, 3.0, 0.0], rel=1e-12)
    assert not weights.requires_grad
    with pytest.raises(ValueError, match="cap: expected a finite number > 0, got 0"):
        truncated_importance(logprobs, sampler_logprobs, mask, cap=0)
