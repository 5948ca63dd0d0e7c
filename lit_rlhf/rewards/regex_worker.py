"""Searches for a pattern in texts, as a program: it may have to be killed.

Reads `{"pattern": str, "texts": [str]}` as JSON from standard input and writes 1 or 0 for each text
on a line of its own.
"""

from __future__ import annotations

import json
import re
import sys


def main() -> None:
    """Search, and tell at once what was found in each text."""
    task = json.load(sys.stdin)
    pattern = re.compile(task["pattern"])
    for text in task["texts"]:
        print(int(pattern.search(text) is not None), flush=True)


if __name__ == "__main__":
    main()
