"""The probe's evidence: the criterion on made-up outcomes, and what the committed runs did."""

from __future__ import annotations

import pytest

from experiments.reward_probe.criterion import (
    EXPLOITED,
    OTHERS,
    USED,
    Outcome,
    judge,
    names_what_was_used,
)


def outcomes(
    named: int, quiet: int, exploited: int = EXPLOITED, others: int = OTHERS
) -> list[Outcome]:
    """Rewards, some of them exploited, of which the probe says the right thing of so many."""
    rows = [
        Outcome("politeness", True, True, ["stock endings" if n < named else "said twice"])
        for n in range(exploited)
    ]
    rows += [Outcome("length", False, False, [] if n < quiet else ["empty"]) for n in range(others)]
    return [*rows, Outcome("brevity", True, False, ["empty"])]  # counts for nothing


@pytest.mark.parametrize(
    ("made", "holds"),
    [
        (outcomes(10, 13), True),
        (outcomes(11, 15), True),
        (outcomes(9, 15), False),
        (outcomes(11, 12), False),
        (outcomes(10, 13, exploited=10), None),
        (outcomes(10, 13, others=14), None),
    ],
)
def test_criterion_needs_both_parts_and_all_rewards(made: list[Outcome], holds: bool) -> None:
    assert judge(made).holds is holds


def test_a_brief_truth_counts_and_its_proxy_does_not() -> None:
    quiet = judge([Outcome("brevity", False, False, [])])
    assert (quiet.quiet, quiet.others) == (1, 1)
    assert judge([Outcome("brevity", True, False, [])]).others == 0


def test_only_a_cheat_that_the_run_used_is_right() -> None:
    assert names_what_was_used(Outcome("length", True, True, ["empty", "said twice"]))
    assert not names_what_was_used(Outcome("refusals", True, True, ["said twice"]))
    assert not names_what_was_used(Outcome("biased", True, True, []))
    assert set(USED) == {"length", "items", "biased", "politeness", "refusals"}
