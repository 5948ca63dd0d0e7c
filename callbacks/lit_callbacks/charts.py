"""Draws charts of runs for a page, and figures of runs for an image.

A chart on a page is matplotlib's SVG in the colours of `page.css`. A figure is an image on white.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from lit_callbacks.monitors import Level
from lit_callbacks.panels import Panel, choose_panels
from lit_callbacks.runs import Curve, LoggedVerdict, Run, read_run
from lit_callbacks.words import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

WIDTH = 380  # in CSS pixels, about as wide as a column of the page
HEIGHT = 198  # the same unit, also for the margins
LEFT_MARGIN = 42
RIGHT_MARGIN = 8
BOTTOM_MARGIN = 24
TOP_MARGIN = 18
COLUMNS = 400  # a longer curve is drawn by the extremes of this many columns
AVERAGED_PARTS = 25  # the bold line averages over a 25th of the run
MAX_DOTS = 12  # curves of up to this many values are drawn with dots
FEW_RUNS = 6  # with more runs only the means are drawn
DASHES = ("-", "--", ":")  # for the first runs, one of each colour, the next ones, and so on
DECADES = 1.5  # a metric that spans more of them may get a logarithmic axis
LEVEL_COLORS = {Level.SUSPICIOUS: "suspicious-band", Level.COLLAPSED: "collapsed-band"}
LEVEL_MARKERS = {Level.SUSPICIOUS: "^", Level.COLLAPSED: "s"}
RASTER_DPI = 160  # resolution of the parts of an SVG that are images

BLUE = "#0072b2"
VERMILION = "#d55e00"
GRAY = "#555555"
FIGURE_COLORS = (BLUE, VERMILION, "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Colours of runs, which readers with colour blindness can tell apart (Okabe and Ito)."""

# Variables of `page.css`, which change with the reader's light or dark mode. matplotlib draws in
# these colours, and `to_svg` replaces each by its variable.
COLORS = {
    **{f"c{place}": color for place, color in enumerate(FIGURE_COLORS)},
    "gray": GRAY,
    "faint": "#5c6670",
    "grid": "#e8ebef",
    "zero": "#b9c0c8",
    "suspicious-band": "#f5a300",
    "collapsed-band": "#d4202a",
}
ROLE_COLORS = {
    "vanilla_ppo": VERMILION,
    "ppo_vanilla": VERMILION,
    "ppo_max": BLUE,
    "sft": GRAY,
}
"""Colours of runs that many pictures show, by their names in lower case and with `_`."""
FIGURE_STYLE: dict[Any, Any] = {  # Any: older stubs of matplotlib type the keys as str
    "figure.constrained_layout.use": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "legend.frameon": False,
    "text.parse_math": False,  # a $ in the name of a run or metric is one
}
"""Settings of matplotlib for a figure."""
FIGURE_DPI = 160
FIGURE_KEYS = (
    "rollout/score",
    "rollout/gold",
    "rollout/kl",
    "rollout/response_length",
    "rollout/perplexity",
    "ppo/explained_variance",
)
"""Metrics that a figure of runs shows by default, as far as a run logged them."""
FIGURE_COLUMNS = 3
ITERATION_PREFIXES = ("rollout/", "ppo/")  # metrics that are logged once per PPO iteration


class Svg(str):
    """An `<svg>` element; Jinja2 does not escape what has the method `__html__`."""

    def __html__(self) -> str:
        """The element itself."""
        return self


def new_axes(*, x_title: str = "", y_title: str = "") -> Axes:
    """Make empty axes for a page, in a figure of their own.

    Charts without titles on their axes have the same margins, so that they align on the page.

    Args:
        x_title: Title of the horizontal axis.
        y_title: Title of the vertical axis.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "charts are drawn with matplotlib: pip install matplotlib"
        ) from error
    size = (WIDTH / 72, HEIGHT / 72)
    if x_title or y_title:
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot(frame_on=False)
        axes.set_xlabel(x_title, size=10, color=COLORS["faint"])
        axes.set_ylabel(y_title, size=10, color=COLORS["faint"])
    else:
        figure = Figure(figsize=size)
        axes = figure.add_axes(
            (
                LEFT_MARGIN / WIDTH,
                BOTTOM_MARGIN / HEIGHT,
                1 - (LEFT_MARGIN + RIGHT_MARGIN) / WIDTH,
                1 - (BOTTOM_MARGIN + TOP_MARGIN) / HEIGHT,
            ),
            frame_on=False,
        )
    axes.grid(axis="y", color=COLORS["grid"], linewidth=1)
    axes.tick_params(length=0, labelsize=10, labelcolor=COLORS["faint"])
    axes.ticklabel_format(useOffset=False, scilimits=(-4, 5))
    axes.yaxis.get_offset_text().set(size=10, color=COLORS["faint"])
    axes.set_axisbelow(True)
    return axes


def to_svg(axes: Axes, label: str) -> Svg:
    """Render the figure of some axes as an `<svg>` element.

    Args:
        axes: Axes of `new_axes`.
        label: Description for a screen reader. Charts on one page need different ones.
    """
    import matplotlib

    file = StringIO()
    figure = axes.get_figure(root=True)
    assert figure is not None
    # Fixed ids, so that the same runs make the same page.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing, dpi=RASTER_DPI)
    _, viewbox, drawing = re.split(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', file.getvalue(), maxsplit=1
    )
    # A style inside the SVG would apply to the whole page, and the ids of groups occur in each.
    drawing = re.sub(r"<style.*?</style>", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r'(?<=<g) id="[\w.]+"', "", drawing)
    for name, color in COLORS.items():
        drawing = drawing.replace(color, f"var(--{name})")
    attributes = f'viewBox="{viewbox}" role="img" aria-label="{html.escape(label)}"'
    return Svg(f'<svg class="chart" {attributes}>{drawing}')


def metric_chart(
    panel: Panel,
    runs: Sequence[Run],
    verdicts: Sequence[LoggedVerdict],
    steps: tuple[int, int],
    looks: Mapping[str, RunLook] | None = None,
) -> Svg:
    """Render the chart of one metric for a page.

    Args:
        panel: The metric.
        runs: Runs to draw, as in `draw_metric`.
        verdicts: Verdicts of a single run.
        steps: First and last step of the horizontal axis.
        looks: How the runs look, by name, as in `draw_metric`.
    """
    label = f"{panel.title} over steps {steps[0]} to {steps[1]}"
    return to_svg(draw_metric(panel, runs, verdicts, steps, looks), label)


def draw_metric(
    panel: Panel,
    runs: Sequence[Run],
    verdicts: Sequence[LoggedVerdict],
    steps: tuple[int, int],
    looks: Mapping[str, RunLook] | None = None,
) -> Axes:
    """Draw one metric over all runs.

    The levels of a single run fill the background, and its verdicts are numbered lines. Several
    runs have a mark on their curves where they became suspicious or collapsed.

    Args:
        panel: The metric. A run that did not log it is left out.
        runs: Runs to draw, in the order of their colours.
        verdicts: Verdicts of a single run.
        steps: First and last step of the horizontal axis.
        looks: How the runs look, by name; `None`: as `choose_looks` chooses.
    """
    axes = new_axes()  # says how to install matplotlib where it is missing
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    room = 0.015 * (steps[1] - steps[0]) or 0.5
    axes.set_xlim(steps[0] - room, steps[1] + room)
    values: list[float] = []
    if looks is None:
        looks = choose_looks(run.name for run in runs)
    for run in runs:
        curve = run.curves.get(panel.key)
        if curve is None:
            continue
        look = looks[run.name]
        values += [p.value for piece in (curve.points, *curve.undone) for p in piece]
        draw_curve(axes, curve, look.style, shows_values=len(runs) <= FEW_RUNS)
        if len(runs) > 1:
            _mark_levels(axes, run, curve, COLORS[look.color])
    _fit_values(axes, panel, values)
    if len(runs) == 1:
        _draw_levels(axes, runs[0])
        _number_verdicts(axes, verdicts, apart=0.04 * (steps[1] - steps[0]))
    return axes


def run_figure(runs: Mapping[str, str | Path], keys: Sequence[str] | None = None) -> Figure:
    """Draw metrics of runs over their iterations or steps, with one panel per metric.

    As in Figure 4 of arXiv 2307.04964. Thin lines are the logged values, bold ones their moving
    average.

    Args:
        runs: Folder of each run by its name in the legend, see `lit_callbacks.read_run`.
        keys: Metrics to draw. `None`: the metrics of `FIGURE_KEYS` that a run has.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    if not runs:
        raise ValueError("runs: expected at least one run, got none")
    loaded = [read_run(name, folder) for name, folder in runs.items()]
    panels = choose_panels(loaded, _usual_figure_keys(loaded) if keys is None else keys)
    columns = min(FIGURE_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    lines: dict[str, Line2D] = {}
    with rc_context(FIGURE_STYLE):
        figure = Figure(figsize=(3.3 * columns, 2.3 * rows + 0.5), dpi=FIGURE_DPI)
        every_axes: list[Axes] = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
        for unused in every_axes[len(panels) :]:
            unused.set_axis_off()
        for place, (axes, panel) in enumerate(zip(every_axes, panels, strict=False)):
            lines |= _draw_figure_panel(axes, panel, loaded)
            if place + columns >= len(panels):  # the lowest panel of its column
                by_iteration = panel.key.startswith(ITERATION_PREFIXES)
                axes.set_xlabel("PPO iteration" if by_iteration else "step")
        names = [name for name in runs if name in lines]
        handles = [lines[name] for name in names]
        figure.legend(handles, names, loc="outside upper center", ncols=len(names), fontsize=11)
    return figure


def _usual_figure_keys(runs: Sequence[Run]) -> list[str]:
    """The metrics of `FIGURE_KEYS` that a run logged."""
    logged = {key for run in runs for key in run.curves}
    usual = [key for key in FIGURE_KEYS if key in logged]
    if not usual:
        raise ValueError(
            f"keys: expected metrics that a run logged ({', '.join(sorted(logged))}), got none of "
            "the usual ones"
        )
    return usual


def _draw_figure_panel(axes: Axes, panel: Panel, runs: Sequence[Run]) -> dict[str, Line2D]:
    """Draw a metric into a figure; return the bold line of each run that has it, by name."""
    from matplotlib.ticker import MaxNLocator

    lines: dict[str, Line2D] = {}
    values: list[float] = []
    colors = figure_colors(run.name for run in runs)
    for run in runs:
        curve = run.curves.get(panel.key)
        if curve is not None:
            values += [point.value for point in curve.points]
            color = colors[run.name]
            lines[run.name] = draw_curve(axes, curve, {"color": color}, shows_values=True)
    _fit_values(axes, panel, values)
    axes.set_title(", ".join(filter(None, (panel.title, panel.unit))))
    axes.tick_params(labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return lines


class RunLook(NamedTuple):
    """How a run is drawn, on every page and in every figure.

    Attributes:
        color: Name of its colour in `COLORS`.
        dashes: Its line, an index of `DASHES`.
    """

    color: str
    dashes: int = 0

    @property
    def style(self) -> dict[str, Any]:
        """The look as arguments of matplotlib."""
        return {"color": COLORS[self.color], "linestyle": DASHES[self.dashes]}

    @property
    def css(self) -> str:
        """The look as CSS classes of `page.css`."""
        return f"run-{self.color} dash-{self.dashes}"


def choose_looks(names: Iterable[str]) -> dict[str, RunLook]:
    """Choose how runs look: a run of `ROLE_COLORS` has the same colour in every picture.

    The other runs take the colours that are left, in order, and then the same with other dashes.

    Args:
        names: Names of the runs, or paths that end with them, in the order of the legend.

    Returns:
        Looks by name, in the order of the names.
    """
    names = list(names)
    name_of = {color: name for name, color in COLORS.items()}
    by_role: dict[str, str] = {}
    for name in names:
        role = name.rpartition("/")[2].lower().replace("-", "_").replace(" ", "_")
        color = ROLE_COLORS.get(role)
        if color is not None and name_of[color] not in by_role.values():
            by_role[name] = name_of[color]
    free_colors = [
        name_of[color] for color in FIGURE_COLORS if name_of[color] not in by_role.values()
    ]
    looks: dict[str, RunLook] = {}
    n_others = 0
    for name in names:
        if name in by_role:
            looks[name] = RunLook(by_role[name])
        else:
            dashes = n_others // len(free_colors) % len(DASHES)
            looks[name] = RunLook(free_colors[n_others % len(free_colors)], dashes)
            n_others += 1
    return looks


def choose_looks_over_seeds(
    names: Iterable[str], groups: Mapping[str, Sequence[str]]
) -> dict[str, RunLook]:
    """Choose how runs look where some differ in their seeds alone.

    The runs of a group have the colour of a run with the group's name, and dashes in turn.

    Args:
        names: Names of the runs, in the order of the legend.
        groups: Names of the runs of each group, by its name.

    Returns:
        Looks by name, in the order of the names.
    """
    names = list(names)
    group_of = {name: group for group, members in groups.items() for name in members}
    looks = choose_looks(dict.fromkeys(group_of.get(name, name) for name in names))
    for group, members in groups.items():
        for place, name in enumerate(members):
            looks[name] = RunLook(looks[group].color, place % len(DASHES))
    return {name: looks[name] for name in names}


def figure_colors(names: Iterable[str]) -> dict[str, str]:
    """Choose the colours of a figure's runs, see `choose_looks`.

    Args:
        names: Names of the runs, or paths that end with them, in the order of the legend.

    Returns:
        Colours by name.
    """
    return {name: COLORS[look.color] for name, look in choose_looks(names).items()}


def moving_average(values: Sequence[float], half_width: int) -> list[float]:
    """Average the finite values in a centered window, which shrinks at the ends.

    Args:
        values: Values in the order of their steps.
        half_width: Number of values on either side of the middle one.

    Returns:
        A mean for each value; NaN where a window has no finite value.
    """
    windows = (values[max(0, i - half_width) : i + half_width + 1] for i in range(len(values)))
    finite = ([value for value in window if math.isfinite(value)] for window in windows)
    return [fmean(window) if window else math.nan for window in finite]


def thin(values: Sequence[float], columns: int = COLUMNS) -> list[int]:
    """Choose values that look like the whole series when they are drawn.

    Args:
        values: Values in the order of their steps.
        columns: Number of columns that the series is divided into.

    Returns:
        Indices of the extremes of each column, of its first gap, and of both ends.
    """
    n = len(values)
    if n <= 2 * columns:
        return list(range(n))
    extremes = {0, n - 1}
    for column in range(columns):
        indices = range(column * n // columns, (column + 1) * n // columns)
        finite = [i for i in indices if math.isfinite(values[i])]
        ends = (min, max) if finite else ()
        extremes |= {end(finite, key=values.__getitem__) for end in ends}
        extremes.update([i for i in indices if not math.isfinite(values[i])][:1])
    return sorted(extremes)


def draw_curve(axes: Axes, curve: Curve, style: Mapping[str, Any], *, shows_values: bool) -> Line2D:
    """Draw a curve and its moving average as a bold line, and return that line.

    Pieces that were undone are dotted, and values that are not finite are gaps with a stroke.

    Args:
        axes: Axes to draw in.
        curve: The curve.
        style: Arguments of matplotlib for the bold line, `color` among them.
        shows_values: Whether the logged values are drawn as a thin line.
    """
    for piece in curve.undone:
        points = [piece[i] for i in thin([point.value for point in piece])]
        undone = {**style, "linestyle": (0, (1, 3)), "linewidth": 1.6}
        axes.plot([p.step for p in points], [p.value for p in points], **undone)
    values = [p.value if math.isfinite(p.value) else math.nan for p in curve.points]
    indices = thin(values)
    steps = [curve.points[i].step for i in indices]
    broken = [curve.points[i].step for i in indices if math.isnan(values[i])]
    half_width = len(values) // AVERAGED_PARTS // 2
    if half_width:
        if shows_values:
            shown = [values[i] for i in indices]
            axes.plot(steps, shown, color=style["color"], linewidth=0.8, alpha=0.4)
        values = moving_average(values, half_width)
    marker = "o" if len(steps) <= MAX_DOTS else None
    shown = [values[i] for i in indices]
    (bold,) = axes.plot(steps, shown, linewidth=1.8, markersize=4, marker=marker, **style)
    if broken:
        bottom = axes.get_xaxis_transform()
        axes.plot(broken, [0.03] * len(broken), "|", color=style["color"], transform=bottom)
    return bold


def _fit_values(axes: Axes, panel: Panel, values: Sequence[float]) -> None:
    """Choose the scale and the limits of the vertical axis for the finite values."""
    finite = [value for value in values if math.isfinite(value)]
    low = min(finite, default=0.0)
    high = max(finite, default=1.0)
    decades = _signed_log(high) - _signed_log(low)
    if panel.signed_log and decades > DECADES:
        axes.set_yscale("symlog", linthresh=1)
        axes.yaxis.set_major_formatter(lambda value, _: format_number(value))
    if 0 < low < 0.4 * high:
        axes.set_ylim(bottom=0)  # costs little room here, and shows proportions
    if panel.floor is not None and low < panel.floor:
        axes.set_ylim(bottom=panel.floor, top=max(high, panel.floor + 1))


def _signed_log(value: float) -> float:
    return math.copysign(math.log10(1 + abs(value)), value)


def _draw_levels(axes: Axes, run: Run) -> None:
    for start, end, level in run.spans:
        if level in LEVEL_COLORS:
            color = COLORS[LEVEL_COLORS[level]]
            axes.axvspan(start, end, color=color, alpha=0.2, zorder=0)
            if level is Level.COLLAPSED:  # stripes tell it from a suspicion without colours
                stripes = axes.axvspan(start, end, edgecolor=color, alpha=0.5, zorder=0)
                stripes.set(fill=False, hatch="//", linewidth=0)


def _number_verdicts(axes: Axes, verdicts: Sequence[LoggedVerdict], apart: float) -> None:
    last = -math.inf
    for number, verdict in enumerate(verdicts, start=1):
        axes.axvline(verdict.step, color=COLORS["faint"], linewidth=1, linestyle=(0, (2, 2)))
        if verdict.step - last >= apart:  # numbers must not overlap; the table has them all
            last = verdict.step
            above = axes.get_xaxis_transform()
            text = axes.text(verdict.step, 1.03, str(number), transform=above, ha="center")
            text.set(size=10, color=COLORS["faint"])
            text.set_url(f"#verdict-{number}")


def _mark_levels(axes: Axes, run: Run, curve: Curve, color: str) -> None:
    for start, _, level in run.spans:
        if level in LEVEL_MARKERS:
            nearest = min(curve.points, key=lambda point: abs(point.step - start))
            look: dict[str, Any] = {
                "color": COLORS[LEVEL_COLORS[level]],
                "markeredgecolor": color,
                "zorder": 3,
            }
            axes.plot(nearest.step, nearest.value, LEVEL_MARKERS[level], markersize=7, **look)
