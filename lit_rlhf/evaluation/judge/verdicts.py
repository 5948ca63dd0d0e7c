"""One verdict from the answers to a question in both orders, and what many of them add up to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from lit_rlhf.evaluation.comparison import Outcomes, outcomes
from lit_rlhf.evaluation.judge.answers import Answer

Result = Literal["win", "tie", "lose", "invalid"]
_POINTS = {"win": 1.0, "tie": 0.0, "lose": -1.0}


class PairVerdict(NamedTuple):
    """What the judge says of a policy's answer beside the baseline's.

    Attributes:
        result: For the policy; `invalid` if one of the two replies could not be read.
        shown_first: The judge's answer with the policy's answer as A; `None` if the two answers
            were equal, so that nothing was asked.
        shown_second: The same with the policy's answer as B.
    """

    result: Result
    shown_first: Answer | None
    shown_second: Answer | None


EQUAL_ANSWERS = PairVerdict("tie", None, None)
"""Of two answers that are the same text."""


class PositionBias(NamedTuple):
    """Share of pairs for which the judge named the same place in both orders.

    Attributes:
        first: It preferred whatever was shown first.
        second: It preferred whatever was shown second.
    """

    first: float
    second: float


def pair_verdict(shown_first: Answer, shown_second: Answer) -> PairVerdict:
    """Combine both orders: a policy wins or loses if both say so, otherwise it is a tie.

    Args:
        shown_first: The judge's answer with the policy's answer as A.
        shown_second: The judge's answer with the policy's answer as B.
    """
    verdicts = (shown_first.verdict, shown_second.verdict)
    result: Result = "tie"
    if None in verdicts:
        result = "invalid"
    elif verdicts == ("A", "B"):
        result = "win"
    elif verdicts == ("B", "A"):
        result = "lose"
    return PairVerdict(result, shown_first, shown_second)


def judged_outcomes(verdicts: Sequence[PairVerdict], seed: int = 0) -> Outcomes | None:
    """Win, tie and lose rates over the valid verdicts, `None` if there is none.

    Args:
        verdicts: One for each prompt.
        seed: Of the intervals.
    """
    points = [_POINTS[verdict.result] for verdict in verdicts if verdict.result != "invalid"]
    return outcomes(points, [0.0] * len(points), seed=seed) if points else None


def position_bias(verdicts: Sequence[PairVerdict]) -> PositionBias | None:
    """How often the place decided, over the pairs with two valid answers; `None` without any."""
    pairs = [
        (verdict.shown_first.verdict, verdict.shown_second.verdict)
        for verdict in verdicts
        if verdict.result != "invalid" and verdict.shown_first and verdict.shown_second
    ]
    if not pairs:
        return None
    return PositionBias(pairs.count(("A", "A")) / len(pairs), pairs.count(("B", "B")) / len(pairs))
