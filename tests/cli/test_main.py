"""`lit_rlhf`: dispatch by the command's name, help, version, and what a mistyped command costs."""

import logging
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import lit_rlhf
from lit_rlhf.cli.main import _tell_error_of_thread, main
from lit_rlhf.cli.registry import COMMANDS, STAGES
from lit_rlhf.terminal import fold
from lit_rlhf.tools.commands.report import USAGE


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_help_lists_all_commands_and_fits_the_terminal(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    names = (*STAGES, *COMMANDS)
    for words in ([], ["-h"], ["--help"], *([name, "--help"] for name in names)):
        with suppress(SystemExit):
            main(words)
        shown = capsys.readouterr().out.splitlines()
        assert len(shown) > 3
        assert [line for line in shown if len(line) > columns] == [], words
        listed = {line.split()[0] for line in shown if line[2:].strip()}
        assert len(words) > 1 or listed >= {*names}
    assert fold(USAGE) == USAGE or columns < 80  # no line is broken in two


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "lit_rlhf", "--version"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output == f"lit_rlhf {lit_rlhf.__version__}\n"


def run_code(*lines: str) -> subprocess.CompletedProcess[str]:
    first = ("import sys", "before = set(sys.modules)", "from lit_rlhf.cli.main import main")
    code = "\n".join([*first, *lines])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_python_without_docstrings_is_refused_in_one_line() -> None:
    command = [sys.executable, "-OO", "-m", "lit_rlhf", "generate", "--help"]
    output = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (output.returncode, output.stdout) == (2, "")
    assert output.stderr.startswith("lit_rlhf: expected docstrings, of which")
    assert output.stderr.count("\n") == 1


def test_help_version_and_mistyped_names_do_not_wait_for_libraries() -> None:
    calls = (["--help"], ["--version"], ["fti", "--config", "a.yaml"], ["fit", "--help"])
    attempts = [f"try: main({call})\nexcept SystemExit: pass" for call in calls]
    imported = "{name.partition('.')[0] for name in sys.modules.keys() - before}"
    process = run_code(*attempts, f"print(sorted({imported} - sys.stdlib_module_names))")
    # the core of lit_callbacks needs no library either
    assert process.stdout.splitlines()[-1] == "['lit_callbacks', 'lit_rlhf']"
    attempt = "try: main(['fit', '--config', 'quickstart/ppo_mx'])"
    ran = run_code(attempt, "finally: assert 'torch' not in sys.modules")
    assert ran.returncode == 2
    assert "did you mean quickstart/ppo_max?" in ran.stderr
    assert ran.stderr.count("\n") == 1


HEAVY = {"torch", "transformers", "lightning", "datasets", "pandas", "matplotlib"}


@pytest.mark.parametrize("name", [*COMMANDS])
def test_help_of_a_command_does_not_wait_for_libraries(name: str) -> None:
    ran = run_code(
        f"try: main([{name!r}, '--help'])",
        "except SystemExit: pass",
        f"print(sorted({HEAVY!r} & sys.modules.keys()))",
    )
    assert ran.stderr == ""
    assert ran.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "hi", "--models", "no/such/model"], "got 'no/such/model', which is not a"),
        (["generate", "--models", "a"], "expected exactly one of them"),
        (["evaluate", "--policies", "a", "--prompts", "lost.jsonl"], "lost.jsonl: no such file"),
        (["evaluate", "--polices", "a"], "did you mean policies?"),
        (["start", "lost.csv"], "lost.csv: no such file"),
        (["init", "--data", "lost.csv", "--output_dir", "x"], "lost.csv: no such file"),
        (["export", "--checkpoint", "lost.ckpt", "--output", "x"], "lost.ckpt: does not exist"),
        (["show", "lost"], "got no file lost"),
        (
            ["evaluate", "--policies", "a", "--prompts", "b", "--rewards", "{no/such/model: 1}"],
            "rewards: expected a folder with a model or a hub id (name or owner/name), got 'no/s",
        ),
        (
            ["report", "reward", "--model", "a", "--preferences", "name=lost.csv"],
            "lost.csv: no such file",
        ),
        (["reward", "bench", "--models", "a", "--questions", "lost.jsonl"], "lost.jsonl: no such"),
        (["reward", "probe", "--rewards", "{a: 1}", "--data", "lost.csv"], "lost.csv: no such"),
        (["doctor", "--config", "quickstart/ppo_max"], "; this prepares it: lit_rlhf lab world"),
        (["fit", "--config", "quickstart/sft"], "model.model_path: expected a folder with a model"),
        (
            ["fit", "--config", "quickstart/sft", "--model.model_path", "own/model"],
            "runs/quickstart/world/demonstrations.jsonl: no such file; this prepares it: lit_rlhf",
        ),
        (
            ["fit", "--config=quickstart/ppo_max", "--model.init_args={model_path: own/model}"],
            "model.rewards: expected a folder with a model or a hub id (name or owner/name), got '",
        ),
        (
            [
                *("fit", "--config", "quickstart/sft", "--model.model_path=own/model"),
                *("--data.train_sources", "[{path: own/data}]", "--ckpt_path=lost.ckpt"),
            ],
            "--ckpt_path: expected a checkpoint, or last for the newest, got lost.ckpt",
        ),
    ],
)
def test_a_wrong_path_or_option_is_told_before_torch_is_imported(
    words: list[str], said: str
) -> None:
    ran = run_code(
        f"try: main({words!r})", "finally: print('torch' in sys.modules, file=sys.stderr)"
    )
    assert ran.returncode != 0
    assert said in ran.stderr
    assert "False" in ran.stderr.splitlines()


@pytest.mark.slow
def test_fit_imports_no_library_that_it_does_not_need(tmp_path: Path) -> None:
    lines = [
        "import gc",
        f"sys.argv[1:] = 'fit', '--config', 'quickstart/sft', '--model.model_path', '{tmp_path}'",
        f"sys.argv += '--data.train_sources', '[{{path: {tmp_path}}}]', '--data.val_sources', '[]'",
        "try: main()",  # to its first line; no model is in the folder
        "except SystemExit: assert gc.get_freeze_count() > 1e5",
        "unused = {'deepspeed', 'lm_eval', 'openai', 'gguf', 'IPython'} & sys.modules.keys()",
        "print(len(sys.modules), unused)",
    ]
    ran = run_code(*lines)
    assert "Seed set to 0" in ran.stderr
    modules, unused = ran.stdout.splitlines()[-1].split(maxsplit=1)
    assert unused == "set()"
    assert int(modules) <= 6000  # there were 5,400


def test_help_all_is_lightnings_help(monkeypatch: Any, capsys: Any) -> None:
    seen: list[Sequence[str]] = []
    monkeypatch.setattr("lit_rlhf.cli.training.main", seen.append)
    main(["fit", "--help_all"])
    assert seen == [["fit", "--help"]]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    main(["fit", "--help_all"])
    assert capsys.readouterr().err == "loading torch and Lightning ...\n"  # somebody waits for it
    monkeypatch.setenv("LOCAL_RANK", "1")  # Lightning runs the command again for each other rank
    main(["fit", "--help_all"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["fti", "--config", "a.yaml"], "lit_rlhf: no command 'fti'; did you mean fit? (lit_rlhf"),
        (["--verison"], "no command '--verison'; did you mean --version? (lit_rlhf --help lists"),
        (["frobnicate"], "no command 'frobnicate' (lit_rlhf --help lists all)\n"),
        (["chat"], "lit_rlhf generate --models FOLDER --chat"),
        (["help"], "lit_rlhf --help"),
        (["train"], "lit_rlhf fit --config NAME"),
        (["predict"], "lit_rlhf generate writes"),
        (["fit", "quickstart/sft"], "lit_rlhf fit --config quickstart/sft"),
        (["fit", "mine.yaml"], "lit_rlhf fit --config mine.yaml"),
    ],
)
def test_near_miss_is_answered_with_the_right_word(
    capsys: pytest.CaptureFixture[str], words: list[str], advice: str
) -> None:
    with pytest.raises(SystemExit) as error:
        main(words)
    message = capsys.readouterr().err
    assert (error.value.code, message.count("\n")) == (2, 1)
    assert advice in message


def test_command_hides_notes_of_libraries_and_finds_no_modules_in_the_current_folder(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("lit_rlhf.tools.commands.generate.main", print, raising=False)
    monkeypatch.setattr(logging.getLogger("bitsandbytes"), "level", logging.NOTSET)
    main(["generate"])
    assert str(tmp_path) not in sys.path
    assert logging.getLogger("bitsandbytes").level == logging.ERROR


def test_deleted_folder_is_told_in_one_line(tmp_path: Path, capsys: Any) -> None:
    tmp_path.rmdir()
    with pytest.raises(SystemExit):
        main(["generate"])
    assert capsys.readouterr().err == "lit_rlhf: the current folder has been deleted\n"
    tmp_path.mkdir()


def test_error_of_a_thread_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    def fill() -> None:  # as TensorBoard's writer, whose names are bytes
        with open(b"/dev/full", "ab") as file:
            file.write(b"a value")

    for fail in (fill, {}.popitem):
        with patch("threading.excepthook", _tell_error_of_thread):
            thread = threading.Thread(target=fail)
            thread.start()
            thread.join()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "lit_rlhf: [Errno 28] No space left on device"
    assert lines[1].startswith("Exception in thread")


@pytest.mark.parametrize("error", [MemoryError(), ImportError("torch.so: failed to map segment")])
def test_memory_that_is_too_small_for_imports_is_told(error: Exception, capsys: Any) -> None:
    module = "lit_rlhf.cli.main.importlib.import_module"
    with patch(module, side_effect=error), pytest.raises(SystemExit, match="2"):
        main(["generate", "--models", "a"])
    assert capsys.readouterr().err == "lit_rlhf generate: the memory is too small to start\n"


def test_a_path_that_is_too_long_for_the_system_ends_in_a_line() -> None:
    with pytest.raises(SystemExit, match=r"^lit_rlhf fit: error: .*File name too long") as ended:
        main(["fit", "--model.model_path", "é" * 300])
    assert "\n" not in str(ended.value)
