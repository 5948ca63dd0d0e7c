"""Functions named as `package.module:function`."""

import sys
from pathlib import Path

import pytest

from lit_rlhf.imports import import_function

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
