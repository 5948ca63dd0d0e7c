"""Rewards from a service: JSON over HTTP, with a time limit and repeated attempts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lit_rlhf.checks import check_count, check_fields, check_not_negative, check_positive
from lit_rlhf.remote import Answer, RemoteClient, RemoteError
from lit_rlhf.rewards.functions import RewardError
from lit_rlhf.terminal import shorten
from lit_rlhf.urls import ServiceUrl

LARGEST_SCORE = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class RemoteScorer:
    """Scores from a service that gets `{"prompts": [...], "responses": [...]}` by POST.

    With `fields`, the request also has `"fields": {name: [...]}`. The service answers
    `{"scores": [...]}`, a finite number for each response, or null to abstain. An attempt is
    repeated if the connection fails, no answer comes in time, or the status is 408, 429 or 5xx.
    Redirects are not followed.

    Args:
        url: URL of the service, http or https. It may begin with `user:$VARIABLE@`, which sends the
            password in that environment variable (HTTP Basic); parameters of its query may be
            `name=$VARIABLE`, and parts of its path `$VARIABLE`. A password or token itself is
            refused, because configurations, checkpoints and model cards contain the URL.
        batch_size: Most responses per request.
        timeout: Seconds that an attempt may take, from connecting to the end of the answer.
        retries: Further attempts after the first.
        backoff: Seconds before the second attempt; doubled before each further one.
        fields: Fields of the prompts' records that the service gets.
    """

    url: str
    batch_size: int = 64
    timeout: float = 30.0
    retries: int = 4
    backoff: float = 1.0
    fields: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        ServiceUrl(self.url)
        check_count("batch_size", self.batch_size)
        check_count("retries", self.retries, minimum=0)
        check_fields(check_positive, self, "timeout")
        check_fields(check_not_negative, self, "backoff")

    @property
    def record_fields(self) -> Sequence[str]:
        """The fields of the records that the call needs."""
        return self.fields

    def __call__(
        self, prompts: Sequence[str], responses: Sequence[str], **fields: Sequence[Any]
    ) -> list[float | None]:
        """Score `responses` to `prompts`, whose records have `fields`."""
        scores: list[float | None] = []
        client = RemoteClient(
            ServiceUrl(self.url), timeout=self.timeout, retries=self.retries, backoff=self.backoff
        )
        with client:
            for start in range(0, len(responses), self.batch_size):
                rows = slice(start, start + self.batch_size)
                request: dict[str, Any] = {
                    "prompts": list(prompts[rows]),
                    "responses": list(responses[rows]),
                }
                if fields:
                    columns = {name: list(column[rows]) for name, column in fields.items()}
                    request["fields"] = columns
                scores += _score_batch(client, request)
        return scores


def _score_batch(client: RemoteClient, request: Mapping[str, Any]) -> list[float | None]:
    """Score the responses of one request."""
    responses = request["responses"]
    try:
        return _parse_scores(client, client.post(body=request), len(responses))
    except RemoteError as error:
        content = f"{len(responses)} responses, the first: {shorten(responses[0])}"
        raise RewardError(f"{error}; asked about {content}") from error


def _parse_scores(client: RemoteClient, answer: Answer, count: int) -> list[float | None]:
    """Take `count` finite scores or nulls from an answer."""
    content = answer.parse()
    scores: Any = content.get("scores") if isinstance(content, dict) else None
    problem = ""
    # by type: true and false are integers to `isinstance`
    types = {int, float, type(None)}
    if not isinstance(scores, list) or not {type(score) for score in scores} <= types:
        problem = "got"
    elif len(scores) != count:
        problem = f"got {len(scores)} scores with"
    # compared and not passed to `isfinite`, which fails for an integer of 400 digits
    elif not all(abs(score) < math.inf for score in scores if score is not None):
        problem = "not all are finite in"
    elif not all(abs(score) <= LARGEST_SCORE for score in scores if score is not None):
        problem = "not all are in the range of float32 in"
    if problem:
        raise RemoteError(
            client.url.shown,
            f'expected {{"scores": [...]}} with {count} finite numbers, one for each response, '
            f"{problem} {answer}",
            status=answer.status,
        )
    return [None if score is None else float(score) for score in scores]
