"""The verdicts on many quickstarts, on made-up results, and what is kept of an interrupted run."""

from itertools import product
from pathlib import Path

import pytest

from experiments.quickstart_seeds.study import (
    ARITHMETICS,
    CLAIMS,
    REPETITION,
    SEEDS,
    RunResult,
    draw,
    format_repetition,
    format_verdicts,
    read_results,
)
from experiments.results_file import write_run
from tests.support.quickstart_outcome import EXPECTED_OUTCOME

FIGURES = {"response_length": 8.0, "kl": 1.0, "perplexity": 2.0}
AS_EXPECTED = RunResult(
    seed=24,
    arithmetic="1_thread",
    outcome=EXPECTED_OUTCOME,
    metrics={name: FIGURES for name in ("sft", "ppo_vanilla", "ppo_max")},
    flagged_at={"ppo_vanilla": [8, 9, 10], "ppo_max": [None, None, None]},
    healthy_until=[7, 8, 9],
    in_time=[True, True, True],
    harmed_at=11,
    minutes=4.0,
    versions={"torch": "2"},
)
ALL = [AS_EXPECTED._replace(seed=s, arithmetic=a) for s, a in product(SEEDS, ARITHMETICS)]
FAILURES: dict[int, RunResult] = {
    0: AS_EXPECTED._replace(outcome=AS_EXPECTED.outcome._replace(vanilla_gold=0.0)),
    1: AS_EXPECTED._replace(outcome=AS_EXPECTED.outcome._replace(max_gold=0.7)),
    2: AS_EXPECTED._replace(in_time=[True, True, False]),
    3: AS_EXPECTED._replace(flagged_at={"ppo_vanilla": [8, 9, 10], "ppo_max": [40, None, None]}),
}
"""By place of a claim in `CLAIMS`, a run in which it alone fails."""


def verdicts(runs: list[RunResult]) -> list[str]:
    return [line.split("|")[-2].strip() for line in format_verdicts(runs).splitlines()[2:]]


def test_every_claim_holds_when_all_runs_are_as_expected() -> None:
    assert len(ALL) == 60
    assert verdicts(ALL) == ["holds"] * 4


def test_missing_runs_leave_a_claim_open() -> None:
    missing = "open: not all runs are done"
    assert verdicts([]) == [missing] * 4
    assert verdicts(ALL[:-1]) == ["holds", "holds", missing, missing]
    assert verdicts(ALL[1:]) == [missing, missing, "holds", "holds"]


@pytest.mark.parametrize("place", FAILURES)
def test_failing_run_decides_its_claim_alone(place: int) -> None:
    claim = CLAIMS[place]
    deciding = [run for run in ALL if run.seed in claim.seeds]
    outside = [run for run in ALL if run.seed not in claim.seeds]
    others = [FAILURES[place]._replace(seed=r.seed, arithmetic=r.arithmetic) for r in outside]
    failing = [FAILURES[place]._replace(seed=claim.seeds[0])] * (claim.allowed_failures + 1)
    expected = ["holds"] * 4
    assert verdicts([*others, *failing[1:], *deciding[claim.allowed_failures :]]) == expected
    expected[place] = "does not hold"
    assert verdicts([*others, *failing, *deciding[claim.allowed_failures + 1 :]]) == expected
    # a claim that has failed is not open any more
    assert verdicts(failing)[place] == "does not hold"


def test_results_are_read_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    for run in reversed(ALL[:4]):
        write_run(path, f"seed_{run.seed}_{run.arithmetic}", run.as_dict())
    assert read_results(path) == ALL[:4]


def test_repetition_decides_no_claim_and_is_counted_beside_it() -> None:
    seeds = product(range(30, 40), [REPETITION])
    repeated = [FAILURES[1]._replace(seed=seed, arithmetic=name) for seed, name in seeds]
    assert verdicts([*ALL, *repeated]) == ["holds"] * 4
    sentence = format_repetition([*ALL, *repeated])
    assert "10 of 10 runs are done" in sentence
    assert "hold in 10, 0, 10, 10 of 10" in sentence
    assert "0.70 to 0.70 (PPO-max)" in sentence
    assert format_repetition(ALL) == "No run of it is done."


def test_figure_has_the_gold_of_every_deciding_run() -> None:
    runs = [run for run in read_results() if run.arithmetic in ARITHMETICS]
    gold = {line.get_label(): line.get_ydata() for line in draw(runs).axes[0].lines}
    assert list(gold["PPO-max"]) == [run.outcome.max_gold for run in runs]
