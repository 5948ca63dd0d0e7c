"""Small defects of a module: each mutant is its source with one expression or statement changed."""

import ast
from collections.abc import Iterator
from typing import NamedTuple

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd},
    **dict.fromkeys((ast.Div, ast.FloorDiv, ast.Mod, ast.Pow), ast.Mult),
    ast.Mult: ast.Div,
}
# names that are easily taken for each other
PAIRS = [("all", "any"), ("ceil", "floor"), ("max", "min"), ("maximum", "minimum")]
PAIRS += [("ones_like", "zeros_like"), ("advantages", "returns"), ("logprobs", "ref_logprobs")]
PAIRS += [("policy", "critic"), ("policy_optimizer", "critic_optimizer")]
NAMES = dict(PAIRS) | {other: one for one, other in PAIRS}
NAMES |= {"mean": "sum", "nanmean": "mean", "float64": "float32", "old_values": "returns"}
NAMES |= {"loss_mask": "rollouts.response_mask"}
DROPPED_METHODS = {"abs", "clamp", "clone", "detach", "double", "flip", "float", "long"}
DROPPED_METHODS |= {"masked_fill", "square", "to"}
SYMMETRIC = {"isinstance", "max", "min", "maximum", "minimum", "ones", "zeros", "print"}
# types and messages, which tests of behaviour do not see
SKIPPED_NODES = (ast.Raise, ast.Import, ast.ImportFrom, ast.Assert, ast.JoinedStr)
SKIPPED_FIELDS = {"annotation", "returns", "decorator_list"}


class Mutant(NamedTuple):
    """A module with a defect: the line as it was, what stood there, and what stands there now."""

    module: str
    function: str
    line: int
    text: str
    was: str
    now: str
    source: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.function}: `{self.was}` -> `{self.now}`"


def make_mutants(module: str, source: str, functions: tuple[str, ...] = ("",)) -> list[Mutant]:
    """All mutants of a module in functions whose names begin so, in the order of its lines."""
    mutants, tree = [], ast.parse(source)
    clean, lines = ast.dump(tree), source.splitlines()
    for node, function in _nodes(tree, ""):
        if not function.startswith(functions):
            continue
        for now in dict.fromkeys(_variants(node)):
            was, changed = _replace(source, node, now)
            try:
                same = ast.dump(ast.parse(changed)) == clean
            except SyntaxError:
                continue
            if not same:
                text = lines[node.lineno - 1].strip()
                mutants.append(
                    Mutant(
                        module=module,
                        function=function,
                        line=node.lineno,
                        text=text,
                        was=was,
                        now=now,
                        source=changed,
                    )
                )
    return sorted(mutants, key=lambda mutant: mutant.line)


def _nodes(node: ast.AST, function: str) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Expressions and statements that may be changed, with the function that they are in."""
    if isinstance(node, SKIPPED_NODES) or _is_literal_type(node):
        return
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}".lstrip(".")
    if isinstance(node, ast.expr | ast.stmt):
        yield node, function
    for field, value in ast.iter_fields(node):
        if field in SKIPPED_FIELDS:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not (_is_docstring(child) or _is_name(node, child)):
                yield from _nodes(child, function)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_name(node: ast.AST, child: ast.AST) -> bool:
    """Whether `child` is the name of an argument in the call of a check."""
    if not (isinstance(node, ast.Call) and ast.unparse(node.func).startswith("check_")):
        return False
    return isinstance(child, ast.Constant) and isinstance(child.value, str)


def _is_literal_type(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id == "__all__"
    return isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal"


def _variants(node: ast.expr | ast.stmt) -> Iterator[str]:
    """Text that may replace a node."""
    match node:
        case ast.Constant():
            yield from _constants(node.value)
        case ast.Compare():
            for index, operator in enumerate(node.ops):
                for other in COMPARISONS[type(operator)]:
                    ops = [*node.ops[:index], other(), *node.ops[index + 1 :]]
                    yield _text(ast.Compare(node.left, ops, node.comparators))
        case ast.BinOp() if type(node.op) in OPERATORS:
            yield _text(ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right))
        case ast.UnaryOp():
            yield _text(node.operand)
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield _text(ast.BoolOp(other, node.values))
        case ast.IfExp():
            yield _text(node.body)
            yield _text(node.orelse)
        case ast.Name(id=name) if name in NAMES and isinstance(node.ctx, ast.Load):
            yield NAMES[name]
        case ast.Attribute(attr=name) if name in NAMES and isinstance(node.ctx, ast.Load):
            yield f"{_text(node.value)}.{NAMES[name]}"
        case ast.Call():
            yield from _calls(node)
        case ast.If() | ast.While():
            yield from ("True", "False")  # in place of its condition
        case ast.Expr(value=ast.Call()) if "super()" in ast.unparse(node):
            return  # nothing of the object works without it
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "pass"


def _constants(value: object) -> Iterator[str]:
    match value:
        case bool():
            yield str(not value)
        case int():
            yield from (str(value + 1), f"({value - 1})")
        case float():
            yield from ([str(value * 2), str(value / 2)] if value else ["1.0"])
        case str() if " " not in value:  # prose is for readers
            yield repr(value + "_")


def _calls(node: ast.Call) -> Iterator[str]:
    if isinstance(node.func, ast.Attribute) and node.func.attr in DROPPED_METHODS:
        yield _text(node.func.value)
    if isinstance(node.func, ast.Name) and node.func.id == "reversed":
        yield _text(node.args[0])
    for index, keyword in enumerate(node.keywords):
        if keyword.arg == "device":
            continue  # the tests run on a single device
        other_keywords = [*node.keywords[:index], *node.keywords[index + 1 :]]
        yield _text(ast.Call(node.func, node.args, other_keywords))
    plain = all(isinstance(arg, ast.Name | ast.Attribute) for arg in node.args[:2])
    called = ast.unparse(node.func).rpartition(".")[2]
    if len(node.args) > 1 and plain and called not in SYMMETRIC:
        swapped = [node.args[1], node.args[0], *node.args[2:]]
        yield _text(ast.Call(node.func, swapped, node.keywords))


def _text(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if isinstance(node, ast.Name | ast.Attribute | ast.Call) else f"({text})"


def _replace(source: str, node: ast.expr | ast.stmt, now: str) -> tuple[str, str]:
    """The text of a node, and the source with `now` in its place."""
    place = node.test if isinstance(node, ast.If | ast.While) else node
    encoded = source.encode()
    lines = encoded.splitlines(keepends=True)
    start = sum(map(len, lines[: place.lineno - 1])) + place.col_offset
    end = sum(map(len, lines[: place.end_lineno - 1])) + place.end_col_offset
    parts = (encoded[:start], encoded[start:end], encoded[end:])
    before, was, after = (part.decode() for part in parts)
    return " ".join(was.split()), before + now + after
