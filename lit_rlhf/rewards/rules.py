"""Ready-made reward functions: length, format and regular expression.

Each is a callable like any `RewardFunction`; its fields are the options of a configuration.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from time import monotonic
from typing import Any, Literal

import regex
import torch

from lit_rlhf.functional import length_penalty
from lit_rlhf.rewards.functions import RewardError, shorten

# a mark that ends a sentence, with quotes and brackets that may close after it
SENTENCE_END = re.compile(r"[.!?…。！？][\"'”’»)\]）」』]*\s*\Z")

# a brace that `re` takes literally: neither escaped (group 1) nor a quantifier such as {2,5}
LITERAL_BRACE = re.compile(r"(\\N\{[^}]*\}|\\.)|\{(?!\d*,?\d*\})", re.DOTALL)


@dataclass(frozen=True)
class LengthRule:
    """Minus the distance of a response's length from a range; 0 within the range.

    With `longest: 0` every unit costs one point.

    Args:
        shortest: Shortest length without a penalty.
        longest: Longest length without a penalty; `None` for no limit.
        unit: What is counted: tokens (EOS included), words (separated by white space) or
            characters.

    Raises:
        ValueError: If the range is empty, or contains every length.
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
        """Score the lengths of `responses`; each score is at most 0."""
        if self.unit == "words":
            lengths = [len(response.split()) for response in responses]
        elif self.unit == "characters":
            lengths = [len(response) for response in responses]
        scores = length_penalty(torch.tensor(lengths), self.shortest, self.longest)
        return scores.tolist()


@dataclass(frozen=True)
class FormatRule:
    """1 for a response of the required form, 0 for any other.

    White space around the response is ignored.

    Args:
        kind: The required form: `sentence` (ends like a sentence), `json` (a single JSON object or
            array), `prefix` or `suffix` (begins or ends with `text`).
        text: The required beginning or end, for `prefix` and `suffix` alone.

    Raises:
        ValueError: If `text` is missing, or given for a kind without one.
    """

    kind: Literal["sentence", "json", "prefix", "suffix"]
    text: str | None = None

    def __post_init__(self) -> None:
        """Check that `text` is given exactly where it is needed."""
        needed = self.kind in ("prefix", "suffix")
        if needed != bool(self.text):
            wanted = "a text" if needed else "none"
            raise ValueError(f"text: expected {wanted} for kind: {self.kind}, got {self.text!r}")

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        """Score `responses` with 0 or 1."""
        return [float(self._matches(response.strip())) for response in responses]

    def _matches(self, response: str) -> bool:
        match self.kind:
            case "sentence":
                return SENTENCE_END.search(response) is not None
            case "json":
                return _is_json(response)
            case "prefix":
                return response.startswith(str(self.text))
            case "suffix":
                return response.endswith(str(self.text))


@dataclass(frozen=True)
class RegexRule:
    r"""1 for a response that contains a match of a pattern, 0 for any other.

    Patterns have the syntax of Python's `re`, but the search is done by the `regex` package: a
    search by `re` that backtracks cannot be interrupted, and stops all threads of the process.

    Args:
        pattern: Searched for anywhere in the response.
        absent: Give the point for a response without a match instead.
        timeout: Seconds for all responses of a call.

    Raises:
        ValueError: If `pattern` is not a regular expression, or `timeout` is not positive.
    """

    pattern: str
    absent: bool = False
    timeout: float = 10.0

    def __post_init__(self) -> None:
        """Check the timeout, and compile the pattern."""
        if not self.timeout > 0:
            raise ValueError(f"timeout: expected a value > 0, got {self.timeout}")
        _compile(self.pattern)

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        """Score `responses` with 0 or 1.

        Raises:
            RewardError: If the searches take longer than `timeout`; names the response.
        """
        pattern, deadline = _compile(self.pattern), monotonic() + self.timeout
        scores = []
        for response in responses:
            try:
                # concurrent releases the interpreter lock, so that other threads run and a time
                # limit on the whole call (`reward_timeout`) acts; regex takes 0 as no time left
                found = pattern.search(
                    response, timeout=max(deadline - monotonic(), 0.0), concurrent=True
                )
            except TimeoutError as error:
                raise RewardError(
                    f"pattern {self.pattern!r}: no result after {self.timeout:g} seconds "
                    f"(timeout) for the response {shorten(response)}; rewrite nested or "
                    "overlapping repetitions such as (a|aa)+, or raise timeout"
                ) from error
            scores.append(float((found is not None) != self.absent))
        return scores


@lru_cache
def _compile(pattern: str) -> Any:  # noqa: ANN401  # regex has no type information
    """Compile a pattern of Python's `re` with the `regex` package.

    Raises:
        ValueError: If `re` or `regex` does not accept it.
    """
    try:
        # re decides which patterns are legal, as regex has a syntax of its own beyond it. re warns
        # about brackets that look like nested sets or [:alpha:], which regex does not read alike.
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            re.compile(pattern)
        # VERSION0 is the mode that follows re, except that a brace after an item can be an
        # approximate match: \frac{d} would allow a deletion in place of the letter d
        escaped = LITERAL_BRACE.sub(lambda found: found[1] or r"\{", pattern)
        return regex.compile(escaped, regex.VERSION0)
    except (re.error, regex.error, FutureWarning) as error:
        raise ValueError(
            f"pattern: expected a regular expression of Python's re, got {pattern!r}: {error}"
        ) from error


def _is_json(text: str) -> bool:
    """Whether `text` is one JSON object or array; the standard has no NaN."""
    try:
        return isinstance(json.loads(text, parse_constant=_reject_constant), dict | list)
    except (ValueError, RecursionError):
        return False


def _reject_constant(constant: str) -> None:
    # Python's parser accepts NaN and Infinity by default
    raise ValueError(f"{constant} is not JSON")
