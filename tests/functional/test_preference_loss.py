import math

import pytest
import torch
from torch.autograd import gradcheck

from lit_rlhf.functional import (
    difference_loss,
    pairwise_reward_loss,
    preference_probability,
    reward_model_loss,
)


def naive_loss(difference: float) -> float:
    return math.log1p(math.exp(-difference))


def test_pairwise_loss_by_hand() -> None:
    chosen, rejected = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0]])
    output = pairwise_reward_loss(chosen, rejected)
    expected = (naive_loss(2.0) + naive_loss(-3.0) + math.log(2.0)) / 3
    assert output.loss.item() == pytest.approx(expected, rel=1e-6)
    assert output.accuracy.item() == pytest.approx(1 / 3, rel=1e-6)  # a tie is a miss
    assert output.margin.item() == pytest.approx(-1 / 3, rel=1e-6)


def test_metrics_of_several_heads_are_of_their_mean() -> None:
    chosen = torch.tensor([[3.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    output = pairwise_reward_loss(chosen, torch.tensor([[0.0, 1.0], [0.0, 0.0], [2.0, 0.0]]))
    # differences of 3 and -1, 0 and 1, -2 and 1
    assert output.accuracy.item() == pytest.approx(2 / 3)
    assert output.margin.item() == pytest.approx(1 / 3)


def test_a_margin_asks_for_a_larger_difference() -> None:
    output = pairwise_reward_loss(
        torch.tensor([2.0]), torch.tensor([0.0]), margin=torch.tensor([3.0])
    )
    assert output.loss.item() == pytest.approx(naive_loss(-1.0), rel=1e-6)
    # accuracy and margin speak of the scores alone
    assert (output.accuracy.item(), output.margin.item()) == (1.0, 2.0)


def test_smoothed_labels_and_centered_scores_by_a_loop() -> None:
    chosen, rejected, margin = [2.0, -1.0, 0.5], [0.0, 3.0, 0.5], [0.0, 0.5, 1.0]
    expected = 0.0
    for chosen_score, rejected_score, distance in zip(chosen, rejected, margin, strict=True):
        difference = chosen_score - rejected_score - distance
        expected += (
            0.9 * naive_loss(difference)
            + 0.1 * naive_loss(-difference)
            + 0.01 * (chosen_score + rejected_score) ** 2
        )
    scores = [torch.tensor(x, dtype=torch.float64) for x in (chosen, rejected, margin)]
    chosen_scores, rejected_scores, margins = scores
    output = pairwise_reward_loss(
        chosen_scores, rejected_scores, margin=margins, label_smoothing=0.1, center_coef=0.01
    )
    assert output.loss.item() == pytest.approx(expected / 3, rel=1e-12)
    assert output.margin.item() == pytest.approx(-2 / 3)  # the scores' alone


@pytest.mark.parametrize("difference", [-20.0, -100.0, -1000.0])
def test_a_pair_that_is_far_off_keeps_its_gradient(difference: float) -> None:
    chosen, rejected = (x.requires_grad_() for x in (torch.tensor([difference]), torch.zeros(1)))
    output = pairwise_reward_loss(chosen, rejected)
    assert output.loss.item() == pytest.approx(-difference, rel=1e-6)
    grads = torch.autograd.grad(output.loss, [chosen, rejected])
    assert [g.item() for g in grads] == pytest.approx([-1.0, 1.0], rel=1e-6)


def test_pairwise_loss_has_the_right_gradient_and_its_metrics_no_graph() -> None:
    chosen, rejected = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert gradcheck(lambda c, r: pairwise_reward_loss(c, r).loss, (chosen, rejected))
    output = pairwise_reward_loss(chosen, rejected)
    assert not output.accuracy.requires_grad
    assert not output.margin.requires_grad


def test_difference_loss_by_hand_whichever_response_is_first() -> None:
    first, second = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0]], dtype=torch.float64)
    for trained, other in ((first.requires_grad_(), second), (second.requires_grad_(), first)):
        loss = difference_loss(trained, other.detach())
        apart = [1 / (1 + math.exp(-difference)) for difference in (2.0, 3.0, 0.0)]
        assert loss.item() == pytest.approx(sum(apart) / 3)
        (gradient,) = torch.autograd.grad(loss, trained)
        # away from the other score; a tie has no direction
        far = [sigmoid * (1 - sigmoid) / 3 for sigmoid in apart[:2]]
        assert (gradient * (trained - other).sign()).tolist() == pytest.approx([*far, 0.0])


def test_switches_that_are_off_do_not_multiply_what_overflows() -> None:
    far = torch.tensor([3e38])
    assert pairwise_reward_loss(far, -far).loss.item() == 0.0
    assert pairwise_reward_loss(far, torch.zeros(1)).loss.item() == 0.0


def test_half_of_the_labels_cannot_be_flipped_nor_no_pair_be_compared() -> None:
    chosen, rejected = torch.tensor([[1.0], [0.0]])
    assert pairwise_reward_loss(chosen, rejected, label_smoothing=0.49).loss.isfinite()
    with pytest.raises(ValueError, match=r"label_smoothing: expected a number in \[0, 0.5\), got"):
        pairwise_reward_loss(chosen, rejected, label_smoothing=0.5)
    with pytest.raises(ValueError, match="chosen: expected at least one pair, got none"):
        pairwise_reward_loss(torch.zeros(0), torch.zeros(0))


def test_reward_model_loss_weighs_lm_imitation() -> None:
    assert reward_model_loss(torch.tensor(2.0), torch.tensor(3.0), lm_coef=0.5).item() == 3.5
    assert reward_model_loss(torch.tensor(2.0), torch.tensor(3.0), lm_coef=0.0).item() == 2.0


def test_preference_probability_belongs_to_the_loss() -> None:
    probability = preference_probability(torch.tensor([2.0, 0.0])).tolist()
    assert probability == pytest.approx([math.exp(-naive_loss(2.0)), 0.5], rel=1e-6)


def test_each_head_has_the_loss_of_the_pairs_that_it_learns_from() -> None:
    chosen, rejected = torch.tensor([[1.0, -3.0], [0.0, 2.0]]), torch.tensor([[0.0, 0.0]] * 2)
    mask, margin = torch.tensor([[True, False], [True, True]]), torch.tensor([0.0, 1.0])
    output = pairwise_reward_loss(chosen, rejected, margin=margin, head_mask=mask)
    expected = (naive_loss(1.0) + naive_loss(-1.0) + naive_loss(1.0)) / 3
    assert output.loss.item() == pytest.approx(expected, rel=1e-6)
    # the heads' means are -1 and 1
    assert (output.accuracy.item(), output.margin.item()) == (0.5, 0.0)
