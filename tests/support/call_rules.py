"""Rules on calls and signatures that ruff does not have: squeezed calls hide swapped arguments.

`python -m tests.support.call_rules [PATH ...]` lists what breaks them, one place a line, and fails
if there is any. In tests and benchmarks only the rules on calls and aliases hold. A line whose form
another library asks for has the comment `# call rules: REASON`.
"""

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
EXCEPTION = "# call rules: "
PACKAGES = (ROOT / "lit_rlhf", ROOT / "callbacks" / "lit_callbacks")
OTHER_FOLDERS = tuple(ROOT / name for name in ("benchmarks", "experiments", "tests"))
MAX_POSITIONAL_ARGUMENTS = 5
"""Largest number of arguments by position at a call; PLR0917 of ruff is the rule for signatures."""
MIN_DESCRIBED_PARAMETERS = 3
"""A public function with at least this many parameters describes each in its `Args:` section."""

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (ast.Module, *FUNCTIONS)


class Breach(NamedTuple):
    """A place in a file that breaks a rule."""

    line: int
    message: str


def check_source(source: str, in_package: bool) -> list[Breach]:
    """Find what breaks the rules in a module.

    Args:
        source: Text of the module.
        in_package: Whether the rules on results, assignments and docstrings hold there, too.
    """
    tree = ast.parse(source)
    breaches = [*find_packed_tuples(tree), *find_tuple_aliases(tree), *find_long_calls(tree)]
    if in_package:
        breaches += [
            *find_tuple_results(tree),
            *find_double_assignments(tree),
            *find_undescribed_parameters(tree),
        ]
    lines = source.splitlines()
    return sorted(breach for breach in breaches if EXCEPTION not in lines[breach.line - 1])


def walk_scope(scope: ast.AST) -> Iterator[ast.AST]:
    """Walk the nodes of a module or function, but not the bodies of functions inside."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, FUNCTIONS):
            yield from walk_scope(node)


def find_packed_tuples(tree: ast.Module) -> Iterator[Breach]:
    """Find calls `f(*packed)` with a tuple that the same function has packed before."""
    for scope in (node for node in ast.walk(tree) if isinstance(node, SCOPES)):
        nodes = list(walk_scope(scope))
        packed = {
            target.id
            for node in nodes
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            for argument in call.args:
                starred = argument.value if isinstance(argument, ast.Starred) else None
                if isinstance(starred, ast.Name) and starred.id in packed:
                    yield Breach(
                        call.lineno,
                        f"arguments packed in {starred.id}: write them at the call, by keyword",
                    )


def find_tuple_aliases(tree: ast.Module) -> Iterator[Breach]:
    """Find aliases of types that are bare tuples of fields."""
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign)):
        if node.value is not None and is_tuple_of_fields(node.value):
            yield Breach(node.lineno, "alias of a bare tuple: define a NamedTuple")


def find_long_calls(tree: ast.Module) -> Iterator[Breach]:
    """Find calls with many arguments by position."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        n_positional = sum(not isinstance(argument, ast.Starred) for argument in call.args)
        if n_positional > MAX_POSITIONAL_ARGUMENTS:
            yield Breach(call.lineno, f"{n_positional} arguments by position: use keywords")


def find_tuple_results(tree: ast.Module) -> Iterator[Breach]:
    """Find functions that return bare tuples of fields."""
    for function in (node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)):
        if function.returns is not None and is_tuple_of_fields(function.returns):
            yield Breach(function.lineno, f"{function.name} returns a bare tuple: name its fields")


def find_double_assignments(tree: ast.Module) -> Iterator[Breach]:
    """Find assignments `a, b = x, y` that do not swap."""
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.Assign)):
        if not (isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)):
            continue
        targets = {ast.unparse(target) for target in node.targets[0].elts}
        # a swap, or a step of values that depend on each other, needs one statement
        if not any(ast.unparse(part) in targets for part in ast.walk(node.value) if is_name(part)):
            yield Breach(node.lineno, "several values assigned in one statement")


def find_undescribed_parameters(tree: ast.Module) -> Iterator[Breach]:
    """Find parameters of public functions that `Args:` does not describe."""
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef)):
        for function in owner.body:
            if not isinstance(function, FUNCTIONS) or function.name.startswith("_"):
                continue
            if any("override" in ast.unparse(d) for d in function.decorator_list):
                continue
            arguments = function.args
            positional = [*arguments.posonlyargs, *arguments.args]
            names = [argument.arg for argument in (*positional, *arguments.kwonlyargs)]
            names = [name for name in names if name not in ("self", "cls")]
            section = (ast.get_docstring(function) or "").partition("Args:")[2]
            missing = [name for name in names if f"    {name}: " not in section]
            if len(names) >= MIN_DESCRIBED_PARAMETERS and missing:
                yield Breach(
                    function.lineno, f"{function.name}: no entry in Args for {', '.join(missing)}"
                )


def is_name(node: ast.AST) -> bool:
    """Whether a node is a variable or an attribute."""
    return isinstance(node, ast.Name | ast.Attribute | ast.Subscript)


def is_tuple_of_fields(node: ast.expr) -> bool:
    """Whether an annotation is `tuple[A, B]`: neither `tuple[A, ...]` nor an empty tuple."""
    if isinstance(node, ast.BinOp):  # `tuple[A, B] | None`
        return is_tuple_of_fields(node.left) or is_tuple_of_fields(node.right)
    if not (isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("tuple", "Tuple")):
        return False
    fields = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    return len(fields) > 1 and not any(
        isinstance(field, ast.Constant) and field.value is Ellipsis for field in fields
    )


def python_files(paths: Sequence[Path]) -> Iterator[Path]:
    """Python files among the paths and below them."""
    for path in paths:
        yield from [path] if path.is_file() else sorted(path.rglob("*.py"))


def main(arguments: Sequence[str]) -> int:
    """Print the breaches below the given paths, or in the whole tree; return the exit status."""
    paths = [Path(argument).resolve() for argument in arguments] or [*PACKAGES, *OTHER_FOLDERS]
    n_breaches = 0
    for path in python_files(paths):
        in_package = any(path.is_relative_to(package) for package in PACKAGES)
        for breach in check_source(path.read_text("utf-8"), in_package):
            print(f"{path.relative_to(ROOT)}:{breach.line}: {breach.message}")
            n_breaches += 1
    print(f"{n_breaches} breaches", file=sys.stderr)
    return int(n_breaches > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
