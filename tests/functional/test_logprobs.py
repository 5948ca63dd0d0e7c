"""Log-probs, entropy, and language-model loss by hand."""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from lit_rlhf.functional import language_model_loss, token_logprobs, token_logprobs_and_entropy

PROBABILITIES = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]], dtype=torch.float64)
RAGGED = torch.tensor([[-1.0, -2.0, 999.0], [-6.0, 999.0, 999.0]], dtype=torch.float64)
RAGGED_MASK = torch.tensor([[True, True, False], [True, False, False]])


def token_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    ids = torch.zeros(logits.shape[:2], dtype=torch.long)
    return token_logprobs_and_entropy(logits, ids, temperature)[1]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.long])
def test_logprobs_are_those_of_the_tokens(dtype: torch.dtype) -> None:
    # a constant added to the logits changes nothing
    logits, ids = PROBABILITIES.log() + 5.0, torch.tensor([[1, 2]], dtype=dtype)
    for logprobs in (token_logprobs(logits, ids), token_logprobs_and_entropy(logits, ids)[0]):
        assert logprobs.exp().tolist()[0] == pytest.approx([0.3, 0.8], rel=1e-12)


def test_temperature_divides_the_logits() -> None:
    logprobs = token_logprobs(PROBABILITIES.log(), torch.tensor([[1, 2]]), temperature=0.5)
    weights = [0.5**2, 0.3**2, 0.2**2]
    expected = [0.3**2 / sum(weights), 0.8**2 / (0.01 + 0.01 + 0.64)]
    assert logprobs.exp().tolist()[0] == pytest.approx(expected, rel=1e-12)
    entropy = token_entropy(PROBABILITIES.log(), temperature=0.5)
    expected_entropy = -sum(p * math.log(p) for p in [w / sum(weights) for w in weights])
    assert entropy[0, 0].item() == pytest.approx(expected_entropy, rel=1e-12)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_half_precision_is_raised_not_double(dtype: torch.dtype, expected: torch.dtype) -> None:
    logits = torch.randn(1, 2, 5).to(dtype)
    assert token_logprobs(logits, torch.tensor([[0, 1]])).dtype == expected
    assert token_entropy(logits).dtype == expected


def test_half_precision_is_raised_before_the_sum_over_the_vocabulary() -> None:
    # 5000 equal logits: summed in bfloat16, the probabilities would come to about 4096 at best
    logprob = token_logprobs(torch.zeros(1, 1, 5000, dtype=torch.bfloat16), torch.tensor([[7]]))
    assert logprob.item() == pytest.approx(-math.log(5000), rel=1e-6)


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[[1000.0, 0.0], [-1000.0, 0.0]]])
    assert token_logprobs(logits, torch.tensor([[1, 0]])).tolist() == [[-1000.0, -1000.0]]
    assert token_entropy(logits).tolist() == [[0.0, 0.0]]


def test_one_pass_gives_what_two_give() -> None:
    logits, ids = PROBABILITIES.log() * 3.0, torch.tensor([[1, 2]])
    logprobs, entropy = token_logprobs_and_entropy(logits, ids, 3.0)
    assert logprobs.exp().tolist()[0] == pytest.approx([0.3, 0.8], rel=1e-12)
    # -0.5 log 0.5 - 0.3 log 0.3 - 0.2 log 0.2, and -0.2 log 0.1 - 0.8 log 0.8
    assert entropy.tolist()[0] == pytest.approx([1.0296530140645737, 0.6390318596501768], rel=1e-12)


def test_a_token_that_is_ruled_out_has_no_entropy_and_no_nan_gradient() -> None:
    logits = torch.tensor([[[0.0, 0.0, -math.inf]]], requires_grad=True)
    entropy = token_entropy(logits)
    assert entropy.item() == pytest.approx(math.log(2), rel=1e-6)
    torch.autograd.backward(entropy.sum())
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("denominator", [None, 12, 12.0, torch.tensor(12)])
def test_the_loss_is_the_mean_over_kept_tokens(denominator: Tensor | float | None) -> None:
    loss = language_model_loss(RAGGED, RAGGED_MASK, denominator)
    assert loss.item() == pytest.approx(3.0 if denominator is None else 9 / 12, rel=1e-12)


def test_logprobs_and_entropy_have_the_right_gradients() -> None:
    logits = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 1, 2], [3, 0, 1]])
    assert gradcheck(lambda x: token_logprobs(x, ids, 0.7), (logits,))
    assert gradcheck(lambda x: token_entropy(x, 0.7), (logits,))
