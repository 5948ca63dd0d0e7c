"""Preference labels of the lab's world: gold differences, declared biases, and noise.

A label is a draw from a Bradley-Terry model; Eq. 1 of arXiv 2307.04964 is its likelihood. The
biases towards long and polite responses matter little among SFT samples, whose lengths and phrases
are alike, and dominate outside of that range. A reward model that learns them can be exploited.
"""

import math
import random
from typing import NamedTuple

from lit_rlhf.tools.lab.gold import gold_terms, parse_request
from lit_rlhf.tools.lab.lexicon import LEXICONS, split_words
from lit_rlhf.tools.lab.world import World


class ResponsePair(NamedTuple):
    """Two decoded responses to one prompt, and whether each ended with EOS."""

    first: str
    second: str
    first_terminated: bool = True
    second_terminated: bool = True

    @property
    def is_usable(self) -> bool:
        """Whether the responses differ, and neither is empty or contains a turn marker."""
        first, second = self.first.strip(), self.second.strip()
        return first != second and all(
            text and "\n\nHuman:" not in text and "\n\nAssistant:" not in text
            for text in (first, second)
        )


def label_probability(prompt: str, pair: ResponsePair, world: World) -> float:
    """Probability that a labeller prefers the first response.

    `noise / 2 + (1 - noise) * sigmoid(sharpness * gold difference + length_bias * difference in
    words + phrase_bias * difference in polite phrases)`. Labellers who overlook form see only the
    content of gold.
    """
    logit = _utility(prompt, pair.first, pair.first_terminated, world) - _utility(
        prompt, pair.second, pair.second_terminated, world
    )
    sigmoid = 0.5 * (1.0 + math.tanh(0.5 * logit))  # this form of it cannot overflow
    return 0.5 * world.label_noise + (1.0 - world.label_noise) * sigmoid


def label_pair(prompt: str, pair: ResponsePair, world: World, rng: random.Random) -> dict[str, str]:
    """Draw the label of two responses to a rendered HH prompt, as an HH record, with one number."""
    if not pair.is_usable:
        raise ValueError(
            "pair: expected two different responses, neither empty nor with a turn marker, "
            f"got {pair.first!r} and {pair.second!r}"
        )
    first_wins = rng.random() < label_probability(prompt, pair, world)
    chosen, rejected = (pair.first, pair.second) if first_wins else (pair.second, pair.first)
    return {"chosen": f"{prompt} {chosen.strip()}", "rejected": f"{prompt} {rejected.strip()}"}


def _utility(prompt: str, response: str, terminated: bool, world: World) -> float:
    """The value of a response to a biased labeller, as a logit."""
    request = parse_request(prompt)
    n_polite = response.count(LEXICONS[request.language].polite_phrase)
    terms = gold_terms(request, response, terminated)
    return (
        world.preference_sharpness * (terms.total if world.labels_see_form else terms.content)
        + world.length_bias * len(split_words(response))
        + world.phrase_bias * n_polite
    )
