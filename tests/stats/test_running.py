import copy
import statistics
from itertools import islice

import pytest
import torch
from torch import nn

from lit_rlhf.stats import FixedDtypeBuffers, RunningMoments

STREAM = [3.0, -1.5, 100.25, 7.0, 0.0, 2.5, -40.0]


def moments_of(*batches: list[float]) -> RunningMoments:
    moments = RunningMoments()
    for batch in batches:
        moments.update(torch.tensor(batch))
    return moments


@pytest.mark.parametrize("cuts", [(7,), (1, 1, 1, 1, 1, 1, 1), (3, 1, 3), (2, 5)])
def test_a_stream_has_the_statistics_of_all_its_numbers(cuts: tuple[int, ...]) -> None:
    moments, stream = RunningMoments(), iter(STREAM)
    for n in cuts:
        moments.update(torch.tensor(list(islice(stream, n))))
    assert moments.count.item() == 7
    assert moments.mean.item() == pytest.approx(statistics.fmean(STREAM), rel=1e-12)
    assert moments.var.item() == pytest.approx(statistics.pvariance(STREAM), rel=1e-12)
    assert moments.std.item() == pytest.approx(statistics.pstdev(STREAM), rel=1e-12)


def test_before_the_first_number_all_is_zero_and_none_changes_nothing() -> None:
    moments = RunningMoments()
    assert [x.item() for x in (moments.mean, moments.var, moments.std)] == [0] * 3
    moments.update(torch.tensor([1.0, 2.0]))
    before = copy.deepcopy(moments.state_dict())
    moments.update(torch.zeros(0))
    assert moments.state_dict() == before


def test_the_spread_of_numbers_far_from_zero_survives() -> None:
    moments = moments_of(*([10_000.0 + i % 2] for i in range(1000)))
    assert moments.std.item() == pytest.approx(0.5, rel=1e-9)


@pytest.mark.parametrize(
    "bad",
    [[1.0, float("nan")], [1.0, float("inf")], [1.0, float("-inf")], [1e200, -1e200]],
    ids=["nan", "inf", "-inf", "variance"],
)
def test_what_is_not_finite_is_refused_and_leaves_no_trace(bad: list[float]) -> None:
    moments = moments_of([1.0, 2.0])
    before = copy.deepcopy(moments.state_dict())
    with pytest.raises(ValueError, match="values: expected finite numbers"):
        moments.update(torch.tensor(bad, dtype=torch.float64))
    assert moments.state_dict() == before


def test_a_resumed_stream_equals_one_that_was_never_cut() -> None:
    whole = moments_of(STREAM[:4], STREAM[4:])
    resumed = RunningMoments()
    resumed.load_state_dict(moments_of(STREAM[:4]).state_dict())
    resumed.update(torch.tensor(STREAM[4:]))
    assert resumed.state_dict() == whole.state_dict()
    assert set(whole.state_dict()) == {"mean", "m2", "count"}


@pytest.mark.parametrize("cast", ["half", "bfloat16", "float"])
def test_a_cast_of_the_model_leaves_the_statistics_in_double_precision(cast: str) -> None:
    moments = moments_of(STREAM)
    before = copy.deepcopy(moments.state_dict())
    parent = nn.ModuleDict({"scores": moments, "layer": nn.Linear(1, 1)})
    getattr(parent, cast)()
    assert moments.state_dict() == before
    assert {x.dtype for x in moments.state_dict().values()} == {torch.float64}


def test_an_update_has_no_graph() -> None:
    moments = RunningMoments()
    moments.update(torch.ones(3, requires_grad=True))
    assert not any(x.requires_grad for x in (moments.mean, moments.m2, moments.std))


@pytest.mark.parametrize("dtype", [torch.float64, torch.long, torch.bool])
def test_buffers_keep_their_type_beside_weights_that_are_cast(dtype: torch.dtype) -> None:
    class Outer(FixedDtypeBuffers):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.inner = nn.Parameter(torch.ones(1)), nn.BatchNorm1d(1)
            self.register_buffer("state", torch.ones((), dtype=dtype))

    outer = Outer()
    outer.inner.get_buffer("running_mean").fill_(1 / 3)
    before = outer.inner.get_buffer("running_mean").clone()
    outer.to(torch.bfloat16)
    assert outer.get_buffer("state").dtype == dtype
    assert outer.weight.dtype == outer.inner.weight.dtype == torch.bfloat16
    assert torch.equal(outer.inner.get_buffer("running_mean"), before)
    outer.to("meta", torch.float16)  # a move and a cast at once
    assert {x.device.type for x in outer.state_dict().values()} == {"meta"}
    assert outer.get_buffer("state").dtype == dtype
