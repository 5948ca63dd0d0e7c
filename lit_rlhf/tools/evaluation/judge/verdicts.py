"""Verdicts of the judge on pairs: win, tie and lose rates, position bias, agreement with people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from lit_rlhf.functional import Interval, wilson_interval
from lit_rlhf.tools.evaluation.judge.client import Answer
from lit_rlhf.tools.evaluation.outcomes import Outcomes, outcome_rates

Result = Literal["win", "tie", "lose", "invalid"]
_POINTS = {"win": 1.0, "tie": 0.0, "lose": -1.0}
_CREDIT = {"win": 1.0, "tie": 0.5, "lose": 0.0}


class PairVerdict(NamedTuple):
    """The judge's verdict on a policy's answer beside the baseline's.

    Attributes:
        result: The result for the policy; `invalid` if one of the two replies could not be read.
        policy_as_a: The judge's answer with the policy's answer as A; `None` if the two answers
            are the same text, so that nothing was asked.
        policy_as_b: The judge's answer with the policy's answer as B; `None` likewise.
    """

    result: Result
    policy_as_a: Answer | None
    policy_as_b: Answer | None


EQUAL_ANSWERS = PairVerdict("tie", None, None)
"""The verdict on two answers with the same text."""


class PositionBias(NamedTuple):
    """Shares of pairs in which the judge preferred the same position in both orders.

    Attributes:
        first: Share in which it preferred whichever answer came first.
        second: Share in which it preferred whichever answer came second.
    """

    first: float
    second: float


class Agreement(NamedTuple):
    """Agreement of the judge with human labels.

    Attributes:
        share: Share of pairs in which the judge prefers the answer that people chose; a tie counts
            half, and guessing gives 0.5. `None` without a valid verdict.
        share_interval: 95 % Wilson interval of `share`, too wide where there are many ties.
        kappa: Cohen's kappa: 0 for guessing, 1 for full agreement.
        outcomes: Rates at which the judge preferred the answer that people chose (win), neither
            (tie), or the one that they rejected (lose).
        invalid: Number of pairs without a valid verdict. Nothing else counts them.
        position_bias: Position bias.
    """

    share: float | None
    share_interval: Interval | None
    kappa: float | None
    outcomes: Outcomes | None
    invalid: int
    position_bias: PositionBias | None


def combine_orders(policy_as_a: Answer, policy_as_b: Answer) -> PairVerdict:
    """Combine the judge's answers to both orders of a pair.

    The policy wins or loses if both answers say so. Otherwise it is a tie.
    """
    verdicts = (policy_as_a.verdict, policy_as_b.verdict)
    result: Result = "tie"
    if None in verdicts:
        result = "invalid"
    elif verdicts == ("A", "B"):
        result = "win"
    elif verdicts == ("B", "A"):
        result = "lose"
    return PairVerdict(result, policy_as_a, policy_as_b)


def verdict_rates(verdicts: Sequence[PairVerdict]) -> Outcomes | None:
    """Win, tie and lose rates over the valid verdicts; `None` if there is none."""
    points = [_POINTS[verdict.result] for verdict in verdicts if verdict.result != "invalid"]
    return outcome_rates(points, [0.0] * len(points)) if points else None


def position_bias(verdicts: Sequence[PairVerdict]) -> PositionBias | None:
    """Position bias over the pairs with two valid answers; `None` if there is none."""
    pairs = [
        (verdict.policy_as_a.verdict, verdict.policy_as_b.verdict)
        for verdict in verdicts
        if verdict.result != "invalid" and verdict.policy_as_a and verdict.policy_as_b
    ]
    if not pairs:
        return None
    return PositionBias(pairs.count(("A", "A")) / len(pairs), pairs.count(("B", "B")) / len(pairs))


def human_agreement(verdicts: Sequence[PairVerdict]) -> Agreement:
    """Agreement of the judge with human labels.

    Args:
        verdicts: Verdicts on pairs in which the policy's answer is the one that people chose.
    """
    credits = [_CREDIT[verdict.result] for verdict in verdicts if verdict.result != "invalid"]
    rates = verdict_rates(verdicts)
    return Agreement(
        share=sum(credits) / len(credits) if credits else None,
        share_interval=wilson_interval(sum(credits), len(credits)) if credits else None,
        kappa=None if rates is None else cohens_kappa(rates),
        outcomes=rates,
        invalid=len(verdicts) - len(credits),
        position_bias=position_bias(verdicts),
    )


def cohens_kappa(rates: Outcomes) -> float:
    """Agreement beyond chance of a judge that may tie with labels that never do.

    Every pair is seen in both orders, so people name each position in half of all cases, and the
    judge names each in `(1 - tie) / 2` of them. Agreement by chance is then `p_e = (1 - tie) / 2`,
    and with `p_o = win`, `kappa = (p_o - p_e) / (1 - p_e) = (win - lose) / (1 + tie)`.

    Args:
        rates: Rates at which the judge preferred the chosen answer, neither, or the rejected one.
    """
    return (rates.win - rates.lose) / (1 + rates.tie)
