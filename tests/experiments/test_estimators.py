"""The comparison of estimators: verdicts on made-up results, and the page with the real ones."""

import math
from typing import Any

from experiments.estimators.study import (
    ARMS,
    LAB,
    SEEDS,
    by_arm,
    draw,
    find_largest_bound,
    format_tables,
    gold_within,
    list_small_differences,
)


def result(seed: int, arm: str, gold: float) -> dict[str, Any]:
    kls = [0.0] * 5 + [0.04] * 5 + [1.0] * 5
    courses = {"gold": [0.0] * 5 + [gold] * 5 + [5.0] * 5, "kl": kls, "score": kls}
    return {
        **{"seed": seed, "arm": arm, "sft_gold": 0.5, "gold": gold, "cpu_seconds": 30.0},
        "courses": {**courses, "response_length": [8.0] * 15},
    }


def test_gold_counts_within_the_budget_alone() -> None:
    run = result(43, "rloo", 1.0)
    assert gold_within(run, 0.2) == 1.0  # KL of 0.04
    assert gold_within(run, 0.1) < 1.0
    assert gold_within(run, 2.0) == 5.0
    late = {**run, "courses": {**run["courses"], "kl": [9.0] * 15}}
    assert math.isnan(gold_within(late, 1.0))


def test_tables_have_a_row_per_arm() -> None:
    runs: dict[str, Any] = {}
    for seed in SEEDS:
        for arm in ARMS:
            gold = {"ppo_max": 1.0, "rloo": 2.0}.get(arm, 0.5)
            runs[f"{arm}-seed_{seed}"] = result(seed, arm, gold)
        best_of = {"1": 0.5, "4": 0.75, "16": 1.0 + seed}
        runs[f"best_of-seed_{seed}"] = {"seed": seed, "arm": "best_of", "gold": best_of}
    lines = format_tables(runs).splitlines()
    rows = {line.split("|")[1].strip(): line for line in lines if line.startswith("| ")}
    assert [name for name in rows if name in ARMS] == list(ARMS)
    assert f"{', '.join(['1.50'] * len(SEEDS))}; better" in rows["rloo"]
    assert f"{', '.join(['0.00'] * len(SEEDS))}; worse" in rows["grpo"]
    # log 4 - 3/4 is 0.636
    assert rows["best of 4"] == f"| best of 4 | {', '.join(['0.25'] * len(SEEDS))} | 0.80 |"
    assert "| 43.50, 44.50, 45.50" in rows["best of 16"]
    assert draw(by_arm(runs.values())).axes[0].get_legend_handles_labels()[1] == list(ARMS)


def test_differences_below_the_margin_are_listed_by_their_intervals() -> None:
    # above PPO-max by 0.05, 0.06, ..., 0.09: mean 0.07, standard deviation 0.0158, and 2.776 from
    # four degrees of freedom, so half is 2.776 * 0.0158 / 5**.5 = 0.0196
    gains = {"rloo": 0.05, "ppo_max": 0.0}
    runs = [
        result(seed, arm, 1.0 + (start and start + 0.01 * place))
        for arm, start in gains.items()
        for place, seed in enumerate(SEEDS)
    ]
    arms = {arm: results for arm, results in by_arm(runs).items() if results}
    at_the_end = LAB._replace(measures=dict([next(iter(LAB.measures.items()))]))
    assert list_small_differences(arms, at_the_end) == (
        "- rloo, held-out gold at the end, above SFT's: +0.070 [+0.050, +0.090], at most 0.090"
    )
    assert round(find_largest_bound(arms, at_the_end), 4) == 0.0896
    arms["rloo"] = arms["ppo_max"]
    assert list_small_differences(arms, at_the_end) == "- none"
