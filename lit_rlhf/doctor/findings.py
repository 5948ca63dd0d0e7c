"""What an examination found: one finding for each check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        status: How it ended.
        found: A sentence or two: what was measured, or what is wrong.
        change: What to change, with the argument's name; empty where there is nothing to.
    """

    status: Status
    found: str
    change: str = ""


def ok(found: str) -> Finding:
    """A check that found nothing wrong."""
    return Finding(Status.OK, found)


def warning(found: str, change: str) -> Finding:
    """Something to look at that does not keep the run from working."""
    return Finding(Status.WARNING, found, change)


def failure(found: str, change: str) -> Finding:
    """Something that makes the run fail, or its result worthless."""
    return Finding(Status.FAILURE, found, change)


@dataclass
class Report:
    """The findings of an examination.

    Attributes:
        findings: By the check's name, in the order of the checks.
        stand_in: What the checks used instead of what the configuration asks for; empty if nothing.
    """

    findings: dict[str, Finding] = field(default_factory=dict)
    stand_in: str = ""

    def count(self, status: Status) -> int:
        """How many checks ended like this."""
        return sum(finding.status is status for finding in self.findings.values())

    @property
    def failed(self) -> bool:
        """Whether the run should not start as it is."""
        return self.count(Status.FAILURE) > 0

    def as_dict(self) -> Mapping[str, Any]:
        """Plain data, for JSON."""
        return {
            "failed": self.failed,
            "stand_in": self.stand_in,
            "checks": [{"check": name, **asdict(f)} for name, f in self.findings.items()],
        }
