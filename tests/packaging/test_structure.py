"""Rules of the source tree that no linter checks."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def sources(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def attributes(file: Path) -> Iterator[ast.Attribute]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            yield node


def place(file: Path, node: ast.expr | ast.stmt) -> str:
    return f"{file.relative_to(ROOT)}:{node.lineno}"


# the step of Lightning's loggers, which has no public name, and a documented method of NamedTuple
WITHOUT_PUBLIC_NAME = {"_batches_that_stepped", "_replace"}


def test_callbacks_use_only_what_lightning_documents() -> None:
    found = []
    for file in sources("callbacks/lit_callbacks"):
        for node in attributes(file):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            private = node.attr.startswith("_") and not node.attr.startswith("__")
            if private and owner != "self" and node.attr not in WITHOUT_PUBLIC_NAME:
                found.append(place(file, node))
        for statement in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(statement, ast.ImportFrom) and statement.module is not None:
                path = statement.module.split(".") + [alias.name for alias in statement.names]
                if path[0] == "lightning" and any(part.startswith("_") for part in path):
                    found.append(place(file, statement))
    assert found == []


@pytest.mark.parametrize("package", ["lit_rlhf", "lit_callbacks"])
def test_package_is_typed(package: str) -> None:
    folder = ROOT / package if package == "lit_rlhf" else ROOT / "callbacks" / package
    assert (folder / "py.typed").is_file()
