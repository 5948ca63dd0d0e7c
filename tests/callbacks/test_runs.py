"""How runs are read from event files and tables."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from torch.utils.tensorboard import SummaryWriter

from lit_callbacks import read_log, read_logged_steps, read_run
from lit_callbacks.runs import EmptyLogError, find_logs, name_runs, parse_verdict
from tests.support.monitor_levels import C, H, S
from tests.support.report_pages import report, write_run


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
        points = [(point.step, point.value) for point in curve.points]
        assert points == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0), (5, 50.0)]

    def test_a_clock_that_goes_back_does_not_change_the_order(self, tmp_path: Path) -> None:
        with SummaryWriter(str(tmp_path)) as writer:
            for step, time in ((1, 86_400.0), (2, 86_401.0), (3, 2.0), (4, 3.0)):
                writer.add_scalar("toy/a", float(step), step, walltime=time)
                writer.add_scalar("monitor/level", int(step > 3), step, walltime=time)
        run = read_run("run", tmp_path)
        curve = run.curves["toy/a"]
        assert [point.step for point in curve.points] == [1, 2, 3, 4]
        assert curve.undone == []
        assert run.spans == [(1, 4, H), (4, 4, S)]
        assert (run.name, run.folder) == ("run", str(tmp_path))

    def test_a_clock_that_is_set_back_between_starts_does_not_change_the_order(
        self, tmp_path: Path
    ) -> None:
        day = 86_400
        starts = {"a": range(1, 6), "b": range(4, 9), "c": range(8, 11)}
        times = {"a": 5 * day, "b": 4 * day, "c": 4 * day + 100}  # set back after the first start
        for name, steps in starts.items():
            with SummaryWriter(str(tmp_path), filename_suffix=name) as writer:
                writer.add_scalar("hp_metric", -1, 0, walltime=times[name])
                for place, step in enumerate(steps):
                    time = times[name] + place
                    writer.add_scalar("toy/a", float(f"{step}.{ord(name)}"), step, walltime=time)
                    writer.add_scalar("monitor/level", int(step > 8), step, walltime=time)
        run = read_run("run", tmp_path)
        values = [point.value for point in run.curves["toy/a"].points]
        expected = [1.97, 2.97, 3.97, 4.98, 5.98, 6.98, 7.98, 8.99, 9.99, 10.99]
        assert values == pytest.approx(expected)
        times_of_points = [point.time for point in run.curves["toy/a"].points]
        assert times_of_points == sorted(times_of_points)
        assert run.spans == [(1, 9, H), (9, 10, S)]

    def test_undone_values_are_kept_apart(self, tmp_path: Path) -> None:
        run = write_run(tmp_path / "run", {"toy/a": [1.0, 2.0, 3.0, 4.0]})
        write_run(tmp_path / "run", {"toy/a": [9.0]}, first=3)
        curve = read_run("run", run).curves["toy/a"]
        assert [point.step for point in curve.points] == [1, 2, 3]
        assert [[r.value for r in piece] for piece in curve.undone] == [[2.0, 3.0, 4.0]]

    def test_a_step_logged_again_counts_once(self, tmp_path: Path) -> None:
        run = write_run(tmp_path, {"toy/a": [1.0, 2.0]})
        write_run(tmp_path, {"toy/a": [5.0, 6.0]}, first=2)
        curve = read_run("run", run).curves["toy/a"]
        assert [point.value for point in curve.points] == [1.0, 5.0, 6.0]
        assert curve.undone == []

    def test_a_level_ends_where_the_next_one_starts(self, tmp_path: Path, watched: str) -> None:
        spans = [(1, 3, H), (3, 4, S), (4, 5, C)]
        assert read_run("run", watched).spans == spans

    def test_a_verdict_newer_than_the_last_level_counts(self, tmp_path: Path) -> None:
        texts = {4: "**collapsed** at step 4\n\nbad"}
        run = write_run(tmp_path, {"toy/a": [1.0] * 4, "monitor/level": [0, 0]}, texts)
        read = read_run("run", run)
        assert read.level is C
        assert read.reason is read.verdicts[-1]
        assert read.spans == [(1, 4, H), (4, 4, C)]

    def test_a_collapse_before_a_rollback_is_not_forgotten(self, tmp_path: Path) -> None:
        series = {"toy/a": [1.0] * 4, "monitor/level": [0, 0, 2, 2]}
        texts = {3: "**collapsed** at step 3\n\nbad\n\n- went back"}
        run = write_run(tmp_path / "run", series, texts)
        write_run(tmp_path / "run", {"toy/a": [1.0] * 5, "monitor/level": [0] * 5}, first=2)
        read = read_run("run", run)
        assert read.spans == [(1, 6, H)]
        assert read.worst is C
        assert read.reason is None
        assert [(v.step, v.actions) for v in read.verdicts] == [(3, ("went back",))]

    def test_the_placeholder_of_lightning_is_no_metric(self, tmp_path: Path) -> None:
        with SummaryWriter(str(tmp_path)) as writer:
            writer.add_scalar("hp_metric", -1, 0)
        with pytest.raises(EmptyLogError, match="expected a run with scalars"):
            read_run("run", tmp_path)
        write_run(tmp_path, {"toy/a": [3.0]})
        assert read_log(tmp_path) == [{"step": 1, "toy/a": 3.0}]

    def test_exports_of_commas_and_tabs_are_one_run(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text("Wall time,Step,Value\n1,1,2.0\n")
        (tmp_path / "b.tsv").write_text("Wall time\tStep\tValue\n1\t1\t3.0\n")
        assert list(read_run("run", tmp_path).curves) == ["a", "b"]
        assert find_logs(tmp_path) == [tmp_path]

    def test_a_run_is_found_below_its_folder(self, tmp_path: Path) -> None:
        write_run(tmp_path / "run" / "version_0", {"toy/a": [3.0]})
        assert list(read_run("run", str(tmp_path / "run")).curves) == ["toy/a"]

    def test_all_values_of_a_long_run_are_read(self, tmp_path: Path) -> None:
        run = write_run(tmp_path, {"toy/a": [0.0] * 10_500})
        assert len(read_run("run", run).curves["toy/a"].points) == 10_500

    @pytest.mark.parametrize(
        ("text", "level", "sentence", "actions"),
        [
            ("**healthy** at step 7\n\nall is well", H, "all is well", ()),
            ("**collapsed** at 7\nKL\nrose\n- a\n- b", C, "KL rose", ("a", "b")),
            ("**odd** at 7\n\nKL rose", None, "**odd** at 7 KL rose", ()),
            ("just a note", None, "just a note", ()),
            ("", None, "", ()),
        ],
    )
    def test_verdict_is_parsed_from_its_text(
        self, text: str, level: Any, sentence: str, actions: tuple[str, ...]
    ) -> None:
        assert parse_verdict(1.5, 7, text) == (1.5, 7, level, sentence, actions)


def table_run(folder: Path, passes: Sequence[Mapping[str, Sequence[float]]], text: str) -> str:
    """What a `CSVLogger` writes: a row for each step of each pass, and a verdict after it."""
    logger = CSVLogger(folder, name="", version="run")
    for series in passes:
        for step in range(1, 1 + max(map(len, series.values()))):
            # Lightning logs a float if the module logs `step` itself
            logged = {k: v[step - 1] for k, v in series.items() if step <= len(v)}
            logger.log_metrics(logged, step=float(step))  # type: ignore[arg-type]
        note: Any = {"monitor/verdict": text, "monitor/note": "words"}
        logger.log_metrics(note, step=step)
    logger.save()
    return str(folder)


class TestTables:
    def test_a_csv_logger_is_read_like_event_files(self, tmp_path: Path) -> None:
        levels = {"monitor/level": [0.0, 0.0, 1.0, 2.0], "toy/a": [1.0, math.nan, 3.0, math.inf]}
        text = '**collapsed** at step 4\n\nKL, "rose": bad\n\n- stopped'
        run = read_run("run", table_run(tmp_path, [levels], text))
        assert sorted(run.curves) == ["monitor/level", "toy/a"]
        (verdict,) = run.verdicts
        assert verdict[1:] == (4, C, 'KL, "rose": bad', ("stopped",))
        assert [point.step for point in run.curves["toy/a"].points] == [1, 2, 3, 4]
        assert run.spans == [(1, 3, H), (3, 4, S), (4, 4, C)]
        assert run.reason == verdict

    def test_a_run_that_went_back_is_read_in_order_of_its_rows(self, tmp_path: Path) -> None:
        passes = [{"toy/a": [1.0, 2.0, 3.0]}, {"toy/a": [4.0, 5.0]}]
        curve = read_run("run", table_run(tmp_path, passes, "note")).curves["toy/a"]
        assert [point.value for point in curve.points] == [4.0, 5.0]
        assert [[point.value for point in piece] for piece in curve.undone] == [[1.0, 2.0, 3.0]]

    def test_a_replay_reads_a_table(self, tmp_path: Path) -> None:
        steps = read_logged_steps(table_run(tmp_path, [{"toy/a": [1.0, 2.0]}], "note"))
        assert steps == {1: {"toy/a": 1}, 2: {"toy/a": 2}}

    def test_verdicts_are_also_read_from_json_lines(self, tmp_path: Path) -> None:
        logger = CSVLogger(tmp_path, name="", version="")
        logger.log_metrics({"toy/a": 1.0, "monitor/level": 2.0}, step=3)
        logger.save()
        text = "**collapsed** at step 3\n\nx"
        record = {"time": 5.0, "step": 3, "key": "monitor/verdict", "text": text}
        other = {"time": 4.0, "step": 3, "key": "toy/values", "counts": [1], "edges": [0, 1]}
        lines = "".join(json.dumps(entry) + "\n" for entry in (other, record))
        (tmp_path / "log.jsonl").write_text(lines + '{"time": 6.0, "st', "utf-8")
        (verdict,) = read_run("run", tmp_path).verdicts
        assert verdict == (5.0, 3, C, "x", ())

    def test_event_files_are_preferred(self, tmp_path: Path) -> None:
        table_run(tmp_path, [{"toy/table": [1.0]}], "note")
        write_run(tmp_path / "events", {"toy/events": [1.0]})
        assert list(read_run("run", tmp_path).curves) == ["toy/events"]


class TestErrors:
    def test_folder_with_several_runs_is_refused(
        self, tmp_path: Path, watched: str, calm: str
    ) -> None:
        with pytest.raises(ValueError, match=rf"of one run, .*{calm}, {watched}"):
            read_run("run", tmp_path)
        assert name_runs([str(tmp_path)]) == {"calm": calm, "watched": watched}

    def test_run_without_scalars_is_refused(self, tmp_path: Path) -> None:
        with SummaryWriter(str(tmp_path)) as writer:
            writer.add_text("note", "text", 1)
        with pytest.raises(ValueError, match=r"a run with scalars, got .* without any"):
            report(tmp_path, str(tmp_path))

    def test_unknown_level_is_refused(self, tmp_path: Path) -> None:
        run = write_run(tmp_path / "run", {"toy/a": [1.0], "monitor/level": [1.5]})
        with pytest.raises(ValueError, match=r"monitor/level: expected -1, 0, 1 or 2, got 1\.5"):
            report(tmp_path, run)

    def test_absent_tensorboard_is_named(self, tmp_path: Path, calm: str, monkeypatch: Any) -> None:
        module = "tensorboard.backend.event_processing.event_accumulator"
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ModuleNotFoundError, match="pip install tensorboard"):
            report(tmp_path, calm)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.csv", "step,kl,kl\n1,2,3\n", r"a\.csv:1: expected each column once, got 'kl'"),
        ("a.jsonl", '{"kl": 1}\n{"kl": 1, "kl": 2}\n', r"a\.jsonl:2: expected each key .* 'kl'"),
        ("a.json", '[{"kl": 1, "kl": 2}]', r"a\.json:1: expected each key of .* once, got 'kl'"),
    ],
)
def test_names_that_a_log_gives_twice_are_refused(
    tmp_path: Path, name: str, text: str, problem: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=problem):
        read_run("run", tmp_path / name)


def test_event_file_is_read_up_to_a_damaged_record(tmp_path: Path) -> None:
    folder = Path(write_run(tmp_path, {"kl": [0.1] * 100}))
    (file,) = folder.glob("events*")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    points = read_run("run", folder).curves["kl"].points
    assert [point.step for point in points] == list(range(1, len(points) + 1))
    assert 40 < len(points) < 60


@pytest.mark.parametrize("time", [float("inf"), float("nan"), 1e18, -1e18])
def test_time_of_no_calendar_is_refused(tmp_path: Path, time: float) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("kl", 0.1, 1, walltime=time)
    with pytest.raises(ValueError, match=r"expected times before the year 9999, got -?\w+"):
        read_run("run", tmp_path)


def test_verdict_that_is_no_text_is_left_out(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("kl", 0.1, 1)
        numbers = TensorProto(dtype=1, float_val=[1.0])
        plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        value = Summary.Value(tag="monitor/verdict/text_summary", tensor=numbers, metadata=plugin)
        writer._get_file_writer().add_summary(Summary(value=[value]), 1)
    assert read_run("run", tmp_path).verdicts == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a system without named pipes")
@pytest.mark.parametrize("name", ["metrics.csv", "a.jsonl", "events.out.tfevents.0", "log.jsonl"])
def test_pipes_in_the_folder_of_a_log_are_not_read(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    (tmp_path / "b.csv").write_text("step,kl\n1,2\n")
    assert [*read_run("run", tmp_path).curves] == ["kl"]


def test_table_with_the_newest_step_first_is_read_from_its_end(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("step,kl\n3,0.3\n2,0.2\n1,0.1\n")
    curve = read_run("run", tmp_path).curves["kl"]
    assert [(point.step, point.value) for point in curve.points] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert curve.undone == []
