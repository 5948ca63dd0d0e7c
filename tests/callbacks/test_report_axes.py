"""Places, ticks, averages and thinning behind the report's pictures."""

from __future__ import annotations

import math

import pytest

from lit_callbacks.report.axes import Axis, nice_step, tick_text, value_axis
from lit_callbacks.report.chart import moving_average, thinned
from lit_callbacks.runs import Point


class TestAxes:
    def test_places_and_ticks_are_linear(self) -> None:
        axis = Axis(-1.0, 3.0, 100.0, 20.0)

        assert [axis.at(value) for value in (-1.0, 0.0, 3.0, 4.0)] == [100.0, 80.0, 20.0, 0.0]
        assert axis.ticks(4) == [(-1.0, "-1"), (0.0, "0"), (1.0, "1"), (2.0, "2"), (3.0, "3")]

    def test_a_signed_logarithm_has_ticks_at_powers_of_ten(self) -> None:
        axis = Axis(-9.0, 999.0, 0.0, 4.0, signed_log=True)

        assert [round(axis.at(value), 6) for value in (-9.0, 0.0, 9.0, 999.0)] == [0, 1, 2, 4]
        assert [text for _, text in axis.ticks(8)] == ["-1", "0", "1", "10", "100"]

    @pytest.mark.parametrize(
        ("values", "low", "high"),
        [
            ([], 0.0, 1.06),
            ([0.0, 0.0], 0.0, 1.06),
            ([5.0, 5.0], 4.44, 5.56),  # 4.5 to 5.5 and room
            ([-1.0, 1.0], -1.12, 1.12),
            ([1.0, 10.0], 0.0, 10.6),  # from zero
            ([9.0, 10.0], 8.94, 10.06),
        ],
    )
    def test_an_axis_has_room(self, values: list[float], low: float, high: float) -> None:
        axis = value_axis(values, 0.0, 1.0, log_allowed=True, floor=None)

        assert (round(axis.low, 6), round(axis.high, 6)) == (low, high)
        assert not axis.signed_log

    def test_a_wide_range_is_logarithmic_where_allowed(self) -> None:
        assert value_axis([0.0, 100.0], 0.0, 1.0, log_allowed=True, floor=None).signed_log
        assert not value_axis([0.0, 100.0], 0.0, 1.0, log_allowed=False, floor=None).signed_log

    def test_a_floor_cuts_off_what_is_far_below(self) -> None:
        assert value_axis([-40.0, 0.5], 0.0, 1.0, False, floor=-1.0).low == pytest.approx(-1.09)
        assert value_axis([-9.0, -8.0], 0.0, 1.0, False, floor=-1.0).high > -1.0

    @pytest.mark.parametrize(
        ("least", "step"), [(0.04, 0.05), (0.05, 0.05), (0.6, 1.0), (3.0, 5.0), (70.0, 100.0)]
    )
    def test_steps_are_round(self, least: float, step: float) -> None:
        assert nice_step(least) == pytest.approx(step)

    @pytest.mark.parametrize(
        ("value", "step", "text"),
        [
            (0.15, 0.05, "0.15"),
            (0.3, 0.1, "0.3"),
            (40.0, 20.0, "40"),
            (20000.0, 5000.0, "20k"),
            (0.0, 5000.0, "0"),
            (2.5e6, 5e5, "2500k"),
            (3e7, 1e7, "30M"),
            (2e-5, 2e-5, "2e-05"),
        ],
    )
    def test_tick_texts(self, value: float, step: float, text: str) -> None:
        assert tick_text(value, step) == text

    def test_moving_average_passes_over_what_is_not_finite(self) -> None:
        values = [1.0, math.nan, 3.0, 5.0, math.nan, math.nan, math.nan]
        readings = [Point(0.0, step, value) for step, value in enumerate(values)]
        averages = [moving_average(readings, place, 1) for place in range(7)]

        assert averages[:5] == [1.0, 2.0, 4.0, 4.0, 5.0]
        assert math.isnan(averages[5])
        assert math.isnan(averages[6])

    def test_thinning_keeps_ends_extremes_and_gaps(self) -> None:
        values = [0.0, 1.0, 9.0, 2.0, -5.0, 0.0, math.nan, math.nan, 3.0, 3.0]
        readings = [Point(0.0, step, value) for step, value in enumerate(values)]

        # halves: 0 1 9 2 -5 (extremes at 2 and 4) and 0 nan nan 3 3 (at 5 and 8, gap at 6)
        assert thinned(readings, columns=2) == [0, 2, 4, 5, 6, 8, 9]
        assert thinned(readings[:4], columns=2) == [0, 1, 2, 3]
