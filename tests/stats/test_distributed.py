"""Two ranks that hold parts of a batch agree with one that holds all of it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lit_rlhf import stats
from lit_rlhf.functional import masked_whiten
from tests.support.masks import length_mask
from tests.support.ranks import run_on_ranks

# rows of a batch of five: the ranks have unlike numbers of rows and of tokens
ROWS = (slice(0, 3), slice(3, 5))
MASK = length_mask(torch.tensor([6, 1, 3, 2, 5]), 6)


def batch() -> Tensor:
    values = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)) * 3 + 4
    return values.masked_fill(~MASK, 999.0)


def on_a_rank(rank: int) -> dict[str, Any]:
    values, mask = batch()[ROWS[rank]], MASK[ROWS[rank]]
    moments = stats.global_masked_moments(values, mask)
    running = stats.RunningMoments()
    running.update(values[mask])
    running.update(values[:, 0])
    # on one rank only there is nothing left
    running.update(values[mask & (rank == 1)])
    before = {name: buffer.clone() for name, buffer in running.state_dict().items()}
    bad = torch.tensor([float("nan") if rank == 1 else 1.0])
    try:
        running.update(bad)
        error = None
    except ValueError as caught:
        error = str(caught)
    tensor = torch.tensor([1.0, 10.0]) * (rank + 1)
    try:
        with stats.fail_together("read a number"):
            failure = str(int("one" if rank else "1"))
    except Exception as caught:
        failure = repr(caught)
    counts = [torch.tensor(n, dtype=torch.float64) for n in (3.0 * rank, 0.0)]
    return {
        "failure": failure,
        "denominators": [stats.global_denominator(n, tensor.device) for n in counts],
        "means": stats.global_means({"a": torch.tensor((1.0, 2**-24)[rank])}, tensor.device),
        "whitened": masked_whiten(values, mask, moments=moments),
        "moments": torch.stack(moments),
        "running": running.state_dict(),
        "before_bad": before,
        "error": error,
        "sum": stats.global_sum(tensor),
        "rows": stats.all_gather_rows(batch()[ROWS[rank]]),
        "rows of one": stats.all_gather_rows(batch()[: 2 * rank]),
        "summand": tensor,
        "ranks": stats.world_size(),
        "most": stats.global_max(rank),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_ranks(on_a_rank, 2, tmp_path_factory.mktemp("stats"))


def test_rows_of_ranks_are_joined_in_their_order(ranks: list[dict[str, Any]]) -> None:
    for rank_outputs in ranks:
        assert torch.equal(rank_outputs["rows"], batch())
        assert torch.equal(rank_outputs["rows of one"], batch()[:2])


def test_whitening_on_two_ranks_is_whitening_on_one(ranks: list[dict[str, Any]]) -> None:
    together = torch.cat([rank_outputs["whitened"] for rank_outputs in ranks])
    torch.testing.assert_close(together, masked_whiten(batch(), MASK))
    alone = torch.cat([masked_whiten(batch()[rows], MASK[rows]) for rows in ROWS])
    assert (alone - together).abs().max() > 0.01


def test_global_moments_are_those_of_all_tokens(ranks: list[dict[str, Any]]) -> None:
    values = batch()[MASK].double()
    expected = torch.stack([values.mean(), values.var(unbiased=False), torch.tensor(17.0).double()])
    torch.testing.assert_close(ranks[0]["moments"], expected, rtol=1e-12, atol=0)


def test_running_moments_take_in_all_ranks(ranks: list[dict[str, Any]]) -> None:
    rows = batch()
    second = rows[ROWS[1]][MASK[ROWS[1]]]
    seen = torch.cat([rows[MASK], rows[:, 0], second]).double()
    state = ranks[0]["running"]
    assert state["count"].item() == len(seen)
    assert state["mean"].item() == pytest.approx(seen.mean().item(), rel=1e-12)
    squares = (seen - seen.mean()).square().sum()
    assert state["m2"].item() == pytest.approx(squares.item(), rel=1e-12)


@pytest.mark.parametrize("name", ["moments", "running", "sum"])
def test_ranks_agree_to_the_bit(ranks: list[dict[str, Any]], name: str) -> None:
    torch.testing.assert_close(ranks[0][name], ranks[1][name], rtol=0, atol=0)


def test_a_bad_number_on_one_rank_is_refused_on_both(ranks: list[dict[str, Any]]) -> None:
    for rank_outputs in ranks:
        assert "values: expected finite numbers" in str(rank_outputs["error"])
        assert rank_outputs["running"] == rank_outputs["before_bad"]


def test_sum_maximum_and_number_of_ranks(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["sum"].tolist() == [3.0, 30.0]
    assert ranks[1]["summand"].tolist() == [2.0, 20.0]  # the argument stays as it is
    assert [(rank["most"], rank["ranks"]) for rank in ranks] == [(1, 2), (1, 2)]
    assert stats.world_size() == 1


def test_denominators_are_per_rank_and_means_float64(ranks: list[dict[str, Any]]) -> None:
    for rank_outputs in ranks:
        assert rank_outputs["denominators"] == [1.5, 0.5]
        assert {number.dtype for number in rank_outputs["denominators"]} == {torch.float32}
        assert rank_outputs["means"]["a"].item() == 0.5 + 2**-25


def test_an_error_of_one_rank_is_raised_on_both(ranks: list[dict[str, Any]]) -> None:
    assert "could not read a number" in ranks[0]["failure"]
    assert "invalid literal" in ranks[1]["failure"]


def test_without_ranks_global_is_local() -> None:
    values, mask = torch.tensor([1.0, 3.0, 999.0]), torch.tensor([True, True, False])
    assert [x.item() for x in stats.global_masked_moments(values, mask)] == [2, 1, 2]
    numbers = torch.tensor([1, 2])
    total = stats.global_sum(numbers)
    assert total.tolist() == [1, 2]
    assert total is not numbers
    trained = torch.ones(2, requires_grad=True)
    assert not stats.global_sum(trained).requires_grad
    assert not stats.all_gather_rows(trained).requires_grad


def test_a_sum_of_bools_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor: expected a numeric dtype"):
        stats.global_sum(torch.tensor([True]))
