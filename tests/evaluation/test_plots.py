from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch.utils.tensorboard import SummaryWriter

from lit_rlhf.evaluation.plots import collapse_figure, moving_average, run_figure, scalars


def write_run(folder: Path, series: Mapping[str, Sequence[float]], first: int = 0) -> Path:
    with SummaryWriter(str(folder)) as writer:
        for key, values in series.items():
            for step, value in enumerate(values, start=first):
                writer.add_scalar(key, value, step)
    return folder


@pytest.fixture
def vanilla(tmp_path: Path) -> Path:
    series = {"rollout/score": [0.0, 1.0, 2.0], "rollout/kl": [-0.1, 5.0, 50.0]}
    return write_run(tmp_path / "vanilla", series)


@pytest.fixture
def ppo_max(tmp_path: Path) -> Path:
    series = {
        "rollout/score": [0.0, 0.5],
        "rollout/gold": [0.5, 1.0],
        "ppo/explained_variance": [-40.0, 0.5],
    }
    return write_run(tmp_path / "ppo_max", series)


def panels(figure: Figure) -> dict[str, Axes]:
    return {axis.get_title(loc="left"): axis for axis in figure.axes if axis.axison}


def test_scalars_are_steps_and_values(vanilla: Path) -> None:
    steps, values = scalars(vanilla, "rollout/score")

    assert steps.tolist() == [0, 1, 2]
    assert values.tolist() == [0.0, 1.0, 2.0]


def test_a_run_is_found_below_its_folder(vanilla: Path) -> None:
    write_run(vanilla.parent / "run" / "logs" / "version_0", {"rollout/score": [3.0]})

    assert scalars(vanilla.parent / "run", "rollout/score").values.tolist() == [3.0]


def test_a_resumed_run_is_read_as_one(tmp_path: Path) -> None:
    write_run(tmp_path, {"rollout/score": [0.0, 1.0, 2.0]})
    write_run(tmp_path, {"rollout/score": [10.0, 20.0]}, first=2)

    steps, values = scalars(tmp_path, "rollout/score")

    assert steps.tolist() == [0, 1, 2, 3]
    assert values.tolist() == [0.0, 1.0, 10.0, 20.0]


def test_every_value_of_a_long_run_is_read(tmp_path: Path) -> None:
    write_run(tmp_path, {"rollout/score": [0.0] * 10_500})

    assert len(scalars(tmp_path, "rollout/score").steps) == 10_500


def test_an_unknown_key_is_refused_with_those_there_are(vanilla: Path) -> None:
    with pytest.raises(ValueError, match=r"rollout/kl, rollout/score\), got 'rollout/gold'"):
        scalars(vanilla, "rollout/gold")


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"event files of one run, got .* with no event file"):
        scalars(tmp_path, "rollout/score")


def test_a_folder_of_several_runs_is_refused(vanilla: Path, ppo_max: Path) -> None:
    with pytest.raises(ValueError, match=r"of one run, got .* with .*ppo_max, .*vanilla"):
        scalars(vanilla.parent, "rollout/score")


def test_each_metric_gets_a_panel_with_the_runs_that_have_it(vanilla: Path, ppo_max: Path) -> None:
    drawn = panels(run_figure({"vanilla": vanilla, "PPO-max": ppo_max}))

    runs = {title: len(axis.get_lines()) // 2 for title, axis in drawn.items()}
    assert runs == {
        "reward model's score": 2,
        "gold reward": 1,
        "KL to the SFT policy, nats per response": 1,
        "critic's explained variance": 1,
    }


def test_a_run_has_one_color_in_all_panels(vanilla: Path, ppo_max: Path) -> None:
    drawn = panels(run_figure({"vanilla": vanilla, "PPO-max": ppo_max}))

    both, gold = drawn["reward model's score"].get_lines(), drawn["gold reward"].get_lines()
    assert both[0].get_color() == both[1].get_color() != both[2].get_color()
    assert gold[0].get_color() == both[2].get_color()


def test_kl_is_on_a_logarithmic_scale_that_shows_negative_estimates(vanilla: Path) -> None:
    axis = panels(run_figure({"vanilla": vanilla}))["KL to the SFT policy, nats per response"]

    assert axis.get_yscale() == "symlog"
    assert axis.get_ylim()[0] < -0.1


def test_the_first_readings_of_a_critic_do_not_flatten_the_rest(ppo_max: Path) -> None:
    axis = panels(run_figure({"PPO-max": ppo_max}))["critic's explained variance"]

    assert axis.get_ylim()[0] == -1.0


def test_the_baseline_is_a_line_in_its_panels(vanilla: Path) -> None:
    figure = run_figure({"vanilla": vanilla}, baseline={"rollout/score": 0.25})

    drawn = panels(figure)
    level = drawn["reward model's score"].get_lines()[-1]
    assert np.asarray(level.get_ydata()).tolist() == [0.25, 0.25]
    assert len(drawn["KL to the SFT policy, nats per response"].get_lines()) == 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["vanilla", "SFT"]


def test_chosen_keys_are_drawn_in_their_order(vanilla: Path) -> None:
    figure = run_figure({"vanilla": vanilla}, keys=["rollout/kl", "rollout/score"])

    assert list(panels(figure)) == [
        "KL to the SFT policy, nats per response",
        "reward model's score",
    ]


def test_a_key_that_no_run_has_is_refused(vanilla: Path) -> None:
    with pytest.raises(ValueError, match=r"rollout/score.*, got rollout/nothing"):
        run_figure({"vanilla": vanilla}, keys=["rollout/score", "rollout/nothing"])


def test_a_run_without_any_usual_metric_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "sft", {"sft/loss": [1.0]})

    with pytest.raises(ValueError, match=r"\(sft/loss\), got none of the usual ones"):
        run_figure({"sft": tmp_path / "sft"})


def test_no_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="runs: expected at least one"):
        run_figure({})


def test_the_figure_is_written_as_wide_as_a_readme_needs(vanilla: Path, tmp_path: Path) -> None:
    path = collapse_figure({"vanilla": vanilla}, tmp_path / "new" / "collapse.png")

    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert int.from_bytes(content[16:20], "big") >= 1000


def test_a_moving_average_is_centered_and_shrinks_at_the_ends() -> None:
    average = moving_average(np.array([0.0, 3.0, 6.0, 0.0]), half_width=1)

    assert average.tolist() == [1.5, 3.0, 3.0, 3.0]


def test_a_moving_average_skips_gaps() -> None:
    average = moving_average(np.array([1.0, math.nan, 3.0, math.nan, math.nan]), half_width=1)

    assert average[:4].tolist() == [1.0, 2.0, 3.0, 3.0]
    assert math.isnan(average[4])
