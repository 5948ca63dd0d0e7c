"""Rewards that tests name as `tests.support.reward_functions:<name>`."""

import asyncio
import io
import os
import random
import signal
import sys
from collections.abc import Callable
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


def draws(prompts: list[str], responses: list[str]) -> list[float]:
    return torch.rand(len(responses)).tolist()


def seeds(prompts: list[str], responses: list[str]) -> list[float]:
    torch.manual_seed(0)
    return draws(prompts, responses)


def noisy(prompts: list[str], responses: list[str]) -> list[float]:
    """Draws from every global generator that a checkpoint keeps."""
    return [random.random() + np.random.random() + float(torch.rand(())) for _ in responses]  # noqa: NPY002


def _returns(result: Callable[[int], Any]) -> Callable[[list[str], list[str]], Any]:
    """Make a reward function that returns `result` of the number of responses."""
    return lambda prompts, responses: result(len(responses))


one_too_few = _returns(lambda n: [0.0] * (n - 1))
a_column = _returns(lambda n: [[0.0]] * n)
not_a_number = _returns(lambda n: [float("nan") if index == 1 else 0.0 for index in range(n)])
nothing = _returns(lambda n: None)
words = _returns(lambda n: ["good", "bad", "good"])
infinite = _returns(lambda n: [-float("inf")] * n)
beyond_any_float = _returns(lambda n: [10**400] * n)


def _does(effect: Callable[[list[str], list[str]], object]) -> Callable[..., list[float]]:
    """Make a reward function that has an `effect` before it scores."""

    def score(prompts: list[str], responses: list[str]) -> list[float]:
        effect(prompts, responses)
        return [0.0] * len(responses)

    return score


turns_gradients_off = _does(lambda *_: torch.set_grad_enabled(False))
turns_gradients_on = _does(lambda *_: torch.set_grad_enabled(True))
changes_the_folder = _does(lambda *_: os.chdir("/"))
changes_the_dtype = _does(lambda *_: torch.set_default_dtype(torch.float64))
changes_the_device = _does(lambda *_: torch.set_default_device("meta"))
leaves_autocast_on = _does(lambda *_: torch.autocast("cpu", torch.bfloat16).__enter__())
turns_flash_attention_off = _does(lambda *_: torch.backends.cuda.enable_flash_sdp(False))
turns_denormals_to_zero = _does(lambda *_: torch.set_flush_denormal(True))
looks_for_anomalies = _does(lambda *_: torch.autograd.set_detect_anomaly(True))
raises_numpys_errors = _does(lambda *_: np.seterr(all="raise"))
ignores_sigterm = _does(lambda *_: signal.signal(signal.SIGTERM, signal.SIG_IGN))
changes_autocast_on_gpus = _does(lambda *_: torch.set_autocast_dtype("cuda", torch.bfloat16))
becomes_deterministic = _does(lambda *_: torch.use_deterministic_algorithms(True, warn_only=True))
changes_the_precision = _does(lambda *_: torch.set_float32_matmul_precision("medium"))
changes_the_threads = _does(lambda *_: torch.set_num_threads(torch.get_num_threads() + 1))
changes_cudnn = _does(lambda *_: setattr(torch.backends.cudnn, "benchmark", True))
replaces_the_output = _does(lambda *_: setattr(sys, "stdout", io.StringIO()))
closes_the_output = _does(lambda *_: sys.stdout.close())
sorts_the_responses = _does(lambda prompts, responses: responses.sort())
empties_the_prompts = _does(lambda prompts, responses: prompts.clear())


def fails_on_no_way(prompts: list[str], responses: list[str]) -> list[float]:
    if "no way" in responses:
        raise KeyError("way")
    return [0.0] * len(responses)


def fails_on_several(prompts: list[str], responses: list[str]) -> list[float]:
    if len(responses) > 1:
        raise KeyError("several")
    return [0.0]


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
    """Wait until a test sets `released`."""
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
