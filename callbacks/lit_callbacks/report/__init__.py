"""One page about one or several training runs, from their TensorBoard logs."""

from lit_callbacks.report.page import write_report

__all__ = ["write_report"]
