"""PhaseSummary: numbers by hand, a table within 80 columns, hints of the caller."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_callbacks import PhaseReport, PhaseSummary, StageProgressBar
from lit_callbacks.phases import Phase
from tests.callbacks.scripted import Scripted, batches, trainer

SCRIPT = {
    "time/rollout": [2.0, 4.0, 3.0],
    "time/update": [1.0, None, 2.0],  # the second is skipped
    "time/iteration": [3.0, 4.0, 5.0],
    "memory/rollout": [0.5, 1.5, 1.0],
    "throughput/tokens_per_second": [10.0, 40.0, 20.0],
    "val/time/rollout": [99.0, 99.0, 99.0],
}


class Timed(Scripted):
    """Takes as long as its script says, and a second more; validation takes three."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.now = 100.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        iteration = self.script.get("time/iteration", [0.0] * 9)[batch_idx]
        self.now += (iteration or 0.0) + 1.0
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.now += 3.0


def summary(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    script: Any = SCRIPT,
    callbacks: tuple[Any, ...] = (),
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> PhaseSummary:
    callback, module = PhaseSummary(**(options or {})), Timed(script)
    monkeypatch.setattr("lit_callbacks.phases.monotonic", lambda: module.now)
    run = trainer(folder, callback, *callbacks, **{"limit_val_batches": 0, **arguments})
    run.fit(module, batches(3), batches(1))
    return callback


def test_the_report_adds_up_what_was_logged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = summary(monkeypatch, tmp_path, limit_val_batches=1, num_sanity_val_steps=1).report
    # 12 s in phases, 3 s beside them, 3 s of validation; the sanity check came before
    assert report.seconds == 18.0
    assert report.batches == 3
    assert report.phases == {
        "rollout": Phase(9.0, slowest=4.0, steps=3, peak=1.5),
        "update": Phase(3.0, slowest=2.0, steps=2, peak=None),
        "validation": Phase(3.0, slowest=3.0, steps=1, peak=None),
        "other": Phase(3.0),
    }
    assert list(report.phases) == ["rollout", "update", "validation", "other"]
    assert report.share("rollout") == 0.5
    assert report.share("no such phase") == 0.0
    assert report.peak == 1.5
    # 30 + 160 + 100 tokens in 12 s
    assert report.rates == {"tokens_per_second": pytest.approx(290 / 12)}


def test_the_table_fits_80_columns_below_the_progress_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    summary(
        monkeypatch,
        tmp_path,
        callbacks=(StageProgressBar("toy"),),
        enable_progress_bar=True,
        options={"hints": [lambda *_: "buy [more] GPUs", lambda *_: None]},
    )
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line.rstrip() for line in err.splitlines()]
    shown = lines[lines.index("fit took 00:15 for 3 batches, tokens per second 24.2") :]
    assert lines[lines.index(shown[0]) - 1].startswith("toy 3/3 100%")
    assert shown == [
        "fit took 00:15 for 3 batches, tokens per second 24.2",
        "phase    total  share  mean, s  slowest, s  peak, GiB",
        "rollout  00:09    60%        3           4        1.5",
        "update   00:03    20%      1.5           2",
        "other    00:03    20%",
        "- buy [more] GPUs",
    ]


def test_the_loggers_get_the_same_as_markdown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="")
    options = {"hints": [lambda *_: "buy more"]}
    summary(monkeypatch, tmp_path, logger=logger, options=options)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (event,) = events.Tensors("phases/text_summary")
    assert event.step == 3
    assert event.tensor_proto.string_val[0].decode().split("\n") == [
        "Fit took 00:15 for 3 batches, tokens per second 24.2",
        "",
        "| phase | total | share | mean, s | slowest, s | peak, GiB |",
        "|---|---:|---:|---:|---:|---:|",
        "| rollout | 00:09 | 60% | 3 | 4 | 1.5 |",
        "| update | 00:03 | 20% | 1.5 | 2 |  |",
        "| other | 00:03 | 20% |  |  |  |",
        "",
        "- buy more",
    ]
    assert not any(key.startswith("phases") for key in events.Tags()["scalars"])


def test_a_hint_is_given_the_report_the_trainer_and_the_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[PhaseReport, Trainer, LightningModule]] = []

    def hint(report: PhaseReport, trainer: Trainer, module: LightningModule) -> str | None:
        seen.append((report, trainer, module))
        return None

    callback = summary(monkeypatch, tmp_path, options={"hints": [hint]})
    ((report, run, module),) = seen
    assert report is callback.report
    assert isinstance(module, Timed)
    assert "time/rollout" in run.callback_metrics


def test_the_keys_have_other_names_where_the_module_calls_them_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = {
        "s/step": [1.0] * 3,
        "s/forward": [0.5] * 3,
        "gib/forward": [2.0] * 3,
        "speed/x": [7, 9, 8],
    }
    options = {"time": "s/", "memory": "gib/", "throughput": "speed/", "total": "s/step"}
    report = summary(monkeypatch, tmp_path, script, options=options).report
    assert report.phases["forward"] == Phase(1.5, slowest=0.5, steps=3, peak=2.0)
    assert report.rates == {"x": 8.0}


def test_a_module_that_logs_nothing_gets_its_total_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary(monkeypatch, tmp_path, {})
    lines = [line.rstrip() for line in capsys.readouterr().err.splitlines()]
    assert lines[-3:] == [
        "fit took 00:03 for 3 batches",
        "phase  total  share  mean, s  slowest, s  peak, GiB",
        "other  00:03   100%",
    ]


def test_a_second_fit_starts_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    callback, module = PhaseSummary(), Timed(SCRIPT)
    monkeypatch.setattr("lit_callbacks.phases.monotonic", lambda: module.now)
    for _ in range(2):
        trainer(tmp_path, callback).fit(module, batches(3))
        assert callback.report.seconds == 15.0
        assert callback.report.phases["rollout"].steps == 3


def test_rich_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"PhaseSummary draws with rich: pip install rich"
    ):
        trainer(tmp_path, PhaseSummary()).fit(Timed(SCRIPT), batches(3))
