"""Mutants are what they are said to be, and reach functions that were imported before."""

import subprocess
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest

from tests.mutation.__main__ import (
    FUNCTIONS,
    ROOT,
    changed_lines,
    find_tests,
    read_equivalents,
    replace_code,
    use_forked_ranks,
)
from tests.mutation.mutants import make_mutants
from tests.support import ranks

SOURCE = '''"""A module."""
from typing import Literal
Kind = Literal["a", "b"]

def clipped(x: float, bound: float = 2.0) -> float:
    """Clip 1 number."""
    check_positive("bound", bound)
    if bound <= 0:
        raise ValueError("bound: expected more than 0")
    return min(x.detach(), bound) - offset(size=x)
'''


def test_mutants_of_a_function_are_all_its_changes() -> None:
    changes = [(m.line, m.was, m.now) for m in make_mutants("module.py", SOURCE)]
    call, result = "min(x.detach(), bound)", "min(x.detach(), bound) - offset(size=x)"
    assert set(changes) == {
        (5, "2.0", "4.0"),
        (5, "2.0", "1.0"),
        (7, 'check_positive("bound", bound)', "pass"),
        (8, "bound <= 0", "True"),
        (8, "bound <= 0", "False"),
        (8, "bound <= 0", "(bound < 0)"),
        (8, "bound <= 0", "(bound > 0)"),
        (8, "0", "1"),
        (8, "0", "(-1)"),
        (10, result, f"({call} + offset(size=x))"),
        (10, "min", "max"),
        (10, "x.detach()", "x"),
        (10, "offset(size=x)", "offset()"),
    }
    assert len(changes) == 13


def test_functions_to_change_can_be_chosen() -> None:
    source = SOURCE + SOURCE.replace("clipped", "other")
    mutants = make_mutants("module.py", source, ("other",))
    assert {m.function for m in mutants} == {"other"}
    assert all(m.text in source for m in mutants)


CODE = """
BOUND = 1
TABLE = {"a": (1, 2)}

def function(x=1):
    return x + BOUND + TABLE["a"][0] - 1

class Class:
    @property
    def size(self):
        return 1

    def method(self):
        return 1

import enum
Level = enum.IntEnum("Level", "LOW HIGH")
"""


@pytest.mark.parametrize("name", ["function", "method", "size"])
def test_imported_function_runs_the_new_code(name: str) -> None:
    module = ModuleType("module")
    module.__file__ = "module.py"
    exec(CODE, vars(module))
    function, thing = module.function, module.Class()

    def results() -> dict[str, int]:
        return {"function": function(), "method": thing.method(), "size": thing.size}

    assert results() == {"function": 2, "method": 1, "size": 1}
    for was, now, change in (
        ("BOUND = 1", "BOUND = 5", {"function": 6}),
        ("(1, 2)", "(5, 2)", {"function": 6}),
        ("x=1", "x=5", {"function": 6}),
        ("x + BOUND", "x - BOUND", {"function": 0}),
        ("size(self):\n        return 1", "size(self):\n        return 5", {"size": 5}),
        ("method(self):\n        return 1", "method(self):\n        return 5", {"method": 5}),
    ):
        if name in change:
            replace_code(module, CODE.replace(was, now))
            assert results() == {"function": 2, "method": 1, "size": 1} | change
            replace_code(module, CODE)
    assert results() == {"function": 2, "method": 1, "size": 1}


@pytest.mark.parametrize(
    ("module", "tests"),
    [
        ("lit_rlhf/data/samplers.py", "tests/data/test_samplers.py"),
        ("lit_rlhf/data/datamodules/base.py", "tests/data/test_datamodules.py"),
        ("callbacks/lit_callbacks/verdict.py", "tests/callbacks/test_verdict.py"),
        ("experiments/reproduce/table.py", "tests/experiments/test_reproduce.py"),
    ],
)
def test_tests_of_a_module_are_found_by_its_name(module: str, tests: str) -> None:
    assert find_tests(module) == (tests,)


def test_changed_lines_differ_from_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.mutation.__main__.ROOT", tmp_path)
    for name, value in {"HOME": tmp_path, "GIT_CONFIG_NOSYSTEM": 1}.items():
        monkeypatch.setenv(name, str(value))
    file = tmp_path / "lit_rlhf" / "a.py"
    file.parent.mkdir()
    file.write_text("1\n2\n3\n4\n")
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "a"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    file.write_text("1\n5\n3\n6\n7\n")  # not committed
    assert changed_lines("HEAD") == {"lit_rlhf/a.py": {2, 4, 5}}


DEFECTS: list[int] = []


def seen(rank: int) -> list[int]:
    return DEFECTS


def test_ranks_have_the_defect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "start_processes", ranks.start_processes)  # to be restored
    # as in a fork
    monkeypatch.setattr(ranks, "ensure_running", Mock(side_effect=ChildProcessError))
    monkeypatch.setattr("tests.mutation.test_mutation.DEFECTS", [7])
    use_forked_ranks()
    assert ranks.run_on_ranks(seen, 2, tmp_path) == [[7], [7]]


@pytest.mark.slow
def test_entries_of_the_equivalents_are_mutants() -> None:
    entries = read_equivalents((ROOT / "tests/mutation/equivalents.txt").read_text("utf-8"))
    mutants = {
        (mutant.module, mutant.text, mutant.was, mutant.now)
        for module in {entry[0] for entry in entries}
        for mutant in make_mutants(
            module, (ROOT / module).read_text("utf-8"), FUNCTIONS.get(module, ("",))
        )
    }
    assert entries - mutants == set()
