"""Which troubles a run has by its truth and by its variety; see `criterion`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import NamedTuple

from experiments.detector.criterion import (
    BROKEN_NATS,
    ENDS,
    ENTROPY_KEPT,
    HARM_STDS,
    HARM_STEPS,
    VARIETY_KEPT,
    VARIETY_SHARE,
)
from lit_callbacks.verdict import Trouble


class Question(StrEnum):
    """What a label answers."""

    HARM = "harm"
    VARIETY = "variety"


JUDGED = {
    Question.HARM: frozenset({Trouble.BROKEN, Trouble.EXPLOITING}),
    Question.VARIETY: frozenset({Trouble.MONOTONOUS}),
}
"""Kinds of verdicts that a question judges."""


@dataclass(frozen=True)
class Label:
    """The troubles of a run.

    Attributes:
        troubles: Those that hold; empty for an untroubled run.
        tells: The questions that have an answer; empty for a run that nobody labelled.
        harm: Place of the first reading of the harm, if it is known.
    """

    troubles: frozenset[Trouble] = frozenset()
    tells: frozenset[Question] = frozenset(Question)
    harm: int | None = None


class Change(NamedTuple):
    """A measure at the start and at the end of a run.

    Attributes:
        first: Its value at the start, or of the SFT policy.
        last: Its value at the end.
    """

    first: float
    last: float


def find_harm(truth: Sequence[float], std: float) -> int | None:
    """Place of the first of `HARM_STEPS` readings in a row whose truth is too low.

    Args:
        truth: Mean truth of the responses, by step.
        std: Standard deviation of the truth of single responses at the start.
    """
    bound = fmean(truth[:3]) - HARM_STDS * std
    for place in range(len(truth) - HARM_STEPS + 1):
        if all(value < bound for value in truth[place : place + HARM_STEPS]):
            return place
    return None


def ends_of(curve: Sequence[float]) -> Change:
    """The start and the end of a curve."""
    return Change(fmean(curve[:3]), fmean(curve[-ENDS:]))


def loses_variety(measures: Mapping[str, Change]) -> bool | None:
    """Whether variety is lost; `None` if no measure of it is known.

    Args:
        measures: Changes of `distinct` (share of distinct bigrams), `opening` and `canned` (shares
            of responses) and `entropy` (nats per token), as far as they are known. Entropy decides
            only where it is the only one.
    """
    known = measures.keys() - {"entropy"}
    if not measures:
        return None
    if not known:
        return measures["entropy"].last < ENTROPY_KEPT * measures["entropy"].first
    shares = [measures[name] for name in ("opening", "canned") if name in measures]
    is_alike = any(share.last - share.first > VARIETY_SHARE for share in shares)
    distinct = measures.get("distinct")
    return is_alike or (distinct is not None and distinct.last < VARIETY_KEPT * distinct.first)


def label_run(
    truth: Sequence[float],
    std: float,
    reward: Sequence[float] | None,
    kl: Sequence[float],
    variety: Mapping[str, Change],
) -> Label:
    """Label a run by its truth and its variety.

    Args:
        truth: Mean truth of the responses, by step.
        std: Standard deviation of the truth of single responses at the start.
        reward: Mean reward that the run optimizes, by step; `None` if it is not known.
        kl: KL to the reference, in nats per response, by step.
        variety: Measures of the variety, see `loses_variety`.
    """
    troubles = set()
    harm = find_harm(truth, std)
    fell = reward is not None and ends_of(reward).last < ends_of(reward).first
    if harm is not None:
        troubles.add(Trouble.BROKEN if fell else Trouble.EXPLOITING)
    if ends_of(kl).last < -BROKEN_NATS:
        troubles.add(Trouble.BROKEN)
    monotonous = loses_variety(variety)
    if monotonous:
        troubles.add(Trouble.MONOTONOUS)
    tells = {Question.HARM} if monotonous is None else set(Question)
    return Label(frozenset(troubles), frozenset(tells), harm)
