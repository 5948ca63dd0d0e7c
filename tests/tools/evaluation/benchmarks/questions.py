"""Multiple-choice questions that the tests share."""

from typing import Any

RECORDS: list[dict[str, Any]] = [
    {"question": "One and one?", "choices": ["one", "two"], "answer": "B", "subject": "sums"},
    {"question": "What is {{ 1 }}?", "choices": ["a", "b", "c"], "answer": 0, "subject": "sums"},
    {"question": "说出金属", "choices": [*"铁水木火"], "answer": "a", "subject": "metals"},
    {"question": "Zinc?", "choices": ["no", "yes", "so"], "answer": 1, "subject": "metals"},
    {"question": "Why?", "choices": ["so", "no", "yes", "ok"], "answer": "D", "subject": "sums"},
    {"question": "Tea?", "choices": ["yes", "no"], "answer": "A", "subject": "sums"},
]
