import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from lit_rlhf.modules import MinibatchOptions
from lit_rlhf.tools.doctor.checks import time
from lit_rlhf.tools.doctor.plan import RunPlan, plan_run
from tests.support.doctor_runs import findings, not_ok, only_finding


@pytest.mark.parametrize(
    ("plan", "trainer", "status", "message"),
    [
        (RunPlan(ranks=2), {}, "failure", "(2 ranks)"),  # not one iteration
        (None, {"max_epochs": -1}, "warning", "trainer.max_epochs"),
        (RunPlan(max_time={"seconds": 1}), {"max_epochs": 10**7}, "warning", "max_time ends the"),
    ],
)
def test_end_of_a_run_is_judged_with_its_remedy(
    root: Path, tmp_path: Path, plan: Any, trainer: Any, status: str, message: str
) -> None:
    finding = only_finding(findings(root, tmp_path, plan=plan, **trainer), "time", status)
    assert message in finding.observation + str(finding.change)


def test_a_run_for_gpus_that_are_not_there_is_counted(root: Path, tmp_path: Path) -> None:
    with (
        patch("torch.cuda.is_available", return_value=False),
        patch.object(time, "ppo_seconds", wraps=time.ppo_seconds) as count_seconds,
    ):
        report = findings(root, tmp_path, plan=RunPlan(on_gpu=True))
    assert count_seconds.call_args.kwargs == {"rollouts": 8, "ppo_epochs": 2}
    counted = re.search(
        r"for an A100 .* takes .* s \((.*)\)\.", report.findings["time"].observation
    )
    assert counted is not None
    assert sum(map(int, re.findall(r"(\d+)%", counted[1]))) == pytest.approx(100, abs=2)
    bounds = counted[1].partition("; bound: ")[2]
    products = ", ".join(f"{phase} by products" for phase in ("score", "estimate", "update"))
    assert bounds == f"rollout by memory, {products}"


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({"log_every_n_steps": 50}, "None is logged: trainer.log_every_n_steps is 50"),
        ({"logger": False}, "its course cannot be seen afterwards"),
        ({"log_every_n_steps": 1}, None),
    ],
)
def test_no_curve_is_a_warning(root: Path, tmp_path: Path, trainer: Any, expected: Any) -> None:
    plan = plan_run({"accelerator": "cpu", "devices": 1, **trainer})
    report = findings(root, tmp_path, plan=plan)  # 4 iterations
    assert not_ok(report) == ({} if expected is None else {"time": "warning"})
    assert expected is None or expected in report.findings["time"].observation


@pytest.mark.parametrize(
    ("max_epochs", "max_iterations", "plan", "expected"),
    [
        (3, None, RunPlan(), 3 * 4),
        (3, None, RunPlan(ranks=3), 3 * 1),
        (3, None, RunPlan(limit_train_batches=2), 3 * 2),
        (3, None, RunPlan(limit_train_batches=0.5), 3 * 2),
        (-1, 5, RunPlan(), 5),
        (1, 2, RunPlan(), 2),
        (-1, None, RunPlan(), math.inf),
        (3, None, RunPlan(ranks=5), 0),
    ],
)
def test_iterations_are_counted_from_epochs_and_limits(
    max_epochs: int, max_iterations: Any, plan: RunPlan, expected: float
) -> None:
    trainer = SimpleNamespace(train_dataloader=[None] * 4, max_epochs=max_epochs)
    module = SimpleNamespace(max_iterations=max_iterations)
    case: Any = SimpleNamespace(trainer=trainer, plan=plan, module=module)
    assert time.count_iterations(case) == expected


def test_times_are_for_people() -> None:
    shown = {0.034: "0.034 s", 9.94: "9.9 s", 59: "59 s", 90: "1.5 min", 5400: "1.5 h"}
    assert {seconds: time.format_seconds(seconds) for seconds in shown} == shown


def test_an_update_counts_as_often_as_an_iteration_makes_it() -> None:
    timer = SimpleNamespace(seconds={"rollout": 5.0, "score": 1.0, "update": 0.5})
    minibatches = MinibatchOptions(ppo_epochs=2, minibatch_size=3)
    module = SimpleNamespace(timer=timer, minibatches=minibatches)
    case: Any = SimpleNamespace(module=module, experience=[None] * 6)
    assert time.iteration_seconds(case) == {"rollout": 5.0, "score": 1.0, "update": 2.0}
