"""Reads YAML, without what silently means something else and what takes very long.

A key that is given twice is refused, of which the last would win; a plain `1:30` or `010`, which
YAML 1.1 reads as 90 and 8; and aliases that contain themselves or stand for very much.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from lit_callbacks.files import check_file

MAX_BYTES = 2**22
"""Largest size of a file."""

MAX_VALUES = 100_000
"""Most values of a document, with each alias counted as what it stands for."""

MAX_DEPTH = 50
"""Most levels of lists and mappings inside each other."""

_FLOAT = re.compile(
    r"""^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
    |\.[0-9_]+(?:[eE][-+][0-9]+)?
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)
"""Numbers as YAML 1.2 and jsonargparse write them, `1e-5` too."""
_INT = re.compile(
    r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)$",
)
"""Whole numbers as PyYAML writes them, without those to the bases 8 and 60."""
_BASE_60 = re.compile(
    r"[-+]?[1-9][0-9_]*(?::[0-5]?[0-9])+|[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*"
)
_BASE_8 = re.compile(r"[-+]?0[0-7_]+")
_INT_TAG = "tag:yaml.org,2002:int"
_FLOAT_TAG = "tag:yaml.org,2002:float"
_REPLACED_TAGS = (_INT_TAG, _FLOAT_TAG, "tag:yaml.org,2002:timestamp")


class StrictLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # C if it is built
    """PyYAML's safe loader with the numbers of YAML 1.2, and dates as text."""


# a copy: the resolvers of the base class are for everybody
StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED_TAGS]
    for first, resolvers in StrictLoader.yaml_implicit_resolvers.items()
}
StrictLoader.add_implicit_resolver(_INT_TAG, _INT, list("-+0123456789"))
StrictLoader.add_implicit_resolver(_FLOAT_TAG, _FLOAT, list("-+0123456789."))


def read_yaml(path: str | Path) -> Any:  # noqa: ANN401  # whatever the file holds
    """Read a file that may be anybody's.

    Args:
        path: The file.

    Raises:
        ValueError: If it is no file, or not YAML in UTF-8, or has something that this module
            refuses. The message begins with the path.
    """
    check_file(path, MAX_BYTES)
    try:
        return load_yaml(Path(path).read_bytes().decode("utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected YAML in UTF-8, got {error}") from error


def load_yaml(text: str) -> Any:  # noqa: ANN401  # whatever the document holds
    """Load a document.

    Args:
        text: The document.

    Raises:
        yaml.YAMLError: If it is no YAML, or has something that this module refuses.
    """
    try:
        _check_events(text)
    except yaml.MarkedYAMLError as error:
        if explained := _explain_tab(text, error):
            raise explained from error
        raise
    loader = StrictLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check(node, {}, set())
        _check_bases(node, set())
        return loader.construct_document(node)
    except ValueError as error:  # an integer of more digits than Python converts
        raise yaml.YAMLError(str(error)) from error
    finally:
        loader.dispose()


def check_yaml(text: str) -> None:
    """Refuse what this module refuses, except for numbers to other bases, which may be text.

    Args:
        text: The document.

    Raises:
        yaml.YAMLError: If it is no YAML, or has something that this module refuses.
    """
    _check_events(text)
    loader = StrictLoader(text)
    try:
        if (node := loader.get_single_node()) is not None:
            _check(node, {}, set())
    finally:
        loader.dispose()


def _explain_tab(text: str, error: yaml.MarkedYAMLError) -> yaml.YAMLError | None:
    """The error of a document in words of its own, if a tab stands where it was noticed."""
    mark = error.problem_mark
    line = text.splitlines()[mark.line : mark.line + 1] if mark is not None else []
    if mark is None or not line or not line[0][: mark.column + 1].endswith("\t"):
        return None
    return yaml.YAMLError(
        f"line {mark.line + 1}, column {mark.column + 1}: expected spaces before a key, got a tab"
    )


def _check_events(text: str) -> None:
    """Refuse what PyYAML would read for long, or with recursion that would end the process."""
    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader=StrictLoader)):
        if number > 2 * MAX_VALUES + 4:  # a start and an end each, of stream and document too
            raise yaml.YAMLError(f"expected at most {MAX_VALUES} values")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise yaml.YAMLError(f"expected at most {MAX_DEPTH} levels of nesting")


def _check(node: yaml.Node, sizes: dict[int, int], above: set[int]) -> int:
    """Count the values of a node; raise `YAMLError` for what is refused.

    Args:
        node: The node.
        sizes: Counts of the nodes that have been checked, by identity.
        above: Identities of the nodes that contain this one.
    """
    if (known := sizes.get(id(node))) is not None:
        return known
    if id(node) in above:
        raise _refusal(node, "expected a value, got an alias of what contains it")
    if isinstance(node, yaml.MappingNode):
        _check_keys(node)
    children = _children(node)
    inside = above | {id(node)} if children else above
    size = 1
    for child in children:
        size += _check(child, sizes, inside)
        if size > MAX_VALUES:
            raise _refusal(node, f"expected at most {MAX_VALUES} values, aliases resolved")
    sizes[id(node)] = size
    return size


def _children(node: yaml.Node) -> list[yaml.Node]:
    """The nodes in a node: keys and values of a mapping, items of a list."""
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return [] if isinstance(node, yaml.ScalarNode) else list(node.value)


def _check_bases(node: yaml.Node, checked: set[int]) -> None:
    """Refuse plain numbers to the bases 8 and 60.

    Args:
        node: A node that `_check` has taken.
        checked: Identities of the nodes that have been checked.
    """
    if id(node) in checked:
        return
    checked.add(id(node))
    for base, pattern in ((8, _BASE_8), (60, _BASE_60)):
        is_plain = isinstance(node, yaml.ScalarNode) and not node.style  # without quotes
        if is_plain and pattern.fullmatch(node.value):
            raise _refusal(
                node,
                f"expected a number or text in quotes, got {node.value:.40}, which YAML reads to "
                f"the base {base}",
            )
    for child in _children(node):
        _check_bases(child, checked)


def _check_keys(node: yaml.MappingNode) -> None:
    """Refuse a mapping that gives a key twice; `<<` may be there several times."""
    keys = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
            continue
        if key.value in keys:
            raise _refusal(key, f"expected each key once, got {key.value!r:.60} twice")
        keys.add(key.value)


def _refusal(node: yaml.Node, problem: str) -> yaml.YAMLError:
    mark = node.start_mark
    return yaml.YAMLError(f"line {mark.line + 1}, column {mark.column + 1}: {problem}")
