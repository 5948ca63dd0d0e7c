import pytest
import torch

from lit_rlhf import functional as F
from lit_rlhf.functional import clipped_advantages, gae
from tests.support.masks import length_mask

NAN = float("nan")


def naive_gae(
    values: list[float], rewards: list[float], gamma: float, lam: float, bootstrap: float
) -> list[float]:
    """A_t as the double sum of Eq. 9, not by its recursion."""
    following = [*values, bootstrap][1:]
    deltas = [r + gamma * n - v for v, r, n in zip(values, rewards, following, strict=True)]
    n = len(deltas)
    return [sum((gamma * lam) ** (s - t) * deltas[s] for s in range(t, n)) for t in range(n)]


def test_gae_by_hand() -> None:
    # backwards: delta_1 = 2 - 1 = 1, A_1 = 1; delta_0 = 1 + 0.5 * 1 - 3 = -1.5, A_0 = -1.5 + 0.25
    given = torch.tensor([[3.0, 1.0, 5.0]]), torch.tensor([[1.0, 2.0, 5.0]])
    values, rewards = (x.clone().requires_grad_() for x in given)
    mask, bootstrap = torch.tensor([[True, True, False]]), torch.zeros(1, requires_grad=True)
    advantages, returns = gae(values, rewards, mask, gamma=0.5, lam=0.5, bootstrap_values=bootstrap)
    assert (advantages.tolist(), returns.tolist()) == ([[-1.25, 1.0, 0.0]], [[1.75, 2.0, 0.0]])
    assert not advantages.requires_grad
    assert not returns.requires_grad
    assert torch.equal(values, given[0])  # also outside the mask
    assert torch.equal(rewards, given[1])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.99, 0.9), (1.0, 1.0), (0.9, 0.0)])
def test_gae_agrees_with_the_double_sum(gamma: float, lam: float) -> None:
    lengths = [5, 1, 3, 0]
    values, rewards = (torch.randn(4, 5, dtype=torch.float64) for _ in range(2))
    bootstrap = torch.randn(4, dtype=torch.float64)
    mask = length_mask(torch.tensor(lengths), 5)
    advantages, returns = gae(
        values, rewards, mask, gamma=gamma, lam=lam, bootstrap_values=bootstrap
    )
    for row, n in enumerate(lengths):
        row_values = values[row, :n].tolist()
        expected = naive_gae(
            values=row_values,
            rewards=rewards[row, :n].tolist(),
            gamma=gamma,
            lam=lam,
            bootstrap=float(bootstrap[row]),
        )
        assert advantages[row].tolist() == pytest.approx(expected + [0.0] * (5 - n), rel=1e-12)
        targets = [a + v for a, v in zip(expected, row_values, strict=True)]
        assert returns[row].tolist() == pytest.approx(targets + [0.0] * (5 - n), rel=1e-12)


def test_a_row_may_have_a_lambda_of_its_own() -> None:
    values, rewards = (torch.randn(4, 6, dtype=torch.float64) for _ in range(2))
    lengths = torch.tensor([6, 1, 4, 6])
    lam = F.length_adaptive_lam(lengths, alpha=0.5)  # the first two are 1 - 1/3 and, below 0, 0
    assert lam.tolist() == pytest.approx([2 / 3, 0.0, 0.5, 2 / 3])
    advantages, _ = gae(values, rewards, length_mask(lengths, 6), gamma=0.9, lam=lam)
    for row, n in enumerate(lengths.tolist()):
        expected = naive_gae(
            values=values[row, :n].tolist(),
            rewards=rewards[row, :n].tolist(),
            gamma=0.9,
            lam=float(lam[row]),
            bootstrap=0.0,
        )
        assert advantages[row, :n].tolist() == pytest.approx(expected, rel=1e-6)
    for wrong in ([0.5, 0.5, -0.1, 0.5], [0.5, 0.5, 1.1, 0.5], [0.5, NAN, 0.5, 0.5], [0.5]):
        with pytest.raises(ValueError, match=r"lam: expected"):
            gae(values, rewards, length_mask(lengths, 6), gamma=0.9, lam=torch.tensor(wrong))


@pytest.mark.parametrize("junk", [999.0, NAN, float("inf")])
def test_junk_behind_the_responses_changes_nothing(junk: float) -> None:
    values, rewards = torch.randn(3, 4), torch.randn(3, 4)
    mask = length_mask(torch.tensor([4, 2, 1]), 4)
    clean = gae(values.masked_fill(~mask, 0.0), rewards.masked_fill(~mask, 0.0), mask)

    def padded(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.masked_fill(~mask, junk), torch.full((3, 2), junk)], dim=1)

    wide_mask = torch.cat([mask, torch.zeros(3, 2, dtype=torch.bool)], dim=1)
    actuals = gae(padded(values), padded(rewards), wide_mask)
    for expected, actual in zip(clean, actuals, strict=True):
        torch.testing.assert_close(actual[:, :4], expected, rtol=0, atol=0)
        assert (actual[~wide_mask] == 0).all()


@pytest.mark.parametrize("row", [[False, True, True], [True, False, True]])
def test_a_mask_with_a_gap_is_refused(row: list[bool]) -> None:
    with pytest.raises(ValueError, match="mask: expected a prefix of each row"):
        gae(torch.zeros(1, 3), torch.zeros(1, 3), torch.tensor([row]))


def test_clipped_advantages_stay_within_the_bound() -> None:
    clipped = clipped_advantages(torch.tensor([-3.0, -0.5, 0.0, 0.5, 3.0]), 1.0)
    assert clipped.tolist() == [-1.0, -0.5, 0.0, 0.5, 1.0]


def test_groups_by_hand() -> None:
    # kept of each group: three far from 0, where float32 has steps of 8; two; one; none
    scores = torch.tensor([1e8, 1e8 + 8, 1e8 + 16, 2, 4, NAN, 7, NAN, 1, 2, 3, NAN])
    mask = torch.tensor([1, 1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0]).bool()
    scores.requires_grad_()
    for advantages, large, small in (
        (F.group_advantages(scores, 3, mask), 1.0, 0.5**0.5),
        (F.group_advantages(scores, 3, mask, scale=False), 8.0, 1.0),
        (F.leave_one_out_advantages(scores, 3, mask), 12.0, 2.0),
    ):
        expected = torch.tensor([-large, 0.0, large, -small, small, *[0.0] * 7])
        torch.testing.assert_close(advantages, expected)
        assert not advantages.requires_grad


def test_informative_groups_by_hand() -> None:
    # alike; not alike; alike but for one that does not count; one left; none left
    scores = torch.tensor([0.1, 0.1, 0.1, 1, 0, 1, 0, 0, NAN, 1, NAN, 0, 0, 1, NAN])
    mask = torch.tensor([1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0]).bool()
    assert F.informative_groups(scores, 3, mask).tolist() == [False, True, False, False, False]
    alike = torch.full((14,), 0.1, dtype=torch.float64)  # whose mean is not 0.1
    assert not F.informative_groups(alike, 7, alike > 0).any()
    # a score at the mean of its group has no advantage, and the group still teaches something
    spread = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    assert F.informative_groups(spread, 3, spread >= 0).tolist() == [True]


def test_reinforce_plus_plus_by_hand() -> None:
    rewards = torch.tensor([[8.0, 2.0, 4.0], [6.0, NAN, NAN]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    # sums from a token on, where each token later counts half: 10, 4, 4 and 6
    learned = mask & (rewards != 2)
    moments = F.Moments(*torch.tensor([2.0, 4.0, 9.0], dtype=torch.float64))
    advantages = F.reinforce_plus_plus_advantages(
        rewards, mask, gamma=0.5, loss_mask=learned, moments=lambda *_: moments
    )
    assert advantages.tolist() == [[4.0, 0.0, 1.0], [2.0, 0.0, 0.0]]
