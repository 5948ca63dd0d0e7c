import ast

import pytest

from tests.support.call_rules import check_source


@pytest.mark.parametrize(
    "source",
    [
        "def f(a, b):\n    both = a, b\n    return g(*both)",
        "Pair = tuple[int, str]",
        "Pair: TypeAlias = tuple[int, str]",
        "g(1, 2, 3, 4, 5, 6)",
        "def f() -> tuple[int, str]: ...",
        "def f() -> tuple[int, str] | None: ...",
        "a, b = x, 1",
        "def f(a, b, c):\n    '''F.'''",
        "def f(a, b, c):\n    '''F.\n\n    Args:\n        a: A.\n        b: B.\n    '''",
        "class C:\n    def f(self, a, b, c):\n        '''F.'''",
    ],
)
def test_a_breach_is_found_once(source: str) -> None:
    ast.parse(source)
    assert len(check_source(source, in_package=True)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "def f(all_of_them):\n    return g(*all_of_them)",
        "Row = tuple[int, ...]",
        "g(1, 2, 3, 4, 5, f=6)",
        "def f() -> tuple[int, ...]: ...",
        "def f() -> Iterator[tuple[int, str]]: ...",
        "a, b = b, a",
        "first, second = second, first + second",
        "a, b = f()",
        "def f() -> tuple[int, str]:  # call rules: a hook of torch\n    ...",
        "def f(a, b): ...",
        "def _f(a, b, c): ...",
        "def f(a, b, c):\n    '''F.\n\n    Args:\n        a: A.\n"
        "        b: B.\n        c: C.\n    '''",
    ],
)
def test_what_keeps_the_rules_is_not_listed(source: str) -> None:
    assert check_source(source, in_package=True) == []


def test_results_and_docstrings_of_tests_are_free() -> None:
    assert check_source("def f(a, b, c) -> tuple[int, str]: ...", in_package=False) == []
    assert len(check_source("g(1, 2, 3, 4, 5, 6)", in_package=False)) == 1
