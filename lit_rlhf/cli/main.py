"""`lit_rlhf`: finds the command by its name and runs it.

Importing this module imports no library, so that help, the version and a mistyped command do not
wait for torch.
"""

import gc
import importlib
import os
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from lit_rlhf import __version__
from lit_rlhf.cli.registry import COMMANDS, CONFIGURED, STAGES, WITHOUT_MODELS, module_of
from lit_rlhf.environment import hide_loading_notes, set_environment
from lit_rlhf.suggestions import did_you_mean
from lit_rlhf.terminal import (
    check_output,
    fold,
    help_text,
    one_line,
    outlive_terminal,
    show_control_characters,
)

_HINTS = {
    "chat": "lit_rlhf generate --models FOLDER --chat",
    "help": "lit_rlhf --help lists all",
    "predict": "lit_rlhf generate writes responses, evaluate compares models",
    "train": "lit_rlhf fit --config NAME trains a stage",
    "version": "lit_rlhf --version",
}
"""Names of our commands for names that other tools use."""
INTERRUPTED = 130  # exit status after Ctrl-C, like a shell's


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console script.

    Args:
        argv: The arguments, without the program's name. Default: the process's.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    outlive_terminal()
    if argv is None:
        show_control_characters()
    if sys.flags.optimize > 1:
        _refuse(
            "lit_rlhf: expected docstrings, of which options and their help are made, got python "
            "-OO or PYTHONOPTIMIZE=2, which removes them"
        )
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
    elif arguments[0] == "--version":
        print(f"lit_rlhf {__version__}")
    # LightningCLI takes `--config FILE fit` too
    elif (stage := find_stage(arguments)) is None:
        name, *rest = arguments
        if name not in COMMANDS:
            _refuse(f"lit_rlhf: no command {name!r}{_advise(name)}")
        _run(name, rest, owns_process=argv is None)
    elif {"-h", "--help"}.isdisjoint(arguments):
        _run_stage(stage, arguments, owns_process=argv is None)
    else:
        print(stage_usage(stage))


def find_stage(arguments: Sequence[str]) -> str | None:
    """Look for the name of a stage command, unless the first argument names another command."""
    if arguments[0] in COMMANDS:
        return None
    return next((word for word in arguments if word in STAGES), None)


def _advise(name: str) -> str:
    """What to do instead, for the end of an error about a command that does not exist."""
    if (hint_name := name.lstrip("-")) in _HINTS:
        return f"; {_HINTS[hint_name]}"
    names = [*STAGES, *COMMANDS, "--help", "--version"]
    return f"{did_you_mean(name, names)} (lit_rlhf --help lists all)"


def _run_stage(stage: str, arguments: Sequence[str], owns_process: bool) -> None:
    """Run a command of the LightningCLI with all arguments of the program."""
    words = ["--help" if word == "--help_all" else word for word in arguments]
    _check_configs(stage, words)  # before Lightning is imported, which takes seconds
    if sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0":
        print("loading torch and Lightning ...", file=sys.stderr)
    _run(stage, words, owns_process)


def _run(name: str, arguments: Sequence[str], owns_process: bool) -> None:
    """Prepare the process, import a command and run it.

    Args:
        name: Name of the command.
        arguments: Those of the command.
        owns_process: Whether the process has nothing else to do.
    """
    debug = "--debug" in arguments
    words = [word for word in arguments if word != "--debug"]
    values = set_environment()
    if debug and values:
        settings = " ".join(f"{variable}={value}" for variable, value in values.items())
        print(f"lit_rlhf: set {settings}", file=sys.stderr)
    _check_current_folder()
    hide_loading_notes()
    threading.excepthook = _tell_error_of_thread
    try:
        asks_help = not {"-h", "--help"}.isdisjoint(words)
        if name in CONFIGURED and not asks_help:
            importlib.import_module("lit_rlhf.cli.configured_paths").refuse_missing(name, words)
        if name not in WITHOUT_MODELS and not asks_help:
            _hide_bars_of_models()
        command = _import_command(name, owns_process)
        _call(command, name, words)
        if name not in STAGES:  # a run leaves a model
            check_output()
    except SystemExit as stopped:
        if debug and stopped.__cause__ is not None:
            # with its own cause: `from None` would hide where the libraries raised it
            raise stopped.__cause__ from stopped.__cause__.__cause__
        raise
    except KeyboardInterrupt as interrupt:
        if debug:
            raise
        notes = "; ".join(["interrupted", *getattr(interrupt, "__notes__", ())])
        print(f"\nlit_rlhf {name}: {notes}", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from interrupt
    except (MemoryError, ImportError) as error:  # while importing; a command reports its own errors
        if debug or not (isinstance(error, MemoryError) or "failed to map" in str(error)):
            raise
        _refuse(f"lit_rlhf {name}: the memory is too small to start", error)


def _check_current_folder() -> None:
    """End with a usage error if the current folder has been deleted."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        _refuse("lit_rlhf: the current folder has been deleted", error)


def _import_command(name: str, owns_process: bool) -> ModuleType:
    """Import the module of a command without the garbage collector.

    Imports leave no garbage, and the collector would look through all that they make several times:
    a fifth of the time until a command starts.
    """
    gc.disable()
    command = importlib.import_module(module_of(name))
    if owns_process:  # nor would it find any later; parsing a configuration took 1 s longer
        gc.freeze()
    gc.enable()
    return command


def _call(command: ModuleType, name: str, arguments: Sequence[str]) -> None:
    """Call what the module of a command has: `main`, a `COMMAND` or a group of `COMMANDS`."""
    if hasattr(command, "main"):
        command.main(arguments)
    elif hasattr(command, "COMMAND"):
        command.COMMAND.run(arguments, f"lit_rlhf {name}")
    else:
        run_group = importlib.import_module("lit_rlhf.command").run_group
        run_group(command.COMMANDS, arguments, f"lit_rlhf {name}")


def usage() -> str:
    """Help of the program: its commands."""
    lines = [f"  {name:<12}{text}" for name, text in (STAGES | COMMANDS).items()]
    return fold(help_text("program").format(commands="\n".join(lines)))


def stage_usage(name: str) -> str:
    """Help of a stage command: what is asked for most, and where the rest is.

    The parser's own help has some 500 lines and waits for Lightning, which takes seconds to import.
    """
    summary = f"{STAGES[name].capitalize()}."
    checkpoint = help_text("fit") if name == "fit" else "  --ckpt_path FILE     the checkpoint\n"
    return fold(help_text("stage").format(name=name, summary=summary, checkpoint=checkpoint))


def _check_configs(stage: str, arguments: Sequence[str]) -> None:
    """End with a usage error if there is no configuration of a name, or it lacks its flag."""
    from lit_rlhf.cli.configs import config_names, resolve_configs

    previous = ""
    for word in arguments:
        named = word.removeprefix("configs/").removesuffix(".yaml")
        is_flag_or_value = word.startswith("-") or previous.startswith("-")
        if not is_flag_or_value and (word.endswith(".yaml") or named in config_names()):
            _refuse(
                f"lit_rlhf: error: {word}: a configuration follows its flag: "
                f"lit_rlhf {stage} --config {word}"
            )
        previous = word
    try:
        resolve_configs(arguments)
    except ValueError as error:
        _refuse(f"lit_rlhf: error: --config: {error}", error)


def _refuse(message: str, cause: Exception | None = None) -> NoReturn:
    """End with a usage error."""
    print(one_line(message), file=sys.stderr)
    raise SystemExit(2) from cause


def _tell_error_of_thread(raised: threading.ExceptHookArgs) -> None:
    """Tell the system's error in a thread in one line: loggers that write there raise it again."""
    if isinstance(raised.exc_value, OSError):
        print(one_line(f"lit_rlhf: {raised.exc_value}"), file=sys.stderr)
    else:
        threading.__excepthook__(raised)


def _hide_bars_of_models() -> None:
    """Hide transformers' bars for the files of a model, which break the bars of a stage."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped there


if __name__ == "__main__":
    main()
