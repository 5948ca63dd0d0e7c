"""`lit_rlhf doctor`: check a PPO run before it starts."""

import json
import sys
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lit_rlhf.errors import end_with_message
from lit_rlhf.terminal import fold, help_text, print_line

if TYPE_CHECKING:  # it imports torch, for which --help does not wait
    from lit_rlhf.tools.doctor import Report

PROG = "lit_rlhf doctor"
USAGE = help_text("doctor usage")
HELP = help_text("doctor")


def main(argv: Sequence[str]) -> "Report":
    """Run `lit_rlhf doctor`; the exit status is 1 if a check failed, 2 for unusable arguments."""
    arguments = list(argv)
    if not arguments or {"-h", "--help"} & set(arguments):
        print(fold(HELP.format(usage=USAGE)), file=sys.stdout if arguments else sys.stderr)
        raise SystemExit(0 if arguments else 2)
    from lit_rlhf.files import write_text
    from lit_rlhf.tools.commands.doctor_cli import examine_run

    parser = {"prog": PROG, "usage": USAGE, "description": str(__doc__)}
    with tempfile.TemporaryDirectory(prefix="lit_rlhf_doctor_") as folder:
        # callbacks or loggers of the user's own may write to the default folder
        arguments += ["--trainer.default_root_dir", folder]
        report, output = examine_run(arguments, parser)
    if output is not None:
        try:
            file = write_text(output, json.dumps(report.as_dict(), indent=2) + "\n")
        except OSError as error:
            end_with_message(error, PROG)
        print_line(f"Report: {file}")
    if report.failed:
        raise SystemExit(1)
    return report
