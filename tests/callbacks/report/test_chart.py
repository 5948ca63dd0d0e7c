"""Positions and ticks of the charts."""

from __future__ import annotations

import pytest

from lit_callbacks.report.chart import Scale, fit_scale, nice_step, tick_text


class TestScales:
    def test_places_and_ticks_are_linear(self) -> None:
        scale = Scale(-1.0, 3.0)

        assert [scale.fraction(value) for value in (-1.0, 0.0, 3.0, 4.0)] == [0.0, 0.25, 1.0, 1.25]
        assert scale.ticks(4) == [(-1.0, "-1"), (0.0, "0"), (1.0, "1"), (2.0, "2"), (3.0, "3")]

    def test_a_signed_logarithm_has_ticks_at_powers_of_ten(self) -> None:
        scale = Scale(-9.0, 999.0, signed_log=True)

        places = [4 * scale.fraction(value) for value in (-9.0, 0.0, 9.0, 999.0)]
        assert [round(place, 6) for place in places] == [0, 1, 2, 4]
        assert [text for _, text in scale.ticks(8)] == ["-1", "0", "1", "10", "100"]

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
        scale = fit_scale(values, allow_signed_log=True)

        assert (round(scale.low, 6), round(scale.high, 6)) == (low, high)
        assert not scale.signed_log

    def test_a_wide_range_is_logarithmic_where_allowed(self) -> None:
        assert fit_scale([0.0, 100.0], allow_signed_log=True).signed_log
        assert not fit_scale([0.0, 100.0]).signed_log

    def test_a_floor_cuts_off_what_is_far_below(self) -> None:
        assert fit_scale([-40.0, 0.5], floor=-1.0).low == pytest.approx(-1.09)
        assert fit_scale([-9.0, -8.0], floor=-1.0).high > -1.0

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
