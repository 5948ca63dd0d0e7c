"""The fenced code blocks of the documentation, and the commands in them."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["README.md", "README.zh.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md"]
DOCUMENTS = [ROOT / name for name in (*NAMES, "callbacks/README.md")]
DOCUMENTS += sorted((ROOT / "docs").glob("*.md"))
SHELLS = ("", "bash", "sh", "console")
_FENCE = re.compile(r"```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?")
_ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")


class Block(NamedTuple):
    """A fenced code block: its file, line of its opening fence, its language and title or ""."""

    document: Path
    line: int
    language: str
    title: str
    text: str


class Command(NamedTuple):
    """A command line in a block, split as a shell does, without leading variable assignments."""

    block: Block
    words: list[str]


def blocks(document: Path) -> list[Block]:
    """The fenced code blocks of a document, in order; ValueError for a fence that is not closed."""
    code_blocks: list[Block] = []
    opened: tuple[int, str, str] | None = None
    lines: list[str] = []
    for number, line in enumerate(document.read_text("utf-8").splitlines(), 1):
        if not line.startswith("```"):
            lines.append(line)
        elif opened is None:
            fence = _FENCE.fullmatch(line.strip())
            if fence is None:
                raise ValueError(f"{document}:{number}: expected ```language, got {line!r}")
            opened, lines = (number, fence["language"], fence["title"] or ""), []
        else:
            code_blocks.append(Block(document, *opened, text="\n".join(lines) + "\n"))
            opened = None
    if opened is not None:
        raise ValueError(f"{document}:{opened[0]}: the fence is not closed")
    return code_blocks


def commands(block: Block) -> Iterator[Command]:
    """The commands of a shell block. Lines that cannot be split are taken for output."""
    if block.language not in SHELLS:
        return
    for line in block.text.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line.removeprefix("$ "), comments=True)
        except ValueError:  # an apostrophe in a program's output
            continue
        while words and _ASSIGNMENT.fullmatch(words[0]):
            del words[0]
        if words:
            yield Command(block, words)


def all_blocks() -> list[Block]:
    """The code blocks of all documents."""
    return [block for document in DOCUMENTS for block in blocks(document)]


def place(block: Block) -> str:
    """File and line for test ids, for instance `docs/data.md:12`."""
    return f"{block.document.relative_to(ROOT)}:{block.line}"
