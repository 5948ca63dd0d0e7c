"""Two rounds of labels: the verdict, the tables, and the annotator's reading of a prompt."""

import pytest

from experiments.rounds.study import (
    SEEDS,
    format_finding,
    format_labels,
    judge,
    prompt_text,
)
from lit_rlhf.data import Message


def results(*pairs: tuple[float, float]) -> list[dict[str, object]]:
    """Results whose gold is of two rounds and of one, by seed."""
    return [
        {
            "seed": seed,
            "gold": {"sft": 0.25, "ppo_two_first": 0.5, "ppo_two": two, "ppo_one": one},
            "preferences": {"first": 700, "second of PPO": 500 + seed},
        }
        for seed, (two, one) in zip(SEEDS, pairs, strict=False)
    ]


@pytest.mark.parametrize(
    ("pairs", "verdict"),
    [
        (((0.9, 0.7), (0.9, 0.7), (0.9, 0.75)), "better"),
        (((0.7, 0.9), (0.7, 0.9), (0.75, 0.9)), "worse"),
        (((0.9, 0.7), (0.9, 0.7)), "open"),
    ],
)
def test_verdict_needs_the_margin_with_each_seed(
    pairs: tuple[tuple[float, float], ...], verdict: str
) -> None:
    assert judge(results(*pairs)) == verdict


def test_verdict_of_another_seed_is_an_interval() -> None:
    verdict = judge(results((0.9, 0.7), (0.9, 0.7), (0.8, 0.7)))
    assert verdict.startswith("+0.167 [")


def test_tables_have_a_row_for_each_seed_and_the_mean() -> None:
    runs = results((0.9, 0.7), (0.8, 0.7))
    rows = format_finding(runs).splitlines()[2:]
    assert rows[0] == "| 71 | 0.25 | 0.50 | 0.90 | 0.70 | +0.20 |"
    assert rows[2] == "| mean | 0.25 | 0.50 | 0.85 | 0.70 | +0.15 |"
    assert format_labels(runs).splitlines()[3] == "| 72 | 700 | 572 |"


def test_prompt_is_written_as_gold_reads_it() -> None:
    turns = (Message("user", "Hi."), Message("assistant", "Hello."), Message("user", "Bye."))
    written = "\n\nHuman: Hi.\n\nAssistant: Hello.\n\nHuman: Bye.\n\nAssistant:"
    assert prompt_text(turns) == written
