"""How far a judge agrees with the people who labelled preferences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lit_rlhf.data import DataSource, PreferenceRecord, load_records
from lit_rlhf.evaluation.comparison import Outcomes, ScoreSummary, score_summary
from lit_rlhf.evaluation.judge.asking import Pair
from lit_rlhf.evaluation.judge.options import Criterion
from lit_rlhf.evaluation.judge.verdicts import (
    PairVerdict,
    PositionBias,
    judged_outcomes,
    position_bias,
)

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


def labelled_pairs(criterion: Criterion, path: str, limit: int) -> list[Pair]:
    """Human preferences as pairs, the chosen answer ours; pairs of equal answers are left out.

    Args:
        criterion: What people compared by.
        path: A file of preferences.
        limit: Use only this many of the first pairs.

    Raises:
        RecordError: If the file cannot be used.
    """
    records = load_records(
        "preference", [DataSource(path)], on_bad_record="skip", apply_weights=False
    ).records
    return [
        Pair(criterion, record.prompt, record.chosen, record.rejected)
        for record in records[:limit]
        if isinstance(record, PreferenceRecord)  # the kind that was asked for
    ]


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
