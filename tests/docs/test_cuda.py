"""The table of docs/cuda.md is the one place that says what GPUs have run."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from tests.support.docs_blocks import ROOT

PAGE = ROOT / "docs" / "cuda.md"
STATES = ("measured", "counted", "computed", "not run")
RESULT = re.compile(r"\d (ms|s|GB|GiB|%|minutes|times)\b")
NOT_RUN = re.compile(
    r"(?<!does )\bnot (yet )?(been )?(run|tried|measured|timed)\b"
    r"|\bneither .* has run\b|\bnever ran\b|\bhas run on CPUs only\b|\bnobody measured\b"
)
GPU = re.compile(r"\bGPUs?\b|CUDA|\b[AH]100\b")


class Path(NamedTuple):
    """A row of the table.

    Attributes:
        name: What runs on a GPU.
        state: One of `STATES`.
        known: What is known of it.
    """

    name: str
    state: str
    known: str

    @property
    def options(self) -> set[str]:
        """Names of options, configurations and classes."""
        return set(re.findall(r"`([^`]+)`", self.name))


def table() -> list[Path]:
    """The rows of the table, which is above the first section."""
    head = PAGE.read_text("utf-8").partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in head.splitlines() if line.startswith("| ")]
    assert rows[0] == ["path", "state", "what is known"]
    return [Path(*cells) for cells in rows[1:]]


def options(*, not_run: bool) -> set[str]:
    """Options of the paths that GPUs have not run, or that were measured."""
    state = "not run" if not_run else "measured"
    return {option for path in table() if path.state == state for option in path.options}


def sentences() -> Iterator[tuple[str, str]]:
    """Where each sentence is that could speak of GPUs, and the sentence; comments included."""
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    files += [*(ROOT / "configs").rglob("*.yaml"), *(ROOT / "lit_rlhf").rglob("*.py")]
    for file in files:
        text = re.sub(r"\n[# ]*(?=[^\s|-])", " ", file.read_text("utf-8"))
        for sentence in re.split(r"(?<=[.;|])\s|\n", text):
            yield str(file.relative_to(ROOT)), sentence


def test_table_knows_four_states_and_names_an_option_in_one_row() -> None:
    assert {path.state for path in table()} == {*STATES}
    names = [option for path in table() for option in path.options]
    assert sorted(names) == sorted(set(names))


def test_path_that_was_not_run_stands_beside_no_result() -> None:
    with_results = [
        path.name for path in table() if path.state == "not run" and RESULT.search(path.known)
    ]
    assert with_results == []
    sections = PAGE.read_text("utf-8").split("\n## ")
    measured = [section for section in sections if section.startswith("What an H")]
    assert len(measured) == 2
    assert [name for name in options(not_run=True) if any(name in text for text in measured)] == []


def test_path_that_was_measured_is_nowhere_called_not_run() -> None:
    stale = [
        (page, sentence)
        for page, sentence in sentences()
        if NOT_RUN.search(sentence) and GPU.search(sentence)
        for name in options(not_run=False)
        if name in sentence
    ]
    assert stale == []


def test_pages_that_say_what_gpus_have_not_run_link_to_the_table() -> None:
    alone = [
        (page, sentence)
        for page, sentence in sentences()
        if page != "docs/cuda.md" and NOT_RUN.search(sentence) and GPU.search(sentence)
        if "cuda.md" not in sentence
    ]
    assert alone == []
