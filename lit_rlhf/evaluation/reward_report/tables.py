"""The report's main numbers for the terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table

from lit_rlhf.evaluation.output import print_table
from lit_rlhf.evaluation.reward_report.page import verdict
from lit_rlhf.evaluation.reward_report.report import RewardReport


def reward_report_table(report: RewardReport) -> Table:
    """A row for each source, and one for all if there are several."""
    table = Table(
        box=box.HORIZONTALS,
        padding=(0, 1),
        title=f"{report.accuracy.pairs} pairs; right: the chosen response scores higher",
        caption=f"calibration error {report.calibration_error:.3f}. {verdict(report)}",
    )
    for head in ("", "pairs", "right [95 % interval]", "longer is right"):
        table.add_column(head, justify="right" if head else "left", overflow="fold")
    rows = dict(report.by_source)
    if len(rows) > 1:
        rows |= {"all": report.accuracy}
    for name, found in rows.items():
        table.add_row(
            name,
            str(found.pairs),
            f"{found.accuracy:.1%} [{found.low:.1%}, {found.high:.1%}]",
            f"{found.longer:.1%}",
        )
    return table


def print_reward_report(report: RewardReport) -> None:
    """Print the table on standard output."""
    print_table(reward_report_table(report))
