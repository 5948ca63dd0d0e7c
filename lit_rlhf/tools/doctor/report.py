"""Findings of the checks, their report, and how they are shown on a terminal."""

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Finding:
    """The result of a check, and what to change, with the option's name; empty for nothing."""

    status: Status
    found: str
    change: str = ""


def ok(found: str) -> Finding:
    """A check that found nothing wrong."""
    return Finding(Status.OK, found)


def warning(found: str, change: str) -> Finding:
    """A risk that does not keep the run from working."""
    return Finding(Status.WARNING, found, change)


def failure(found: str, change: str) -> Finding:
    """A mistake that makes the run fail, or its result worthless."""
    return Finding(Status.FAILURE, found, change)


def failure_of(error: Exception) -> Finding:
    """The failure that an exception inside a check is."""
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return failure(f"{kind}{error}", "The run would end with this error: change what it names.")


@dataclass
class Report:
    """The findings of all checks by name, in their order.

    `substitution` says what was used instead of what the configuration asks for, if anything.
    """

    findings: dict[str, Finding] = field(default_factory=dict)
    substitution: str = ""

    def count(self, status: Status) -> int:
        """Number of checks with this status."""
        return sum(finding.status is status for finding in self.findings.values())

    @property
    def failed(self) -> bool:
        """Whether a check failed, so that the run should not start as it is."""
        return self.count(Status.FAILURE) > 0

    def as_dict(self) -> Mapping[str, Any]:
        """The report as plain data, for JSON."""
        return {
            "failed": self.failed,
            "substitution": self.substitution,
            "checks": [{"check": name, **asdict(f)} for name, f in self.findings.items()],
        }


_SHOWN = {
    Status.OK: ("ok", "green", "ok"),
    Status.WARNING: ("warn", "yellow", "warned"),
    Status.FAILURE: ("FAIL", "bold red", "failed"),
    Status.NOT_CHECKED: ("-", "dim", "not checked"),
}
"""Word and style of each status on the terminal, and its word in the summary."""
_MAX_WIDTH = 100  # columns; longer lines are hard to read


class Display:
    """Prints findings to a console, and the check in progress to standard error."""

    def __init__(self, console: Console | None = None) -> None:
        # Bound to the stream: while a status is shown, rich redirects prints to standard error.
        self.console = console or Console(file=sys.stdout, highlight=False)
        self.width = min(self.console.width, _MAX_WIDTH)

    def show_progress(self, text: str) -> AbstractContextManager[object]:
        """Show what is being checked during a block, if there is a terminal."""
        return Console(stderr=True).status(f"{text} ...")

    def show_finding(self, name: str, finding: Finding) -> None:
        """Print a finding."""
        word, style, _ = _SHOWN[finding.status]
        row = Table.grid(padding=(0, 2))
        row.add_column(no_wrap=True)  # before rich 14.3, padding would add to a fixed width
        row.add_column(no_wrap=True)
        row.add_column(overflow="fold")
        row.add_row(Text(f"{word:4}", style=style), Text(f"{name:15}"), Text(finding.found))
        if finding.change:
            row.add_row("", "", Text.assemble(("Change: ", "bold"), finding.change))
        self.console.print(row, width=self.width)

    def show_summary(self, report: Report) -> None:
        """Print the number of findings by status, and whether the run can start."""
        counts = [f"{n} {_SHOWN[s][2]}" for s in Status if (n := report.count(s))]
        if report.substitution:
            self.console.print()
            self.console.print(Text(report.substitution), width=self.width)
        advice = "Fix the failures before the run." if report.failed else "The run can start."
        self.console.print()
        self.console.print(Text(f"{', '.join(counts)}. {advice}", style="bold"), width=self.width)
