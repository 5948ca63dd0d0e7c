"""Whole examinations: sound runs pass, and errors become findings."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from lit_rlhf.files import FolderLocks
from lit_rlhf.ppo import iteration_draws
from lit_rlhf.tools.doctor import Status
from lit_rlhf.tools.doctor.plan import RunPlan
from lit_rlhf.tools.doctor.run import run_iteration
from tests.support.doctor_runs import findings, module_of, not_ok, only_finding
from tests.support.stages import content


def test_a_sound_run_is_left_untouched(root: Path, tmp_path: Path) -> None:
    before = content(root)
    module = module_of(root, output_dir=str(tmp_path / "model"))
    running = FolderLocks()  # the run itself, which goes on
    running.acquire([tmp_path / "model"])
    report = findings(root, tmp_path / "run", module)
    running.release()
    assert (not_ok(report), report.failed) == ({}, False)
    assert content(root) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        {"network.lora_rank": 2, "advantages.truncation": "mask"},
        {"memory.frozen_dtype": "bfloat16"},
        pytest.param(
            {"network.dtype": "bfloat16"},
            marks=pytest.mark.filterwarnings(
                "ignore:.* rounded back to what they were:UserWarning"
            ),
        ),
        {"memory.offload_frozen": True, "network.gradient_checkpointing": True},
        {"critic_pretraining.iterations": 2, "loss.policy_objective": "kl_penalty"},
        {"minibatches.micro_batch_size": 2, "memory.rollout_batch_size": 3},
        {"loss.old_policy": "reference", "critic_init": "policy", "sampling.temperature": 0.7},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_sound_runs_pass_too(root: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    assert not_ok(findings(root, tmp_path, module_of(root, **options))) == {}


def test_weights_that_engines_give_masters_are_not_warned_of(root: Path, tmp_path: Path) -> None:
    module = module_of(root, **{"network.dtype": "bfloat16"})
    assert not_ok(findings(root, tmp_path, module, RunPlan(engines=True))) == {}


def test_an_exception_inside_a_check_is_its_finding(root: Path, tmp_path: Path) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("something odd")

    with patch("lit_rlhf.tools.doctor.memory.ppo_memory", broken):
        finding = only_finding(findings(root, tmp_path), "memory", "failure")
    assert finding.observation == "RuntimeError: something odd"


def test_responses_have_the_seed_of_the_runs_first_iteration_on_its_rank() -> None:
    class SeedSeen(Exception):
        pass

    def collect(prompts: object, seed: int, timer: object) -> None:
        raise SeedSeen(seed)

    algorithm = SimpleNamespace(collect=collect)
    module = SimpleNamespace(seed=3, global_rank=2, ppo=algorithm, timer=None)
    case: Any = SimpleNamespace(module=module, batch=None)
    with pytest.raises(SeedSeen) as seen:
        run_iteration(case)
    draws = iteration_draws(seed=3, iteration=0, rank=2)
    assert seen.value.args == (draws.rollout_seed,)


def nothing(prompts: list[str], responses: list[str]) -> list[float]:
    """A reward function without a score for any response."""
    return [math.nan] * len(responses)


def test_scores_that_are_not_finite_are_a_failure(root: Path, tmp_path: Path) -> None:
    options = {"rewards": {"tests.tools.doctor.test_run:nothing": 1.0}, "critic_init": "policy"}
    with pytest.warns(UserWarning, match="expected finite scores"):
        report = findings(root, tmp_path, module_of(root, **options))
    assert report.findings["iteration"].status is Status.FAILURE
    assert "rewards" in report.findings["iteration"].observation
    for name in ("ratio", "clipping", "time"):
        assert report.findings[name].status is Status.NOT_CHECKED
    for name in ("reference", "padding", "sampling", "EOS"):
        assert report.findings[name].status is Status.OK


def test_data_that_cannot_be_read_are_a_failure(root: Path, tmp_path: Path) -> None:
    report = findings(root, tmp_path, module_of(root, minibatches={"minibatch_size": 3}))
    assert (
        "minibatch_size: expected a divisor of the 8 rollouts"
        in report.findings["start"].observation
    )
    report = findings(root, tmp_path, data={"batch_size": 9})
    assert report.findings["start"].status is Status.FAILURE
    assert "batch" in report.findings["start"].observation
    assert report.findings["time"].status is Status.NOT_CHECKED
    assert report.failed
