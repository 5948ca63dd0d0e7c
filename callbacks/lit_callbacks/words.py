"""Numbers, names and sentences on one line."""

from __future__ import annotations

import math
import re
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import NoReturn

# control characters but tab and line end, and what changes the direction of the text around it
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

# whatever a URL has before the @ of its host, unless it ends with the name of a variable
_CREDENTIALS = re.compile(r"(?<=\w:/)(/?)(?![^\s/@]*\$[A-Za-z_]\w*@)[^\s/]+@")

_LONGEST_PAUSE = 7 * 24 * 3600  # seconds


def hide_passwords(text: str) -> str:
    """Replace user and password in the URLs of a text by `***`; names of variables stay.

    Examples:
        >>> hide_passwords("no folder https://me:secret@host/x, give https://me:$SECRET@host/x")
        'no folder https://***@host/x, give https://me:$SECRET@host/x'
    """
    return _CREDENTIALS.sub(r"\1***@", text)


def printable(text: str) -> str:
    r"""Make text of other people's printable: a control character is shown as `\x1b`.

    A terminal would obey what such characters begin: colours, titles, and deleting lines. Tabs and
    line ends stay, and a carriage return before a line end is left out.

    Examples:
        >>> printable("loss\x1b[2J")
        'loss\\x1b[2J'
    """
    text = text.replace("\r\n", "\n")
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def printable_line(text: str) -> str:
    r"""Make text printable on one line: its tabs and line ends are shown, too.

    Examples:
        >>> printable_line("folder\nof runs")
        'folder\\nof runs'
    """
    return printable(text).replace("\t", r"\t").replace("\n", r"\n")


def check_seconds(name: str, seconds: float) -> None:
    """Refuse a pause between two looks that is no time.

    Args:
        name: Option that names it.
        seconds: The pause; 0 for a single look.
    """
    if not 0 <= seconds <= _LONGEST_PAUSE:
        raise ValueError(f"{name}: expected 0 to {_LONGEST_PAUSE} seconds, got {seconds}")


def end_with_error(parser: ArgumentParser, error: Exception) -> NoReturn:
    """End a command with status 2 and one printable line about what the user can change.

    Args:
        parser: The parser of the command, which knows its name.
        error: The error.
    """
    message = hide_passwords(" ".join(str(error).split()))
    parser.exit(2, f"{parser.prog}: error: {printable(message)}\n")


def printable_json(text: str) -> str:
    r"""Make JSON printable: a control character becomes its JSON escape, so the values stay.

    Examples:
        >>> printable_json('{"a": "\x9b2J"}')
        '{"a": "\\u009b2J"}'
    """
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def format_duration(seconds: float) -> str:
    """A duration in seconds as `mm:ss`, or `h:mm:ss` from one hour on; fractions are cut off."""
    minutes, remainder = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{remainder:02d}" if hours else f"{minutes:02d}:{remainder:02d}"


def format_number(value: float) -> str:
    """A number in three significant digits, without an exponent below a million."""
    if math.isfinite(value) and 1000 <= abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.3g}"


def align_columns(rows: Sequence[Sequence[str]], width: int = 0) -> str:
    """Rows of cells as lines of text: the first column to the left, the others to the right.

    A line end in a cell is shown, see `printable_line`, so that a row stays a line. Columns beyond
    `width` characters (0: no limit) follow in further blocks below the first column.

    Examples:
        >>> print(align_columns([("phase", "s"), ("score", "12")]))
        phase   s
        score  12
    """
    rows = [[printable_line(cell) for cell in row] for row in rows]
    widths = [
        max(len(row[place]) for row in rows if place < len(row)) for place in range(len(rows[0]))
    ]
    blocks = [[0]]
    for place in range(1, len(widths)):
        filled_width = sum(widths[column] + 2 for column in blocks[-1])
        if width and len(blocks[-1]) > 1 and filled_width + widths[place] > width:
            blocks.append([0])
        blocks[-1].append(place)
    return "\n\n".join("\n".join(_line(row, widths, block) for row in rows) for block in blocks)


def _line(row: Sequence[str], widths: Sequence[int], places: Sequence[int]) -> str:
    cells = [(row[place], widths[place]) for place in places if place < len(row)]
    return "  ".join(
        cell.rjust(width) if place else cell.ljust(width)
        for place, (cell, width) in enumerate(cells)
    ).rstrip()


def shorten_keys(keys: Sequence[str]) -> list[str]:
    """The part of each key after its last slash, or the whole key where two would look the same."""
    tails = [key.rsplit("/", 1)[-1] for key in keys]
    return [tail if tails.count(tail) == 1 else key for key, tail in zip(keys, tails, strict=True)]


def shorten_sentence(sentence: str, words: int) -> str:
    """Shorten a sentence to about `words` words, by whole reasons.

    Its first reason and its conclusion, after the last colon, are kept. A single reason is kept
    without the conclusion, or cut if it is too long by itself.

    Examples:
        >>> shorten_sentence("KL 41 nats is 12x its baseline, length 40: the policy exploits", 9)
        'KL 41 nats is 12x its baseline and 1 more: the policy exploits'
    """
    if len(sentence.split()) <= words:
        return sentence
    reasons, _, conclusion = sentence.rpartition(": ")
    if ", " in conclusion:  # it is a list of reasons itself
        reasons = sentence
        conclusion = ""
    first, *others = reasons.split(", ")
    if not others and first and len(first.split()) <= words:
        return first
    if not others:
        return " ".join([*sentence.split()[: words - 1], "..."])
    room = words - len(f"{first} and 9 more {conclusion}".split())
    n_kept = 0
    while n_kept < len(others) and (room := room - len(others[n_kept].split())) >= 0:
        n_kept += 1
    n_unnamed = len(others) - n_kept
    text = ", ".join([first, *others[:n_kept]]) + (f" and {n_unnamed} more" if n_unnamed else "")
    return f"{text}: {conclusion}" if conclusion else text
