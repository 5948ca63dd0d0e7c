"""The reward model's page, read back from its HTML."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_rlhf.data import Message, PreferenceRecord
from lit_rlhf.tools.evaluation.reward_report import RewardReport, measure_reward_model, report_html
from lit_rlhf.tools.evaluation.reward_report.render import verdict
from lit_rlhf.tools.evaluation.reward_report.scores import ScoredPairs
from tests.callbacks.reports import Page

NASTY = '<script>alert("&\'")</script>'


def record(number: int, source: str = "helpful", text: str = "") -> PreferenceRecord:
    prompt = (Message("user", f"question {number} {text}"),)
    answers = (f"good {number} {text}", f"bad {number} {text}")
    return PreferenceRecord(prompt, *answers, source, location=f"{source}.jsonl:{number}")


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


def test_the_page_needs_nothing_else(report: RewardReport) -> None:
    shown = page(report)
    assert shown.source.startswith("<!doctype html>")
    assert not shown.root.all("link") + shown.root.all("script")
    charts = shown.root.all("img")
    assert all(chart.attributes["src"].startswith("data:image/svg+xml;") for chart in charts)
    assert not re.findall(r"https?:|@import|url\(", shown.source)


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
    labels = [image.attributes["alt"] for image in shown.root.all("img")]
    assert labels[1] == f"Difference of the scores, a{NASTY}"


def test_missing_measurements_are_named() -> None:
    few = {"logprobs": {}, "lm_head": "", "left_out": Counter({"too long": 3}), "shortened": 2}
    sources, own = {"helpful": "a.jsonl"}, replace(pairs(), **few)
    found = measure_reward_model("runs/reward", sources, own, n_mistakes=0)
    footer = page(found).root.one("footer").text
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
    found = measure_reward_model("m", {}, swapped)
    assert found.length_baseline == "shorter"
    assert found.gain.mean == pytest.approx(0.5 - 1.0)


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


def strength_rows(*strengths: float, text: str = "") -> list[dict[str, Any]]:
    """Rows of `read_strengths`; those of odd places are of the source `b`."""
    return [
        {
            "prompt": [{"role": "user", "content": f"question {n} {text}"}],
            **{"chosen": f"good {n}", "rejected": f"bad {n}", "strength": strength},
            **{"source": f"{'ab'[n % 2]}{text}", "location": f"{'ab'[n % 2]}.jsonl:{n}"},
        }
        for n, strength in enumerate(strengths)
    ]


def test_strengths_by_hand_and_the_pairs_below_zero_weakest_first() -> None:
    rows = strength_rows(-1.0, 3.0, 2.0, -2.5, 2.0, 0.0, -0.5)
    found = measure_reward_model("m", {}, pairs(), n_mistakes=2, strengths=rows)
    assert found.strengths["by_source"] == {
        "a": {"pairs": 4, "mean": 0.625, "negative": 0.5},
        "b": {"pairs": 3, "mean": pytest.approx(0.5 / 3), "negative": pytest.approx(1 / 3)},
    }
    counts = found.strengths["histogram"]["counts"]
    assert {source: sum(bars) for source, bars in counts.items()} == {"a": 4, "b": 3}
    *_, strengths, doubtful = page(found).root.all("section")
    assert [i.attributes["alt"] for i in strengths.all("img")] == [
        *("Strength, all sources", "Strength, a", "Strength, b")
    ]
    cells = [[cell.text for cell in row.all("td")] for row in strengths.all("tr")[1:]]
    assert cells == [["4", "0.625", "50.0%"], ["3", "0.167", "33.3%"]]
    assert "2 of 3 pairs with a strength below 0" in doubtful.text
    first, second = doubtful.all("article")
    assert first.one("h3").text == "1. strength -2.500 b, b.jsonl:3"
    assert second.one("h3").text == "2. strength -1.000 a, a.jsonl:0"
    assert [answer.text for answer in first.all(css="answer")] == [
        "chosen good 3",
        "rejected bad 3",
    ]
    assert first.all(css="turn")[0].text == "Human question 3"
    values = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert values["strengths"]["weakest"][0]["location"] == "b.jsonl:3"


def test_without_strengths_or_doubtful_pairs_nothing_is_claimed(report: RewardReport) -> None:
    assert "Strength" not in page(report).root.text
    found = measure_reward_model("m", {}, pairs(), strengths=strength_rows(1.0, 2.0))
    assert "None has a strength below 0." in page(found).root.text
    nasty = measure_reward_model("m", {}, pairs(), strengths=strength_rows(-1.0, text=NASTY))
    assert page(nasty).root.all("script") == []
