"""The charts of the report: curves, levels and verdicts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lit_callbacks.report import moving_average, thin
from tests.callbacks.reports import calm_run, rectangles, report, watched_run, write_run


@pytest.fixture
def watched(tmp_path: Path) -> str:
    return watched_run(tmp_path / "watched")


@pytest.fixture
def calm(tmp_path: Path) -> str:
    return calm_run(tmp_path / "calm")


class TestOneRun:
    def test_verdicts_are_numbered_at_their_steps_and_in_the_table(
        self, tmp_path: Path, watched: str
    ) -> None:
        page = report(tmp_path, watched)

        for panel in page.root.all(css="panel"):
            marks = panel.all("path", css="mark")
            assert [mark.attributes["data-number"] for mark in marks] == ["1", "2"]
            assert [mark.attributes["d"].split()[0] for mark in marks] == ["M208.0", "M287.0"]
            assert [number.text for number in panel.all(css="number")] == ["1", "2"]
        rows = [[cell.text for cell in row.children] for row in page.root.one("tbody").all("tr")]
        assert rows == [
            ["1", "step 3", "▲ suspicious", "KL is <b>rising</b>", ""],
            [
                "2",
                "step 4",
                "■ collapsed",
                "KL 41 nats is 12x its baseline: the policy is exploiting the reward model",
                "raised kl_coef from 0 to 0.2 multiplied the learning rates by 0.5",
            ],
        ]
        ids = [row.attributes["id"] for row in page.root.one("tbody").all("tr")]
        assert ids == ["verdict-1", "verdict-2"]

    def test_numbers_too_near_to_each_other_share_a_label(self, tmp_path: Path) -> None:
        texts = {step: f"**suspicious** at {step}\n\nreason" for step in (10, 11, 12, 50)}
        series = {"toy/a": [0.0] * 101, "monitor/level": [0.0] * 101}
        page = report(tmp_path, write_run(tmp_path / "run", series, texts))

        assert [number.text for number in page.root.all(css="number")] == ["1-3", "4"]
        assert [pin.text for pin in page.root.all(css="pin")] == ["1-3", "4"]
        assert len(page.root.all(css="mark")) == 4

    def test_levels_are_bands_behind_the_curves(self, tmp_path: Path, watched: str) -> None:
        panel = report(tmp_path, watched).panel("rollout/kl")
        bands = panel.all("rect", css="band")

        assert rectangles(bands) == [("suspicious", 208.0, 79.0), ("collapsed", 287.0, 79.0)]
        assert {float(band.attributes["height"]) for band in bands} == {136.0}
        hatched = [r for r in panel.all("rect") if r.attributes.get("fill") == "url(#hatch)"]
        assert [r.attributes["x"] for r in hatched] == ["287.0"]

    def test_a_curve_goes_through_its_values(self, tmp_path: Path, watched: str) -> None:
        # values 0 to 4 on an axis from 0 to 4.24, from 160 up to 24: 32.08 for each unit
        curve = report(tmp_path, watched).panel("rollout/kl").one("path", css="bold")

        assert curve.attributes["data-x"] == "1 2 3 4 5"
        assert curve.attributes["data-y"] == "0 1 2 3 4"
        assert curve.attributes["d"] == ("M50.0 160.0L129.0 127.9L208.0 95.8L287.0 63.8L366.0 31.7")

    def test_values_that_are_not_finite_are_gaps_with_a_stroke(self, tmp_path: Path) -> None:
        series = {"toy/a": [0.0, math.nan, 1.0, math.inf, 1.0, 1.0]}
        panel = report(tmp_path, write_run(tmp_path / "run", series)).panel("toy/a")
        curve = panel.one("path", css="bold")

        places = [piece.count("L") + 1 for piece in curve.attributes["d"].split("M")[1:]]
        assert places == [1, 1, 2]
        assert curve.attributes["data-y"] == "0 nan 1 inf 1 1"
        assert panel.one(css="broken").attributes["d"] == "M113.2 160v-7M239.6 160v-7"

    def test_a_long_run_has_a_bold_average_and_keeps_its_peaks(self, tmp_path: Path) -> None:
        values = [0.0] * 3000
        values[1234] = 7.0
        panel = report(tmp_path, write_run(tmp_path / "run", {"toy/a": values})).panel("toy/a")
        curve = panel.one("path", css="thin")

        steps = curve.attributes["data-x"].split()
        shown = dict(zip(steps, curve.attributes["data-y"].split(), strict=True))
        assert len(shown) <= 802
        assert shown["1235"] == "7"
        assert {value for step, value in shown.items() if step != "1235"} == {"0"}
        assert panel.one("path", css="bold").attributes["d"].count("L") == len(shown) - 1


class TestSeveralRuns:
    def test_they_are_overlaid_in_their_colours(
        self, tmp_path: Path, watched: str, calm: str
    ) -> None:
        page = report(tmp_path, watched, calm)
        panel = page.panel("rollout/kl")

        assert [item.text for item in page.root.one(css="legend").all("li")] == ["watched", "calm"]
        assert len(panel.all("g", css="run-0")) == len(panel.all("g", css="run-1")) == 1
        assert panel.one("g", css="run-1").one("path", css="bold").attributes["data-x"] == "1 2"
        assert [value.text for value in panel.one(css="values").all("b")] == ["4", "0.1"]

    def test_a_metric_of_one_run_is_drawn_for_that_run(
        self, tmp_path: Path, watched: str, calm: str
    ) -> None:
        panel = report(tmp_path, watched, calm).panel("rollout/gold")

        assert panel.all("g", css="run-0") == []
        assert len(panel.all("g", css="run-1")) == 1

    def test_levels_of_one_run_stay_in_the_background(
        self, tmp_path: Path, watched: str, calm: str
    ) -> None:
        page = report(tmp_path, calm, watched)

        assert page.root.all(css="lane") == []
        assert len(page.panel("rollout/kl").all("rect", css="band")) == 2
        assert "verdict of watched was" in page.root.one("footer").text

    def test_levels_of_two_runs_have_a_lane_each(self, tmp_path: Path, watched: str) -> None:
        series = {"rollout/kl": [1.0] * 4, "monitor/level": [1, 1, 0, 0]}
        other = write_run(tmp_path / "other", series)
        panel = report(tmp_path, watched, other).panel("rollout/kl")

        lanes = panel.all("g", css="lane")
        assert [lane.classes & {"run-0", "run-1"} for lane in lanes] == [{"run-0"}, {"run-1"}]
        assert rectangles(lanes[1].all("rect", css="band")) == [("suspicious", 50.0, 158.0)]
        assert len(panel.all("rect", css="band")) == 3
        assert {float(r.attributes["height"]) for r in panel.all("rect", css="band")} == {6.0}


class TestSeries:
    def test_moving_average_passes_over_what_is_not_finite(self) -> None:
        values = [1.0, math.nan, 3.0, 5.0, math.nan, math.nan, math.nan]
        averages = moving_average(values, half_width=1)

        assert averages[:5] == [1.0, 2.0, 4.0, 4.0, 5.0]
        assert math.isnan(averages[5])
        assert math.isnan(averages[6])

    def test_thinning_keeps_ends_extremes_and_gaps(self) -> None:
        values = [0.0, 1.0, 9.0, 2.0, -5.0, 0.0, math.nan, math.nan, 3.0, 3.0]

        # halves: 0 1 9 2 -5 (extremes at 2 and 4) and 0 nan nan 3 3 (at 5 and 8, gap at 6)
        assert thin(values, columns=2) == [0, 2, 4, 5, 6, 8, 9]
        assert thin(values[:4], columns=2) == [0, 1, 2, 3]
