"""The report's page, read back from its HTML, and its command."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path

import pytest

from lit_callbacks.report import main, write_report
from lit_callbacks.report.panels import KNOWN
from tests.callbacks.reports import Page, calm_run, report, watched_run, write_run

ROOT = Path(__file__).resolve().parents[3]


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
        run = write_run(tmp_path / "run", series, {2: "**collapsed** at step 2\n\nbad"})
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
        texts = {1: f"**collapsed** at step 1\n\n{nasty}\n\n- {nasty}"}
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

    def test_the_timeline_names_the_levels(self, tmp_path: Path, watched: str) -> None:
        segments = report(tmp_path, watched).root.all(css="segment")

        assert [segment.text for segment in segments] == ["healthy", "suspicious", "collapsed"]
        assert [segment.attributes["style"] for segment in segments] == [
            "left:0.00%;width:50.00%",
            "left:50.00%;width:25.00%",
            "left:75.00%;width:25.00%",
        ]

    def test_the_last_value_stands_above_the_picture(self, tmp_path: Path, watched: str) -> None:
        values = report(tmp_path, watched).panel("rollout/kl").one(css="values")

        assert values.one("b").text == "4"


class TestSeveralRuns:
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
        texts = {1: "**suspicious** at step 1\n\nfirst", 4: "**suspicious** at step 4\n\nlast"}
        other = write_run(tmp_path / "other", series, texts)
        rows = report(tmp_path, watched, other).root.one("tbody").all("tr")

        told = [(row.one("td", css="name").text, row.one("td", css="step").text) for row in rows]
        assert told == [
            ("other", "step 1"),
            ("watched", "step 3"),
            ("watched", "step 4"),
            ("other", "step 4"),
        ]

    def test_names_are_those_of_the_folders_or_paths_where_two_are_alike(
        self, tmp_path: Path
    ) -> None:
        one = write_run(tmp_path / "a" / "ppo", {"toy/a": [1.0]})
        two = write_run(tmp_path / "b" / "ppo", {"toy/a": [1.0]})
        three = write_run(tmp_path / "sft", {"toy/a": [1.0]})
        page = report(tmp_path, one, two, three)

        names = [item.text for item in page.root.one(css="legend").all("li")]
        assert names == [one, two, "sft"]


class TestErrors:
    def test_an_unknown_key(self, tmp_path: Path, calm: str) -> None:
        with pytest.raises(
            ValueError, match=r"logged \(rollout/gold, rollout/kl\), got rollout/scor$"
        ):
            report(tmp_path, calm, keys=["rollout/kl", "rollout/scor"])

    def test_a_run_of_placeholders_only(self, tmp_path: Path) -> None:
        run = write_run(tmp_path / "run", {"hp_metric": [-1.0]})

        with pytest.raises(ValueError, match=r"logged \(hp_metric\), got none"):
            report(tmp_path, run)

    def test_no_run_one_twice_and_a_string(self, tmp_path: Path, calm: str) -> None:
        with pytest.raises(ValueError, match="expected at least one run, got none"):
            report(tmp_path)
        with pytest.raises(ValueError, match="expected each folder once"):
            report(tmp_path, calm, calm)
        with pytest.raises(ValueError, match="expected a list of folders, got the string"):
            write_report(calm, tmp_path / "report.html")
        with pytest.raises(ValueError, match="expected a list of keys, got the string"):
            write_report([calm], tmp_path / "report.html", keys="rollout/kl")

    def test_an_output_that_is_a_folder(self, tmp_path: Path, calm: str) -> None:
        with pytest.raises(ValueError, match="output: expected a file, got the folder"):
            write_report([calm], tmp_path)


class TestTheCommand:
    def test_it_writes_the_page(
        self,
        tmp_path: Path,
        watched: str,
        calm: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        output = str(tmp_path / "page.html")
        words = [watched, calm, "--output", output, "--keys", "rollout/kl"]
        monkeypatch.setattr(sys, "argv", ["report", *words])
        # another test of this process may have imported it, of which runpy warns
        monkeypatch.delitem(sys.modules, "lit_callbacks.report.__main__", raising=False)

        runpy.run_module("lit_callbacks.report", run_name="__main__")

        assert capsys.readouterr().out.endswith(f"\n\nReport: {output}\n")
        assert [c.text for c in Page(Path(output)).root.all("code")] == ["rollout/kl"]

    def test_runs_may_have_names(self, tmp_path: Path, watched: str, calm: str) -> None:
        output = tmp_path / "page.html"
        main([f"vanilla={watched}", f"ppo max={calm}", "--output", str(output)])

        assert Page(output).title == "vanilla, ppo max"

    def test_a_folder_may_have_a_sign_of_equality(self, tmp_path: Path) -> None:
        run = write_run(tmp_path / "lr=0.1", {"toy/a": [1.0]})
        output = tmp_path / "page.html"
        main([run, "--output", str(output)])

        assert Page(output).title == "lr=0.1"

    @pytest.mark.parametrize("words", [["a={calm}", "{watched}"], ["a={calm}", "a={watched}"]])
    def test_names_for_some_runs_or_twice_the_same(
        self, words: list[str], watched: str, calm: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as stop:
            main([word.format(calm=calm, watched=watched) for word in words])

        assert stop.value.code == 2
        assert "expected folders, or NAME=FOLDER with different names" in capsys.readouterr().err

    def test_an_error_is_one_line_without_a_traceback(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as stop:
            main([str(tmp_path / "nothing"), "--output", str(tmp_path / "page.html")])

        assert stop.value.code == 2
        assert "with no event file" in capsys.readouterr().err
        assert os.listdir(tmp_path) == []
