from __future__ import annotations

import re

import pytest

from lit_rlhf.evaluation import (
    Comparison,
    HeadToHead,
    Outcomes,
    PolicyReport,
    ScoreSummary,
    outcomes_table,
    print_comparison,
    print_table,
)
from lit_rlhf.evaluation.compare import METRICS
from lit_rlhf.functional import Interval

METRIC_VALUES = dict.fromkeys(METRICS, 0.0) | {
    "response_length": 12.345,
    "truncation_rate": 0.125,
    "kl": 1.5,
    "perplexity": 2.25,
    "distinct_2": 0.4567,
}
SFT = PolicyReport("runs/sft", {"gold": ScoreSummary(0.5, 0.4, 0.6, 1.0)}, {}, METRIC_VALUES)
OUTCOMES = Outcomes(
    0.5, 0.25, 0.25, Interval(0.44, 0.56), Interval(0.2, 0.31), Interval(0.2, 0.3), 256
)
PPO = PolicyReport(
    "runs/ppo",
    {"gold": ScoreSummary(1.25, 1.0, 1.5, 1.0)},
    {"gold": OUTCOMES},
    METRIC_VALUES,
)


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def test_the_table_shows_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    print_comparison(Comparison({"sft": SFT, "ppo": PPO}, {}, {"gold": "a:gold"}, 256, 0))

    printed = capsys.readouterr().out
    lines = [cells(line) for line in printed.splitlines()]
    assert ["sft", "ppo"] in lines
    assert {line[0]: line[1:] for line in lines if len(line) == 3} == {
        "gold": ["0.50 [0.40, 0.60]", "1.25 [1.00, 1.50]"],
        "length, tokens": ["12.3", "12.3"],
        "truncated": ["12.5%", "12.5%"],
        "KL, nats": ["1.50", "1.50"],
        "perplexity": ["2.25", "2.25"],
        "distinct-2": ["0.457", "0.457"],
    }
    assert "256 prompts" in printed
    against = ["gold", "ppo", "50 [44, 56]", "25 [20, 31]", "25 [20, 30]", "256"]
    assert against in lines


def test_a_judge_without_a_valid_verdict_has_no_shares(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(outcomes_table([HeadToHead("ppo", "helpful", None)], "sft"))

    lines = [cells(line) for line in capsys.readouterr().out.splitlines()]
    assert ["helpful", "ppo", "-", "-", "-", "0"] in lines


def test_many_policies_are_not_cut_off_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"policy-{number}" for number in range(12)]

    print_comparison(Comparison(dict.fromkeys(names, PPO), {}, {"gold": "a:gold"}, 256, 0))

    printed = capsys.readouterr().out
    assert [name for name in names if name not in printed] == []
    assert printed.count("1.25 [1.00, 1.50]") == 12
