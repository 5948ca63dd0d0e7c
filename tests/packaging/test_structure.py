"""Rules of the source tree that no linter checks."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
CALLBACKS = ROOT / "callbacks" / "lit_callbacks"

# the step of Lightning's loggers, which has no public name, and a documented method of NamedTuple
WITHOUT_PUBLIC_NAME = {"_batches_that_stepped", "_replace"}


def test_callbacks_use_only_what_lightning_documents() -> None:
    undocumented = []
    for file in CALLBACKS.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Attribute):
                of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
                names = [] if of_self or node.attr.startswith("__") else [node.attr]
            elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("lightning"):
                names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            private = {name for name in names if name.startswith("_")} - WITHOUT_PUBLIC_NAME
            undocumented += [f"{file}:{node.lineno} {name}" for name in private]
    assert undocumented == []


def find_imports(source: str) -> list[str]:
    """Full names of the modules, and of what is taken from them, that a module imports."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names += [f"{module}.{alias.name}" for alias in node.names]
    return names


def test_experiments_import_nothing_from_benchmarks() -> None:
    # which use what experiments share: results, processes and judgements
    imports = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in sorted((ROOT / "experiments").rglob("*.py"))
        for name in find_imports(file.read_text("utf-8"))
        if name.partition(".")[0] == "benchmarks"
    ]
    assert imports == []


def find_forbidden_imports(path: str, source: str) -> list[str]:
    """What a module of the tests imports from tests other than `tests.support`.

    Tools in a folder of their own (`tests/faults`, `tests/mutation`) may import from it, and so
    may the test of the tool.

    Args:
        path: Path of the module below `tests`, with slashes.
        source: Text of the module.
    """
    folder = path.rpartition("/")[0].replace("/", ".")
    allowed = ["tests.support."]
    if folder in ("faults", "mutation"):
        allowed.append(f"tests.{folder}.")
    return [
        name
        for name in find_imports(source)
        if name.partition(".")[0] in ("tests", "")
        and (
            not name.startswith(tuple(allowed))
            or any(part == "conftest" or part.startswith("test_") for part in name.split("."))
        )
    ]


@pytest.mark.parametrize(
    ("path", "statement", "forbidden"),
    [
        ("data/test_a.py", "from tests.support.stages import prompts", False),
        ("data/test_a.py", "from tests.data.test_b import rows", True),
        ("data/test_a.py", "from tests.data import test_b", True),
        ("data/test_a.py", "import tests.data.test_b", True),
        ("data/test_a.py", "from .test_b import rows", True),
        ("data/test_a.py", "from . import conftest", True),
        ("data/test_a.py", "from tests import conftest", True),
        ("data/test_a.py", "from tests.mutation.mutants import make_mutants", True),
        ("support/stages.py", "from tests.support.test_call_rules import ROOT", True),
        ("mutation/test_mutation.py", "from tests.mutation.mutants import make_mutants", False),
    ],
)
def test_forbidden_import_is_noticed(path: str, statement: str, forbidden: bool) -> None:
    assert bool(find_forbidden_imports(path, statement)) == forbidden


def test_tests_import_from_no_tests_but_support() -> None:
    forbidden = []
    for file in sorted(TESTS.rglob("*.py")):
        path = file.relative_to(TESTS).as_posix()
        names = find_forbidden_imports(path, file.read_text("utf-8"))
        forbidden += [f"tests/{path}: {name}" for name in names]
    assert forbidden == []
