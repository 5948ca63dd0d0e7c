"""Win, tie and lose by people, and agreement, by numbers worked out by hand."""

from typing import Any

import numpy as np
import pytest

from lit_rlhf.functional import wilson_interval
from lit_rlhf.tools.evaluation.people import measure_people, people_html
from lit_rlhf.tools.evaluation.people.measure import (
    between_annotators,
    machine_agreement,
    majority_verdicts,
    people_outcomes,
    within_annotators,
)
from tests.support.labels import make_label as label


def test_outcomes_count_each_comparison_once() -> None:
    labels = [
        *(label("1", choice, name) for choice, name in (("b", "ann"), ("b", "bob"), ("a", "cem"))),
        label("2", "b"),
        label("3", "both_bad"),
        label("4", "tie", None),
    ]
    outcomes = people_outcomes(labels, "ppo")
    # comparisons: (2/3, 0, 1/3), (1, 0, 0), (0, 1, 0), (0, 1, 0)
    assert (outcomes.win, outcomes.tie, outcomes.lose) == pytest.approx((5 / 12, 0.5, 1 / 12))
    assert outcomes.n == 4
    mirrored = people_outcomes(labels, "sft")
    assert (mirrored.win, mirrored.tie, mirrored.lose) == pytest.approx((1 / 12, 0.5, 5 / 12))


def test_interval_of_one_annotator_is_a_bootstrap_over_prompts() -> None:
    labels = [label(str(number), "b" if number < 30 else "a") for number in range(40)]
    outcomes = people_outcomes(labels, "ppo", seed=3)
    # 2.5 and 97.5 % of the binomial of 40 trials at 0.75 are 24 and 35; it has steps of 1 / 40
    assert outcomes.win_interval == pytest.approx((24 / 40, 35 / 40), abs=1.01 / 40)
    assert outcomes.tie_interval == (0.0, 0.0)
    assert people_outcomes(labels, "ppo", seed=3) == outcomes


def test_interval_is_wider_when_annotators_differ() -> None:
    keys = [str(number) for number in range(60)]
    alike = [label(key, "b" if int(key) % 2 else "a", name) for key in keys for name in "uvwxyz"]
    apart = [
        label(key, "b" if "uvwxyz".index(name) % 2 else "a", name)
        for key in keys
        for name in "uvwxyz"
    ]
    same, different = (people_outcomes(labels, "ppo") for labels in (alike, apart))
    assert same.win == different.win == 0.5
    widths = [outcome.win_interval.high - outcome.win_interval.low for outcome in (same, different)]
    # over 60 prompts the deviation is 0.5 / sqrt(60), over 6 annotators 0.5 / sqrt(6)
    assert widths[0] == pytest.approx(2 * 1.96 * 0.5 / np.sqrt(60), rel=0.15)
    assert widths[1] == pytest.approx(2 * 1.96 * 0.5 / np.sqrt(6), rel=0.25)


def test_majority_is_a_tie_without_most() -> None:
    labels = [
        *(label("1", choice) for choice in "aab"),
        *(label("2", choice) for choice in "ab"),
        label("3", "both_bad"),
        *(label("4", choice) for choice in ("tie", "tie", "b")),
    ]
    assert majority_verdicts(labels) == {"1": "a", "2": "tie", "3": "tie", "4": "tie"}


def test_agreement_between_people_by_hand() -> None:
    choices = {
        "ann": ["a", "a", "a", "b", "b", "b", "tie", "tie"],
        "bob": ["a", "a", "b", "b", "b", "a", "tie", "both_bad"],
    }
    labels = [
        label(str(number), choice, name)
        for name, of_name in choices.items()
        for number, choice in enumerate(of_name)
    ]
    agreement = between_annotators(labels)
    assert agreement is not None
    assert (agreement.n, agreement.share) == (8, 0.75)
    assert agreement.interval == wilson_interval(6, 8)
    # chance: (3/8 * 3/8 + 3/8 * 3/8 + 2/8 * 2/8) = 22/64
    assert agreement.kappa == pytest.approx((0.75 - 22 / 64) / (1 - 22 / 64))
    assert between_annotators(labels[:8]) is None


def test_kappa_of_more_people_is_the_weighted_mean_over_pairs() -> None:
    labels = [
        *(label(str(n), "ab"[n % 2], name) for n in range(4) for name in ("ann", "bob")),
        # cem has seen two of them, and is wrong in one
        label("0", "a", "cem"),
        label("1", "a", "cem"),
    ]
    agreement = between_annotators(labels)
    assert agreement is not None
    # ann and bob: 4 of 4, kappa 1; with cem: 1 of 2 each, chance 1/2, kappa 0
    assert (agreement.n, agreement.share) == (8, 0.75)
    assert agreement.kappa == pytest.approx((4 * 1.0 + 2 * 0.0 + 2 * 0.0) / 8)


def test_kappa_is_none_where_all_say_the_same() -> None:
    labels = [label(str(n), "a", name) for n in range(3) for name in ("ann", "bob")]
    agreement = between_annotators(labels)
    assert agreement is not None
    assert (agreement.share, agreement.kappa) == (1.0, None)


def test_second_look_is_compared_with_the_first() -> None:
    labels = [
        label("1", "a"),
        label("2", "b"),
        label("3", "skip"),
        label("1", "a", repeat=True),
        label("2", "a", repeat=True),
        label("3", "a", repeat=True),
        label("1", "b", "bob"),
    ]
    agreement = within_annotators(labels)
    assert agreement is not None
    assert (agreement.n, agreement.share) == (2, 0.5)


def test_machine_agrees_where_people_prefer_a_response() -> None:
    majority: Any = {"1": "a", "2": "b", "3": "b", "4": "tie", "5": "a"}
    verdicts: Any = {"1": "a", "2": "b", "3": "tie", "4": "a"}
    agreement = machine_agreement(majority, verdicts)
    assert agreement is not None
    assert (agreement.n, agreement.share) == (3, pytest.approx(2 / 3))
    # chance: people (1/3, 0, 2/3), machine (1/3, 1/3, 1/3) in the order a, tie, b
    chance = 1 / 9 + 2 / 9
    assert agreement.kappa == pytest.approx((2 / 3 - chance) / (1 - chance))
    assert machine_agreement({"4": "tie"}, verdicts) is None


def test_report_leaves_second_looks_and_skips_out_of_the_rates() -> None:
    labels = [
        label("1", "b", seconds=4.0),
        label("2", "skip", seconds=8.0),
        label("1", "a", repeat=True, seconds=6.0),
        label("3", "tie", None),
        label("4", "both_bad", left="b"),
        label("5", "a", "bob", selection="spread"),
    ]
    people = measure_people(labels, machines={"gold": {"1": "a"}})
    assert people.baseline == "sft"
    outcomes = people.outcomes["ppo"]
    assert (outcomes.win, outcomes.tie, outcomes.lose) == pytest.approx((1 / 3, 2 / 3, 0.0))
    assert people.from_spread == 1
    assert people.both_bad == 0.25
    assert people.counts == {
        "skipped": 1,
        "second looks": 1,
        "equal responses, shown to nobody": 1,
    }
    assert (people.n_labels, people.n_comparisons) == (5, 4)
    ann = people.annotators["ann"]
    assert (ann.labels, ann.skips, ann.left, ann.ties, ann.seconds) == (4, 1, 0.5, 0.5, 6.0)
    assert ann.others is None
    gold = people.machines["gold"]
    assert gold is not None
    assert (gold.n, gold.share) == (1, 0.0)
    longer = people.machines["longer is better"]
    assert longer is not None
    assert (longer.n, longer.share) == (2, 0.5)
    report = people.as_dict()
    assert report["outcomes"]["ppo"]["win_interval"] == list(outcomes.win_interval)
    assert [one.judge for one in people.head_to_heads] == ["people"]


def test_report_has_each_share_of_an_annotator_and_each_agreement_at_its_place() -> None:
    labels = [
        label("1", "a"),
        label("2", "a"),
        label("3", "tie"),
        label("1", "b", repeat=True),
        label("1", "a", "bob"),
    ]
    people = measure_people(labels)
    ann = people.annotators["ann"]
    assert ann.left == pytest.approx(2 / 3)  # two of three choices of a side, which is a
    assert ann.ties == pytest.approx(1 / 3)
    assert people.between is not None
    assert people.within is not None
    assert (people.between.share, people.within.share) == (1.0, 0.0)


def test_report_of_one_policy_has_no_winner() -> None:
    people = measure_people([label("1", "b", policy_b="sft")])
    assert people.outcomes == {}
    assert people.head_to_heads == []
    with pytest.raises(ValueError, match="expected at least one label"):
        measure_people([])


def test_page_escapes_what_comes_from_labels() -> None:
    name = "<script>alert(1)</script>"
    labels = [label(str(n), "ab"[n % 2], who) for n in range(4) for who in (name, "bob")]
    labels = [one for one in labels if one.annotator != "bob" or one.comparison != "0"]
    page = people_html(measure_people(labels, machines={"<b>": {"1": "b"}}))
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "most people with &lt;b&gt;" in page
    assert "win 50 [" in page
    assert "http" not in page.partition("<body>")[2]
