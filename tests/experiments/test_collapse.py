"""The benchmark of the detector: thresholds, flags, harm, and the pages with the results."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.collapse import study as collapse
from experiments.quickstart_seeds import study as quickstart_seeds
from lit_callbacks import KLMonitor, LengthMonitor, Level, Monitor, PerplexityMonitor

# runs of the quickstart, of which the vanilla one collapses
LOGS = {
    # SFT's gold is 0.4 with a deviation of 1.4, so harm is done below -0.3: in iteration 6
    "ppo_vanilla": {
        "rollout/kl": [0.1, 0.1, 0.1, 0.1, 0.9, 2.0, 3.0, 9.0],
        "rollout/gold": [0.5, 0.6, 0.5, 0.8, 0.2, -0.4, -1.0, -2.0],
        "rollout/response_length": [8.0] * 8,
    },
    "ppo_max": {
        "rollout/kl": [0.1, 0.1, 0.1, 0.1, 0.78, 0.9, 0.7, 0.2],
        "rollout/gold": [0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.1],
        "rollout/response_length": [8.0] * 8,
    },
    "ppo_rollback": {
        "rollout/kl": [0.1] * 6,
        "rollout/gold": [0.5] * 6,
        "rollout/response_length": [8.0] * 6,
        # two collapses, the first of which lasts two iterations
        "monitor/level": [Level(level) for level in (0, 2, 2, 1, 2, 0)],
    },
}
GOLDS = {"sft": (0.4, 1.4), "ppo_vanilla": (-2.1, 0.1), "ppo_max": (1.1, 0.3)}
GOLDS["ppo_rollback"] = (0.6, 0.2)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with logs and the evaluation; the detector is one monitor of KL, above 1."""

    def monitors() -> list[Monitor]:
        monitor = KLMonitor(high=1.0, baseline_steps=3, horizon=0)
        monitor.signal = ""  # a metric of one's own makes a collapse alone
        return [monitor]

    folder = tmp_path / "seed_7"
    for name, columns in LOGS.items():
        log = folder / "logs" / name
        log.mkdir(parents=True)
        rows = zip(*columns.values(), strict=True)
        lines = [",".join(map(str, map(float, (k, *row)))) for k, row in enumerate(rows, 1)]
        (log / "metrics.csv").write_text("\n".join([",".join(["step", *columns]), *lines]) + "\n")
    policies: dict[str, Any] = {}
    for place, (name, (mean, std)) in enumerate(GOLDS.items()):
        rewards = {"gold_reward": {"mean": mean, "std": std}}
        rewards["reward"] = {"mean": 10.0 + place, "std": 7.0}
        rewards["well_formed"] = {"mean": 0.9 - place / 10, "std": 0.3}
        policies[name] = {"rewards": rewards, "response_length": 8, "kl": place, "perplexity": 2.0}
    (folder / "evaluation.json").write_text(json.dumps({"policies": policies}))
    monkeypatch.setattr(collapse, "default_monitors", monitors)
    monkeypatch.setattr(quickstart_seeds, "default_monitors", monitors)
    return tmp_path


def test_quickstart_is_judged_by_its_logs_and_evaluation(root: Path) -> None:
    run = quickstart_seeds.judge_run(root / "seed_7", 7, "bf16", minutes=3.0)
    assert run.outcome == (0.4, 1.4, -2.1, 1.1, 11.0, 12.0, 0.9, 0.8, 0.7)
    # two readings beyond 1 / 1.3, 1 and 1.3; the first beyond the way to it is still healthy
    assert run.flagged_at == {"ppo_vanilla": [6, 7, 7], "ppo_max": [6, None, None]}
    assert run.healthy_until == [5, 5, 6]
    assert run.harmed_at == 6
    assert run.in_time == [True, True, False]  # with the farthest, harm was called healthy
    assert run.metrics["ppo_max"] == {"response_length": 8, "kl": 2, "perplexity": 2.0}
    assert (run.seed, run.arithmetic, run.minutes) == (7, "bf16", 3.0)


def test_seed_of_the_detector_is_summarized(root: Path) -> None:
    row = collapse.summarize_seed(root, 7)
    assert row["ppo_vanilla"] == {
        "flagged_at": 7,
        "healthy_until": 5,
        "gold_at_flag": -1.0,
        "peak_gold": 0.8,
        "last_gold": pytest.approx(-0.1),
        "harmed_at": 6,
        "lead": -1,  # the flag comes an iteration after the harm
        "in_time": True,
    }
    assert (row["ppo_max"]["flagged_at"], row["ppo_max"]["harmed_at"]) == (None, None)
    assert row["ppo_max"]["in_time"] is False
    log = root / "seed_7/logs/ppo_vanilla"
    assert collapse.compare_with_harm(log, collapse.Detection(7, 6), bound=-9.0)["in_time"]
    assert row["collapses"] == 2
    assert row["sft_gold"] == 0.4
    assert row["final_gold"] == {"ppo_vanilla": -2.1, "ppo_max": 1.1, "ppo_rollback": 0.6}
    assert row["curves"]["ppo_max"]["gold"] == LOGS["ppo_max"]["rollout/gold"]


def test_committed_tables_follow_from_the_committed_curves() -> None:
    for row in json.loads(collapse.RESULT.read_text("utf-8")):
        vanilla = row["ppo_vanilla"]
        gold = np.array(row["curves"]["ppo_vanilla"]["gold"])
        assert vanilla["peak_gold"] == pytest.approx(gold.max(), abs=6e-4)
        assert vanilla["last_gold"] == pytest.approx(gold[-10:].mean(), abs=6e-4)
        assert vanilla["gold_at_flag"] == pytest.approx(gold[vanilla["flagged_at"] - 1], abs=6e-4)
        assert gold[: vanilla["harmed_at"] - 1].min() > gold[vanilla["harmed_at"] - 1]
        assert vanilla["lead"] == vanilla["harmed_at"] - vanilla["flagged_at"]
        assert vanilla["in_time"] == (vanilla["healthy_until"] < vanilla["harmed_at"])
    for run in quickstart_seeds.read_results():
        o = run.outcome
        harm = run.harmed_at or math.inf
        assert o.exploited == (o.sft_gold - o.vanilla_gold >= o.sft_std / 2) & (
            o.vanilla_score > o.max_score
        )
        flags = zip(run.flagged_at["ppo_vanilla"], run.healthy_until, strict=True)
        assert run.in_time == [bool(flag) and healthy < harm for flag, healthy in flags]


def test_thresholds_move_as_far_from_the_baseline_as_the_factor_says() -> None:
    kl = collapse.scale_thresholds(KLMonitor(high=10.0), 0.5)
    assert kl.high == pytest.approx(5.0)
    length = collapse.scale_thresholds(LengthMonitor(high_ratio=1.6, low_ratio=0.5), 2.0)
    assert (length.high_ratio, length.low_ratio) == pytest.approx((2.2, 0.0))
    perplexity = collapse.scale_thresholds(PerplexityMonitor(low_ratio=0.6, high_ratio=2.0), 0.5)
    assert (perplexity.low_ratio, perplexity.high_ratio) == pytest.approx((0.8, 1.5))
