"""Functions named as `package.module:function`."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lit_rlhf.imports import current_folder, import_class_module, import_function

FUNCTIONS = "tests.support.reward_functions"


@pytest.mark.parametrize(
    ("code", "error"), [("exit(0)", r"SystemExit\(0\)"), ("def f(:", r"SyntaxError\('invalid")]
)
def test_exit_of_an_imported_module_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, error: str
) -> None:
    monkeypatch.delitem(sys.modules, "exits_at_import", raising=False)
    (tmp_path / "exits_at_import.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"'exits_at_import:score': .* ends with {error}"):
        import_function("exits_at_import:score", "reward function")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:score", "expected 'package.module:function'; No module named 'no_such"),
        (f"{FUNCTIONS}:no_such_name", "expected 'package.module:function'; .*'no_such_name'"),
        (f"{FUNCTIONS}:not_callable", "expected a callable, got int"),
        (":score", "expected 'package.module:function'"),
        (f"{FUNCTIONS}:", "expected 'package.module:function'"),
    ],
)
def test_missing_function_is_named(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"reward function '{path}': {message}"):
        import_function(path, "reward function")


def test_missing_module_says_where_it_is_looked_for() -> None:
    with pytest.raises(ValueError, match="must be in the current folder or in one of PYTHONPATH"):
        import_function("my_rewards:score", "reward function")
    with pytest.raises(ValueError, match=r"no_such_part'$"):
        import_function("tests.no_such_part:score", "reward function")


def test_folder_is_on_the_path_only_while_a_module_of_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "own_helper.py").write_text("SCORE = 2.0")
    (tmp_path / "own_rewards.py").write_text(
        "import sys\nfrom own_helper import SCORE\nPATH = list(sys.path)\n"
        "def score(prompts, responses): return [SCORE] * len(responses)\n"
    )
    score = import_function("own_rewards:score", "reward function")
    assert score(["a"], ["b"]) == [2.0]
    assert sys.modules["own_rewards"].PATH[-1] == str(tmp_path)
    assert str(tmp_path) not in sys.path


def test_name_of_an_installed_module_does_not_put_the_folder_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "optional_part.py").write_text("raise AssertionError")
    package = tmp_path.parent / "installed"
    package.mkdir(exist_ok=True)
    (package / "library_with_options.py").write_text(
        "try: import optional_part\nexcept ImportError: pass\ndef score(): pass\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(package)
        import_function("library_with_options:score", "reward function")


@pytest.mark.slow
def test_command_runs_no_file_of_a_hostile_folder(tmp_path: Path) -> None:
    """Names that libraries look for, though they are not installed, and that are run if found."""
    planted = ["gmpy2", "h2", "kernels", "socksio", "brotli", "zstandard", "sitecustomize"]
    for name in planted:
        if find_spec(name) is None:
            text = f"open({str(tmp_path / 'ran.txt')!r}, 'a').write({name!r})\nraise ImportError"
            (tmp_path / f"{name}.py").write_text(text)
    code = (
        "import sys; sys.path.remove(''); from lit_rlhf.cli.main import main\n"
        "main(['fit', '--config', 'quickstart/sft'])"
    )
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = subprocess.run(
        command, env=environment, capture_output=True, check=False, cwd=tmp_path, text=True
    )
    assert "model.model_path: expected a folder with a model" in ran.stderr
    assert not (tmp_path / "ran.txt").exists()


def test_no_other_python_is_started_with_the_current_folder_on_its_path(tmp_path: Path) -> None:
    """The parser's library would ask one for its path, to look for stubs of types there."""
    (tmp_path / "json.py").write_text(f"open({str(tmp_path / 'ran.txt')!r}, 'a')")
    code = (
        "import sys; sys.path.remove(''); import lit_rlhf.parser\n"
        "from jsonargparse._stubs_resolver import get_stubs_resolver; get_stubs_resolver()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, cwd=tmp_path)
    assert not (tmp_path / "ran.txt").exists()


def test_class_of_the_current_folder_is_imported_when_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "own_callbacks.py").write_text("class Silent: pass")
    (tmp_path / "own_records.py").write_text("raise AssertionError")
    (tmp_path / "own_records.JSON").write_text("[]")
    for name in ("own_callbacks.Silent", "own_records.JSON", "no_module_here.Callback", "Callback"):
        import_class_module(name)
    assert sys.modules["own_callbacks"].Silent
    assert str(tmp_path) not in sys.path
    (tmp_path / "needs_others.py").write_text("import no_such_package")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        import_class_module("needs_others.Callback")


def test_modules_come_from_the_folder_that_the_command_was_started_in(tmp_path: Path) -> None:
    """Parsing a configuration changes to its folder."""
    (tmp_path / "own_starting_point.py").write_text("def score(): pass")
    (tmp_path / "configs").mkdir()
    with current_folder(str(tmp_path)), pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path / "configs")
        import_function("own_starting_point:score", "reward function")
