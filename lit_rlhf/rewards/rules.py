"""Ready-made reward functions: length, format, regular expression, known answer and sentiment.

Each is a callable like any `RewardFunction`; its fields are the options of a configuration.
"""

import json
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from time import monotonic
from typing import Any, Literal

import regex
import torch

from lit_rlhf.checks import check_positive
from lit_rlhf.functional import length_penalty
from lit_rlhf.rewards.functions import RewardError
from lit_rlhf.terminal import shorten

# a mark that ends a sentence, with quotes and brackets that may close after it
SENTENCE_END = re.compile(r"[.!?…。！？][\"'”’»)\]）」』]*\s*\Z")

# a brace that `re` takes literally: neither escaped (group 1) nor a quantifier such as {2,5}
_LITERAL_BRACE = re.compile(r"(\\N\{[^}]*\}|\\.)|\{(?!\d*,?\d*\})", re.DOTALL)


@dataclass(frozen=True)
class LengthRule:
    """Minus the distance of a response's length from a range; 0 within the range.

    Args:
        shortest: Shortest length without a penalty.
        longest: Longest length without a penalty; `None` for no limit.
        unit: What is counted: tokens (EOS included), words (separated by white space) or
            characters.
    """

    shortest: int = 0
    longest: int | None = None
    unit: Literal["tokens", "words", "characters"] = "tokens"

    def __post_init__(self) -> None:
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
        scores = length_penalty(torch.tensor(lengths), shortest=self.shortest, longest=self.longest)
        return scores.tolist()


@dataclass(frozen=True)
class FormatRule:
    """1 for a response of the required form, 0 for any other.

    White space around the response is ignored.

    Args:
        kind: The required form: `sentence` (ends like a sentence), `json` (a single JSON object or
            array), `prefix` or `suffix` (begins or ends with `text`).
        text: The required beginning or end, only for `prefix` and `suffix`.
    """

    kind: Literal["sentence", "json", "prefix", "suffix"]
    text: str | None = None

    def __post_init__(self) -> None:
        needed = self.kind in ("prefix", "suffix")
        if needed != bool(self.text):
            expected = "a text" if needed else "none"
            raise ValueError(f"text: expected {expected} for kind: {self.kind}, got {self.text!r}")

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
    """

    pattern: str
    absent: bool = False
    timeout: float = 10.0

    def __post_init__(self) -> None:
        check_positive("timeout", self.timeout)
        _compile(self.pattern)

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        """Score `responses` with 0 or 1."""
        search = _Search(self.pattern, self.timeout)
        matches = [next(search.find(response), None) is not None for response in responses]
        return [float(match != self.absent) for match in matches]


@dataclass(frozen=True)
class EqualsRule:
    r"""1 for a response that equals a field of the prompt's record, 0 for any other.

    White space around both is ignored. A field may hold a list of answers, any of which counts. The
    rule abstains where a record does not have the field.

    Args:
        field: Name of the field, for instance `answer`.
        pattern: Compare what this pattern of Python's `re` finds last in the response: its first
            group, or the whole match if it has none. A response without a match gets 0. The same is
            taken of the field, unless nothing in it matches. `####\s*(\S+)` reads the results of
            GSM8K.
        ignore_case: Ignore the difference of upper and lower case.
        timeout: Seconds for all searches of a call.
    """

    field: str
    pattern: str | None = None
    ignore_case: bool = False
    timeout: float = 10.0

    def __post_init__(self) -> None:
        check_positive("timeout", self.timeout)
        if self.pattern is not None:
            _compile(self.pattern)

    @property
    def record_fields(self) -> tuple[str, ...]:
        """The fields of the records that the call needs."""
        return (self.field,)

    def __call__(
        self, prompts: Sequence[str], responses: Sequence[str], **fields: Sequence[Any]
    ) -> list[float | None]:
        """Score `responses` with 0 or 1, or abstain."""
        search = None if self.pattern is None else _Search(self.pattern, self.timeout)
        lists = _read_answers(self.field, fields[self.field], prompts)
        return [
            None if answers is None else float(self._is_right(response, answers, search))
            for response, answers in zip(responses, lists, strict=True)
        ]

    def _is_right(self, response: str, answers: Sequence[str], search: "_Search | None") -> bool:
        answer: str | None = response
        if search is not None:
            answer = search.extract(response)
            answers = [text if (part := search.extract(text)) is None else part for text in answers]
        normalized = {_normalize(text, self.ignore_case) for text in answers}
        return answer is not None and _normalize(answer, self.ignore_case) in normalized


@dataclass(frozen=True)
class ContainsRule:
    """1 for a response that contains a field of the prompt's record, 0 for any other.

    White space around the field is ignored. It may hold a list of answers, any of which counts. The
    rule abstains where a record does not have the field.

    Args:
        field: Name of the field, for instance `answer`.
        ignore_case: Ignore the difference of upper and lower case.
    """

    field: str
    ignore_case: bool = False

    @property
    def record_fields(self) -> tuple[str, ...]:
        """The fields of the records that the call needs."""
        return (self.field,)

    def __call__(
        self, prompts: Sequence[str], responses: Sequence[str], **fields: Sequence[Any]
    ) -> list[float | None]:
        """Score `responses` with 0 or 1, or abstain."""
        lists = _read_answers(self.field, fields[self.field], prompts)
        return [
            None if answers is None else float(self._is_right(response, answers))
            for response, answers in zip(responses, lists, strict=True)
        ]

    def _is_right(self, response: str, answers: Sequence[str]) -> bool:
        text = _normalize(response, self.ignore_case)
        return any(_normalize(answer, self.ignore_case) in text for answer in answers)


class SentimentRule:
    """How positive a response is, by VADER's lexicon of English words: from -1 to 1.

    A text without a word of the lexicon gets 0. Negations and exclamation marks count.
    """

    def __init__(self) -> None:
        try:
            from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
        except ImportError as error:
            raise ValueError(
                "expected the package vaderSentiment to be installed (pip install "
                f"vaderSentiment), got {error}"
            ) from error
        self.analyzer = SentimentIntensityAnalyzer()

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        """Score `responses`."""
        return [float(self.analyzer.polarity_scores(text)["compound"]) for text in responses]


def _read_answers(
    field: str, values: Sequence[Any], prompts: Sequence[str]
) -> list[list[str] | None]:
    """Read the answers in a field of each prompt's record; `None` where it lacks the field."""
    return [
        None if value is None else _read_value(value, field=field, prompt=prompt)
        for value, prompt in zip(values, prompts, strict=True)
    ]


def _read_value(value: Any, *, field: str, prompt: str) -> list[str]:  # noqa: ANN401  # as in the data
    """Read the answers in a field as text; refuse empty ones, which every response contains."""
    values = value if isinstance(value, list | tuple) else [value]
    answers = [str(answer) for answer in values if answer is not None]
    if not answers or not all(answer.strip() for answer in answers):
        raise RewardError(
            f"field {field!r}: expected an answer or a list of answers in each record, got "
            f"{value!r:.100} for the prompt {shorten(prompt)}"
        )
    return answers


def _normalize(text: str, ignore_case: bool) -> str:
    return text.strip().casefold() if ignore_case else text.strip()


class _Search:
    """Searches of a call, which share a time limit of `timeout` seconds."""

    def __init__(self, pattern: str, timeout: float) -> None:
        self.pattern = pattern
        self.timeout = timeout
        self.deadline = monotonic() + timeout

    def find(self, text: str) -> Iterator[Any]:
        """Find the matches; raise RewardError if that takes too long."""
        try:
            # concurrent releases the interpreter lock, so that other threads run and a time limit
            # on the whole call (`reward_timeout`) acts; regex takes 0 as no time left
            yield from _compile(self.pattern).finditer(
                text, timeout=max(self.deadline - monotonic(), 0.0), concurrent=True
            )
        except TimeoutError as error:
            raise RewardError(
                f"pattern {self.pattern!r}: no result after {self.timeout:g} seconds (timeout) for "
                f"the response {shorten(text)}; rewrite nested or overlapping repetitions such as "
                "(a|aa)+, or raise timeout"
            ) from error

    def extract(self, text: str) -> str | None:
        """Return the first group of the last match; `None` without a match."""
        last = None
        for match in self.find(text):
            last = match
        if last is None:
            return None
        return str((last[1] or "") if last.re.groups else last[0])


@lru_cache
def _compile(pattern: str) -> Any:  # noqa: ANN401  # regex has no type information
    """Compile a pattern of Python's `re` with the `regex` package."""
    try:
        # re decides which patterns are legal: regex has more syntax. re warns about brackets that
        # look like nested sets or [:alpha:], which regex does not read alike.
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            re.compile(pattern)
        # VERSION0 is the mode that follows re, except that a brace after an item can be an
        # approximate match: \frac{d} would allow a deletion in place of the letter d
        escaped = _LITERAL_BRACE.sub(lambda match: match[1] or r"\{", pattern)
        return regex.compile(escaped, regex.VERSION0)
    except (re.error, regex.error, FutureWarning) as error:
        raise ValueError(
            f"pattern: expected a regular expression of Python's re, got {pattern!r}: {error}"
        ) from error


def _is_json(text: str) -> bool:
    """Whether `text` is one JSON object or array."""
    try:
        # `int` refuses NaN and Infinity, which Python's parser would accept
        return isinstance(json.loads(text, parse_constant=int), dict | list)
    except (ValueError, RecursionError):
        return False
