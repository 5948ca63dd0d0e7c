"""Measures what the code costs to read: `make budgets` prints a report.

There are no limits. Limits on lines are met by layout, which makes code harder to read.
"""

import ast
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from lit_rlhf.modules import PPOModule
from tests.support.stages import fit_module, ppo_options, prompts, write_data, write_models

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (ROOT / "lit_rlhf", ROOT / "callbacks" / "lit_callbacks")
TOP_FOLDERS = ("lit_rlhf", "callbacks", "tests", "benchmarks", "experiments")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BLOCKS = (ast.Module, ast.ClassDef, *FUNCTIONS)


class Place(NamedTuple):
    """Where a function begins.

    Attributes:
        path: Its file.
        line: Its first line, decorators included.
    """

    path: Path
    line: int


def trace_iteration() -> set[Place]:
    """Functions of the project that run in one PPO iteration."""
    seen: set[Place] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and any(path.is_relative_to(package) for package in PACKAGES):
            seen.add(Place(path, frame.f_code.co_firstlineno))

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
        fit_module(
            module, prompts(root, ptx=True), root / "run", max_epochs=1, limit_train_batches=1
        )
    return seen


def functions_of(path: Path) -> dict[int, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions of a file by their first line, decorators included."""
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    functions = [node for node in nodes if isinstance(node, FUNCTIONS)]
    return {min([n.lineno, *(d.lineno for d in n.decorator_list)]): n for n in functions}


def measure_iteration() -> dict[str, int]:
    """Files, functions and lines that a reader of one iteration meets."""
    lines: set[Place] = set()
    functions: set[Place] = set()
    for place in trace_iteration():
        function = functions_of(place.path).get(place.line)
        if function is not None:  # not a lambda or a comprehension
            functions.add(place)
            last = function.end_lineno or place.line
            lines |= {Place(place.path, line) for line in range(place.line, last + 1)}
    return {
        "files of an iteration": len({place.path for place in functions}),
        "functions of an iteration": len(functions),
        "lines of an iteration": len(lines),
    }


def count_statements(source: str) -> int:
    """Statements of a module; docstrings do not count."""
    nodes = list(ast.walk(ast.parse(source)))
    statements = sum(isinstance(node, ast.stmt) for node in nodes)
    documented = (node for node in nodes if isinstance(node, BLOCKS))
    return statements - sum(ast.get_docstring(node, clean=False) is not None for node in documented)


def tracked_files(folder: str) -> Iterator[Path]:
    """Python files of a folder that git tracks."""
    command = ["git", "ls-files", f"{folder}/**.py", f"{folder}/*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in sorted(set(listed.stdout.splitlines())):
        if (ROOT / name).exists():
            yield ROOT / name


def measure_folders() -> dict[str, int]:
    """Statements of the top folders, and of the folders of lit_rlhf and its tools."""
    inner = [
        f"{parent}/{file.parent.name}"
        for parent in ("lit_rlhf", "lit_rlhf/tools")
        for file in sorted((ROOT / parent).glob("*/__init__.py"))
    ]
    return {
        f"statements of {folder}": sum(
            count_statements(file.read_text("utf-8")) for file in tracked_files(folder)
        )
        for folder in (*TOP_FOLDERS, *inner)
        if (ROOT / folder).exists()
    }


def count_methods(cls: type) -> int:
    """Methods and properties of a class that the project defines, its bases included."""
    return len(
        {
            name
            for base in cls.__mro__
            if base.__module__.partition(".")[0] in ("lit_rlhf", "lit_callbacks")
            for name, member in vars(base).items()
            if callable(member) or isinstance(member, property | classmethod | staticmethod)
        }
    )


def measure() -> dict[str, int]:
    """All numbers by what they count."""
    return {
        **measure_iteration(),
        "methods of PPOModule with its bases": count_methods(PPOModule),
        **measure_folders(),
    }


def main() -> None:
    """Print the report."""
    for name, number in measure().items():
        print(f"{name:<44}{number:>8,}")


if __name__ == "__main__":
    main()
