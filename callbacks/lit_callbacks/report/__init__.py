"""One HTML page about training runs, and the charts and the base template for such pages."""

from lit_callbacks.report.chart import Chart, Scale, Tick, nice_step
from lit_callbacks.report.curves import moving_average, thin
from lit_callbacks.report.page import main, render_page, write_report

__all__ = [
    "Chart",
    "Scale",
    "Tick",
    "main",
    "moving_average",
    "nice_step",
    "render_page",
    "thin",
    "write_report",
]
