import math

import pytest
import torch
from torch.autograd import gradcheck

from lit_rlhf.functional import KLEstimator, adaptive_kl_coef, exact_kl, kl_estimate, token_rewards
from lit_rlhf.functional.losses import policy_gradient_loss

POLICY, REFERENCE = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
KL = sum(p * math.log(p / q) for p, q in zip(POLICY, REFERENCE, strict=True))


def logs(probs: list[float]) -> torch.Tensor:
    return torch.tensor(probs, dtype=torch.float64).log()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_expectation_over_the_policys_samples_is_the_exact_kl(estimator: KLEstimator) -> None:
    estimates = kl_estimate(logs(POLICY), logs(REFERENCE), estimator)
    assert float((logs(POLICY).exp() * estimates).sum()) == pytest.approx(KL, rel=1e-12)


def test_estimators_have_the_signs_of_a_token_below_its_reference() -> None:
    # a token that the policy likes less than the reference does
    below = {e: float(kl_estimate(logs([0.2]), logs([0.6]), e)) for e in ("k1", "k2", "k3")}
    assert below["k1"] == pytest.approx(-math.log(3), rel=1e-12)
    assert below["k2"] == pytest.approx(math.log(3) ** 2 / 2, rel=1e-12)
    assert below["k3"] == pytest.approx(3 - 1 - math.log(3), rel=1e-12)


def test_k3_keeps_its_digits_for_policies_that_hardly_differ() -> None:
    # x - x^2 / 2 + ... - 1 + x in float32 would be rounding error
    estimate = kl_estimate(torch.tensor([1e-3]), torch.zeros(1), "k3")
    assert float(estimate) == pytest.approx(math.expm1(-1e-3) + 1e-3, rel=1e-3)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_equal_policies_are_at_zero_and_gradients_right(estimator: KLEstimator) -> None:
    x, y = (torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert gradcheck(lambda a, b: kl_estimate(a, b, estimator), (x, y))
    assert (kl_estimate(x, x.detach().clone(), estimator) == 0).all()


@pytest.mark.parametrize(("estimator", "share"), [("k1", 1.0), ("k2", 0.0), ("k3", 0.0)])
def test_as_a_reward_only_k1_has_the_gradient_of_kl(estimator: KLEstimator, share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(6, dtype=torch.float64, generator=generator)
    mask = torch.ones(6, 1, dtype=torch.bool)
    for _ in range(20):
        offset = 0.02 * torch.randn(6, dtype=torch.float64, generator=generator)
        logits = (reference + offset).requires_grad_()
        kl = exact_kl(logits[None, None], reference[None, None]).sum()
        (exact,) = torch.autograd.grad(kl, logits)
        # every token of the vocabulary is a response, weighted by its probability
        logprobs, ref_logprobs = (x.log_softmax(0)[:, None] for x in (logits, reference))
        no_scores = torch.zeros(6, dtype=torch.float64)
        rewards = token_rewards(
            no_scores, logprobs, ref_logprobs, mask, kl_coef=1.0, estimator=estimator
        )
        weighted = logprobs.detach().exp() * rewards
        loss = policy_gradient_loss(logprobs, weighted, mask, denominator=1.0).loss
        (gradient,) = torch.autograd.grad(loss, logits)
        # the part of the gradient of KL that is in it
        projection = float(gradient @ exact / (exact @ exact))
        assert projection == pytest.approx(share, abs=1e-9 if share else 0.05)


def test_the_reward_of_k3_has_the_difference_of_the_gradients_of_both_kls() -> None:
    logits = torch.tensor(POLICY, dtype=torch.float64).log().requires_grad_()
    probs, reference = logits.softmax(0), logs(REFERENCE)
    estimates = kl_estimate(probs.log(), reference, "k3").detach()
    (gradient,) = torch.autograd.grad((probs * estimates).sum(), logits, retain_graph=True)
    one, other = logits[None, None], reference[None, None]
    kls = (exact_kl(one, other).sum(), exact_kl(other, one).sum())
    gradients = [torch.autograd.grad(kl, logits, retain_graph=True)[0] for kl in kls]
    torch.testing.assert_close(gradient, gradients[0] - gradients[1], rtol=1e-9, atol=1e-12)


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match=r"estimator: expected one of .*'k3'.*, got 'k4'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]


@pytest.mark.parametrize(("temperature", "power"), [(1.0, 1), (0.5, 2)])
def test_exact_kl_by_enumeration(temperature: float, power: int) -> None:
    powers = [[p**power for p in probs] for probs in (POLICY, REFERENCE)]
    p, q = ([x / sum(probs) for x in probs] for probs in powers)
    expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    one, other = (logs(probs).expand(2, 1, 3) for probs in (POLICY, REFERENCE))
    kl = exact_kl(one + 3, other, temperature)
    assert (kl.shape, kl.flatten().tolist()) == ((2, 1), pytest.approx([expected] * 2, rel=1e-12))


def test_exact_kl_with_tokens_ruled_out() -> None:
    half, thirds = logs([0.5, 0.5, 0.0])[None, None], logs([1 / 3] * 3)[None, None]
    assert float(exact_kl(half, thirds)) == pytest.approx(math.log(1.5), rel=1e-12)
    assert (float(exact_kl(half, half)), float(exact_kl(thirds, half))) == (0, math.inf)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.2),  # on target
        (6.6, 0.2 * (1 + 0.1 * 128 / 1000)),  # ten percent above
        (5.4, 0.2 * (1 - 0.1 * 128 / 1000)),
        (60.0, 0.2 * (1 + 0.2 * 128 / 1000)),  # the error is clipped
        (-5.0, 0.2 * (1 - 0.2 * 128 / 1000)),  # k1 can be negative
    ],
)
def test_the_coefficient_moves_towards_the_target(kl: float, expected: float) -> None:
    coef = adaptive_kl_coef(0.2, kl=kl, target=6.0, horizon=1000, n_samples=128)
    assert coef == pytest.approx(expected, rel=1e-12)


def test_a_horizon_that_could_bring_the_coefficient_to_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"horizon: expected more than .* = 25.6, got 25"):
        adaptive_kl_coef(0.2, kl=1.0, target=6.0, horizon=25, n_samples=128)
    with pytest.raises(ValueError, match=r"horizon: expected more than .* = 32, got 32"):
        adaptive_kl_coef(0.2, kl=1.0, target=6.0, horizon=32, n_samples=128, error_clip=0.25)
