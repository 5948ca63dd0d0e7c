"""PhaseSummary: numbers by hand, and the table in the terminal and for loggers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from lit_callbacks import PhaseSummary, StageProgressBar
from lit_callbacks.phases import Phase
from tests.support.report_pages import read_texts
from tests.support.scripted import Scripted, batches, trainer

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


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Fits three batches on the clock of the module."""

    def fit(*callbacks: Any, script: Any = SCRIPT, **arguments: Any) -> None:
        module = Timed(script)
        monkeypatch.setattr("lit_callbacks.phases.monotonic", lambda: module.now)
        run = trainer(tmp_path, *callbacks, **{"limit_val_batches": 0, **arguments})
        run.fit(module, batches(3), batches(1))

    return fit


def test_time_memory_and_rates_add_up(fit: Any) -> None:
    summary = PhaseSummary()
    fit(summary, limit_val_batches=1, num_sanity_val_steps=1)
    # 12 s in phases, 3 s beside them, 3 s of validation; the sanity check came before
    assert (summary.seconds, summary.batches) == (18.0, 3)
    assert list(summary.phases.items()) == [
        ("rollout", Phase(9.0, slowest=4.0, steps=3, peak=1.5)),
        ("update", Phase(3.0, slowest=2.0, steps=2, peak=None)),
        ("validation", Phase(3.0, slowest=3.0, steps=1, peak=None)),
        ("other", Phase(3.0)),
    ]
    # 30 + 160 + 100 tokens in 12 s
    assert summary.rates == {"tokens_per_second": pytest.approx(290 / 12)}


def test_table_goes_below_the_progress_line_and_to_loggers(
    fit: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    logger = TensorBoardLogger(tmp_path, name="", version="")
    fit(PhaseSummary(), StageProgressBar("toy"), enable_progress_bar=True, logger=logger)
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line.rstrip() for line in err.splitlines()]
    place = next(i for i, line in enumerate(lines) if line.startswith("fit took 00:15"))
    assert lines[place - 1].startswith("toy 3/3 100%")
    shown = [re.split(r"  +", line) for line in lines[place + 1 :]]
    assert shown[1:] == [
        ["rollout", "00:09", "60%", "3", "4", "1.5"],
        ["update", "00:03", "20%", "1.5", "2"],
        ["other", "00:03", "20%"],
    ]
    ((step, text),) = read_texts(tmp_path, "phases")
    assert step == 3
    assert all(line in text for line in lines[place:])


def test_keys_may_have_other_prefixes(fit: Any) -> None:
    script = {"s/step": [1.0] * 3, "s/forward": [0.5] * 3}
    script |= {"gib/forward": [2.0] * 3, "speed/x": [7, 9, 8]}
    summary = PhaseSummary(time="s/", memory="gib/", throughput="speed/", total="s/step")
    fit(summary, script=script)
    assert summary.phases["forward"] == Phase(1.5, slowest=0.5, steps=3, peak=2.0)
    assert summary.rates == {"x": pytest.approx(8.0)}


def test_second_fit_starts_anew(fit: Any) -> None:
    callback = PhaseSummary()
    for _ in range(2):
        fit(callback)
        assert callback.seconds == 15.0
        assert callback.phases["rollout"].steps == 3
        assert callback.rates == {"tokens_per_second": pytest.approx(290 / 12)}
