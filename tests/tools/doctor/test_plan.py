"""What a configuration asks of the machine, by the Trainer's settings."""

import io
from typing import Any
from unittest.mock import patch

import pytest
import torch
from jsonargparse import Namespace
from rich.console import Console

from lit_rlhf.tools.doctor import Display, Finding, Report, Status
from lit_rlhf.tools.doctor.plan import examination_settings, plan_run

CLASS = {"class_path": "lit_rlhf.strategies.MultiEngineDeepSpeedStrategy"}
OFFLOADING = Namespace(**CLASS, init_args=Namespace(stage=2, offload_optimizer=True))


@pytest.fixture(params=[0, 2])
def gpus(request: pytest.FixtureRequest) -> Any:
    """GPUs that seem to be there."""
    count: int = request.param
    available = patch.object(torch.cuda, "is_available", lambda: count > 0)
    with available, patch.object(torch.cuda, "device_count", lambda: count):
        yield count


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ({}, {0: 1, 2: 2}),
        ({"accelerator": "cpu"}, {0: 1, 2: 1}),
        ({"accelerator": "cpu", "devices": 4}, {0: 4, 2: 4}),
        ({"accelerator": "gpu", "devices": 8, "num_nodes": 2}, {0: 16, 2: 16}),
        ({"accelerator": "gpu", "devices": -1}, {0: 1, 2: 2}),
        ({"accelerator": "gpu", "devices": [0, 3, 5]}, {0: 3, 2: 3}),
        ({"accelerator": "cuda", "devices": "0,1,"}, {0: 2, 2: 2}),
        ({"accelerator": "cuda", "devices": "3"}, {0: 3, 2: 3}),
    ],
)
def test_plan_has_the_ranks_and_nodes_of_the_settings(
    gpus: int, settings: dict[str, Any], ranks: dict[int, int]
) -> None:
    plan = plan_run(settings)
    assert (plan.ranks, plan.nodes) == (ranks[gpus], settings.get("num_nodes", 1))


@pytest.mark.parametrize(
    ("strategy", "engines", "offload"),
    [
        ("auto", False, False),
        ("ddp_find_unused_parameters_true", False, False),
        ("multi_deepspeed_stage_2", True, False),
        ("multi_deepspeed_stage_2_offload", True, True),
        (Namespace(CLASS), True, False),
        (OFFLOADING, True, True),
        (CLASS, True, False),
    ],
)
def test_plan_has_engines_and_offloading_of_the_strategy(
    strategy: Any, engines: bool, offload: bool
) -> None:
    plan = plan_run({"strategy": strategy})
    assert (plan.engines, plan.offload_optimizer) == (engines, offload)


def test_without_the_gpus_the_cpu_stands_in_and_says_so(gpus: int) -> None:
    settings = {"accelerator": "gpu", "devices": 8, "strategy": "multi_deepspeed_stage_2"}
    substitution, used = plan_run(settings).substitution, examination_settings(settings)
    assert "The configuration has 8 processes" in substitution
    assert used["devices"] == used["num_nodes"] == 1
    if gpus:
        assert "there is none here" not in substitution
        assert "strategy" not in used
    else:
        assert "clipping without the strategy multi_deepspeed_stage_2" in substitution
        assert (used["accelerator"], used["strategy"]) == ("cpu", "auto")


def test_a_run_in_one_process_needs_no_substitution() -> None:
    assert plan_run({"accelerator": "cpu", "devices": 1}).substitution == ""


LONG = "The ratio is 1.1052 before the first update (KL of old to new policy 0.0052), expected 1."


def test_a_finding_has_its_status_its_name_and_what_to_change() -> None:
    findings = {
        "ratio": Finding(Status.FAILURE, LONG, "Set [model.x] to 1."),
        "memory": Finding(Status.OK, "3 GiB are there."),
        "time": Finding(Status.NOT_CHECKED, "Not reached."),
    }
    console = Console(file=io.StringIO(), width=80)
    display = Display(console)
    for name, finding in findings.items():
        display.show_finding(name, finding)
    display.show_summary(Report(findings, "On the CPU only."))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(len(line.rstrip()) for line in lines) <= 80
    starts = [line.split()[:2] for line in lines if line and line[0] != " "]
    assert starts[:3] == [["FAIL", "ratio"], ["ok", "memory"], ["-", "time"]]
    words = " ".join(" ".join(lines).split())
    assert f"{LONG} Change: Set [model.x] to 1." in words
    assert "On the CPU only. 1 ok, 1 failed, 1 not checked. Fix the failures" in words


def test_a_report_is_plain_data() -> None:
    report = Report({"ratio": Finding(Status.FAILURE, "1.1", "Do.")})
    check = {"check": "ratio", "status": "failure", "observation": "1.1", "change": "Do."}
    assert report.as_dict() == {"failed": True, "substitution": "", "checks": [check]}
