"""Multiple-choice questions that the tests share."""

import json
from pathlib import Path
from typing import Any

RECORDS: list[dict[str, Any]] = [
    {"question": "One and one?", "choices": ["one", "two"], "answer": "B", "subject": "sums"},
    {"question": "What is {{ 1 }}?", "choices": ["a", "b", "c"], "answer": 0, "subject": "sums"},
    {
        "question": "说出金属",
        "choices": ["铁", "水", "木", "火"],
        "answer": "a",
        "subject": "metals",
    },
    {"question": "Zinc?", "choices": ["no", "yes", "so"], "answer": 1, "subject": "metals"},
    {"question": "Why?", "choices": ["so", "no", "yes", "ok"], "answer": "D", "subject": "sums"},
    {"question": "Tea?", "choices": ["yes", "no"], "answer": "A", "subject": "sums"},
]


def write_questions(path: Path, records: list[dict[str, Any]]) -> str:
    """A JSON lines file of questions."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return str(path)
