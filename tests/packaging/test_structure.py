"""A rule of the source tree that no linter checks."""

import ast
from pathlib import Path

CALLBACKS = Path(__file__).resolve().parents[2] / "callbacks" / "lit_callbacks"

# the step of Lightning's loggers, which has no public name, and a documented method of NamedTuple
WITHOUT_PUBLIC_NAME = {"_batches_that_stepped", "_replace"}


def test_callbacks_use_only_what_lightning_documents() -> None:
    found = []
    for file in CALLBACKS.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Attribute):
                of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
                names = [] if of_self or node.attr.startswith("__") else [node.attr]
            elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("lightning"):
                names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            private = {name for name in names if name.startswith("_")} - WITHOUT_PUBLIC_NAME
            found += [f"{file}:{node.lineno} {name}" for name in private]
    assert found == []
