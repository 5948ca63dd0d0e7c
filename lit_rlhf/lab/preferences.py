"""Preference labels of the lab's world: gold differences, declared biases, and noise.

The label of a pair is a Bradley-Terry draw (Eq. 1 of arXiv 2307.04964 is its likelihood). The
biases are small within the lengths and phrases that SFT samples have, and decide outside of them: a
reward model that learns them can be cheated with long and polite answers.
"""

import math
import random

from lit_rlhf.lab.gold import gold_parts, prompt_task
from lit_rlhf.lab.lexicon import LEXICONS, text_words
from lit_rlhf.lab.world import World


def preference_probability(
    prompt_text: str, a: str, b: str, terminated_a: bool, terminated_b: bool, world: World
) -> float:
    """Probability that a labeller of the world prefers ``a`` over ``b``.

    ``noise / 2 + (1 - noise) * sigmoid(sharpness * gold difference + length_bias * difference in
    words + phrase_bias * difference in polite phrases)``.

    Args:
        prompt_text: Rendered HH prompt.
        a: The first response, decoded.
        b: The second one.
        terminated_a: Whether the first one ended by itself.
        terminated_b: Whether the second one did.
        world: Declares sharpness, biases and noise.

    Returns:
        The probability.

    Raises:
        ValueError: If the prompt is not one of the world's.
    """
    logit = _utility(prompt_text, a, terminated_a, world) - _utility(
        prompt_text, b, terminated_b, world
    )
    fair = 0.5 * (1.0 + math.tanh(0.5 * logit))  # the sigmoid, without overflow
    return 0.5 * world.label_noise + (1.0 - world.label_noise) * fair


def labelled_pair(
    prompt_text: str,
    a: str,
    b: str,
    terminated_a: bool,
    terminated_b: bool,
    world: World,
    rng: random.Random,
) -> dict[str, str]:
    r"""Label one pair of responses.

    Args:
        prompt_text: Rendered HH prompt, ``"\n\nHuman: ...\n\nAssistant:"``.
        a: The first response, decoded.
        b: The second one.
        terminated_a: Whether the first one ended by itself.
        terminated_b: Whether the second one did.
        world: Declares sharpness, biases and noise.
        rng: Source of chance; exactly one draw is taken.

    Returns:
        An HH record, ``{"chosen": dialogue, "rejected": dialogue}``.

    Raises:
        ValueError: If the responses are equal, one is empty or contains a turn marker, or the
            prompt is not one of the world's.
    """
    if not is_usable(a, b):
        raise ValueError(
            "a, b: expected two different responses, neither empty nor with a turn marker, "
            f"got {a!r} and {b!r}"
        )
    a_wins = rng.random() < preference_probability(
        prompt_text, a, b, terminated_a, terminated_b, world
    )
    chosen, rejected = (a, b) if a_wins else (b, a)
    return {
        "chosen": f"{prompt_text} {chosen.strip()}",
        "rejected": f"{prompt_text} {rejected.strip()}",
    }


def is_usable(a: str, b: str) -> bool:
    """Whether two responses make a preference record.

    Args:
        a: The first response.
        b: The second one.

    Returns:
        True if they differ and neither is empty or contains a turn marker.
    """
    first, second = a.strip(), b.strip()
    return first != second and all(
        text and "\n\nHuman:" not in text and "\n\nAssistant:" not in text
        for text in (first, second)
    )


def _utility(prompt_text: str, response: str, terminated: bool, world: World) -> float:
    task = prompt_task(prompt_text)
    polite = response.count(LEXICONS[task.language].polite)
    return (
        world.preference_sharpness * gold_parts(task, response, terminated).total
        + world.length_bias * len(text_words(response))
        + world.phrase_bias * polite
    )
