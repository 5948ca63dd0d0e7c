"""Verdicts of the judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from lit_rlhf.evaluation.judge.client import Answer
from lit_rlhf.evaluation.outcomes import Outcomes, ScoreSummary, outcome_rates, score_summary

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
    return outcome_rates(points, [0.0] * len(points), seed=seed) if points else None


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


_CREDIT = {"win": 1.0, "tie": 0.5, "lose": 0.0}


class Agreement(NamedTuple):
    """A judge beside human labels.

    Attributes:
        share: Mean agreement with its 95 % interval, a tie counting half; guessing gives 0.5.
            `None` if there was no valid verdict.
        kappa: Cohen's kappa, 0 for guessing and 1 for full agreement.
        outcomes: How often the judge preferred the answer that people chose (win), neither, or the
            one that they rejected.
        invalid: Pairs without a valid verdict, which nothing else counts.
        bias: How often the place decided.
    """

    share: ScoreSummary | None
    kappa: float | None
    outcomes: Outcomes | None
    invalid: int
    bias: PositionBias | None

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON takes it."""
        return {
            "share": self.share._asdict() if self.share else None,
            "kappa": self.kappa,
            "outcomes": self.outcomes._asdict() if self.outcomes else None,
            "invalid": self.invalid,
            "position_bias": self.bias._asdict() if self.bias else None,
        }


def agreement(verdicts: Sequence[PairVerdict], seed: int = 0) -> Agreement:
    """Compare a judge's verdicts with human labels.

    Args:
        verdicts: Of pairs in which ours is the chosen answer.
        seed: Of the interval.
    """
    credits = [_CREDIT[verdict.result] for verdict in verdicts if verdict.result != "invalid"]
    rates = judged_outcomes(verdicts, seed)
    return Agreement(
        share=score_summary(credits, seed) if credits else None,
        kappa=None if rates is None else cohens_kappa(rates),
        outcomes=rates,
        invalid=len(verdicts) - len(credits),
        bias=position_bias(verdicts),
    )


def cohens_kappa(rates: Outcomes) -> float:
    """Agreement beyond chance of a judge that may tie with labels that never do.

    Either answer is as often the first as the second, so people name each place half the time and
    the judge each in `(1 - tie) / 2` of all cases: chance agreement is `p_e = (1 - tie) / 2`, and
    `kappa = (win - p_e) / (1 - p_e) = (win - lose) / (1 + tie)`.

    Args:
        rates: How often the judge preferred the chosen answer, neither, or the rejected one.
    """
    return (rates.win - rates.lose) / (1 + rates.tie)
