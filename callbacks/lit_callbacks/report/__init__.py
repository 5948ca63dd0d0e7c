"""One HTML page about training runs, and the base template for such pages."""

from lit_callbacks.report.page import main, render_page, write_report

__all__ = ["main", "render_page", "write_report"]
