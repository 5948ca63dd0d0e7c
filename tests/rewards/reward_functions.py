"""Rewards that tests name as `tests.rewards.reward_functions:<name>`."""

import asyncio
import os
import random
import sys
from threading import Event
from typing import Any

import numpy as np
import torch

not_callable = 3


def length(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(len(response)) for response in responses]


def prompt_length(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(len(prompt)) for prompt in prompts]


def ended(prompts: list[str], responses: list[str], terminated: list[bool]) -> list[float]:
    return [1.0 if end else -1.0 for end in terminated]


def noisy(prompts: list[str], responses: list[str]) -> list[float]:
    """Draws from every global generator that a checkpoint keeps."""
    return [random.random() + np.random.random() + float(torch.rand(())) for _ in responses]  # noqa: NPY002


def one_too_few(prompts: list[str], responses: list[str]) -> list[float]:
    return [0.0] * (len(responses) - 1)


def a_column(prompts: list[str], responses: list[str]) -> list[list[float]]:
    return [[0.0] for _ in responses]


def not_a_number(prompts: list[str], responses: list[str]) -> list[float]:
    return [float("nan") if index == 1 else 0.0 for index in range(len(responses))]


def nothing(prompts: list[str], responses: list[str]) -> None:
    return None


def words(prompts: list[str], responses: list[str]) -> list[str]:
    return ["good", "bad", "good"]


def fails_on_no_way(prompts: list[str], responses: list[str]) -> list[float]:
    if "no way" in responses:
        raise KeyError("way")
    return [0.0] * len(responses)


def fails_on_several(prompts: list[str], responses: list[str]) -> list[float]:
    if len(responses) > 1:
        raise KeyError("several")
    return [0.0]


def infinite(prompts: list[str], responses: list[str]) -> list[float]:
    return [-float("inf")] * len(responses)


def beyond_any_float(prompts: list[str], responses: list[str]) -> list[int]:
    return [10**400] * len(responses)


def ends_the_process(prompts: list[str], responses: list[str]) -> None:
    os._exit(0)


def forks(prompts: list[str], responses: list[str]) -> list[float]:
    if (child := os.fork()) == 0:
        os._exit(7)
    return [float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))] * len(responses)


def exits(prompts: list[str], responses: list[str]) -> list[float]:
    if "no way" in responses:
        sys.exit(0)
    return [0.0] * len(responses)


def turns_gradients_off(prompts: list[str], responses: list[str]) -> list[float]:
    torch.set_grad_enabled(False)
    return [0.0] * len(responses)


def turns_gradients_on(prompts: list[str], responses: list[str]) -> list[float]:
    torch.set_grad_enabled(True)
    return [0.0] * len(responses)


def changes_the_folder(prompts: list[str], responses: list[str]) -> list[float]:
    os.chdir("/")
    return [0.0] * len(responses)


def changes_the_dtype(prompts: list[str], responses: list[str]) -> list[float]:
    torch.set_default_dtype(torch.float64)
    return [0.0] * len(responses)


def sorts_the_responses(prompts: list[str], responses: list[str]) -> list[float]:
    responses.sort()
    return [0.0] * len(responses)


def empties_the_prompts(prompts: list[str], responses: list[str]) -> list[float]:
    prompts.clear()
    return [0.0] * len(responses)


def changes_the_lengths(prompts: list[str], responses: list[str], lengths: Any) -> list[float]:
    lengths[0] += 1
    return [0.0] * len(responses)


def equals_answer(prompts: list[str], responses: list[str], answer: list[str]) -> list[float]:
    return [float(r == a) for r, a in zip(responses, answer, strict=True)]


def default_level(prompts: Any, responses: list[str], level: Any = (7, 7, 7)) -> list[float]:
    return [float(value) for value in level]


def count_fields(prompts: list[str], responses: list[str], **fields: list[object]) -> list[float]:
    assert all(len(column) == len(responses) for column in fields.values())
    return [float(len(fields))] * len(responses)


def empties_a_field(prompts: list[str], responses: list[str], tags: list[list[str]]) -> list[float]:
    for value in tags:
        value.clear()
    return [0.0] * len(responses)


released = Event()


def waits(prompts: list[str], responses: list[str]) -> list[float]:
    """Until a test sets `released`."""
    released.wait()
    return [0.0] * len(responses)


calls = 0


def nan_in_the_second_call(prompts: list[str], responses: list[str]) -> list[float]:
    global calls  # set to 0 by the test
    calls += 1
    return [float("nan") if calls == 2 else float(len(response)) for response in responses]


def fails_from_the_third_call(prompts: list[str], responses: list[str]) -> list[float]:
    global calls  # set to 0 by the test
    calls += 1
    if calls >= 3:
        raise ConnectionError("the scoring service is gone")
    return [float(len(response)) for response in responses]


async def asynchronous(prompts: list[str], responses: list[str]) -> list[float]:
    await asyncio.sleep(0)
    return length(prompts, responses)
