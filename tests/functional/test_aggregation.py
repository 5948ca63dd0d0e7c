"""KL as a term of the loss, and weights of responses, by hand."""

import pytest
import torch

from lit_rlhf.functional import reference_kl_loss, response_weights

MASK = torch.tensor([[True, True], [True, False]])
# ratios of reference and policy: 1/2, 2, and 4; what is outside the mask has no meaning
NEW = torch.tensor([[0.5, 0.5], [0.25, 0.0]]).log()
REF = torch.tensor([[0.25, 1.0], [1.0, 0.0]]).log()


@pytest.mark.parametrize(
    ("weights", "denominator", "expected"),
    # r - log r - 1 is 0.1931, 0.3069 and 1.6137
    [(None, None, 2.1137 / 3), ([2.0, 0.5], None, 1.8069 / 3), ([2.0, 0.5], 6.0, 1.8069 / 6)],
)
def test_reference_kl_loss_and_its_gradient_by_hand(
    weights: list[float] | None, denominator: float | None, expected: float
) -> None:
    new, ref = NEW.clone().requires_grad_(), REF.clone().requires_grad_()
    given = None if weights is None else torch.tensor(weights)
    loss = reference_kl_loss(new, ref, MASK, weights=given, denominator=denominator)
    assert loss.item() == pytest.approx(expected, abs=1e-4)
    loss.backward()
    factors = torch.tensor([1.0, 1.0] if weights is None else weights)[:, None]
    # the derivative of r - log r - 1 by log pi is 1 - r
    by_hand = torch.tensor([[0.5, -1.0], [-3.0, 0.0]]) * factors / (denominator or 3)
    torch.testing.assert_close(new.grad, by_hand)
    assert ref.grad is None


@pytest.mark.parametrize("name", ["logprobs", "ref_logprobs", "mask"])
def test_tensors_of_unlike_shapes_are_refused(name: str) -> None:
    tensors = {"logprobs": NEW, "ref_logprobs": REF, "mask": MASK}
    with pytest.raises(ValueError, match="expected shape"):
        reference_kl_loss(**tensors | {name: tensors[name][:, :1]})


@pytest.mark.parametrize(
    ("aggregation", "tokens", "responses", "expected"),
    [
        ("token_mean", 4.0, 2.0, [1.0, 1.0, 1.0]),
        ("sequence_mean", 4.0, 2.0, [2.0, 2 / 3, 2.0]),  # the last has no token to weigh
        ("sequence_sum", 4.0, 2.0, [0.25, 0.25, 0.25]),
        ("sequence_sum", 4.0, 1.0, [0.5, 0.5, 0.5]),
        ("sequence_mean", 0.0, 0.0, [0.0, 0.0, 0.0]),
    ],
)
def test_response_weights_equal_those_by_hand(
    aggregation: str, tokens: float, responses: float, expected: list[float]
) -> None:
    weights = response_weights(
        torch.tensor([1, 3, 0]),
        tokens=torch.tensor(tokens),
        responses=torch.tensor(responses),
        longest=8,
        aggregation=aggregation,  # type: ignore[arg-type]
    )
    assert weights.tolist() == pytest.approx(expected)


def test_longest_and_aggregation_are_checked() -> None:
    one = torch.tensor(1.0)
    with pytest.raises(ValueError, match=r"longest: expected .*, got 0"):
        response_weights(torch.tensor([1]), tokens=one, responses=one, longest=0)
    with pytest.raises(ValueError, match=r"aggregation: expected .*'sequence_sum'.*'mean'"):
        response_weights(
            torch.tensor([1]),
            tokens=one,
            responses=one,
            longest=8,
            aggregation="mean",  # type: ignore[arg-type]
        )
