import io
import math
import re

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from lit_rlhf.tools.evaluation import output
from lit_rlhf.tools.evaluation.outcomes import outcome_rates, outcomes_table, score_summary
from lit_rlhf.tools.evaluation.output import print_table


def test_outcomes_are_shares_of_prompts() -> None:
    rates = outcome_rates([1.0, 2.0, 3.0, 4.0], [0.0, 2.0, 5.0, 1.0])
    assert (rates.win, rates.tie, rates.lose, rates.n) == (0.5, 0.25, 0.25, 4)
    # a difference of exactly the margin is a tie
    rates = outcome_rates([0.5, 1.0, -0.5, -1.0], [0.0, 0.0, 0.0, 0.0], margin=0.5)
    assert (rates.win, rates.tie, rates.lose) == (0.25, 0.5, 0.25)


def test_intervals_of_shares_are_wilsons() -> None:
    differences = [1.0] * 120 + [0.0] * 200 + [-1.0] * 80  # shares of 0.3, 0.5 and 0.2
    rates = outcome_rates(differences, [0.0] * 400)
    z = 1.959964  # the normal distribution's quantile at 97.5 %
    intervals = (rates.win_interval, rates.tie_interval, rates.lose_interval)
    for share, interval in zip((0.3, 0.5, 0.2), intervals, strict=True):
        # both ends are the shares from which this one is z standard errors away
        for end in interval:
            assert abs(share - end) == pytest.approx(z * math.sqrt(end * (1 - end) / 400), rel=1e-5)
        assert interval.low < share < interval.high


def test_the_interval_of_a_share_of_0_or_1_has_a_width() -> None:
    rates = outcome_rates([1.0, 1.0, 1.0], [0.0, 0.0, 0.0])
    edge = 1.959964**2 / (3 + 1.959964**2)
    assert rates.win_interval == pytest.approx((1 - edge, 1.0), rel=1e-5)
    assert rates.tie_interval == rates.lose_interval == pytest.approx((0.0, edge), rel=1e-5)


@pytest.mark.parametrize(
    ("scores", "baseline", "margin", "message"),
    [
        ([1.0, 2.0], [1.0], 0.0, "baseline: expected 2 scores"),
        ([], [], 0.0, "scores: expected shape"),
        ([[[1.0]]], [[[1.0]]], 0.0, "scores: expected shape"),
        ([1.0], [math.nan], 0.0, "baseline: expected finite"),
        ([1.0], [1.0], -0.1, "margin: expected a finite number >= 0, got -0.1"),
        ([1.0], [1.0], math.nan, "margin: expected a finite number >= 0, got nan"),
    ],
)
def test_scores_that_give_no_outcomes_are_refused(
    scores: list[float], baseline: list[float], margin: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        outcome_rates(scores, baseline, margin)


def test_summary_of_scores_has_mean_deviation_and_interval() -> None:
    summary = score_summary([1.0, 2.0, 3.0, 6.0])
    assert summary.mean == 3.0
    assert summary.std == pytest.approx(math.sqrt((4 + 1 + 0 + 9) / 3))
    # a resample's mean is 0, 1/2 or 1 with chances 1/4, 1/2 and 1/4, each above 2.5 %
    summary = score_summary([0.0, 1.0])
    assert (summary.low, summary.high) == (0.0, 1.0)
    assert score_summary([0.7]) == (0.7, 0.7, 0.7, 0.0)
    with pytest.raises(ValueError, match="scores: expected finite numbers, got inf"):
        score_summary([1.0, math.inf])


def test_the_interval_has_the_width_of_the_normal_approximation() -> None:
    scores = np.random.default_rng(3).normal(size=400)
    summary = score_summary(scores)
    half_width = 1.96 * scores.std() / math.sqrt(400)
    assert summary.high - summary.mean == pytest.approx(half_width, rel=0.1)
    assert summary.mean - summary.low == pytest.approx(half_width, rel=0.1)


def test_policies_are_resampled_on_the_same_prompts() -> None:
    scores = np.random.default_rng(0).normal(size=50)
    first, second = score_summary(scores), score_summary(scores + 10.0)
    assert second.low - first.low == pytest.approx(10.0)
    assert second.high - first.high == pytest.approx(10.0)
    assert score_summary(scores) == first != score_summary(scores, seed=2)


def test_the_interval_leaves_the_global_generator_alone() -> None:
    before = np.random.get_state()[1].tolist()  # noqa: NPY002 - it is what must not change
    score_summary([1.0, 2.0])
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002 - as above


def test_a_judge_without_a_valid_verdict_has_no_shares(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(outcomes_table([("helpful", {"ppo": None})], "sft"))
    lines = [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert ["helpful", "ppo", "-", "-", "-", "0"] in lines


def test_samples_of_a_prompt_are_one_trial() -> None:
    policy_scores, baseline_scores = [[1.0, 3.0], [0.0, 2.0]], [[0.0, 2.0], [0.0, 3.0]]
    rates = outcome_rates(policy_scores, baseline_scores)
    # the first prompt wins twice; of the second, one sample ties and one loses
    assert (rates.win, rates.tie, rates.lose, rates.n) == (0.5, 0.25, 0.25, 2)
    assert rates.win_interval == outcome_rates([1.0, 0.0], [0.0, 1.0]).win_interval


def test_text_is_printed_as_it_is() -> None:
    console = Console(file=io.StringIO(), width=20)
    text = "[bold]x[/bold] :smile: 3.5 and 铁、铜"
    output.print_text(console, text)
    assert console.file.getvalue() == f"{text}\n"


def test_text_and_names_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(file=io.StringIO(), width=80)
    output.print_text(console, "a\x1b[2Jb\x07\r\x9b31mc\r\n\td")
    assert console.file.getvalue() == "a\\x1b[2Jb\\x07\\r\\x9b31mc\n        d\n"
    table = output.make_table("title\x1b[1m", ["head\x1b[2m"])
    table.add_row("cell\x1b[3m")
    output.print_table(table)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert all(f"\\x1b[{number}m" in shown for number in (1, 2, 3))


def test_names_in_tables_and_progress_bars_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    name = "[red]runs[/red]/[/] :smile:"
    table = Table(title=name)
    table.add_column(name)
    table.add_row(name)
    output.print_table(table)
    with output.progress_bar(f"responses of {name}", 1):
        pass
    printed = capsys.readouterr()
    assert printed.out.count(name) == 3
    assert f"responses of {name}" in printed.err
