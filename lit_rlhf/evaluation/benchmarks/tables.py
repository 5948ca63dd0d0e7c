"""The alignment tax as a table for the terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table

from lit_rlhf.evaluation.benchmarks.comparison import BenchmarkReport, BenchmarkRow, BenchmarkScore
from lit_rlhf.evaluation.tables import print_table

MOST_PARTS = 12  # of one benchmark in the table; MMLU has 61


def benchmark_table(report: BenchmarkReport) -> Table:
    """A row for each benchmark and metric, a column for each model."""
    names = list(report.models)
    rows = shown_rows(report)
    caption = f"Below each score: its difference from {names[0]}." if len(names) > 1 else ""
    if len(rows) < len(report.rows):
        caption += f" {len(report.rows) - len(rows)} more rows, of parts, are in the report."
    shots = "" if report.shots is None else f", {report.shots} examples before each"
    table = Table(
        box=box.HORIZONTALS,
        padding=(0, 1),
        title=f"benchmarks{shots}; score ± standard error",
        caption=caption.strip() or None,
    )
    table.add_column("", overflow="fold")
    table.add_column("questions", justify="right")
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(_label(row), str(row.questions), *(_cell(row.scores[n]) for n in names))
    return table


def shown_rows(report: BenchmarkReport) -> list[BenchmarkRow]:
    """All rows but the parts of benchmarks with many and a score over all of them."""
    parts: dict[str, set[str]] = {}
    for row in report.rows:
        parts.setdefault(row.benchmark, set()).add(row.part)
    return [
        row
        for row in report.rows
        if not row.part
        or "" not in parts[row.benchmark]
        or len(parts[row.benchmark]) <= MOST_PARTS + 1
    ]


def print_benchmarks(report: BenchmarkReport) -> None:
    """Print the table on standard output, and say which questions were not read as a whole."""
    print_table(benchmark_table(report))
    for name, cut in {row.benchmark: row.cut for row in report.rows if not row.part}.items():
        if cut:
            print(f"{name}: the beginning of {cut} questions did not fit into a model.")


def _label(row: BenchmarkRow) -> str:
    name = f"  {row.part}" if row.part else row.benchmark
    lower = ", lower is better" if row.higher_is_better is False else ""
    return f"{name} ({row.metric}{lower})"


def _cell(score: BenchmarkScore) -> str:
    cell = _with_error(f"{score.value:.3f}", score.stderr)
    if score.difference is None:
        return cell
    return f"{cell}\n{_with_error(f'{score.difference:+.3f}', score.difference_stderr)}"


def _with_error(value: str, stderr: float | None) -> str:
    return value if stderr is None else f"{value} ± {stderr:.3f}"
