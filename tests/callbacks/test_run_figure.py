"""The figure of runs, read back from matplotlib."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_callbacks.charts import BLUE, VERMILION, run_figure
from tests.support.report_pages import write_run


@pytest.fixture
def vanilla(tmp_path: Path) -> Path:
    series = {"rollout/score": [0.0, 1.0, 2.0], "rollout/kl": [-0.1, 5.0, 50.0]}
    return Path(write_run(tmp_path / "vanilla", series))


@pytest.fixture
def ppo_max(tmp_path: Path) -> Path:
    series = {
        "rollout/score": [0.0, 0.5],
        "rollout/gold": [0.5, 1.0],
        "ppo/explained_variance": [-40.0, 0.5],
    }
    return Path(write_run(tmp_path / "ppo_max", series))


def axes_by_title(figure: Figure) -> dict[str, Axes]:
    return {axes.get_title(loc="left"): axes for axes in figure.axes if axes.axison}


def test_run_figure_has_a_panel_for_each_metric_with_the_runs_that_logged_it(
    vanilla: Path, ppo_max: Path
) -> None:
    figure = run_figure({"vanilla": vanilla, "PPO-max": ppo_max})
    curves = {
        title: [(line.get_color(), np.asarray(line.get_ydata()).tolist()) for line in axes.lines]
        for title, axes in axes_by_title(figure).items()
    }
    first, second = VERMILION, BLUE  # PPO-max is blue in every picture
    assert curves == {
        "Score of the reward model, reward": [(first, [0.0, 1.0, 2.0]), (second, [0.0, 0.5])],
        "Gold reward, never trained on": [(second, [0.5, 1.0])],
        "KL to the SFT policy, nats per response": [(first, pytest.approx([-0.1, 5.0, 50.0]))],
        "Explained variance of the critic": [(second, [-40.0, 0.5])],
    }
    legend = figure.legends[0]
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["vanilla", "PPO-max"]
    assert [line.get_color() for line in legend.get_lines()] == [first, second]


def test_run_figure_draws_kl_on_a_logarithmic_scale_that_shows_negative_estimates(
    vanilla: Path,
) -> None:
    kl, score = run_figure({"vanilla": vanilla}, keys=["rollout/kl", "rollout/score"]).axes
    assert kl.get_title(loc="left").startswith("KL")  # in the order of the keys
    assert score.get_title(loc="left").startswith("Score")
    assert kl.get_yscale() == "symlog"
    assert kl.get_ylim()[0] < -0.1


def test_run_figure_cuts_the_first_values_of_a_new_critic_off(ppo_max: Path) -> None:
    (axes,) = run_figure({"PPO-max": ppo_max}, keys=["ppo/explained_variance"]).axes
    assert axes.get_ylim() == (-1.0, 0.5)


def test_run_figure_names_the_axis_by_what_a_step_is(ppo_max: Path, tmp_path: Path) -> None:
    sft = write_run(tmp_path / "sft", {"sft/loss": [2.0, 1.0]})
    (of_sft,) = run_figure({"sft": sft}, keys=["sft/loss"]).axes
    (of_ppo,) = run_figure({"PPO-max": ppo_max}, keys=["rollout/gold"]).axes
    assert of_sft.get_xlabel() == "step"
    assert of_ppo.get_xlabel() == "PPO iteration"


def test_run_figure_of_nothing_is_refused(vanilla: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rollout/score.*, got rollout/nothing"):
        run_figure({"vanilla": vanilla}, keys=["rollout/score", "rollout/nothing"])
    sft = write_run(tmp_path / "sft", {"sft/loss": [1.0]})
    with pytest.raises(ValueError, match=r"\(sft/loss\), got none of the usual ones"):
        run_figure({"sft": sft})
    with pytest.raises(ValueError, match="runs: expected at least one"):
        run_figure({})
