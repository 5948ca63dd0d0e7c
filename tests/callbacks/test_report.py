"""The report's page, read back from its HTML."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from lit_callbacks.report import write_report
from lit_callbacks.report.panels import KNOWN
from tests.callbacks.reports import Page, calm_run, rectangles, report, watched_run, write_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def watched(tmp_path: Path) -> str:
    return watched_run(tmp_path / "watched")


@pytest.fixture
def calm(tmp_path: Path) -> str:
    return calm_run(tmp_path / "calm")


class TestThePage:
    def test_it_is_whole_and_needs_nothing_else(self, tmp_path: Path, watched: str) -> None:
        page = report(tmp_path, watched)

        assert page.source.startswith("<!doctype html>")
        assert not page.root.all("link") + page.root.all("img")
        assert all("src" not in element.attributes for element in page.root.all())
        assert not re.findall(r"https?:|@import|url\((?!#)", page.source)
        links = [element.attributes["href"] for element in page.root.all("a")]
        assert {link[0] for link in links} == {"#"}
        ids = {element.attributes.get("id") for element in page.root.all()}
        assert {link[1:] for link in links} <= ids

    def test_the_head_is_the_last_verdict(self, tmp_path: Path, watched: str) -> None:
        card = report(tmp_path, watched).root.one(css="run")

        assert card.one("h2").text == "watched ■ collapsed at step 5"
        assert card.one(css="sentence").text == (
            "KL 41 nats is 12x its baseline: the policy is exploiting the reward model (step 4)"
        )

    def test_a_run_without_a_detector_says_so(self, tmp_path: Path, calm: str) -> None:
        page = report(tmp_path, calm)

        assert page.root.one(css="run").one(css="sentence").text == "no detector ran"
        assert "Verdicts" not in page.root.text.partition("// The pointer")[0]

    def test_a_run_that_got_better_says_what_it_was(self, tmp_path: Path) -> None:
        series = {"toy/a": [1.0, 1.0, 1.0], "monitor/level": [0, 2, 0]}
        run = write_run(tmp_path / "run", series, {2: "**collapsed** at 2\n\nbad"})
        card = report(tmp_path, run).root.one(css="run")

        assert card.one("h2").text == "run ● healthy at step 3, collapsed before"
        assert card.all(css="sentence") == []  # "bad" is no longer true

    def test_a_run_that_was_always_healthy_has_no_marks(self, tmp_path: Path) -> None:
        run = write_run(tmp_path / "run", {"toy/a": [1.0, 2.0], "monitor/level": [0, 0]})
        page = report(tmp_path, run)

        assert page.root.one(css="run").one("h2").text == "run ● healthy at step 2"
        assert page.root.all(css="mark") + page.root.all(css="band") == []
        assert "The level never changed." in page.root.text

    def test_the_known_metrics_come_in_groups(self, tmp_path: Path, watched: str) -> None:
        page = report(tmp_path, watched)
        headings = [section.one("h2").text for section in page.root.all("section")[1:]]

        assert headings == ["Reward", "Policy", "Verdicts"]
        assert [panel.one("h3").text for panel in page.root.all(css="panel")] == [
            "Score of the reward model reward",
            "KL to the SFT policy nats per response",
        ]

    def test_a_run_of_other_metrics_shows_all_of_them(self, tmp_path: Path) -> None:
        series = {key: [1.0] for key in ("b/loss", "plain", "a/x", "hp_metric", "epoch")}
        run = write_run(tmp_path / "run", series | {"monitor/level": [0], "monitor/x": [0]})
        page = report(tmp_path, run)

        assert [code.text for code in page.root.all("code")] == ["plain", "a/x", "b/loss"]
        assert [s.one("h2").text for s in page.root.all("section")[1:4]] == ["Metrics", "a", "b"]

    def test_keys_choose_the_panels(self, tmp_path: Path, watched: str, calm: str) -> None:
        page = report(tmp_path, watched, calm, keys=["rollout/gold", "monitor/level"])

        assert [code.text for code in page.root.all("code")] == ["rollout/gold", "monitor/level"]

    def test_every_known_metric_is_documented(self) -> None:
        documented = (ROOT / "docs" / "metrics.md").read_text("utf-8")

        assert [panel.key for panel in KNOWN if f"| `{panel.key}` |" not in documented] == []

    def test_texts_are_escaped(self, tmp_path: Path) -> None:
        nasty = "<script>\"&'</script>"
        texts = {1: f"**collapsed** at 1\n\n{nasty}\n\n- {nasty}"}
        run = write_run(tmp_path / "run", {f"toy/{nasty}": [1.0], "monitor/level": [2]}, texts)
        path = write_report({nasty: run}, tmp_path / "report.html")
        page = Page(path)

        assert len(page.root.all("script")) == 1  # the page's own
        assert page.title == nasty
        assert page.root.one(css="panel").one("code").text == f"toy/{nasty}"
        assert page.root.one(css="why").text == nasty
        assert page.root.one("tbody").one("li").text == nasty

    def test_it_replaces_an_older_page_and_leaves_nothing_beside_it(
        self, tmp_path: Path, calm: str
    ) -> None:
        output = tmp_path / "new" / "report.html"
        write_report([calm], output)
        output.write_text("old")

        assert write_report([calm], output) == output
        assert output.read_text().startswith("<!doctype html>")
        assert list(output.parent.iterdir()) == [output]

    def test_a_page_that_cannot_be_written_leaves_the_older_one(
        self, tmp_path: Path, calm: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        output = tmp_path / "report.html"
        output.write_text("old")

        def full(self: Path, text: str, encoding: str) -> int:
            with self.open("w") as file:
                file.write("half a page")
            raise OSError("no space left")

        monkeypatch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="no space left"):
            write_report([calm], output)

        assert output.read_text() == "old"
        assert sorted(tmp_path.iterdir()) == sorted([output, Path(calm)])


class TestThePictures:
    # The x axis of a picture goes from 50 (first step) to 366 (last step): 79 for each of 4 steps.

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

    def test_the_timeline_names_the_levels(self, tmp_path: Path, watched: str) -> None:
        segments = report(tmp_path, watched).root.all(css="segment")

        assert [segment.text for segment in segments] == ["healthy", "suspicious", "collapsed"]
        assert [segment.attributes["style"] for segment in segments] == [
            "left:0.00%;width:50.00%",
            "left:50.00%;width:25.00%",
            "left:75.00%;width:25.00%",
        ]

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

    def test_the_last_value_stands_above_the_picture(self, tmp_path: Path, watched: str) -> None:
        values = report(tmp_path, watched).panel("rollout/kl").one(css="values")

        assert values.one("b").text == "4"
