"""The comparison of estimators on sums: its rules on made-up results, and the page's real ones."""

import math
from typing import Any

import pytest

from experiments.estimator_sums.study import (
    ARMS,
    RATES,
    SEEDS,
    choose_rates,
    draw,
    format_tables,
    judged,
    right_within_kl,
    right_within_tokens,
)


def result(seed: int, arm: str, shares: list[float], length: float = 20.0) -> dict[str, Any]:
    courses = {
        "gold": shares,
        "kl": [0.5 * i for i in range(len(shares))],
        "response_length": [length] * len(shares),
    }
    return {"seed": seed, "arm": arm, "courses": courses, "cpu_seconds": 60.0}


def test_shares_within_tokens_and_kl() -> None:
    # 320 tokens an iteration: the twelfth ends at 3,840 and the thirteenth at 4,160
    run = result(1, "rloo", [0.01 * i for i in range(20)])
    assert right_within_tokens(run) == pytest.approx(0.055)
    # means of KL rise by 0.5 from 1.0: the seventh is 4.0, the root of which is 2
    assert right_within_kl(run, 2.0) == pytest.approx(0.08)
    assert math.isnan(right_within_kl(run, 0.9))
    run["courses"]["kl"][-5:] = [0.0] * 5
    assert right_within_kl(run, 2.0) == pytest.approx(0.08)


def test_the_rate_with_most_right_responses_is_kept() -> None:
    def tuning(place: int) -> dict[str, Any]:
        return result(0, "", [[0.2, 0.7, 0.7][place]] * 12 + [1.0 - place] * 8)

    runs = {f"tuning-{arm}-{rate:g}": tuning(n) for arm in ARMS for n, rate in enumerate(RATES)}
    assert choose_rates(runs) == dict.fromkeys(ARMS, RATES[1])


def test_tables_compare_the_arms() -> None:
    runs: dict[str, Any] = {}
    for arm in ARMS:
        for rate in RATES:
            runs[f"tuning-{arm}-{rate:g}"] = result(0, arm, [0.5] * 5)
        for seed in SEEDS:
            runs[f"{arm}-seed_{seed}"] = result(seed, arm, [0.5] * 6)
    for seed in SEEDS:
        right = {f"{arm}-seed_{seed}": 0.8 if arm == "rloo" else 0.5 for arm in ARMS}
        best_of = {"1": 0.1, "4": 0.3, "16": 0.6}
        runs[f"unseen_{seed}"] = {"seed": seed, "right": right, "best_of": best_of}
    runs["beyond-grpo"] = result(0, "grpo", [0.25] * 5) | {"rate": 2e-3}
    text = format_tables(runs)
    lines = reversed(text.splitlines())
    rows = {line.split("|")[1].strip(): line for line in lines if line.startswith("| ")}
    assert "0.80, 0.80, 0.80, 0.80, 0.80; better" in rows["rloo"]
    no_difference = "; +0.000 [+0.000, +0.000], at most 0.000"
    assert f"0.50, 0.50, 0.50, 0.50, 0.50{no_difference}" in rows["grpo"]
    # KL is 1.0 in the first window and 1.5 in the second
    assert rows["rloo"].count(f"0.50, 0.50, 0.50, 0.50, 0.50{no_difference}") == 3
    assert rows["best of 4"] == "| best of 4 | 0.30, 0.30, 0.30, 0.30, 0.30 | 0.80 |"
    assert "| grpo | 0.50 | 0.50 | 0.50 | 0.00025 | 0.25 at 0.002 |" in text
    assert "| rloo | 0.50 | 0.50 | 0.50 | 0.00025 | - |" in text
    assert draw(judged(runs)).axes[0].get_legend_handles_labels()[1] == list(ARMS)
