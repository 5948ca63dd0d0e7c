"""The comparison as a table for the terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich import box
from rich.console import Console
from rich.table import Table

from lit_rlhf.evaluation.compare import Comparison, PolicyReport

# row, its metric, and how a value is written
_ROWS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("length, tokens", "response_length", "{:.1f}".format),
    ("truncated", "truncation_rate", "{:.1%}".format),
    ("KL, nats", "kl", "{:.2f}".format),
    ("perplexity", "perplexity", "{:.2f}".format),
    ("distinct-2", "distinct_2", "{:.3f}".format),
)
_ANY_WIDTH = 100_000  # characters; a console measures a table up to its own width


def comparison_table(comparison: Comparison) -> Table:
    """A column for each policy, a row for each reward and metric."""
    table = Table(
        box=box.HORIZONTALS,  # three policies fit into 80 columns
        padding=(0, 1),
        title=f"{comparison.n_prompts} prompts, one response each; mean [95 % interval]",
        caption=f"KL (per response) and win/tie/lose (by {next(iter(comparison.rewards))}): "
        f"against {comparison.baseline}",
    )
    table.add_column("")
    reports = comparison.policies
    for name in reports:
        table.add_column(name, justify="right", overflow="fold")
    for reward in comparison.rewards:
        table.add_row(reward, *(_score(report, reward) for report in reports.values()))
    table.add_row("win/tie/lose, %", *map(_outcomes, reports.values()), end_section=True)
    for label, metric, write in _ROWS:
        table.add_row(label, *(write(report.metrics[metric]) for report in reports.values()))
    return table


def print_comparison(comparison: Comparison) -> None:
    """Print the table on standard output."""
    print_table(comparison_table(comparison))


def print_table(table: Table) -> None:
    """Print a table on standard output; in a file it is as wide as it needs to be."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=Console(width=_ANY_WIDTH).measure(table).maximum)
    console.print(table)


def _score(report: PolicyReport, reward: str) -> str:
    score = report.scores[reward]
    return f"{score.mean:.2f} [{score.low:.2f}, {score.high:.2f}]"


def _outcomes(report: PolicyReport) -> str:
    if report.outcomes is None:
        return "-"
    return "/".join(f"{100 * share:.0f}" for share in report.outcomes)
