from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from experiments.known_truth.page import draw
from experiments.preferences.study import (
    ARMS,
    CURVES,
    SAMPLES,
    SIZES,
    Preferences,
    agreement,
    complete_seeds,
    format_page,
    format_tables,
    relevance,
    run,
)
from experiments.pretrained.study import read_json
from experiments.results_file import write_run
from lit_rlhf.files import write_json_lines
from tests.support.experiment_steps import options_of


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
    asked = replace(runs, judge="Q").common_steps()[-1].command
    assert asked[asked.index("--policies") + 1 :][1].endswith("people/rejected.jsonl")


def test_seed_whose_criterion_holds_on_the_page() -> None:
    courses = {"sft": (0.0, 0.0), "ppo_vanilla": (9.0, -2.0), "ppo_max": (2.0, 5.0)}
    policies = {}
    for name, (proxy, gold) in courses.items():
        row: dict[str, Any] = {"proxy": [proxy, proxy + 1] * SAMPLES, "kl": 1.0}
        row |= {"truth": [gold, gold + 0.5] * SAMPLES, "ended": [False, True] * SAMPLES}
        row |= {"lengths": [7, 9] * SAMPLES, "length": 9.0 if name == "ppo_max" else 8.0}
        row |= {"opening": {"words": "I am", "share": 0.5}, "samples": [["Hi?", "A\nb"]]}
        policies[name] = row | {"foreign_perplexity": None, "distinct_2": 1.0}
    outcomes = {"win": 0.3, "tie": 0.2, "lose": 0.5, "n": 100}
    bias = {"first": 0.15, "second": 0.01}
    people = {"against_baseline": outcomes, "invalid": 20, "position_bias": bias}
    assert agreement(people) == pytest.approx(0.5)
    assert agreement({"against_baseline": None, "invalid": 9}) == 0.0
    right = {"accuracy": {"accuracy": 0.6, "low": 0.5, "high": 0.7}}
    common = {f"report_{name}": {"result": right} for name in ("reward", "gold")}
    common["judge_people"] = {"result": {"rejected": people}}
    curves = {key: [1.0] * 10 + [3.0] * 20 for key in CURVES}
    curves["rollout/score/reward"] = [1.0, 1.0, 3.0, 3.0] + [5.0] * 26
    curves["rollout/response_length"] = [4.0] * 10 + [8.0] * 10 + [4.0] * 10
    flagged = {"flagged_at": 7, "reasons": "KL", "curves": curves}
    near = {"sft": [0.2, 0.4], "ppo_vanilla": [0.1, 0.3], "ppo_max": [0.5, 0.7]}
    cosines = {name: {"own": values, "next": [0.0, 0.1]} for name, values in near.items()}
    common["relevance_people"] = {
        "result": {"chosen": cosines["ppo_max"], "rejected": {"own": [0.6, 0.6]}}
    }
    seed = {"policies_3": {"result": policies}, "relevance_policies_3": {"result": cosines}}
    seed |= {f"{arm}_3": {"result": flagged} for arm in ARMS}
    seed["judge_policies_3"] = {"result": {"ppo_max": {"against_baseline": outcomes}}}
    results = {"settings": {"judge": "Q"}, "common": common, "seed_3": seed, "seed_4": {}}
    page = format_page(results)
    tables = format_tables(results)
    assert "The judge, Q, agrees with people on 50% of the pairs: dropped by the rule" in tables
    assert "chose as people in 50 pairs and against them in 30, tied in 20 and gave no" in tables
    assert "preferred the first response in either order, in 1% the second." in tables
    assert "Of 3 seeds 1 are done." in page
    assert (
        "| PPO-max | 2.50 | 5.25 | 5.50 | 5.00 | 1.0 | 9.0 | 50% | I am (50%) | 1.00 | -" in tables
    )
    assert "| 1.00 | - | 30%, 20%, 50% |" in tables
    assert "1 exploited: yes, 2 improved: yes, 3 beats best of 4: yes" in tables
    assert "| SFT | Hi? | A b |" in tables
    assert "| 3 | 0.30 | 0.20 | 0.60 | -0.10 [-0.10, -0.10] | +0.30 [+0.30, +0.30] |" in tables
    assert "relevant one in 50%; chosen responses have 0.60, rejected ones 0.60" in tables
    assert "| 3 | vanilla PPO | 7 | right | KL |" in tables
    assert "| 3 | PPO-max | 7 | wrong | KL |" in tables
    # gold changes by 2 and 0, the length by 4 and -4
    assert "correlate by 1.00 (vanilla PPO) and 1.00 (PPO-max)" in page
    lines = draw(complete_seeds(results).values(), CURVES).axes[0].lines
    # the mean of the first four, less SFT's mean of 0.5, over its deviation of 0.5
    assert [line.get_ydata()[0] for line in lines] == [3.0, 3.0]


def test_relevance_is_the_cosine_with_the_own_question_and_the_next(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=9,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        pad_token_id=0,
    )
    BertModel(config).save_pretrained(tmp_path)
    words = {word: n for n, word in enumerate(("[PAD]", "[UNK]", "a", "b"))}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    turns = [{"role": "user", "content": "b"}, {"role": "user", "content": "a"}]
    rows = [
        {"prompt": turns, "response": "a"},
        {"prompt": turns[::-1], "response": "a a b"},
    ]
    write_json_lines(tmp_path / "sft.jsonl", rows)
    relevance(str(tmp_path), str(tmp_path), str(tmp_path / "output.json"), ["sft"])
    report = read_json(tmp_path / "output.json")["sft"]
    assert report["own"][0] == pytest.approx(1.0)
    assert report["own"][1] < 1
    assert report["next"][0] < 1


def test_settings_of_the_results_stay(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    write_run(results, "settings", {"sizes": {}, "judge": "Q"})
    with pytest.raises(ValueError, match=r"sizes: expected {}, as in .*results\.jsonl, got "):
        run("base", "gemma", "hh", output_dir=str(tmp_path), results=str(results))
