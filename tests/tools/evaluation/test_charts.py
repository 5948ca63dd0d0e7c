"""The figures of runs and of outcomes, read back from matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import ANY, Mock

import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_rlhf.functional import Interval
from lit_rlhf.tools.evaluation import LiveCurves, charts, outcome_figure, run_figure, save_figure
from lit_rlhf.tools.evaluation.outcomes import Outcomes
from lit_rlhf.tools.evaluation.reward_report.measures import length_buckets, reliability
from tests.support.report_pages import write_run
from tests.support.scripted import Scripted, batches, trainer


@pytest.fixture
def vanilla(tmp_path: Path) -> Path:
    series = {"rollout/score": [0.0, 1.0, 2.0], "rollout/kl": [-0.1, 5.0, 50.0]}
    return Path(write_run(tmp_path / "vanilla", series))


@pytest.fixture
def ppo_max(tmp_path: Path) -> Path:
    series = {"rollout/score": [0.0, 0.5], "rollout/gold": [0.5, 1.0]}
    series |= {"ppo/explained_variance": [-40.0, 0.5]}
    return Path(write_run(tmp_path / "ppo_max", series))


def panels(figure: Figure) -> dict[str, Axes]:
    return {axis.get_title(loc="left"): axis for axis in figure.axes if axis.axison}


def test_each_metric_gets_a_panel_with_the_runs_that_have_it(vanilla: Path, ppo_max: Path) -> None:
    drawn = panels(run_figure({"vanilla": vanilla, "PPO-max": ppo_max}))
    runs = {title: len(axis.get_lines()) // 2 for title, axis in drawn.items()}
    assert runs.pop("score that PPO optimizes") == 2
    told = ("gold reward", "KL to the SFT policy, nats per response", "critic's explained variance")
    assert runs == dict.fromkeys(told, 1)


def test_kl_is_on_a_logarithmic_scale_that_shows_negative_estimates(vanilla: Path) -> None:
    kl, score = run_figure({"vanilla": vanilla}, keys=["rollout/kl", "rollout/score"]).axes
    assert score.get_title(loc="left") == "score that PPO optimizes"  # in the order asked for
    assert kl.get_yscale() == "symlog"
    assert kl.get_ylim()[0] < -0.1


def test_a_figure_of_nothing_is_refused(vanilla: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rollout/score.*, got rollout/nothing"):
        run_figure({"vanilla": vanilla}, keys=["rollout/score", "rollout/nothing"])
    write_run(tmp_path / "sft", {"sft/loss": [1.0]})
    with pytest.raises(ValueError, match=r"\(sft/loss\), got none of the usual ones"):
        run_figure({"sft": tmp_path / "sft"})
    with pytest.raises(ValueError, match="runs: expected at least one"):
        run_figure({})
    with pytest.raises(ValueError, match="chart: expected verdicts of a reward or a judge"):
        outcome_figure([], "sft")
    with pytest.raises(ValueError, match="every_n_batches: expected an integer >= 1, got 0"):
        LiveCurves(every_n_batches=0)


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
    logger_class: Any, vanilla: Path, screen: Mock, tmp_path: Path, monkeypatch: Any
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(charts, "run_figure", lambda *a: drawn.append(run_figure(*a)) or drawn[-1])
    live = LiveCurves(["rollout/score"], "live", every_n_batches=2, beside={"vanilla": vanilla})
    fit_live(live, logger_class(tmp_path / "live", name="", version=""))
    screen.assert_called_once_with(ANY, display_id=True)
    updates = screen.return_value.update.call_args_list
    assert len(updates) == 2  # after 4 batches, and the end
    assert updates[-1].args[0].data.startswith(b"\x89PNG")
    assert [text.get_text() for text in drawn[-1].legends[0].get_texts()] == ["live", "vanilla"]
    (axis,) = drawn[-1].axes
    assert np.asarray(axis.get_lines()[0].get_ydata()).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_live_curves_need_a_log(screen: Mock) -> None:
    with pytest.raises(ValueError, match="LiveCurves: expected a Trainer with a TensorBoardLogger"):
        fit_live(LiveCurves(), logger=False)


def test_a_metric_that_was_never_logged_is_named_at_the_end(screen: Mock, tmp_path: Path) -> None:
    live = LiveCurves(["rollout/score", "rollout/nothing"])
    with pytest.warns(UserWarning, match=r"got rollout/nothing; it logged .*rollout/score"):
        fit_live(live, CSVLogger(tmp_path))
    screen.assert_called_once()


OF_MAX = (Interval(0.37, 0.51), Interval(0.2, 0.32), Interval(0.24, 0.36))
MAX = Outcomes(0.44, 0.26, 0.3, *OF_MAX, 200)
VANILLA = Outcomes(0.2, 0.02, 0.78, Interval(0.1, 0.3), Interval(0, 0.04), Interval(0.7, 0.88), 200)
JUDGED = [("helpful", {"ppo_max": MAX, "vanilla": VANILLA}), ("harmless", {"ppo_max": None})]


def test_every_share_is_a_bar_behind_the_one_before(tmp_path: Path) -> None:
    figure = outcome_figure(JUDGED, "sft")
    axis, silent = figure.axes
    assert axis.get_title(loc="left") == "helpful"
    bars = [(b.get_y() + b.get_height() / 2, b.get_x(), b.get_width()) for b in axis.patches]
    expected = [(0, 0.0, 0.44), (0, 0.44, 0.26), (0, 0.7, 0.3)]
    expected += [(1, 0.0, 0.2), (1, 0.2, 0.02), (1, 0.22, 0.78)]
    assert bars == [pytest.approx(bar) for bar in expected]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["ppo_max", "vanilla"]
    assert axis.yaxis_inverted()  # the first policy is on top
    assert [text.get_text() for text in axis.texts] == ["44", "26", "30", "20", "78"]
    assert ([*silent.patches], silent.texts[0].get_text()) == ([], "no valid verdict")
    path = save_figure(figure, tmp_path / "new" / "chart.svg")
    assert path.read_text("utf-8").startswith("<?xml")


def test_reward_charts_draw_accuracies_with_their_intervals() -> None:
    differences, lengths = np.array([2.0, -1.0, 0.5, 3.0]), np.array([5, 5, 0, -2])
    bins, buckets = reliability(differences), length_buckets(differences, lengths)
    accuracies = [bucket.accuracy for bucket in buckets]
    reliability_chart, length_chart = charts.reliability_chart(bins), charts.length_chart(buckets)
    for figure, found in ((reliability_chart, list(bins)), (length_chart, accuracies)):
        intervals, dots = figure.axes[0].collections
        assert [float(y) for _, y in dots.get_offsets()] == [f.accuracy for f in found]
        drawn = [list(path.vertices[:, 1]) for path in intervals.get_paths()]
        assert drawn == [[f.low, f.high] for f in found]


def test_scatter_chart_holds_every_pair_and_is_the_same_address_each_time() -> None:
    def chart() -> Figure:
        return charts.scatter_chart(np.array([3, -1]), np.array([0.5, 2.0]))

    (dots,) = chart().axes[0].collections
    assert dots.get_offsets().tolist() == [[3.0, 0.5], [-1.0, 2.0]]
    assert charts.svg_address(chart()) == charts.svg_address(chart())


def test_moving_average_passes_over_missing_values() -> None:
    values = np.arange(100.0)
    values[50] = np.nan
    averaged = charts._moving_average(values)
    assert averaged[10] == pytest.approx(10.0)
    assert averaged[50] == pytest.approx(50.0)
    assert averaged[0] == pytest.approx(1.0)  # a window of five, cut at the end
