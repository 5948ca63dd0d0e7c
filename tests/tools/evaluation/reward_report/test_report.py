"""Measures of a reward model, and its page, read back from its HTML."""

import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lit_rlhf.data import Message, PreferenceRecord
from lit_rlhf.tools.evaluation.outcomes import ScoreSummary
from lit_rlhf.tools.evaluation.reward_report import RewardReport, measure_reward_model, report_html
from lit_rlhf.tools.evaluation.reward_report.measures import (
    Accuracy,
    accuracy,
    calibration_error,
    correlation,
    histogram,
    length_buckets,
    reliability,
)
from lit_rlhf.tools.evaluation.reward_report.render import (
    print_reward_report,
    print_strengths,
    verdict,
)
from lit_rlhf.tools.evaluation.reward_report.scores import ScoredPairs
from tests.support.report_pages import Page

NASTY = '<script>alert("&\'")</script>'


def record(number: int, source: str = "helpful", text: str = "") -> PreferenceRecord:
    return PreferenceRecord(
        prompt=(Message("user", f"question {number} {text}"),),
        chosen=f"good {number} {text}",
        rejected=f"bad {number} {text}",
        source=source,
        location=f"{source}.jsonl:{number}",
    )


def pairs(text: str = "", sources: tuple[str, str] = ("helpful", "harmless")) -> ScoredPairs:
    """Six pairs with differences 2, -3, 1, -1, 0, 4; the chosen are longer in the first four."""
    return ScoredPairs(
        records=[record(n, sources[n > 3], text) for n in range(1, 7)],
        chosen=np.array([3.0, -1.0, 1.0, 0.0, 1.0, 4.0]),
        rejected=np.array([1.0, 2.0, 0.0, 1.0, 1.0, 0.0]),
        chosen_lengths=np.array([9, 8, 7, 6, 2, 3]),
        rejected_lengths=np.array([5, 5, 5, 5, 5, 5]),
        logprobs={"reward model": np.full(6, -7.0)},
        lm_head="runs/reward",
    )


def page(report: RewardReport) -> Page:
    Path("report.html").write_text(report_html(report), "utf-8")
    return Page(Path("report.html"))


@pytest.fixture
def report() -> RewardReport:
    sources = {"helpful": "a.jsonl", "harmless": "b.jsonl"}
    return measure_reward_model("runs/reward", sources, pairs())


def test_numbers_of_the_report_are_each_of_its_own_side(report: RewardReport) -> None:
    assert report.chosen_scores.mean == pytest.approx((3 - 1 + 1 + 0 + 1 + 4) / 6)
    assert report.rejected_scores.mean == pytest.approx((1 + 2 + 0 + 1 + 1 + 0) / 6)
    differences = [2, -3, 1, -1, 0, 4]
    loss = sum(math.log1p(math.exp(-difference)) for difference in differences) / 6
    assert report.pairwise_loss == pytest.approx(loss)
    by_difference = np.corrcoef([4, 3, 2, 1, -3, -2], differences)[0, 1]
    assert report.difference_by_length["pearson"] == pytest.approx(by_difference)
    lengths = [9, 8, 7, 6, 2, 3, *[5] * 6]
    by_score = np.corrcoef(lengths, [3, -1, 1, 0, 1, 4, 1, 2, 0, 1, 1, 0])[0, 1]
    assert report.score_by_length["pearson"] == pytest.approx(by_score)


def test_numbers_of_table_and_page_are_each_in_its_own_column(
    report: RewardReport, capsys: pytest.CaptureFixture[str]
) -> None:
    helpful = Accuracy(pairs=1234, accuracy=0.5, low=0.25, high=0.75, margin=1.5, longer=0.625)
    overall = Accuracy(pairs=2000, accuracy=0.6, low=0.55, high=0.7, margin=2.5, longer=0.65)
    own = replace(
        report,
        accuracy=overall,
        by_source={"helpful": helpful, "harmless": helpful},
        gain=ScoreSummary(mean=0.1, low=0.05, high=0.2, std=1.0),
        calibration_error=0.123,
        pairwise_loss=0.456,
        difference_by_length={"pearson": 0.25, "spearman": -0.5},
        score_by_length={"pearson": 0.75, "spearman": -0.25},
        perplexity={"reward model": {"all": 3.0, "by_source": {"helpful": 2.0, "harmless": 4.0}}},
    )
    sentence = "The model is right more often than preferring the longer response would be"
    assert verdict(own) == f"{sentence}: +10.0 points [+5.0, +20.0]."
    print_reward_report(own)
    lines = [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert ["helpful", "1234", "50.0% [25.0%, 75.0%]", "62.5%"] in lines
    assert ["all", "2000", "60.0% [55.0%, 70.0%]", "65.0%"] in lines
    shown = page(own)
    source_rows = {
        row.one("th").text: [cell.text for cell in row.all("td")]
        for row in shown.root.all("section")[1].all("tr")[1:]
    }
    assert source_rows == {
        "all": ["2,000", "60.0%", "55.0% - 70.0%", "65.0%", "2.500", "3.00"],
        "helpful": ["1,234", "50.0%", "25.0% - 75.0%", "62.5%", "1.500", "2.00"],
        "harmless": ["1,234", "50.0%", "25.0% - 75.0%", "62.5%", "1.500", "4.00"],
    }
    assert [fact.text for fact in shown.root.all(css="fact")] == [
        "60.0% right [55.0%, 70.0%]",
        "65.0% would be right by preferring the longer",
        "0.123 expected calibration error",
        "+0.25 correlation of score and length differences",
        "3.00 perplexity of chosen responses, reward model",
        "0.456 pairwise loss (Eq. 1), nats; 0.693 is guessing",
    ]
    assert "pairs: Pearson +0.25, Spearman -0.50. Score" in shown.root.text
    assert "all responses: Pearson +0.75, Spearman -0.25." in shown.root.text


def test_the_page_needs_nothing_else(report: RewardReport) -> None:
    shown = page(report)
    assert shown.source.startswith("<!doctype html>")
    assert not shown.root.all("link") + shown.root.all("script") + shown.root.all("img")
    images = [image.attributes["xlink:href"] for image in shown.root.all("image")]
    assert len(images) == 1
    assert images[0].startswith("data:image/png;base64,")
    # a reference to a part of the page itself, such as `url(#a)`, loads nothing
    assert not re.findall(r"https?:|@import|url\((?!#)", shown.source)


def test_mistakes_come_with_their_text_worst_first(report: RewardReport) -> None:
    section = page(report).root.all("section")[4]
    assert "2 of 3 mistakes." in section.text  # the third is a tie
    first, second = section.all("article")
    assert first.one("h3").text == "1. 95.3% sure of the rejected response helpful, helpful.jsonl:2"
    assert second.one("h3").text.endswith("harmless, harmless.jsonl:4")
    chosen, rejected = first.all(css="answer")
    assert chosen.text == "chosen, score -1.00, 8 tokens good 2"
    assert rejected.text == "rejected, score 2.00, 5 tokens bad 2"


def test_text_from_data_is_escaped() -> None:
    named = pairs(NASTY, (f"a{NASTY}", f"b{NASTY}"))
    hostile = replace(named, lm_head=NASTY, skipped=Counter({NASTY: 1}))
    nasty = measure_reward_model(NASTY, {f"a{NASTY}": "a", f"b{NASTY}": "b"}, hostile)
    shown = page(nasty)
    assert shown.root.all("script") == []
    assert NASTY not in shown.source
    assert shown.title == f"Reward model {NASTY}"
    assert shown.root.all("article")[0].all(css="text")[0].text == f"question 2 {NASTY}"
    assert shown.root.text.count(NASTY) > 10
    labels = [chart.attributes["aria-label"] for chart in shown.root.all(css="chart")]
    assert labels[1] == f"Difference of the scores, a{NASTY}"


def test_missing_measurements_are_named() -> None:
    few = {"logprobs": {}, "lm_head": "", "left_out": Counter({"too long": 3}), "shortened": 2}
    sources, own = {"helpful": "a.jsonl"}, replace(pairs(), **few)
    report = measure_reward_model("runs/reward", sources, own, n_mistakes=0)
    footer = page(report).root.one("footer").text
    assert "No perplexity: the model's folder holds no output layer" in footer
    assert "3 pairs were left out: 3 x too long." in footer
    assert "The prompts of 2 pairs were shortened" in footer
    with pytest.raises(ValueError, match="mistakes: expected an integer >= 0, got -1"):
        measure_reward_model("m", {}, pairs(), n_mistakes=-1)


@pytest.mark.parametrize(
    ("right", "expected"),
    [
        (90, "right more often than preferring the longer response would be: +30.0 points ["),
        (62, "more often than preferring the longer response would be is not shown: +2.0 points ["),
        (20, "right less often than preferring the longer response would be: -40.0 points ["),
    ],
)
def test_the_verdict_compares_with_length(right: int, expected: str) -> None:
    places = np.random.default_rng(0).permutation(100)
    scored = ScoredPairs(
        records=[record(i) for i in range(100)],
        chosen=np.where(np.arange(100) < right, 1.0, -1.0),
        rejected=np.zeros(100),
        chosen_lengths=np.where(places < 60, 11, 9),
        rejected_lengths=np.full(100, 10),
    )
    assert expected in verdict(measure_reward_model("m", {}, scored))


def test_shorter_is_the_baseline_where_it_is_right_more_often() -> None:
    swapped = replace(pairs(), chosen_lengths=np.full(6, 5), rejected_lengths=np.full(6, 9))
    report = measure_reward_model("m", {}, swapped)
    assert report.length_baseline == "shorter"
    assert report.gain.mean == pytest.approx(0.5 - 1.0)


def test_the_dictionary_is_json_without_nan(report: RewardReport) -> None:
    constant = replace(pairs(), chosen=np.zeros(6), rejected=np.zeros(6))
    flat = measure_reward_model("m", {}, constant)
    text = json.dumps(flat.as_dict(), allow_nan=False)
    assert json.loads(text)["difference_by_length"] == {"pearson": None, "spearman": None}
    values = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert values["accuracy"]["accuracy"] == 0.5
    assert values["by_source"]["harmless"]["pairs"] == 3
    assert values["mistakes"][0]["prompt"] == [{"role": "user", "content": "question 2 "}]
    assert "differences" not in values


def with_strengths(*strengths: float, text: str = "", shown: int = 2) -> RewardReport:
    """A report with pairs of these strengths; every second one comes from source `b`."""
    rows = []
    for n, strength in enumerate(strengths):
        source = "ab"[n % 2]
        row = {"prompt": [{"role": "user", "content": f"question {n} {text}"}]}
        row |= {"chosen": f"good {n}", "rejected": f"bad {n}", "strength": strength}
        rows.append(row | {"source": f"{source}{text}", "location": f"{source}.jsonl:{n}"})
    return measure_reward_model("m", {}, pairs(), n_mistakes=shown, strengths=rows)


def test_weakest_pairs_are_printed_with_their_chosen_response_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = {"location": "a:1", "source": "a", "strength": -0.5}
    print_strengths([row | {"chosen": "preferred", "rejected": "other"}])
    assert re.search(r"a:1\W+0\.500\W+preferred\W+other", capsys.readouterr().out)


def test_strengths_by_hand_and_the_pairs_below_zero_weakest_first() -> None:
    report = with_strengths(*[-1.0, 3.0, 2.0, -2.5, 2.0, 0.0, -0.5])
    assert [sum(n) for n in report.strengths["histogram"]["counts"].values()] == [4, 3]
    *_, strengths, doubtful = page(report).root.all("section")
    titles = [chart.attributes["aria-label"] for chart in strengths.all(css="chart")]
    assert titles == ["Strength, all sources", "Strength, a", "Strength, b"]
    cells = [[cell.text for cell in row.all("td")] for row in strengths.all("tr")[1:]]
    assert cells == [["4", "0.625", "50.0%"], ["3", "0.167", "33.3%"]]
    assert "2 of 3 pairs with a strength below 0" in doubtful.text
    first, second = doubtful.all("article")
    assert first.one("h3").text == "1. strength -2.500 b, b.jsonl:3"
    assert second.one("h3").text == "2. strength -1.000 a, a.jsonl:0"
    assert first.all(css="answer")[1].text == "rejected bad 3"
    assert first.all(css="turn")[0].text == "Human question 3"
    json.dumps(report.as_dict(), allow_nan=False)


def test_without_strengths_or_doubtful_pairs_nothing_is_claimed(report: RewardReport) -> None:
    assert "Strength" not in page(report).root.text
    assert "None has a strength below 0." in page(with_strengths(1.0, 2.0)).root.text
    assert page(with_strengths(-1.0, text=NASTY)).root.all("script") == []


def test_accuracy_counts_ties_as_misses_and_equal_lengths_as_half() -> None:
    rates = accuracy(np.array([2.0, -1.0, 0.0, 3.0]), np.array([5, 5, 0, -2]))
    assert rates.pairs == 4
    assert rates.accuracy == 0.5
    assert rates.margin == 1.0
    assert rates.longer == (1 + 1 + 0.5 + 0) / 4
    assert rates.low < 0.5 < rates.high


def test_buckets_are_thirds_of_the_size_on_either_side() -> None:
    lengths = np.array([-9, -6, -1, 0, 1, 2, 3, 4, 5, 30])
    differences = np.array([-1.0, 1, -1, 1, 1, 1, -1, 1, 1, -1])
    # sizes 1 1 2 3 4 5 6 9 30: a third at 2 + 2/3, two thirds at 5 + 1/3
    buckets = length_buckets(differences, lengths)
    accuracies = [(b.label, b.accuracy.pairs, b.accuracy.accuracy) for b in buckets]
    assert accuracies == [
        ("-6 or less", 2, 0.5),
        ("-2 to -1", 1, 0.0),
        ("0", 1, 1.0),
        ("1 to 2", 2, 1.0),
        ("3 to 5", 3, pytest.approx(2 / 3)),
        ("6 or more", 1, 0.0),
    ]


def test_every_pair_is_in_one_bucket() -> None:
    rng = np.random.default_rng(0)
    for scale in (0, 1, 2, 300):
        lengths = rng.integers(-scale, scale + 1, size=200)
        buckets = length_buckets(rng.normal(size=200), lengths)
        assert sum(bucket.accuracy.pairs for bucket in buckets) == 200
        for bucket in buckets:
            low = -math.inf if bucket.low is None else bucket.low
            high = math.inf if bucket.high is None else bucket.high
            assert bucket.accuracy.pairs == ((lengths >= low) & (lengths <= high)).sum()


def test_reliability_and_its_error_by_hand() -> None:
    # confidences 1/2 (twice: a tie, a miss), then 0.9 (hit, miss, hit) and 0.9999
    logit = math.log(0.9 / 0.1)
    differences = np.array([0.0, -1e-9, logit, -logit, logit, 9.2])
    unsure, sure, certain = reliability(differences)
    assert (unsure.pairs, unsure.accuracy) == (2, 0.0)
    assert (sure.pairs, sure.accuracy) == (3, pytest.approx(2 / 3))
    assert sure.confidence == pytest.approx(0.9)
    assert sure.low < 2 / 3 < sure.high
    assert (certain.pairs, certain.accuracy) == (1, 1.0)
    expected = (2 * 0.5 + 3 * (0.9 - 2 / 3) + (1 - 1 / (1 + math.exp(-9.2)))) / 6
    assert calibration_error(differences) == pytest.approx(expected, abs=1e-6)


def test_histogram_bars_never_cross_zero_and_hold_every_pair() -> None:
    differences = np.array([-0.31, -0.01, 0.0, 0.01, 0.49, 0.5, 90.0] * 100)
    differences[-1] = 1e6
    sources = ["a", "a", "a", "a", "b", "b", "b"] * 100
    edges, counts = histogram(differences, sources).values()
    assert 0.0 in edges
    widths = np.diff(edges)
    assert np.allclose(widths, widths[0])
    middle = edges.index(0.0)
    assert sum(counts["a"][:middle]) == 200
    assert sum(counts["a"][middle:]) == 200
    assert sum(counts["b"]) == 300


def test_a_model_that_scores_all_alike_has_a_histogram_too() -> None:
    edges, counts = histogram(np.zeros(3), ["a"] * 3).values()
    assert counts["a"][edges.index(0.0)] == 3


def test_correlations_equal_those_by_hand() -> None:
    # x: 1 2 3 4, y: 1 3 2 10; deviations -3/2.. and -3 -1 -2 6
    expected = (4.5 + 0.5 - 1 + 9) / math.sqrt(5 * 50)
    correlations = correlation(np.array([1, 2, 3, 4]), np.array([1.0, 3.0, 2.0, 10.0]))
    assert correlations["pearson"] == pytest.approx(expected)
    assert correlations["spearman"] == pytest.approx(1 - 6 * 2 / (4 * 15), abs=1e-5)
    none = {"pearson": None, "spearman": None}
    assert correlation(np.array([1, 1]), np.array([1.0, 2.0])) == none
    assert correlation(np.array([1]), np.array([1.0])) == {"pearson": None, "spearman": None}
