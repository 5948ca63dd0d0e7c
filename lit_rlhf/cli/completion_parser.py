"""The parser of all commands at once, which prints a script that completes them."""

import importlib
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lit_rlhf.cli.configs import config_names
from lit_rlhf.cli.registry import COMMANDS, module_of
from lit_rlhf.cli.training import RLHFArgumentParser, run_cli

_CONFIGS_FUNCTION = "_lit_rlhf_configs"
"""Name of the shell function that completes the names of configurations."""
_PREAMBLE = """\
{function}() {{ compgen -W "{names}" -- "$1"; compgen -f -- "$1"; }}"""


class CompletionParser(RLHFArgumentParser):
    """The parser of the stages and all other commands; it prints the script."""

    shell = "bash"
    commands: Any

    def add_argument(self, *names: Any, **options: Any) -> Any:  # noqa: ANN401  # as its base
        """Complete names of configurations too."""
        action = super().add_argument(*names, **options)
        if {"--config", "names"} & {*names}:
            action.complete = {"bash": _CONFIGS_FUNCTION, "zsh": "_files", "tcsh": "f"}
        return action

    def add_subcommands(self, *others: Any, **options: Any) -> Any:  # noqa: ANN401  # as its base
        """Add the other commands."""
        self.commands = super().add_subcommands(*others, **options)
        for name in COMMANDS:
            module = importlib.import_module(module_of(name))
            if command_of_module := getattr(module, "COMMAND", None):
                self.commands.add_subcommand(name, command_of_module.build_parser(name, type(self)))
            elif group := getattr(module, "COMMANDS", None):
                parser = CompletionParser(prog=name)
                self.commands.add_subcommand(name, parser)
                words = ArgumentParser.add_subcommands(parser)
                for word, command in group.items():
                    words.add_subcommand(word, command.build_parser(word, type(self)))
        return self.commands

    def parse_args(self, *arguments: Any, **options: Any) -> Namespace:  # type: ignore[override]
        """Print the script and end."""
        self.commands.add_subcommand("doctor", self.stages[0])  # takes the flags of `fit`
        names = _PREAMBLE.format(function=_CONFIGS_FUNCTION, names=" ".join(config_names()))
        preambles = [names] if self.shell == "bash" else []
        print(self.get_completion_script(f"shtab-{self.shell}", preambles=preambles))
        raise SystemExit(0)


def print_script(shell: str) -> None:
    """Print the script of a shell, and end."""
    CompletionParser.shell = shell
    run_cli(parser_class=CompletionParser)
