"""Ready-made reward functions with parameters: length, format, regular expression.

Each is a callable, see `RewardFunction`, whose fields are what a configuration may set.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from lit_rlhf.functional import length_penalty
from lit_rlhf.rewards import regex_worker
from lit_rlhf.rewards.functions import RewardError, shorten

# a sentence's last sign, and what may close behind it
SENTENCE_END = re.compile(r"[.!?…。！？][\"'”’»)\]）」』]*\s*\Z")


@dataclass(frozen=True)
class LengthRule:
    """Minus how far a response's length is outside a range; 0 within it.

    With `longest: 0` every unit costs a point.

    Args:
        shortest: Shortest length that costs nothing.
        longest: Longest one; `None`: no bound.
        unit: What is counted: tokens (EOS included), words (between white space) or characters.

    Raises:
        ValueError: If the range is empty, or nothing is outside it.
    """

    shortest: int = 0
    longest: int | None = None
    unit: Literal["tokens", "words", "characters"] = "tokens"

    def __post_init__(self) -> None:
        """Check the range."""
        if self.shortest < 0 or (self.longest is not None and self.longest < self.shortest):
            raise ValueError(
                "shortest, longest: expected 0 <= shortest <= longest, got "
                f"{self.shortest} and {self.longest}"
            )
        if self.shortest == 0 and self.longest is None:
            raise ValueError("shortest, longest: expected at least one of them, got neither")

    def __call__(
        self, prompts: Sequence[str], responses: Sequence[str], lengths: Sequence[int]
    ) -> list[float]:
        """Scores, at most 0."""
        if self.unit == "words":
            lengths = [len(response.split()) for response in responses]
        elif self.unit == "characters":
            lengths = [len(response) for response in responses]
        scores = length_penalty(torch.tensor(lengths), self.shortest, self.longest)
        return scores.tolist()


@dataclass(frozen=True)
class FormatRule:
    """1 for a response of the right form, 0 for another.

    Args:
        kind: What it has to be: `sentence` (it ends with a sentence's last sign), `json` (one JSON
            object or array), `prefix` or `suffix` (it begins or ends with `text`). White space
            around the response does not count.
        text: What it begins or ends with.

    Raises:
        ValueError: If `text` is missing or not for this kind.
    """

    kind: Literal["sentence", "json", "prefix", "suffix"]
    text: str | None = None

    def __post_init__(self) -> None:
        """Check that there is a text where one is needed."""
        needed = self.kind in ("prefix", "suffix")
        if needed != bool(self.text):
            wanted = "a text" if needed else "none"
            raise ValueError(f"text: expected {wanted} for kind: {self.kind}, got {self.text!r}")

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        """Scores, 0 or 1."""
        return [float(self.holds(response.strip())) for response in responses]

    def holds(self, response: str) -> bool:
        """Whether a response has the form."""
        match self.kind:
            case "sentence":
                return SENTENCE_END.search(response) is not None
            case "json":
                return is_json(response)
            case "prefix":
                return response.startswith(str(self.text))
            case "suffix":
                return response.endswith(str(self.text))


def is_json(text: str) -> bool:
    """Whether `text` is one JSON object or array, by the standard (which has no NaN)."""
    try:
        return isinstance(json.loads(text, parse_constant=_not_json), dict | list)
    except (ValueError, RecursionError):
        return False


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


@dataclass(frozen=True)
class RegexRule:
    """1 for a response in which a pattern is found, 0 for another.

    Python's `re` can be neither interrupted nor overtaken: while it searches, no other thread of
    its process runs. It searches in a process of its own, which is ended when it takes too long.

    Args:
        pattern: Of Python's `re`, searched anywhere in the response.
        absent: Give the point where the pattern is not found.
        timeout: Seconds for all responses of a call.

    Raises:
        ValueError: If the pattern is none, or the timeout is not positive.
    """

    pattern: str
    absent: bool = False
    timeout: float = 10.0

    def __post_init__(self) -> None:
        """Check that the pattern compiles."""
        if not self.timeout > 0:
            raise ValueError(f"timeout: expected a value > 0, got {self.timeout}")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(
                f"pattern: expected a regular expression, got {self.pattern!r}: {error}"
            ) from error

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        """Scores, 0 or 1.

        Raises:
            RewardError: If the search takes too long; names the response.
        """
        program = [sys.executable, "-I", "-S", str(Path(regex_worker.__file__))]
        task = json.dumps({"pattern": self.pattern, "texts": list(responses)})
        try:
            done = subprocess.run(
                program, input=task, capture_output=True, text=True, timeout=self.timeout
            )
        except subprocess.TimeoutExpired as error:
            n_done = len((error.output or b"").splitlines())
            culprit = responses[min(n_done, len(responses) - 1)]
            raise RewardError(
                f"pattern {self.pattern!r} took more than {self.timeout:g} seconds (timeout), and "
                f"was not done with the response {shorten(culprit)}"
            ) from error
        if done.returncode != 0:
            raise RewardError(f"pattern {self.pattern!r}: the search ended with {done.stderr!r}")
        return [float((line == "1") != self.absent) for line in done.stdout.splitlines()]
