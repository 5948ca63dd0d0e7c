"""The charts of the report, read from matplotlib's axes and from the page."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from lit_callbacks.charts import (
    COLORS,
    choose_looks,
    choose_looks_over_seeds,
    draw_metric,
    figure_colors,
    metric_chart,
    moving_average,
    thin,
)
from lit_callbacks.panels import Panel
from lit_callbacks.runs import read_run
from tests.support.report_pages import write_run

TEMPLATES = Path(__file__).resolve().parents[2] / "callbacks/lit_callbacks/report/templates"


def drawn(*folders: str, key: str = "toy/a", **options: Any) -> Any:
    """The axes of a metric of some runs, over steps 1 to 5."""
    runs = [read_run(Path(folder).name, folder) for folder in folders]
    verdicts = runs[0].verdicts if len(runs) == 1 else []
    return draw_metric(Panel(key, "Title", "", "Group", **options), runs, verdicts, (1, 5))


def points(line: Any) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in line.get_xydata()]


def test_non_finite_values_are_gaps_with_a_stroke(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"toy/a": [0.0, math.nan, 1.0, math.inf, 1.0]})
    curve, strokes = drawn(run).lines
    assert [x for x, y in points(curve) if math.isnan(y)] == [2, 4]
    assert [x for x, _ in points(strokes)] == [2, 4]


def test_long_run_has_a_bold_mean_and_keeps_its_peaks(tmp_path: Path) -> None:
    values = [0.0] * 3000
    values[1234] = 7.0
    thin_line, bold = drawn(write_run(tmp_path / "run", {"toy/a": values})).lines
    assert len(points(thin_line)) == len(points(bold)) <= 802
    assert [point for point in points(thin_line) if point[1]] == [(1235, 7)]
    assert max(y for _, y in points(bold)) < 0.1


def test_levels_shade_one_run_and_mark_the_curves_of_several(watched: str, calm: str) -> None:
    axes = drawn(watched, key="rollout/kl")
    assert points(axes.lines[0]) == [(step, step - 1) for step in range(1, 6)]
    bands = [(band.get_x(), band.get_width(), band.get_hatch()) for band in axes.patches]
    assert bands == [(3, 1, None), (4, 1, None), (4, 1, "//")]
    numbers = [(text.get_text(), text.get_position()[0], text.get_url()) for text in axes.texts]
    assert numbers == [("1", 3, "#verdict-1"), ("2", 4, "#verdict-2")]
    axes = drawn(calm, watched, key="rollout/kl")
    marks = {mark.get_marker(): points(mark) for mark in axes.lines}
    assert (len(axes.patches), marks["^"], marks["s"]) == (0, [(3, 2)], [(4, 3)])


def test_close_verdicts_share_a_number(tmp_path: Path) -> None:
    texts = {step: f"**suspicious** at {step}\n\nreason" for step in (10, 11, 12, 50)}
    run = read_run("run", write_run(tmp_path / "run", {"toy/a": [0.0] * 101}, texts))
    axes = draw_metric(Panel("toy/a", "A", "", "Toy"), [run], run.verdicts, (1, 101))
    assert [text.get_text() for text in axes.texts] == ["1", "4"]
    assert len(axes.lines) == 2 + 4  # the curve, its mean and the verdicts


def test_twenty_one_runs_look_different(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / str(i), {"toy/a": [1.0, float(i)]}) for i in range(21)]
    drawn_looks = {(line.get_color(), line.get_linestyle()) for line in drawn(*folders).lines}
    looks = choose_looks(str(i) for i in range(22))
    assert len(drawn_looks) == len({looks[str(i)].css for i in range(21)}) == 21
    assert looks["21"] == looks["0"]


@pytest.mark.parametrize(
    ("values", "options", "scale", "low"),
    [
        ([1.0, 10.0], {}, "linear", 0.0),  # from zero, which costs little room
        ([9.0, 10.0], {}, "linear", 8.95),
        ([0.5, 100.0], {"signed_log": True}, "symlog", 0.0),
        ([1.0, 10.0], {"signed_log": True}, "linear", 0.0),
        ([-40.0, 0.5], {"floor": -1.0}, "linear", -1.0),
    ],
)
def test_y_axis_has_the_scale_and_lower_end_that_its_values_need(
    tmp_path: Path, values: list[float], options: Any, scale: str, low: float
) -> None:
    axes = drawn(write_run(tmp_path / "run", {"toy/a": values}), **options)
    assert axes.get_yscale() == scale
    assert axes.get_ylim()[0] == pytest.approx(low)
    assert axes.get_ylim()[1] >= values[-1]


def test_svg_has_the_colors_of_the_page_and_nothing_of_matplotlibs(watched: str) -> None:
    run = read_run("run", watched)
    svg = metric_chart(Panel("rollout/kl", '"<KL>"', "", "Policy"), [run], run.verdicts, (1, 5))
    css = (TEMPLATES / "page.css").read_text("utf-8")
    assert 'aria-label="&quot;&lt;KL&gt;&quot; over steps 1 to 5"' in svg
    assert not re.findall(r"<style|http|<g id=", svg)
    assert [c for name, c in COLORS.items() if c in svg or f"--{name}: {c};" not in css] == []


def test_moving_average_passes_over_non_finite_values() -> None:
    values = [1.0, math.nan, 3.0, 5.0, math.nan, math.nan, math.nan]
    averages = moving_average(values, half_width=1)
    assert averages[:5] == [1.0, 2.0, 4.0, 4.0, 5.0]
    assert all(map(math.isnan, averages[5:]))


def test_thinning_keeps_ends_extremes_and_gaps() -> None:
    values = [0.0, 1.0, 9.0, 2.0, -5.0, 0.0, math.nan, math.nan, 3.0, 3.0]
    # halves: 0 1 9 2 -5 (extremes at 2 and 4) and 0 nan nan 3 3 (at 5 and 8, gap at 6)
    assert thin(values, columns=2) == [0, 2, 4, 5, 6, 8, 9]
    assert thin(values[:4], columns=2) == [0, 1, 2, 3]


def test_a_run_has_the_same_colour_on_the_page_and_in_every_figure(tmp_path: Path) -> None:
    pair = figure_colors(["ppo_max", "ppo_vanilla"])
    three = figure_colors(["SFT", "vanilla PPO", "roll-back", "PPO-max", "another"])
    assert three["vanilla PPO"] == pair["ppo_vanilla"]
    assert (
        three["PPO-max"] == pair["ppo_max"] == figure_colors(["runs/x/ppo_max"])["runs/x/ppo_max"]
    )
    assert len(set(three.values())) == 5
    folders = [write_run(tmp_path / name, {"toy/a": [1.0, 2.0]}) for name in ("ppo_vanilla", "b")]
    assert drawn(*folders).lines[0].get_color() == pair["ppo_vanilla"]
    css = (TEMPLATES / "page.css").read_text("utf-8")
    looks = choose_looks(["ppo_max", "ppo_vanilla", "sft"]).values()
    assert [look.css for look in looks] == ["run-c0 dash-0", "run-c1 dash-0", "run-gray dash-0"]
    assert all(f".run-{look.color} {{ --c: var(--{look.color}); }}" in css for look in looks)


def test_two_runs_of_one_role_have_two_colours() -> None:
    assert len(set(figure_colors(["a/ppo_max", "b/ppo_max"]).values())) == 2


def test_runs_over_seeds_have_the_colour_of_their_group_and_dashes_of_their_own() -> None:
    groups = {"base": ["base_0", "base_1"], "ppo_max": ["x", "y", "z", "w"]}
    names = ["base_0", "base_1", "x", "y", "other", "z", "w"]
    looks = choose_looks_over_seeds(names, groups)
    assert list(looks) == names
    assert [looks[name].css for name in names] == [
        "run-c1 dash-0",
        "run-c1 dash-1",
        "run-c0 dash-0",
        "run-c0 dash-1",
        "run-c2 dash-0",
        "run-c0 dash-2",
        "run-c0 dash-0",  # there are three kinds of lines
    ]
    assert choose_looks_over_seeds(["a", "b"], {}) == choose_looks(["a", "b"])
