"""Which language model judges, by what, and how it is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Criterion = Literal["helpful", "harmless"]


@dataclass(frozen=True)
class JudgeOptions:
    """A language model behind an OpenAI-compatible endpoint as a judge. Sends it all texts.

    Attributes:
        model: Name of the judge as the endpoint knows it. Default: no judge is asked.
        base_url: Of the endpoint, usually ending in /v1, for instance http://localhost:8000/v1.
            Default: OpenAI's.
        api_key_variable: Environment variable with the key. Servers of your own often need none.
        criteria: What answers are compared by, each in a request of its own.
        labels: File of preferences (chosen and rejected) by criterion, to measure the judge's
            agreement with them, for instance {helpful: pairs.jsonl}.
        max_labels: Use only this many of the first preferences of a file.
        folder: Where answers and verdicts are kept; a run continues with the answers there.
        temperature: Of the judge's sampling; null leaves it to the endpoint.
        max_tokens: Longest answer of the judge in tokens.
        max_characters: Longest text shown to the judge; what is behind is cut off and counted.
        concurrency: Requests under way at a time.
        timeout: Seconds that a request may take.
        max_retries: How often a failed request is repeated, after longer and longer waits.
        max_attempts: How often the judge is asked until its answer can be read; after that the
            verdict is invalid.
        input_price: Of a million tokens sent, for the cost. Default: unknown.
        output_price: Of a million tokens answered.
    """

    model: str | None = None
    base_url: str | None = None
    api_key_variable: str = "OPENAI_API_KEY"
    criteria: list[Criterion] = field(default_factory=lambda: ["helpful", "harmless"])
    labels: Mapping[Criterion, str] = field(default_factory=dict)
    max_labels: int = 200
    folder: str = "runs/judge"
    temperature: float | None = 0.0
    max_tokens: int = 1024
    max_characters: int = 20_000
    concurrency: int = 8
    timeout: float = 120.0
    max_retries: int = 6
    max_attempts: int = 3
    input_price: float | None = None
    output_price: float | None = None

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            ValueError: If one is out of range.
        """
        for name, lowest in {
            "max_labels": 1,
            "max_tokens": 1,
            "max_characters": 1,
            "concurrency": 1,
            "max_retries": 0,
            "max_attempts": 1,
        }.items():
            if getattr(self, name) < lowest:
                raise ValueError(
                    f"judge.{name}: expected an integer >= {lowest}, got {getattr(self, name)}"
                )
        known = get_args(Criterion)
        for name in ("criteria", "labels"):
            given = list(getattr(self, name))
            if set(given) - set(known) or len(set(given)) < len(given):
                raise ValueError(f"judge.{name}: expected some of {known}, each once, got {given}")
        if not self.timeout > 0:
            raise ValueError(f"judge.timeout: expected seconds > 0, got {self.timeout}")
        for name in ("temperature", "input_price", "output_price"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"judge.{name}: expected a number >= 0, got {value}")
        if (self.input_price is None) != (self.output_price is None):
            raise ValueError("judge.input_price, judge.output_price: expected both or none of them")
