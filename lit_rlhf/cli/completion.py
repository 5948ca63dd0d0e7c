"""`lit_rlhf completion`: a script that completes commands, options and configurations."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence

from lit_rlhf import __version__
from lit_rlhf.cli.command import run_command
from lit_rlhf.cli.configs import config_names
from lit_rlhf.cli.main import COMMANDS, STAGE_COMMANDS, module_of

SCRIPT = """\
# Completes lit_rlhf {version} in bash, and in zsh after
# `autoload -U compinit bashcompinit && compinit && bashcompinit`.
_lit_rlhf() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
  if [ "$COMP_CWORD" = 1 ]; then
    words="{commands}"
  elif [ "$before" = --config ] || [ "$before" = -c ] || [ "${{COMP_WORDS[1]}}" = configs ]; then
    words="{configs} copy list"
  else
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o bashdefault -o default -F _lit_rlhf lit_rlhf
"""


def completion() -> None:
    """Print a script that completes commands, options and configurations in bash and zsh."""
    commands = [*STAGE_COMMANDS, *COMMANDS]
    print(write_script({command: sorted(set(command_words(command))) for command in commands}))


def write_script(words: Mapping[str, Sequence[str]]) -> str:
    """The script.

    Args:
        words: Words that can follow, by command.
    """
    cases = (f'      {name}) words="{" ".join(known)}" ;;' for name, known in words.items())
    return SCRIPT.format(
        version=__version__,
        commands=" ".join(words),
        configs=" ".join(config_names()),
        cases="\n".join(cases),
    )


def command_words(command: str) -> Iterator[str]:
    """Options of a command as its help shows them, those of the stages, and its own commands."""
    if command in STAGE_COMMANDS or command == "doctor":
        # the doctor's help is an extract
        yield from help_flags("training", [command if command in STAGE_COMMANDS else "fit"])
        yield from stage_flags()
    if command in COMMANDS and command != "completion":
        own = getattr(importlib.import_module(module_of(command)), "COMMANDS", ())
        yield from own
        for name in own or [""]:
            yield from help_flags(command, [name] if name else [])


def help_flags(module: str, words: Sequence[str]) -> list[str]:
    """Flags in the help of a command."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        importlib.import_module(module_of(module)).main([*words, "--help"])
    return re.findall(r"--\w[\w.]*", shown.getvalue())


def stage_flags() -> Iterator[str]:
    """Options of the stages and of their data."""
    from lit_rlhf import data, modules
    from lit_rlhf.modules.option_names import option_names

    for stage in (modules.SFTModule, modules.RewardModule, modules.PPOModule):
        yield from (f"--model.{name}" for name in option_names(stage))
    for kind in (data.DemonstrationDataModule, data.PreferenceDataModule, data.PromptDataModule):
        yield from (f"--data.{name}" for name in option_names(kind))


def main(argv: Sequence[str]) -> None:
    """Entry point of `lit_rlhf completion`."""
    run_command(completion, argv, "lit_rlhf completion")
