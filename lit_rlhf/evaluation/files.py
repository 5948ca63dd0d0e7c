"""Results on disk: a file is either there whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_text(path: str | Path, text: str) -> Path:
    """Write `text` as UTF-8 beside `path` and rename it; missing folders are made.

    Returns:
        The path.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8", newline="\n")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def write_json_lines(path: str | Path, records: Iterable[Mapping[str, Any]]) -> Path:
    """Write one JSON object per line. Halves of surrogate pairs, which UTF-8 lacks, are escaped.

    Returns:
        The path.
    """
    return write_text(path, json_lines(records))


def json_lines(records: Iterable[Mapping[str, Any]]) -> str:
    """The text of a JSON lines file."""
    # UTF-8 has no bytes for half a surrogate pair
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    return text.encode(errors="backslashreplace").decode()
