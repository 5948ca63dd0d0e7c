"""The doctor's probe of the reward, on functions that like a cheat or none."""

from pathlib import Path
from typing import Any

import pytest

from lit_rlhf.tools.doctor.checks.rewards import check_reward
from tests.support.doctor_runs import findings, module_of


def praise(prompts: list[str], responses: list[str]) -> list[float]:
    return [float("What a great" in response) for response in responses]


def constant(prompts: list[str], responses: list[str]) -> list[float]:
    return [1.0] * len(responses)


@pytest.mark.parametrize(("reward", "status"), [(praise, "warning"), (constant, "ok")])
def test_probe_warns_of_a_reward_that_pays_for_cheats(
    root: Path, tmp_path: Path, reward: Any, status: str
) -> None:
    report = findings(root, tmp_path, module_of(root, rewards=[reward], critic_init="policy"))
    finding = report.findings["reward probe"]
    assert finding.status == status
    assert finding.observation.startswith("On 8 prompts: ")
    if status == "warning":
        assert (
            "cheats score higher than the policy's own responses: flattery (+1.0). PPO"
            in finding.observation
        )
        assert finding.change.startswith("Teach the reward to refuse it, by preferences")
    assert not report.failed


def test_probe_needs_some_prompts(root: Path, tmp_path: Path) -> None:
    report = findings(root, tmp_path, module_of(root), data={"batch_size": 4})
    finding = report.findings["reward probe"]
    assert finding.status == "not checked"
    assert finding.observation == "An iteration has 4 prompts; the probe needs 8."


def test_probe_needs_an_encoder() -> None:
    class Case:
        class module:
            encoder = None

    assert check_reward(Case).status == "not checked"  # type: ignore[arg-type]
