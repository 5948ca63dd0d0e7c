"""How runs are read from event files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from lit_callbacks import Level, read_run
from lit_callbacks.runs import Span, parse_verdict
from tests.callbacks.reports import calm_run, report, watched_run, write_run


@pytest.fixture
def watched(tmp_path: Path) -> str:
    return watched_run(tmp_path / "watched")


@pytest.fixture
def calm(tmp_path: Path) -> str:
    return calm_run(tmp_path / "calm")


class TestReading:
    def test_a_resumed_run_is_read_in_order_of_time(self, tmp_path: Path) -> None:
        # in order of their names the second part comes first
        run = write_run(tmp_path, {"toy/a": [1.0, 2.0, 3.0, 4.0]})
        (first,) = tmp_path.iterdir()
        first.rename(tmp_path / "events.out.tfevents.2")
        write_run(tmp_path, {"toy/a": [30.0, 40.0, 50.0]}, first=3)
        (second,) = (f for f in tmp_path.iterdir() if f.name != "events.out.tfevents.2")
        second.rename(tmp_path / "events.out.tfevents.1")

        curve = read_run("run", run).curves["toy/a"]

        told = [(point.step, point.value) for point in curve.points]
        assert told == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0), (5, 50.0)]

    def test_what_was_undone_is_kept_apart_and_drawn_dotted(self, tmp_path: Path) -> None:
        run = write_run(tmp_path / "run", {"toy/a": [1.0, 2.0, 3.0, 4.0]})
        write_run(tmp_path / "run", {"toy/a": [9.0]}, first=3)

        curve = read_run("run", run).curves["toy/a"]
        page = report(tmp_path, run)

        assert [point.step for point in curve.points] == [1, 2, 3]
        assert [[r.value for r in piece] for piece in curve.undone] == [[2.0, 3.0, 4.0]]
        assert len(page.root.all("path", css="undone")) == 1
        assert "Dotted pieces were undone" in page.root.one("footer").text

    def test_a_step_logged_again_counts_once(self, tmp_path: Path) -> None:
        run = write_run(tmp_path, {"toy/a": [1.0, 2.0]})
        write_run(tmp_path, {"toy/a": [5.0, 6.0]}, first=2)

        curve = read_run("run", run).curves["toy/a"]

        assert [point.value for point in curve.points] == [1.0, 5.0, 6.0]
        assert curve.undone == []

    def test_a_level_ends_where_the_next_one_starts(self, tmp_path: Path, watched: str) -> None:
        assert read_run("run", watched).spans == [
            Span(1, 3, Level.HEALTHY),
            Span(3, 4, Level.SUSPICIOUS),
            Span(4, 5, Level.COLLAPSED),
        ]

    def test_a_verdict_newer_than_the_last_level_counts(self, tmp_path: Path) -> None:
        run = write_run(
            tmp_path,
            {"toy/a": [1.0] * 4, "monitor/level": [0, 0]},
            {4: "**collapsed** at 4\n\nbad"},
        )

        read = read_run("run", run)

        assert read.level is Level.COLLAPSED
        assert read.reason is read.verdicts[-1]
        assert read.spans == [Span(1, 4, Level.HEALTHY), Span(4, 4, Level.COLLAPSED)]

    def test_a_collapse_before_a_rollback_is_not_forgotten(self, tmp_path: Path) -> None:
        series = {"toy/a": [1.0] * 4, "monitor/level": [0, 0, 2, 2]}
        run = write_run(tmp_path / "run", series, {3: "**collapsed** at 3\n\nbad\n\n- went back"})
        write_run(tmp_path / "run", {"toy/a": [1.0] * 5, "monitor/level": [0] * 5}, first=2)

        read = read_run("run", run)

        assert read.spans == [Span(1, 6, Level.HEALTHY)]
        assert read.worst is Level.COLLAPSED
        assert read.reason is None
        assert [(v.step, v.actions) for v in read.verdicts] == [(3, ("went back",))]

    def test_a_run_is_found_below_its_folder(self, tmp_path: Path) -> None:
        write_run(tmp_path / "run" / "version_0", {"toy/a": [3.0]})

        assert list(read_run("run", str(tmp_path / "run")).curves) == ["toy/a"]

    def test_all_values_of_a_long_run_are_read(self, tmp_path: Path) -> None:
        run = write_run(tmp_path, {"toy/a": [0.0] * 10_500})

        assert len(read_run("run", run).curves["toy/a"].points) == 10_500

    @pytest.mark.parametrize(
        ("text", "level", "sentence", "actions"),
        [
            ("**healthy** at 7\n\nall is well", Level.HEALTHY, "all is well", ()),
            (
                "**collapsed** at 7\nKL\nrose\n- one\n- two",
                Level.COLLAPSED,
                "KL rose",
                ("one", "two"),
            ),
            ("**odd** at 7\n\nKL rose", None, "**odd** at 7 KL rose", ()),
            ("just a note", None, "just a note", ()),
            ("", None, "", ()),
        ],
    )
    def test_verdicts(
        self, text: str, level: Level | None, sentence: str, actions: tuple[str, ...]
    ) -> None:
        assert parse_verdict(1.5, 7, text) == (1.5, 7, level, sentence, actions)


class TestErrors:
    def test_a_folder_without_event_files(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"event files of one run, got .* with no event file"):
            report(tmp_path, str(tmp_path))

    def test_a_folder_with_several_runs(self, tmp_path: Path, watched: str, calm: str) -> None:
        with pytest.raises(ValueError, match=rf"of one run, .*{calm}, {watched}"):
            report(tmp_path, str(tmp_path))

    def test_a_run_without_scalars(self, tmp_path: Path) -> None:
        with SummaryWriter(str(tmp_path)) as writer:
            writer.add_text("note", "text", 1)

        with pytest.raises(ValueError, match=r"a run with scalars, got .* without any"):
            report(tmp_path, str(tmp_path))

    def test_an_unknown_level(self, tmp_path: Path) -> None:
        run = write_run(tmp_path / "run", {"toy/a": [1.0], "monitor/level": [1.5]})

        with pytest.raises(ValueError, match=r"monitor/level: expected 0, 1 or 2, got 1\.5"):
            report(tmp_path, run)

    def test_without_tensorboard_the_extra_is_named(
        self, tmp_path: Path, calm: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = "tensorboard.backend.event_processing.event_accumulator"
        monkeypatch.setitem(sys.modules, module, None)

        with pytest.raises(ModuleNotFoundError, match=r"pip install lit-callbacks\[report\]"):
            report(tmp_path, calm)
