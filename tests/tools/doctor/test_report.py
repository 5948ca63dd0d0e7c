"""What the doctor prints, in 80 columns."""

from __future__ import annotations

import io

from rich.console import Console

from lit_rlhf.tools.doctor import Display, Finding, Report, Status

LONG = (
    "The ratio is 1.1052 before the first update (KL of old to new policy 0.0052 nats), expected 1."
)


def printed(report: Report) -> str:
    console = Console(file=io.StringIO(), width=80)
    display = Display(console)
    for name, finding in report.findings.items():
        display.show_finding(name, finding)
    display.show_summary(report)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_a_finding_has_its_status_its_name_and_what_to_change() -> None:
    report = Report(
        {
            "ratio": Finding(Status.FAILURE, LONG, "Set [model.x] to 1."),
            "memory": Finding(Status.OK, "3 GiB are there."),
            "time": Finding(Status.NOT_CHECKED, "Not reached."),
        }
    )

    lines = [line.rstrip() for line in printed(report).splitlines()]

    assert lines == [
        "FAIL  ratio            The ratio is 1.1052 before the first update (KL of old to",
        "                       new policy 0.0052 nats), expected 1.",
        "                       Change: Set [model.x] to 1.",
        "ok    memory           3 GiB are there.",
        "-     time             Not reached.",
        "",
        "1 ok, 1 failed, 1 not checked. Fix the failures before the run.",
    ]


def test_a_substitution_is_shown() -> None:
    report = Report({"memory": Finding(Status.WARNING, "Tight.", "Less.")}, "On the CPU only.")

    assert printed(report).splitlines()[-3:] == [
        "On the CPU only.",
        "",
        "1 warned. The run can start.",
    ]


def test_a_report_is_plain_data() -> None:
    report = Report({"ratio": Finding(Status.FAILURE, "1.1", "Do.")})

    assert report.as_dict() == {
        "failed": True,
        "substitution": "",
        "checks": [{"check": "ratio", "status": "failure", "found": "1.1", "change": "Do."}],
    }
