"""The comparison of samplers: its measures of a log, its verdict, and the committed table."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from benchmarks import samplers
from experiments.results_file import read_runs


def result(arm: str, seed: int, gold: float, noticed: int | None = None) -> dict[str, Any]:
    rest = dict.fromkeys(samplers.SHOWN, 0.0) | {"rollout_seconds": 1.0}
    rest |= {"largest_sampler_kl": None, "noticed": noticed}
    rest |= {"heldout_gold": gold, "sft_gold": 0.0}
    return {"arm": arm, "seed": seed, **rest, "rollout/gold": gold}


def test_committed_table_is_written_from_the_committed_results() -> None:
    assert samplers.TABLE.read_text("utf-8") == samplers.format_report(read_runs(samplers.RESULTS))


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.01, -0.02, 0.01], ": within noise"),
        ([0.10, 0.11, 0.12], "not within noise"),  # small, but not by chance
        ([0.70, -0.10, 0.10], "not within noise"),  # by chance, but not small
    ],
)
def test_report_of_samplers_tells_the_verdict_and_what_was_noticed(
    differences: list[float], verdict: str
) -> None:
    runs = {}
    for seed, difference in enumerate(differences):
        runs[f"a{seed}"] = result("decoder", seed, 1.0)
        runs[f"b{seed}"] = result("vllm", seed, 1.0 + difference)
        runs[f"c{seed}"] = result("stale", seed, 0.0, noticed=7)
    text = samplers.format_report(runs)
    assert verdict in text
    assert "noticed the stale samplers, and no other" in text
    runs["b0"]["noticed"] = 3
    assert "noticed something else" in samplers.format_report(runs)


def test_measures_of_a_log_are_means_of_its_last_iterations(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="run", version="")
    for iteration in range(20):
        kl = 0.001 if iteration < 12 else 0.1
        values = dict.fromkeys(samplers.SHOWN, float(iteration))
        values |= {"time/rollout": 2.0, "rollout/sampler_kl": kl}
        logger.log_metrics(values, iteration)
    logger.save()
    means = samplers.measure(samplers.logged_curves(tmp_path / "run"), 2)
    assert means["rollout/gold"] == (18 + 19) / 2
    assert means["rollout_seconds"] == 2.0
    assert means["largest_sampler_kl"] == 0.1
    assert means["noticed"] == 14  # the second step beyond the threshold
