"""What the doctor prints, in 80 columns."""

import io

from rich.console import Console

from lit_rlhf.tools.doctor import Display, Finding, Report, Status

LONG = "The ratio is 1.1052 before the first update (KL of old to new policy 0.0052), expected 1."


def test_a_finding_has_its_status_its_name_and_what_to_change() -> None:
    found = {
        "ratio": Finding(Status.FAILURE, LONG, "Set [model.x] to 1."),
        "memory": Finding(Status.OK, "3 GiB are there."),
        "time": Finding(Status.NOT_CHECKED, "Not reached."),
    }
    console = Console(file=io.StringIO(), width=80)
    display = Display(console)
    for name, finding in found.items():
        display.show_finding(name, finding)
    display.show_summary(Report(found, "On the CPU only."))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(len(line.rstrip()) for line in lines) <= 80
    starts = [line.split()[:2] for line in lines if line and line[0] != " "]
    assert starts[:3] == [["FAIL", "ratio"], ["ok", "memory"], ["-", "time"]]
    words = " ".join(" ".join(lines).split())
    assert f"{LONG} Change: Set [model.x] to 1." in words
    assert "On the CPU only. 1 ok, 1 failed, 1 not checked. Fix the failures" in words


def test_a_report_is_plain_data() -> None:
    report = Report({"ratio": Finding(Status.FAILURE, "1.1", "Do.")})
    check = {"check": "ratio", "status": "failure", "found": "1.1", "change": "Do."}
    assert report.as_dict() == {"failed": True, "substitution": "", "checks": [check]}
