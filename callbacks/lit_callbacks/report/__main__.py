"""`python -m lit_callbacks.report`: one HTML page about one or several runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lit_callbacks.report.page import write_report


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point.

    Args:
        argv: arguments; None for those of the process.
    """
    parser = argparse.ArgumentParser(prog="python -m lit_callbacks.report", description=__doc__)
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="folder with TensorBoard event files, or NAME=FOLDER to name the run",
    )
    parser.add_argument("--output", default="report.html", help="the page (report.html)")
    parser.add_argument("--keys", nargs="+", metavar="KEY", help="metrics to show")
    options = parser.parse_args(argv)
    try:
        path = write_report(_runs(options.runs), options.output, options.keys)
    except (ValueError, ModuleNotFoundError) as error:
        parser.error(str(error))
    print(f"Report: {path}")


def _runs(words: list[str]) -> list[str] | dict[str, str]:
    """Folders, or folders by name where every word has one; a folder may itself contain a ``=``."""
    named = [not Path(word).exists() and "=" in word for word in words]
    if not any(named):
        return words
    pairs = [word.split("=", 1) for word in words]
    runs = {pair[0]: pair[-1] for pair in pairs}
    if not all(named) or len(runs) < len(words):
        raise ValueError(
            f"runs: expected folders, or NAME=FOLDER with different names, got {words}"
        )
    return runs


if __name__ == "__main__":
    main()
