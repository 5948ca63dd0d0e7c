"""`lit-callbacks`: judges and reports the logs of any trainer, without a training framework."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lit_callbacks.monitors import Level
from lit_callbacks.streams import check_output, outlive_terminal
from lit_callbacks.words import end_with_error

TROUBLED = 1
"""Exit status if a run collapsed."""
ERROR = 2
"""Exit status after an error, for instance of a log that cannot be read."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, like a shell's."""
USAGE = """usage: lit-callbacks COMMAND ...

  watch LOG...       judge logs for a collapse, afterwards or while they are written
  report RUN...      put runs side by side, in a table and on a page
  gain SAMPLES...    what the rise of a score is made of, from samples.jsonl

lit-callbacks COMMAND --help tells more."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        argv: The arguments, without the program's name. Default: the process's.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    outlive_terminal()
    try:
        _run(words)
    except KeyboardInterrupt as interrupt:
        print("\nlit-callbacks: interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from interrupt
    finally:
        check_output(ERROR, "lit-callbacks")


def _run(words: list[str]) -> None:
    """Run the command that the first word names."""
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
    elif words[0] == "watch":
        _watch(words[1:])
    elif words[0] == "report":
        from lit_callbacks.report import main as report  # draws with matplotlib

        report(words[1:], "lit-callbacks report")
    elif words[0] == "gain":
        _explain_gain(words[1:])
    else:
        print(f"lit-callbacks: no command {words[0]!r}\n\n{USAGE}", file=sys.stderr)
        raise SystemExit(ERROR)


def _watch(argv: Sequence[str]) -> None:
    from lit_callbacks.logs import watch_logs

    parser = argparse.ArgumentParser(
        prog="lit-callbacks watch",
        description="Judge the logs of training runs, and print each change of a verdict. The exit "
        "status is 0 if no run collapsed, 1 if one did, and 2 after an error.",
    )
    parser.add_argument("logs", nargs="+", metavar="LOG", help="folder of a run, or its log")
    parser.add_argument(
        "--map",
        nargs="+",
        default=[],
        metavar="KEY=NAME",
        help="names of metrics in the log by the keys that are watched: rollout/kl=my/kl",
    )
    parser.add_argument(
        "--follow", type=float, default=0.0, metavar="SECONDS", help="look again, until Ctrl-C"
    )
    parser.add_argument(
        "--votes", type=int, default=2, metavar="N", help="signals that make a collapse (2)"
    )
    parser.add_argument(
        "--responses", type=int, default=0, metavar="N", help="responses of a step, for its noise"
    )
    parser.add_argument(
        "--preset",
        default="chat",
        metavar="TASK",
        help="task that the thresholds are meant for: chat (default), 'short answers' or "
        "'checkable reward'",
    )
    parser.add_argument(
        "--healthy",
        nargs="+",
        default=[],
        metavar="RUN",
        help="logs of runs that you call healthy: thresholds are loosened so that none is flagged",
    )
    options = parser.parse_args(argv)
    names = dict(word.split("=", 1) for word in options.map if "=" in word)
    if len(names) < len(options.map):
        parser.error(f"--map: expected KEY=NAME, each key once, got {' '.join(options.map)}")
    try:
        levels = watch_logs(
            options.logs,
            names,
            votes=options.votes,
            responses=options.responses,
            follow=options.follow,
            preset=options.preset,
            healthy=options.healthy,
        )
    except (ValueError, OSError, ModuleNotFoundError) as error:
        end_with_error(parser, error)
    if Level.COLLAPSED in levels.values():
        raise SystemExit(TROUBLED)


def _explain_gain(argv: Sequence[str]) -> None:
    from lit_callbacks.gain import main as explain  # computes with torch

    parser = argparse.ArgumentParser(
        prog="lit-callbacks gain", description="Say what the rise of a run's score is made of."
    )
    parser.add_argument("files", nargs="+", metavar="SAMPLES", help="samples.jsonl of a run")
    try:
        explain(parser.parse_args(argv).files)
    except (ValueError, OSError) as error:
        end_with_error(parser, error)


if __name__ == "__main__":
    main()
