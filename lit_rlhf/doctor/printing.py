"""Findings on the terminal, as they come."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lit_rlhf.doctor.findings import Finding, Report, Status

SHOWN = {
    Status.OK: ("ok", "green"),
    Status.WARNING: ("warn", "yellow"),
    Status.FAILURE: ("FAIL", "bold red"),
    Status.NOT_CHECKED: ("-", "dim"),
}
WIDEST = 100  # columns; longer lines are hard to read


class Display:
    """Prints findings on standard output and what is being done on standard error.

    Args:
        console: Where findings go; default: standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        # bound to the stream: rich sends prints to standard error while a status is on
        self.console = console or Console(file=sys.stdout, highlight=False)
        self.width = min(self.console.width, WIDEST)

    @contextmanager
    def doing(self, text: str) -> Iterator[None]:
        """Say what is being done, where there is a terminal."""
        with Console(stderr=True).status(f"{text} ..."):
            yield

    def title(self, text: str) -> None:
        """The line above the findings."""
        self.console.print(Text(text, style="bold"), width=self.width)

    def show(self, name: str, finding: Finding) -> None:
        """One finding."""
        word, style = SHOWN[finding.status]
        row = Table.grid(padding=(0, 2))
        row.add_column(width=4)
        row.add_column(width=15)
        row.add_column(overflow="fold")
        row.add_row(Text(word, style=style), Text(name), Text(finding.found))
        if finding.change:
            row.add_row("", "", Text.assemble(("Change: ", "bold"), finding.change))
        self.console.print(row, width=self.width)

    def summary(self, report: Report) -> None:
        """What it comes to."""
        counts = {status: report.count(status) for status in Status}
        words = {
            Status.OK: "ok",
            Status.WARNING: "to look at",
            Status.FAILURE: "failed",
            Status.NOT_CHECKED: "not checked",
        }
        told = ", ".join(f"{n} {words[status]}" for status, n in counts.items() if n)
        if report.stand_in:
            self.console.print()
            self.console.print(Text(report.stand_in), width=self.width)
        verdict = "Change what failed before the run starts." if report.failed else "Go ahead."
        self.console.print()
        self.console.print(Text(f"{told}. {verdict}", style="bold"), width=self.width)
