"""Lists, runs and writes down experiments.

python -m experiments                   # what there is
python -m experiments NAME              # question, cost, result and commands of one
python -m experiments NAME COMMAND ...  # run: trains what is missing; page: writes its pages
python -m experiments readme            # writes the list to README.md
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from experiments.frame import (
    README,
    About,
    experiment_names,
    format_readme,
    read_about,
    read_commands,
)
from lit_rlhf.command import run_group
from lit_rlhf.environment import hide_loading_notes
from lit_rlhf.files import write_text
from lit_rlhf.suggestions import did_you_mean
from lit_rlhf.terminal import fold

PROGRAM = "python -m experiments"


def main(words: Sequence[str]) -> None:
    """Run a command.

    Args:
        words: What stands behind `python -m experiments`.

    Raises:
        SystemExit: If there is no such experiment or command.
    """
    hide_loading_notes()
    name, *rest = words or ["--help"]
    if name in ("-h", "--help"):
        print(format_list())
    elif name == "readme":
        write_text(README, format_readme())
    elif name not in experiment_names():
        raise SystemExit(
            f"{PROGRAM}: no experiment {name!r}{did_you_mean(name, experiment_names())} "
            f"({PROGRAM} lists all)"
        )
    else:
        if not rest or rest[0] in ("-h", "--help"):
            print(fold(describe(read_about(name))))
        run_group(read_commands(name), rest, f"{PROGRAM} {name}")


def format_list() -> str:
    """Every experiment with its question and cost."""
    lines = [f"usage: {PROGRAM} NAME [COMMAND]", ""]
    for name in experiment_names():
        about = read_about(name)
        lines += [name, f"  {about.question}", f"  Cost: {about.cost}."]
    return fold("\n".join(lines))


def describe(about: About) -> str:
    """What an experiment says of itself."""
    return f"{about.question}\n\nResult: {about.answer}\nCost: {about.cost}.\nPage: {about.page}\n"


if __name__ == "__main__":
    main(sys.argv[1:])
