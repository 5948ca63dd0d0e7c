"""`lit_rlhf completion`: a script that completes commands, options and configurations."""

from typing import Literal

from lit_rlhf.command import Command


def completion(shell: Literal["bash", "zsh", "tcsh"] = "bash") -> None:
    """Print a script that completes commands, options and configurations in a shell.

    Args:
        shell: The shell.
    """
    # imports torch, for which --help does not wait
    from lit_rlhf.cli.completion_parser import print_script

    print_script(shell)


COMMAND = Command(completion)
