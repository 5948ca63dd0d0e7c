"""Counts of the records that were skipped, shortened or left out."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from lit_rlhf.choices import OnBadRecord as OnBadRecord
from lit_rlhf.data.examples import Example, TokenExample
from lit_rlhf.data.records import Location, RecordError
from lit_rlhf.rank_zero import rank_zero_only
from lit_rlhf.terminal import printable

MAX_SHOWN = 5
"""Number of bad records that a log message shows."""

_log_info = rank_zero_only(logging.getLogger(__name__).info)
_log_warning = rank_zero_only(logging.getLogger(__name__).warning)


class EncodingError(ValueError):
    """A dialogue that cannot be encoded.

    Attributes:
        reason: What is wrong, in words that do not depend on the dialogue; records left out are
            counted by their reason.
        detail: What is particular to this dialogue.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(reason + (f" ({detail})" if detail else ""))


class ResponseTooLongError(EncodingError):
    """A response that leaves no room for a prompt. Responses are never cut."""


@dataclass
class DataCounts:
    """Counts of what reading and encoding left out of records.

    Attributes:
        kept: Records read, by source.
        label_false: Rows with `label: false`, which are not demonstrations, by source.
        undecided: People's labels without a preference, by reason, such as a tie.
        duplicates: Records that equal an earlier one, by source, dropped or not.
        unused_parts: Parts of turns that records leave out, such as reasoning, by name.
        skipped: Bad records that reading skipped, by reason.
        skipped_examples: The first few of them, as messages with file, line and field.
        shared_prompts: Training records whose prompts are also held out.
        records: Records that were encoded or left out.
        dropped_turns: Oldest turns dropped so that dialogues fit.
        shortened: Dialogues that lost turns.
        cut_prompts: Dialogues whose last human turn was cut on the left.
        escaped_tokens: Control tokens in plain text, encoded as ordinary text.
        dropped: Records that encoding left out, by reason.
        dropped_examples: The first few of them, as messages with file and line.
    """

    kept: Counter[str] = field(default_factory=Counter)
    label_false: Counter[str] = field(default_factory=Counter)
    undecided: Counter[str] = field(default_factory=Counter)
    duplicates: Counter[str] = field(default_factory=Counter)
    unused_parts: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    skipped_examples: list[str] = field(default_factory=list)
    shared_prompts: int = 0
    records: int = 0
    dropped_turns: int = 0
    shortened: int = 0
    cut_prompts: int = 0
    escaped_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_examples: list[str] = field(default_factory=list)

    def skip(self, error: RecordError) -> None:
        """Count a bad record that reading skips."""
        self.skipped[error.reason] += 1
        self.skipped_examples = [*self.skipped_examples, str(error)][:MAX_SHOWN]

    def drop(self, location: Location, error: EncodingError, on_bad_record: OnBadRecord) -> None:
        """Count a record that cannot be encoded, or raise its error.

        Args:
            location: Where the record was read from.
            error: Why it cannot be encoded.
            on_bad_record: Whether to raise or to count. A response longer than `max_length` is not
                a bad record, and is always counted.
        """
        if on_bad_record == "error" and not isinstance(error, ResponseTooLongError):
            raise RecordError(location, error.reason, detail=error.detail) from error
        self.dropped[error.reason] += 1
        self.dropped_examples = [*self.dropped_examples, f"{location}: {error}"][:MAX_SHOWN]

    def add(self, example: Example) -> None:
        """Count what an example lost. What the shared prompt of a pair lost counts once."""
        self.dropped_turns += example.dropped_turns
        self.shortened += example.dropped_turns > 0
        self.cut_prompts += example.cut_tokens > 0
        if isinstance(example, TokenExample):
            self.escaped_tokens += example.escaped_tokens

    def update(self, other: "DataCounts") -> None:
        """Add the counts of records that come later."""
        for name, value in vars(other).items():
            count = getattr(self, name)
            if isinstance(value, Counter):
                count.update(value)
            elif isinstance(value, list):
                setattr(self, name, [*count, *value][:MAX_SHOWN])
            else:
                setattr(self, name, count + value)

    def log_read(self) -> None:
        """Log what reading left out, and why."""
        for label, number in self.label_false.items():
            if number:
                _log_info(f"{label}: left out {number} responses with label: false")
        if self.undecided:
            reasons = ", ".join(f"{n} x {reason}" for reason, n in self.undecided.most_common())
            _log_info(f"left out {self.undecided.total()} labels without a preference: {reasons}")
        for label, number in self.duplicates.items():
            if number:
                _log_info(f"{label}: {number} records equal an earlier one (drop_duplicates)")
        for name, number in self.unused_parts.items():
            _log_warning(f"{number} turns have {name}, which is not used")
        if self.skipped:
            described = describe_bad_records(self.skipped, self.skipped_examples)
            n_read = self.kept.total() + self.skipped.total()
            _log_warning(f"skipped {self.skipped.total()} of {n_read} records as bad: {described}")
        if self.shared_prompts:
            _log_warning(
                f"{self.shared_prompts} training records have prompts that are also held out"
            )

    def log_encoded(self, max_length: int) -> None:
        """Log what encoding left out, and why."""
        shortened = []
        if self.dropped_turns:
            shortened.append(
                f"dropped the {self.dropped_turns} oldest turns of {self.shortened} dialogues"
            )
        if self.cut_prompts:
            shortened.append(f"cut {self.cut_prompts} prompts on the left")
        if shortened:
            _log_warning(f"{' and '.join(shortened)} to fit max_length={max_length}")
        if self.escaped_tokens:
            _log_warning(
                f"encoded {self.escaped_tokens} control tokens in plain text as ordinary text"
            )
        if self.dropped:
            described = describe_bad_records(self.dropped, self.dropped_examples)
            left_out = f"{self.dropped.total():,} of {self.records:,} records"
            _log_warning(f"left out {left_out}: {described}")


def describe_bad_records(counts: Counter[str], examples: Sequence[str]) -> str:
    """Describe bad records for a log message: counts by reason, and messages of the first few."""
    reasons = ", ".join(f"{n} x {reason}" for reason, n in counts.most_common())
    return printable(f"{reasons}; the first ones:\n  " + "\n  ".join(examples))
