"""The study of flipped labels: gold labels, verdicts on made-up results, and the page's tables."""

from typing import Any

import pytest
import torch

from experiments.label_noise import study as label_noise
from experiments.label_noise.study import (
    RATES,
    SEEDS,
    auc,
    by_rate,
    format_accuracy,
    format_finding,
    format_gold,
    label_by_gold,
    split_pairs,
)
from experiments.results_file import read_runs

PROMPT = "\n\nHuman: name two metals.\n\nAssistant:"


def pair(chosen: str, rejected: str, prompt: str = PROMPT) -> dict[str, Any]:
    return {"chosen": f"{prompt} {chosen}", "rejected": f"{prompt} {rejected}"}


def result(seed: int, rate: float, gain: float, strength: float) -> dict[str, Any]:
    accuracy = {"none": 0.79, "flip": 0.79 + gain, "remove": 0.7, "margin": 0.7, "smoothing": 0.6}
    measures = {
        "auc": strength,
        "auc_in_sample": 0.6,
        "flipped_among_weakest": 0.5,
        "negative": 0.3,
    }
    golds = {"sft_gold": 0.5, "gold": {remedy: 10 * value for remedy, value in accuracy.items()}}
    if not rate:
        golds["gold"] = {"none": 9.0}
        return {"seed": seed, "rate": rate, "accuracy": {"none": 0.9}, **golds}
    return {"seed": seed, "rate": rate, "accuracy": accuracy, **measures, **golds}


def test_gold_labels_the_pairs_and_drops_equal_ones() -> None:
    better = "iron and zinc."
    worse = "iron and apple."
    labelled = label_by_gold([pair(better, worse), pair(worse, better), pair(worse, worse)])
    assert labelled == [pair(better, worse)] * 2


def test_no_prompt_is_in_training_and_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_noise, "TRAIN", 11)
    monkeypatch.setattr(label_noise, "TEST", 4)
    pairs = [pair("a", "b", f"\n\nHuman: {n // 2}\n\nAssistant:") for n in range(20)]
    train, test = split_pairs(pairs, seed=1)
    assert len(train) == 11
    assert len(test) == 4
    prompts = ({row["chosen"].split()[1] for row in rows} for rows in (train, test))
    assert set.isdisjoint(*prompts)
    with pytest.raises(ValueError, match=r"^pairs: expected 11 and 4, got 10 and "):
        split_pairs(pairs[:14], seed=1)


def test_auc_counts_pairs_of_pairs() -> None:
    # flipped at -1 and 2; the others at 0, 1 and 3: -1 is below three of three, 2 below one
    strength = torch.tensor([-1.0, 0.0, 1.0, 2.0, 3.0])
    assert auc(strength, torch.tensor([1, 0, 0, 1, 0])) == pytest.approx(4 / 6)


@pytest.mark.parametrize(
    ("gains", "strengths", "finding", "remedy"),
    [
        ([0.02, 0.03, 0.011, 0.02, 0.02], [0.8, 0.9, 0.81, 0.8, 0.8], "found", "; better"),
        ([0.02, 0.03, 0.0, 0.02, 0.02], [0.8, 0.9, 0.79, 0.8, 0.8], "not found", "at most"),
        ([-0.02, -0.03, -0.011, -0.02, -0.02], [0.8, 0.9, 0.81, 0.8, 0.8], "found", "; worse"),
        ([0.02, 0.03], [0.8, 0.9], "open", "; open"),
        ([936 / 1200 - 948 / 1200] * 5, [0.8, 0.9, 0.81, 0.8, 0.8], "found", "at most"),
    ],
)
def test_verdicts_hold_with_each_seed(
    gains: list[float], strengths: list[float], finding: str, remedy: str
) -> None:
    values = zip(SEEDS, gains, strengths, strict=False)
    results = [result(seed, 0.2, gain, value) for seed, gain, value in values]
    results += [result(seed, 0.0, 0.0, 0.0) for seed in SEEDS]
    shares = by_rate(results)
    finding_row = format_finding(shares).splitlines()[-1]
    cells = [cell.strip() for cell in finding_row.split("|")]
    assert cells[1:4] == ["20%", ", ".join(f"{value:.2f}" for value in strengths), finding]
    clean, noisy = format_accuracy(shares).splitlines()[-2:]
    assert clean == f"| 0% | {', '.join(['0.900'] * len(SEEDS))} |  |  |  |  |"
    assert remedy in noisy.split("|")[3]
    clean, noisy = format_gold(shares).splitlines()[-2:]
    assert clean.split("|")[2:4] == [f" {', '.join([n] * len(SEEDS))} " for n in ("0.50", "9.00")]
    assert remedy in noisy.split("|")[4]


def test_committed_runs_have_a_planned_share() -> None:
    results = read_runs(label_noise.RESULTS).values()
    assert {row["rate"] for row in results} == set(RATES)
    assert len(results) == len(RATES) * len(SEEDS)
