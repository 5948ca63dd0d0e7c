import math

import pytest

from lit_callbacks.text import bar_text, duration_text, number_text, short_names, sparkline


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "00:00"), (59.9, "00:59"), (60, "01:00"), (3599, "59:59"), (3600, "1:00:00")],
)
def test_duration(seconds: float, expected: str) -> None:
    assert duration_text(seconds) == expected


def test_duration_counts_hours_past_a_day() -> None:
    assert duration_text(30 * 3600 + 61) == "30:01:01"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, "0"),
        (0.51234, "0.512"),
        (-12.345, "-12.3"),
        (1234.4, "1234"),
        (-123456.0, "-123456"),
        (5e-7, "5e-07"),
        (1.5e6, "1.5e+06"),
        (math.nan, "nan"),
        (math.inf, "inf"),
    ],
)
def test_number(value: float, expected: str) -> None:
    assert number_text(value) == expected


def test_names_are_short_where_they_differ() -> None:
    assert short_names(["rollout/kl", "lr"]) == ["kl", "lr"]


def test_names_are_whole_where_they_would_look_the_same() -> None:
    keys = ["sft/loss", "rollout/kl", "reward/loss"]
    assert short_names(keys) == ["sft/loss", "kl", "reward/loss"]


@pytest.mark.parametrize(
    ("fraction", "expected"), [(0.0, "[....]"), (0.49, "[#...]"), (0.5, "[##..]"), (1.0, "[####]")]
)
def test_bar(fraction: float, expected: str) -> None:
    assert bar_text(fraction, 6) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"),
        ([8, 0, 4], "█▁▅"),
        ([2.5, 2.5, 2.5], "▄▄▄"),
        ([1, math.nan, 3, math.inf, 1], "▁ █ ▁"),
        ([math.nan, math.nan], "  "),
        ([0, 0.9, -1.5e308, 1.5e308], "▅▅▁█"),
        ([], ""),
    ],
)
def test_sparkline(values: list[float], expected: str) -> None:
    assert sparkline(values, 10) == expected


def test_sparkline_shows_the_newest_values_on_a_scale_of_their_own() -> None:
    assert sparkline([100, 0, 1, 2], 3) == "▁▅█"
