"""Findings of the checks, their report, and how they are shown on a terminal."""

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lit_rlhf.terminal import printable


class Status(StrEnum):
    """Result of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        status: How the check ended.
        observation: What the check saw, in sentences.
        change: What to change, with the option's name; empty for nothing.
    """

    status: Status
    observation: str
    change: str = ""


def ok(observation: str) -> Finding:
    """Report that a check found nothing wrong."""
    return Finding(Status.OK, observation)


def warning(observation: str, change: str) -> Finding:
    """Report a risk that does not keep the run from working."""
    return Finding(Status.WARNING, observation, change)


def failure(observation: str, change: str) -> Finding:
    """Report a mistake that makes the run fail, or its result worthless."""
    return Finding(Status.FAILURE, observation, change)


def failure_of(error: Exception) -> Finding:
    """Report an exception inside a check as its failure."""
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return failure(f"{kind}{error}", "The run would end with this error: change what it names.")


@dataclass
class Report:
    """The findings of all checks.

    Attributes:
        findings: Findings by the name of the check, in their order.
        substitution: What was used instead of what the configuration asks for; empty for nothing.
    """

    findings: dict[str, Finding] = field(default_factory=dict)
    substitution: str = ""

    def count(self, status: Status) -> int:
        """Count the checks with this status."""
        return sum(finding.status is status for finding in self.findings.values())

    @property
    def failed(self) -> bool:
        """Whether a check failed, so that the run should not start as it is."""
        return self.count(Status.FAILURE) > 0

    def as_dict(self) -> Mapping[str, Any]:
        """Convert the report to plain data, for JSON."""
        return {
            "failed": self.failed,
            "substitution": self.substitution,
            "checks": [{"check": name, **asdict(f)} for name, f in self.findings.items()],
        }


class StatusLook(NamedTuple):
    """How a status is shown on the terminal.

    Attributes:
        word: Its word before a finding, of at most four characters.
        style: Style of the word, for rich.
        summary: Its word in the summary.
    """

    word: str
    style: str
    summary: str


_LOOKS = {
    Status.OK: StatusLook(word="ok", style="green", summary="ok"),
    Status.WARNING: StatusLook(word="warn", style="yellow", summary="warned"),
    Status.FAILURE: StatusLook(word="FAIL", style="bold red", summary="failed"),
    Status.NOT_CHECKED: StatusLook(word="-", style="dim", summary="not checked"),
}
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
        """Print a finding under the name of its check."""
        look = _LOOKS[finding.status]
        row = Table.grid(padding=(0, 2))
        row.add_column(no_wrap=True)  # before rich 14.3, padding would add to a fixed width
        row.add_column(no_wrap=True)
        row.add_column(overflow="fold")
        row.add_row(
            Text(f"{look.word:4}", style=look.style),
            Text(printable(f"{name:15}")),
            Text(printable(finding.observation)),
        )
        if finding.change:
            row.add_row("", "", Text.assemble(("Change: ", "bold"), printable(finding.change)))
        self.console.print(row, width=self.width)

    def show_summary(self, report: Report) -> None:
        """Print the number of findings by status, and whether the run can start."""
        counts = [
            f"{n_findings} {_LOOKS[status].summary}"
            for status in Status
            if (n_findings := report.count(status))
        ]
        if report.substitution:
            self.console.print()
            self.console.print(Text(printable(report.substitution)), width=self.width)
        advice = "Fix the failures before the run." if report.failed else "The run can start."
        self.console.print()
        self.console.print(Text(f"{', '.join(counts)}. {advice}", style="bold"), width=self.width)
