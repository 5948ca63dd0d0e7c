from __future__ import annotations

from typing import Any

import pytest

from lit_callbacks.monitors import Monitor
from tests.callbacks.watching import NAN, S, levels, monitor


@pytest.mark.parametrize(
    ("options", "values", "expected"),
    [
        ({"high": 10.0}, [3.4] * 4 + [41.0], "x 41 is 12.1x its baseline"),
        ({"high": 10.0}, [4.0] * 4 + [48.0], "x 48 is 12x its baseline"),
        ({"high": 10.0}, [0.05] * 4 + [41.0], "x rose to 41 (baseline 0.05)"),  # 820x
        ({"high": 10.0}, [0.0] * 4 + [41.0], "x rose to 41 (baseline 0)"),
        ({"high": 10.0}, [-2.0] * 4 + [41.0], "x rose to 41 (baseline -2)"),
        ({"high": 1.01}, [1.0] * 4 + [1.02], "x rose to 1.02 (baseline 1)"),
        ({"low_ratio": 0.6}, [2.9] * 4 + [1.3], "x fell to 1.3 (baseline 2.9)"),
        ({"low": 0.0}, [0.5] * 4 + [-0.25], "x fell to -0.25 (baseline 0.5)"),
        ({"low": -3.0}, [-1.0] * 4 + [-4.0], "x fell to -4 (baseline -1)"),
        ({"high": 10.0}, [41.0], "x 41 is above 10"),  # no baseline yet
        ({"low": 5.0}, [4.0], "x 4 is below 5"),
        ({"low": 0.0}, [-0.5] * 4 + [-0.25], "x -0.25 is below 0"),  # not "fell"
        ({"high": 10.0}, [50.0] * 4 + [20.0], "x 20 is above 10"),
        ({"high": 10.0}, [5.0] * 4 + [NAN], "x is nan"),
        ({"high": 10.0}, [5.0] * 4 + [5.0], "x is 5"),
        ({"high": 10.0, "smoothing": 3}, [4.0] * 4 + [20.0, 20.0, 4.0], "x 20 is 5x its baseline"),
    ],
)
def test_sentences(options: dict[str, Any], values: list[float], expected: str) -> None:
    watcher = monitor(**options)
    levels(watcher, values)
    assert watcher.sentence() == expected


def test_a_sentence_has_the_unit() -> None:
    class Nats(Monitor):
        title, unit = "KL", "nats"

    watcher = Nats("x", high=10.0, baseline_records=4, patience=1)
    levels(watcher, [2.0] * 4 + [30.0])
    assert watcher.sentence() == "KL 30 nats is 15x its baseline"
    levels(watcher, [250.0])
    assert watcher.sentence() == "KL rose to 250 nats (baseline 2)"


@pytest.mark.parametrize(
    ("latest", "expected"),
    [
        ([20.0, 22.0, 24.0, 26.0, 28.0], "x 28 is 7x its baseline and rising"),
        ([80.0, 60.0, 50.0, 40.0, 30.0, 28.0], "x 28 is 7x its baseline and falling"),
        ([20.0, 28.0, 25.0, 21.0, 28.0], "x 28 is 7x its baseline"),
    ],
)
def test_a_sentence_says_where_the_signal_goes(latest: list[float], expected: str) -> None:
    watcher = monitor(high=10.0, trend_records=len(latest))
    levels(watcher, [4.0] * 4 + latest)
    assert watcher.sentence() == expected


def test_a_trend_that_is_over_the_line_is_not_still_to_come() -> None:
    watcher = monitor(high=20.0, patience=99, horizon=50)
    levels(watcher, [2.0] * 4 + [2.0 + 4.0 * i for i in range(1, 7)])
    assert (watcher.level, watcher.crossing) == (S, 0.0)
    assert watcher.sentence() == "x 26 is 13x its baseline and rising"


@pytest.mark.parametrize(
    ("options", "values", "expected"),
    [
        # (20 - 6.5) / 0.5 is 27
        (
            {"high": 20.0},
            [2.0 + 0.5 * i for i in range(10)],
            "x 6.5 is 2.4x its baseline and at this pace beyond 20 in 27 records",
        ),
        # (-20 - -2.5) / -0.5 is 35
        (
            {"low": -20.0},
            [2.0 - 0.5 * i for i in range(10)],
            "x fell to -2.5 (baseline 1.25) and at this pace beyond -20 in 35 records",
        ),
        # a fall back to normal, after which it rises: the baseline is still above
        (
            {"high": 20.0},
            [10.0] * 4 + [float(i) for i in range(10)],
            "x is 9 and at this pace beyond 20 in 11 records",
        ),
        (
            {"high": 9.5},
            [float(i) for i in range(10)],
            "x 9 is 6x its baseline and at this pace beyond 9.5 in 1 record",
        ),
        (
            {"high": 9.0},
            [float(i) for i in range(10)],
            "x 9 is 6x its baseline and rising",  # at the line
        ),
    ],
)
def test_a_sentence_of_a_trend_says_when(
    options: dict[str, Any], values: list[float], expected: str
) -> None:
    watcher = monitor(**options, patience=99, horizon=50)
    assert levels(watcher, values)[-1] is S
    assert watcher.sentence() == expected
