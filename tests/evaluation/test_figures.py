"""The figures of runs and of outcomes, read back from matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch.utils.tensorboard import SummaryWriter

from lit_rlhf.evaluation import HeadToHead, Outcomes, outcome_figure, run_figure, save_figure
from lit_rlhf.functional import Interval

# --- runs


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


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"event files of one run, got .* with no event file"):
        run_figure({"run": tmp_path})


def test_a_folder_of_several_runs_is_refused(vanilla: Path, ppo_max: Path) -> None:
    with pytest.raises(ValueError, match=r"of one run, got .* with .*ppo_max, .*vanilla"):
        run_figure({"runs": vanilla.parent})


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
    path = save_figure(run_figure({"vanilla": vanilla}), tmp_path / "new" / "collapse.png")

    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert int.from_bytes(content[16:20], "big") >= 1000


# --- outcomes

MAX = Outcomes(
    0.44, 0.26, 0.3, Interval(0.37, 0.51), Interval(0.2, 0.32), Interval(0.24, 0.36), 200
)
VANILLA = Outcomes(0.2, 0.02, 0.78, Interval(0.1, 0.3), Interval(0, 0.04), Interval(0.7, 0.88), 200)
ROWS = [
    HeadToHead("ppo_max", "helpful", MAX),
    HeadToHead("vanilla", "helpful", VANILLA),
    HeadToHead("ppo_max", "harmless", None),
]


def drawn(figure: Figure, title: str) -> Axes:
    (axis,) = (axis for axis in figure.axes if axis.get_title(loc="left") == title)
    return axis


def test_every_share_is_a_bar_behind_the_one_before() -> None:
    axis = drawn(outcome_figure(ROWS, "sft"), "helpful")

    bars = [
        (bar.get_y() + bar.get_height() / 2, bar.get_x(), bar.get_width()) for bar in axis.patches
    ]
    expected = [
        *((0, 0.0, 0.44), (0, 0.44, 0.26), (0, 0.7, 0.3)),
        *((1, 0.0, 0.2), (1, 0.2, 0.02), (1, 0.22, 0.78)),
    ]
    assert bars == [pytest.approx(bar) for bar in expected]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["ppo_max", "vanilla"]
    assert axis.yaxis_inverted()  # the first policy is on top
    assert [text.get_text() for text in axis.texts] == ["44", "26", "30", "20", "78"]


def test_lines_are_the_intervals_of_win_and_of_lose() -> None:
    axis = drawn(outcome_figure(ROWS, "sft"), "helpful")

    ends = [line.get_xdata() for line in axis.lines]
    assert [list(pair) for pair in ends[:2]] == [
        pytest.approx([0.37, 0.51]),
        pytest.approx([1 - 0.36, 1 - 0.24]),  # lose is counted from the right
    ]


def test_a_policy_without_a_verdict_has_no_bar() -> None:
    axis = drawn(outcome_figure(ROWS, "sft"), "harmless")

    assert list(axis.patches) == []
    assert [text.get_text() for text in axis.texts] == ["no valid verdict"]


def test_the_baseline_is_named() -> None:
    figure = outcome_figure(ROWS, "my_sft")

    assert "against my_sft" in figure.axes[-1].get_xlabel()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["win", "tie", "lose"]


def test_the_suffix_is_the_format(tmp_path: Path) -> None:
    path = save_figure(outcome_figure(ROWS, "sft"), tmp_path / "new" / "chart.svg")

    assert path.read_text("utf-8").startswith("<?xml")


def test_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="chart: expected verdicts of a reward or a judge"):
        outcome_figure([], "sft")
