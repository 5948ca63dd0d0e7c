"""Curves that are drawn in a notebook during a fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import ANY, Mock

import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from matplotlib.figure import Figure

from lit_callbacks.charts import run_figure
from lit_rlhf.tools.evaluation import LiveCurves, live_curves
from tests.support.report_pages import write_run
from tests.support.scripted import Scripted, batches, trainer


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Stands for a notebook's output; gives handles, whose `update` replaces an image."""
    ipython = pytest.importorskip("IPython", reason="the notebooks run with the `test` extra only")
    screen = Mock()
    monkeypatch.setattr(ipython.display, "display", screen)
    return screen


def fit_live(curves: LiveCurves, logger: Any) -> None:
    module = Scripted({"rollout/score": [0.0, 1.0, 2.0, 3.0, 4.0]}, logs_step=False)
    trainer(Path(), curves, logger=logger).fit(module, batches(5))


@pytest.mark.parametrize("logger_class", [TensorBoardLogger, CSVLogger])
def test_live_curves_are_one_figure_that_ends_with_the_whole_run(
    logger_class: Any, screen: Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []

    def record_figure(*arguments: Any) -> Figure:
        figures.append(run_figure(*arguments))
        return figures[-1]

    monkeypatch.setattr(live_curves, "run_figure", record_figure)
    vanilla = write_run(tmp_path / "vanilla", {"rollout/score": [0.0, 1.0, 2.0]})
    live = LiveCurves(["rollout/score"], "live", every_n_batches=2, beside={"vanilla": vanilla})
    fit_live(live, logger_class(tmp_path / "live", name="", version=""))
    screen.assert_called_once_with(ANY, display_id=True)
    updates = screen.return_value.update.call_args_list
    assert len(updates) == 2  # after 4 batches, and the end
    assert updates[-1].args[0].data.startswith(b"\x89PNG")
    assert [text.get_text() for text in figures[-1].legends[0].get_texts()] == ["live", "vanilla"]
    (axes,) = figures[-1].axes
    assert np.asarray(axes.lines[0].get_ydata()).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_live_curves_need_a_log(screen: Mock) -> None:
    with pytest.raises(ValueError, match="LiveCurves: expected a Trainer with a TensorBoardLogger"):
        fit_live(LiveCurves(), logger=False)


def test_live_curves_name_a_metric_that_was_never_logged(screen: Mock, tmp_path: Path) -> None:
    live = LiveCurves(["rollout/score", "rollout/nothing"])
    with pytest.warns(UserWarning, match=r"got rollout/nothing; it logged .*rollout/score"):
        fit_live(live, CSVLogger(tmp_path))
    screen.assert_called_once()


def test_live_curves_refuse_to_draw_after_every_zero_batches() -> None:
    with pytest.raises(ValueError, match="every_n_batches: expected an integer >= 1, got 0"):
        LiveCurves(every_n_batches=0)
