"""Rewards that tests name as `tests.rollout.reward_functions:<name>`."""

from __future__ import annotations

from collections.abc import Sequence

not_callable = 3


def length(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    return [float(len(response)) for response in responses]


def prompt_length(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    return [float(len(prompt)) for prompt in prompts]


def ended(
    prompts: Sequence[str], responses: Sequence[str], terminated: Sequence[bool]
) -> list[float]:
    return [1.0 if end else -1.0 for end in terminated]


def one_too_few(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    return [0.0] * (len(responses) - 1)


def a_column(prompts: Sequence[str], responses: Sequence[str]) -> list[list[float]]:
    return [[0.0] for _ in responses]


def not_a_number(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    return [float("nan") if index == 1 else 0.0 for index in range(len(responses))]


def nothing(prompts: Sequence[str], responses: Sequence[str]) -> None:
    return None


def words(prompts: Sequence[str], responses: Sequence[str]) -> list[str]:
    return ["good", "bad", "good"]


def fails(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    raise RuntimeError("the scorer's own error")
