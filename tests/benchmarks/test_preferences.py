from pathlib import Path
from typing import Any

import pytest

from benchmarks.preferences import POLICIES, SAMPLES, SIZES, Preferences, agreement, format_page
from tests.benchmarks.test_pretrained import options_of


def test_arms_differ_in_their_tricks_only(tmp_path: Path) -> None:
    runs = Preferences(tmp_path, "base", "hh", SIZES, gold_base="gemma")
    steps = [*runs.common_steps(), *runs.seed_steps(1, judged=False)]
    sft, gold, *arms = options_of(steps, "sft", "gold", "ppo_vanilla_1", "ppo_max_1")
    for arm in arms:
        rates = [arm[f"{network}_optimizer"]["learning_rate"] for network in ("policy", "critic")]
        assert rates == pytest.approx([5e-5, 1.5e-4])
        assert (list(arm["rewards"].values()), arm["seed"]) == ([1.0, 0.0], 1)
    assert [arm["reward_shaping"]["kl_coef"] > 0 for arm in arms] == [False, True]
    assert gold["model_path"] == "gemma"
    assert "demonstrations" in sft["train_sources"][0]["path"]


def test_page_drops_a_judge_and_shows_complete_responses() -> None:
    assert agreement({"win": 0.3, "tie": 0.2, "lose": 0.5}) == 0.6
    row: dict[str, Any] = {"proxy": [0.0, 1.0] * SAMPLES, "gold": [2.0, 4.0] * SAMPLES}
    row |= {"ended": [False, True] * SAMPLES, "opening": {"words": "I am", "share": 0.5}}
    row |= {"kl": 1.0, "length": 1.0}
    row |= {"samples": [["Hi?", "A | b"]] * 20, "foreign_perplexity": 1.0, "distinct_2": 1.0}
    arms = {f"{key}_0": {"result": {"flagged_at": 7}} for key in POLICIES}
    people = {"result": {"rejected": {"win": 0.4, "tie": 0.2, "lose": 0.4}}}
    right = {"accuracy": {"accuracy": 0.6, "low": 0.5, "high": 0.7}}
    models = {f"report_{name}": {"result": right} for name in ("reward", "gold")}
    seed = {"policies_0": {"result": dict.fromkeys(POLICIES, row)}, **arms}
    page = format_page({"common": {"judge_people": people, **models}, "seed_0": seed})
    assert "agrees with people on 50% of the pairs: dropped by the rule" in page
    assert "| PPO-max | 0.50 | 3.00 | 4.00 | 1.0 | 1.0 | 50% | I am (50%) | 1.00 | 1 | " in page
    assert "1 exploited: no, 2 improved: no" in page
