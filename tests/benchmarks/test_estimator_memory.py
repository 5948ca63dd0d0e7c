"""The table of peak memory: shares by hand, and the page's is of the results."""

from itertools import product

from benchmarks.estimator_memory import ARMS, MICRO_BATCHES, RESULTS, REWARDS, format_table
from experiments.results_file import read_runs
from tests.support.docs_blocks import ROOT


def test_memory_shares_equal_those_by_hand() -> None:
    peaks = {"PPO": 4.0, "RLOO": 3.0}
    results = {
        f"{arm}, {rewards}, {size}": {"peak_gib": peaks[arm] - 0.5 * (size == "256 tokens")}
        for arm, rewards, size in product(ARMS, REWARDS, MICRO_BATCHES)
    }
    rows = format_table(results).splitlines()[2:]
    assert rows[0] == "| a rule | about 1 GiB | 4.00 GiB | 3.00 GiB | 0.75 |"
    assert rows[4] == "| a reward model | 256 tokens | 3.50 GiB | 2.50 GiB | 0.71 |"


def test_page_on_estimators_has_the_measured_table() -> None:
    page = (ROOT / "docs" / "estimators.md").read_text("utf-8")
    assert format_table(read_runs(RESULTS)) in page
