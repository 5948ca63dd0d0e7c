"""The options of a judge. Importing this module does not import torch."""

from dataclasses import dataclass, field
from typing import get_args

from lit_rlhf.checks import check_count, check_not_negative, check_positive
from lit_rlhf.choices import Criterion
from lit_rlhf.paths import check_output_path, check_written_folder
from lit_rlhf.urls import ServiceUrl


@dataclass(frozen=True)
class JudgeOptions:
    """A language model as judge, behind an OpenAI-compatible endpoint that is sent all texts.

    Attributes:
        model: Name of the judge as the endpoint knows it. Default: no judge.
        base_url: Address of the endpoint. It usually ends in /v1, for example
            http://localhost:8000/v1. Default: OpenAI's.
        api_key_variable: Environment variable that holds the key. Your own server often needs
            none.
        criteria: What answers are compared by. Each criterion is a separate request.
        folder: Folder for answers and verdicts. A run continues with the answers that are there.
        temperature: Sampling temperature of the judge; null leaves it to the endpoint.
        max_tokens: Longest reply of the judge, in tokens.
        max_characters: Longest text that the judge is shown, in characters. Longer texts are cut
            off and counted.
        concurrency: Number of requests at a time.
        timeout: Seconds that a request may take, up to the end of the response.
        max_retries: How often a failed request is repeated, with growing pauses.
        max_attempts: How often the judge is asked for a reply that can be read. After that the
            verdict is invalid.
    """

    model: str | None = None
    base_url: str | None = None
    api_key_variable: str = "OPENAI_API_KEY"
    criteria: list[Criterion] = field(default_factory=lambda: ["helpful", "harmless"])
    folder: str = "runs/judge"
    temperature: float | None = 0.0
    max_tokens: int = 1024
    max_characters: int = 20_000
    concurrency: int = 8
    timeout: float = 120.0
    max_retries: int = 6
    max_attempts: int = 3

    def __post_init__(self) -> None:
        if self.model is not None:
            check_written_folder("judge.folder", check_output_path("judge.folder", self.folder))
        if self.base_url is not None:
            ServiceUrl(self.base_url, "judge.base_url")
        for name in ("max_tokens", "max_characters", "concurrency", "max_attempts"):
            check_count(f"judge.{name}", getattr(self, name))
        check_count("judge.max_retries", self.max_retries, minimum=0)
        check_positive("judge.timeout", self.timeout)
        if self.temperature is not None:
            check_not_negative("judge.temperature", self.temperature)
        criteria = get_args(Criterion)
        unknown = set(self.criteria) - set(criteria)
        if unknown or len(set(self.criteria)) < len(self.criteria):
            raise ValueError(
                f"judge.criteria: expected some of {criteria}, each once, got {self.criteria}"
            )
