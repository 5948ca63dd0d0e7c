"""Comparisons as tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from lit_rlhf.evaluation.compare import Comparison, PolicyReport
from lit_rlhf.evaluation.comparison import HeadToHead

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
        caption=f"KL: per response, against {comparison.baseline}",
    )
    table.add_column("")
    reports = comparison.policies
    for name in reports:
        table.add_column(name, justify="right", overflow="fold")
    for reward in comparison.rewards:
        scores = (_score(report, reward) for report in reports.values())
        table.add_row(reward, *scores, end_section=reward == list(comparison.rewards)[-1])
    for label, metric, write in _ROWS:
        table.add_row(label, *(write(report.metrics[metric]) for report in reports.values()))
    return table


def outcomes_table(rows: Sequence[HeadToHead], baseline: str) -> Table:
    """A row for each policy under each judge: win, tie and lose with their intervals."""
    table = Table(
        box=box.HORIZONTALS,
        padding=(0, 1),
        title=f"against {baseline}, % of prompts [95 % interval]",
    )
    for heading in ("by", "policy"):
        table.add_column(heading, overflow="fold")
    for heading in ("win", "tie", "lose", "prompts"):
        table.add_column(heading, justify="right")
    for row in rows:
        result = row.outcomes
        cells = ("-", "-", "-", "0")
        if result is not None:
            cells = (
                share_with_interval(result.win, *result.win_interval),
                share_with_interval(result.tie, *result.tie_interval),
                share_with_interval(result.lose, *result.lose_interval),
                str(result.n),
            )
        table.add_row(row.by, row.policy, *cells)
    return table


def print_comparison(comparison: Comparison) -> None:
    """Print scores and metrics, then who won, on standard output."""
    print_table(comparison_table(comparison))
    rows = comparison.head_to_heads
    if rows:
        print_table(outcomes_table(rows, comparison.baseline))


def print_table(table: Table) -> None:
    """Print a table on standard output; in a file it is as wide as it needs to be."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=Console(width=_ANY_WIDTH).measure(table).maximum)
    console.print(table)


def share_with_interval(share: float, low: float, high: float) -> str:
    """A share and its interval in per cent."""
    return f"{100 * share:.0f} [{100 * low:.0f}, {100 * high:.0f}]"


def _score(report: PolicyReport, reward: str) -> str:
    score = report.scores[reward]
    return f"{score.mean:.2f} [{score.low:.2f}, {score.high:.2f}]"
