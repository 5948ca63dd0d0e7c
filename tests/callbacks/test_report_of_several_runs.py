"""Several runs on one page of the report."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.callbacks.reports import calm_run, rectangles, report, watched_run, write_run


@pytest.fixture
def watched(tmp_path: Path) -> str:
    return watched_run(tmp_path / "watched")


@pytest.fixture
def calm(tmp_path: Path) -> str:
    return calm_run(tmp_path / "calm")


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

    def test_the_table_and_the_marks_name_the_run(
        self, tmp_path: Path, watched: str, calm: str
    ) -> None:
        page = report(tmp_path, calm, watched)

        rows = page.root.one("tbody").all("tr")
        assert [row.one("td", css="name").text for row in rows] == ["watched", "watched"]
        assert len(page.panel("rollout/kl").all("path", css="mark run-1")) == 2

    def test_verdicts_are_numbered_over_all_runs_by_step(
        self, tmp_path: Path, watched: str
    ) -> None:
        series = {"rollout/kl": [1.0] * 4, "monitor/level": [1, 1, 1, 1]}
        texts = {1: "**suspicious** at 1\n\nfirst", 4: "**suspicious** at 4\n\nlast"}
        other = write_run(tmp_path / "other", series, texts)
        rows = report(tmp_path, watched, other).root.one("tbody").all("tr")

        told = [(row.one("td", css="name").text, row.one("td", css="step").text) for row in rows]
        assert told == [
            ("other", "step 1"),
            ("watched", "step 3"),
            ("watched", "step 4"),
            ("other", "step 4"),
        ]

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

    def test_names_are_those_of_the_folders_or_paths_where_two_are_alike(
        self, tmp_path: Path
    ) -> None:
        one = write_run(tmp_path / "a" / "ppo", {"toy/a": [1.0]})
        two = write_run(tmp_path / "b" / "ppo", {"toy/a": [1.0]})
        three = write_run(tmp_path / "sft", {"toy/a": [1.0]})
        page = report(tmp_path, one, two, three)

        names = [item.text for item in page.root.one(css="legend").all("li")]
        assert names == [one, two, "sft"]
