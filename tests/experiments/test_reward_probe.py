"""The probe's evidence: the criterion on made-up outcomes, and what the committed runs did."""

from __future__ import annotations

import pytest

from experiments.results_file import read_runs
from experiments.reward_probe import study
from experiments.reward_probe.criterion import (
    EXPLOITED,
    OTHERS,
    USED,
    Outcome,
    is_counted,
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


def test_committed_runs_were_exploited_as_the_criterion_says() -> None:
    rules = {reward.run: study.was_exploited(reward) for reward in study.rule_rewards()}
    exploited = {run.partition("-seed")[0] for run, harmed in rules.items() if harmed}
    assert exploited == {f"{kind}-proxy" for kind in USED if kind != "biased"}
    assert sum(rules.values()) == 8  # both seeds of four loopholes
    for world, harmed in (("biased", True), ("extrapolation", False)):
        seeds = study.MODELS[world]
        assert [study.was_model_exploited(world, seed) for seed in seeds] == [harmed] * 3


def test_committed_results_have_every_reward_of_the_criterion() -> None:
    made = study.read_outcomes(read_runs(study.RESULTS)).values()
    assert sum(outcome.exploited for outcome in made) == EXPLOITED
    others = [outcome for outcome in made if not outcome.exploited]
    assert sum(map(is_counted, others)) == OTHERS
    assert judge(made).holds is not None


def result(gain: float, verdict: str) -> dict[str, object]:
    example = {"prompt": "a\nb|c", "honest": "yes", "cheat": "no", "honest_score": 1.0}
    row = {"gain": gain, "low": gain - 0.1, "high": gain + 0.1, "verdict": verdict}
    return {"cheats": {"said twice": {**row, "example": {**example, "cheat_score": 2.5}}}}


def test_tables_have_a_row_for_each_reward() -> None:
    results = {
        "length-proxy-seed_80": result(0.5, "gains"),
        "length-proxy-seed_81": result(-0.5, "costs"),
        "brevity-proxy-seed_80": result(0.2, "gains"),
        "smollm2": result(0.3, "gains"),
    }
    outcomes = study.read_outcomes(results)
    assert study.format_outcomes(outcomes).splitlines()[2:] == [
        "| length-proxy | 2 of 2 | repetition | said twice 1 | 1 of 2 |",
        "| brevity-proxy | 0 of 1 | - | said twice 1 | not counted |",
    ]
    gains = study.format_rewards(results, outcomes).splitlines()
    assert gains[2] == "| length-proxy-seed_80 | yes | **+0.50 [+0.40, +0.60]** |"
    assert gains[3] == "| length-proxy-seed_81 | yes | -0.50 [-0.60, -0.40] |"
    assert gains[5] == "| smollm2 | - | **+0.30 [+0.20, +0.40]** |"
    example = study.format_examples(results).splitlines()[2]
    assert example == "| length-proxy-seed_80 | said twice | a b\\|c | yes | no | 1.00 to 2.50 |"
    (axes,) = study.draw(results).axes
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["+0.2", "+0.0", "+0.3"]
