from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from lit_rlhf.modules import updates
from lit_rlhf.strategies import clipped_step
from tests.tools.doctor.runs import findings, module_of, not_ok, only_finding


def unclipped(optimizer: Any, max_norm: float | None) -> tuple[torch.Tensor, bool]:
    return clipped_step(optimizer, None)


def test_a_clip_norm_that_does_not_act(root: Path, tmp_path: Path) -> None:
    with patch.object(updates, "clipped_step", unclipped):
        finding = only_finding(findings(root, tmp_path), "clipping", "failure")
    assert "clipping does not act under SingleDeviceStrategy" in finding.found


def test_no_clip_norm_is_a_warning(root: Path, tmp_path: Path) -> None:
    report = findings(root, tmp_path, module_of(root, critic_optimizer={"grad_clip": None}))
    assert not_ok(report) == {"clipping": "warning"}
    assert "model.critic_optimizer.grad_clip is null" in report.findings["clipping"].found


def test_an_optimizer_that_does_not_tell_its_gradient(root: Path, tmp_path: Path) -> None:
    with patch("torch.optim.AdamW", lambda groups, lr, **_: torch.optim.SGD(groups, lr=lr)):
        report = findings(root, tmp_path)
    assert not_ok(report) == {"clipping": "warning"}
