"""What the pages on errors and security promise is shown by tests, which are listed beside it."""

import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
EXPLAINS = "explains"
PROMISES: dict[str, dict[str, list[str] | str]] = yaml.safe_load(
    Path(__file__).with_name("promises.yaml").read_text("utf-8")
)


def parts_of(page: Path) -> Iterator[str]:
    """Rows of tables, items of lists, and paragraphs of a page, without headings and code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for block in re.split(r"\n\s*\n", text):
        lines = block.strip().splitlines()
        if not lines or lines[0].startswith("#"):
            continue
        if lines[0].startswith("|"):
            yield from (row.removeprefix("| ") for row in lines[2:])
        else:
            yield from (part.removeprefix("- ") for part in re.split(r"\n(?=- )", "\n".join(lines)))


def names_of_tests() -> set[str]:
    """Names of all tests of the project."""
    files = (ROOT / "tests").rglob("test_*.py")
    return {name for f in files for name in re.findall(r"def (test_\w+)", f.read_text("utf-8"))}


@pytest.mark.parametrize("page", PROMISES)
def test_each_promise_of_a_page_is_beside_its_tests(page: str) -> None:
    listed = PROMISES[page]
    for part, beginning in zip_longest(parts_of(ROOT / page), listed, fillvalue=""):
        assert part.startswith(beginning.rstrip()), "a promise without its tests"
        assert beginning, f"a promise without its tests: {part[:80]}"
    tests = names_of_tests()
    for beginning, shown_by in listed.items():
        assert shown_by == EXPLAINS or set(shown_by) <= tests, beginning
        assert shown_by, f"no test shows: {beginning}"
