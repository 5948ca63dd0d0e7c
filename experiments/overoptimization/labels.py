"""The truth by definition, and the pairs that it labels."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from experiments.overoptimization.criterion import Scores


class GradedResponses(NamedTuple):
    """What the truth of responses follows from, each by prompt, `[N, S]`.

    Attributes:
        gold: The gold model's scores.
        lengths: Lengths in tokens, EOS included.
    """

    gold: Scores
    lengths: Scores


def read_gold(rows: Sequence[dict[str, Any]], *, samples: int) -> GradedResponses:
    """Read gold scores and lengths of responses.

    Args:
        rows: Responses with `scores` and `length`; those to the same prompt are adjacent.
        samples: Number of responses to each prompt.
    """
    return GradedResponses(
        gold=as_matrix([row["scores"]["gold"] for row in rows], samples),
        lengths=as_matrix([row["length"] for row in rows], samples),
    )


@dataclass(frozen=True)
class Truth:
    """The gold model's score less what length is worth to it.

    Attributes:
        slope: Score per token, fitted on SFT's responses.
        typical_length: SFT's mean length in tokens. The score of a response of this length stays.
    """

    slope: float
    typical_length: float

    def of(self, gold: Scores, lengths: Scores) -> Scores:
        """The truth of responses.

        Args:
            gold: The gold model's scores, of any shape.
            lengths: Lengths in tokens, EOS included, of the same shape.
        """
        return gold - self.slope * (lengths - self.typical_length)

    def of_rows(self, rows: Sequence[dict[str, Any]], *, samples: int) -> Scores:
        """The truth of responses by prompt, `[N, samples]`, see `read_gold`."""
        graded = read_gold(rows, samples=samples)
        return self.of(gold=graded.gold, lengths=graded.lengths)


def fit_truth(gold: Scores, lengths: Scores) -> Truth:
    """Fit what length is worth to the gold model, by least squares within prompts.

    Within prompts, since labels compare responses to the same prompt.

    Args:
        gold: Scores of SFT's responses, `[N, S]`.
        lengths: Their lengths in tokens, EOS included, `[N, S]`.
    """
    scores, tokens = (values - values.mean(1, keepdims=True) for values in (gold, lengths))
    slope = (scores * tokens).sum() / (tokens * tokens).sum()
    return Truth(slope=float(slope), typical_length=float(lengths.mean()))


def label_pairs(rows: Sequence[dict[str, Any]], truths: Sequence[float]) -> list[dict[str, Any]]:
    """Label neighbouring responses to the same prompt: two pairs of four responses.

    A pair is left out if a response is empty or was cut off, or if both have the same truth.

    Args:
        rows: Responses with `prompt`, `response` and `ended`; an even number to each prompt, in
            adjacent rows.
        truths: The truth of each response.

    Returns:
        Rows with `prompt`, `chosen` and `rejected`, and the places of both among `rows` as
        `places`.
    """
    pairs = []
    for first in range(0, len(rows), 2):
        places = (first, first + 1)
        is_usable = all(rows[n]["ended"] and rows[n]["response"].strip() for n in places)
        if is_usable and truths[first] != truths[first + 1]:
            chosen, rejected = sorted(places, key=lambda n: -truths[n])
            pairs.append(
                {
                    "prompt": rows[first]["prompt"],
                    "chosen": rows[chosen]["response"].strip(),
                    "rejected": rows[rejected]["response"].strip(),
                    "places": [chosen, rejected],
                }
            )
    return pairs


def draw_pairs(pairs: Sequence[dict[str, Any]], size: int, seed: int) -> list[dict[str, Any]]:
    """Draw the pairs of a proxy anew for each size and seed.

    Args:
        pairs: All labelled pairs for training.
        size: Number of pairs to draw.
        seed: Seed of the repetition.
    """
    return random.Random(f"{size} pairs of seed {seed}").sample(pairs, size)


def as_matrix(values: Sequence[float], samples: int) -> Scores:
    """Values of adjacent responses by prompt, `[N, samples]` float64."""
    return np.array(values, float).reshape(-1, samples)
