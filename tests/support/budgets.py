"""Measures what the code costs to read, and compares it with the budgets in `pyproject.toml`.

`make budgets` prints each number with its budget and fails above one. A change that needs more
raises the budget in the same commit.
"""

import ast
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from lit_rlhf.modules import PPOModule
from tests.support.stages import fitted, ppo_options, prompts, write_data, write_models

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (ROOT / "lit_rlhf", ROOT / "callbacks" / "lit_callbacks")
CARRIERS = {"dataclass", "NamedTuple", "TypedDict"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def trace_iteration() -> set[tuple[Path, int]]:
    """Files and first lines of the project's functions that run in one PPO iteration."""
    seen: set[tuple[Path, int]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and any(path.is_relative_to(package) for package in PACKAGES):
            seen.add((path, frame.f_code.co_firstlineno))

    class Traced(PPOModule):
        def training_step(self, *arguments: Any) -> Any:
            sys.setprofile(note)
            threading.setprofile(note)
            try:
                return super().training_step(*arguments)
            finally:
                sys.setprofile(None)
                threading.setprofile(None)

    with tempfile.TemporaryDirectory() as folder:
        root = write_models(write_data(Path(folder)))
        module = Traced(**ppo_options(root))
        fitted(module, prompts(root, ptx=True), root / "run", max_epochs=1, limit_train_batches=1)
    return seen


def functions_of(path: Path) -> dict[int, Function]:
    """Functions of a file by their first line, decorators included."""
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    functions = [node for node in nodes if isinstance(node, Function)]
    return {min([n.lineno, *(d.lineno for d in n.decorator_list)]): n for n in functions}


def measure_iteration() -> dict[str, int]:
    """Files, functions and lines that a reader of one iteration meets."""
    lines, functions = set(), set()
    for path, first in trace_iteration():
        function = functions_of(path).get(first)
        if function is not None:  # not a lambda or a comprehension
            functions.add((path, first))
            lines |= {(path, line) for line in range(first, (function.end_lineno or first) + 1)}
    files = {path for path, _ in functions}
    return {"files": len(files), "functions": len(functions), "lines": len(lines)}


def count_lines(folder: str) -> int:
    """Lines of the Python files of a folder that git tracks."""
    command = ["git", "ls-files", f"{folder}/**.py", f"{folder}/*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files = {ROOT / name for name in listed.stdout.splitlines()}
    return sum(len(file.read_text("utf-8").splitlines()) for file in files if file.exists())


def folders() -> Iterator[str]:
    """The folders of lit_rlhf and of its tools."""
    for parent in ("lit_rlhf", "lit_rlhf/tools"):
        inside = sorted((ROOT / parent).glob("*/__init__.py"))
        yield from (f"{parent}/{file.parent.name}" for file in inside)


def count_carriers() -> int:
    """Dataclasses, NamedTuples and TypedDicts, which carry values from one place to another."""
    nodes = (
        node
        for package in PACKAGES
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
    )
    return sum(
        any(
            isinstance(part, ast.Name) and part.id in CARRIERS
            for head in (*cls.bases, *cls.decorator_list)
            for part in ast.walk(head)
        )
        for cls in nodes
        if isinstance(cls, ast.ClassDef)
    )


def imports_past_init() -> Iterator[str]:
    """Imports of names from a file inside another package of lit_rlhf, past its `__init__`."""
    for path in sorted((ROOT / "lit_rlhf").rglob("*.py")):
        own = path.relative_to(ROOT).parts[1]
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            parts = node.module.split(".")
            inside = ROOT.joinpath(*parts[:2]).is_dir() and len(parts) > 2
            if parts[0] == "lit_rlhf" and inside and parts[1] not in (own, "tools"):
                yield from (f"{path.name}: {node.module}.{name.name}" for name in node.names)


def count_methods(*classes: type) -> int:
    """Methods and properties that classes define themselves."""
    members = [member for cls in classes for member in vars(cls).values()]
    return sum(callable(m) or isinstance(m, property | classmethod) for m in members)


def measure() -> dict[str, int]:
    """All numbers by the names of their budgets."""
    from lit_rlhf.modules import StageModule

    counted = ("lit_rlhf", "callbacks", "tests", *folders())
    return {
        **{f"{name} of an iteration": number for name, number in measure_iteration().items()},
        **{f"lines of {name}": count_lines(name) for name in counted},
        "types that carry values": count_carriers(),
        "names past an __init__": len(list(imports_past_init())),
        "methods of PPOModule and StageModule": count_methods(PPOModule, StageModule),
    }


def main() -> None:
    """Print the numbers beside their budgets."""
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["budgets"]
    numbers = measure()
    over = budgets.keys() - numbers.keys()
    for name, number in numbers.items():
        budget = budgets.get(name, 0)  # a new folder needs a budget
        if number > budget:
            over.add(name)
        print(f"{name:<40}{number:>8,} of {budget:>6,}{'  over budget' * (number > budget)}")
    for name in budgets.keys() - numbers.keys():
        print(f"{name}: in pyproject.toml, but there is no such number")
    sys.exit(bool(over))


if __name__ == "__main__":
    main()
