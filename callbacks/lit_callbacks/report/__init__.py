"""One HTML page about training runs, and the charts and the base template for such pages."""

from lit_callbacks.report.charts import COLORS, Svg, moving_average, new_axes, thin, to_svg
from lit_callbacks.report.page import main, render_page, write_report

__all__ = [
    "COLORS",
    "Svg",
    "main",
    "moving_average",
    "new_axes",
    "render_page",
    "thin",
    "to_svg",
    "write_report",
]
