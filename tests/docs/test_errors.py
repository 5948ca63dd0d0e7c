"""Messages and settings that docs/errors.md names are those of the program."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from lit_rlhf.modules import ROLLOUT_MEMORY, SCORING_MEMORY, UPDATE_MEMORY
from lit_rlhf.modules.guarded_step import UpdateGuard
from lit_rlhf.modules.stage import SUPERVISED_MEMORY
from tests.docs.blocks import ROOT, blocks

PAGE = ROOT / "docs" / "errors.md"
SETTINGS = {
    "rollout": ROLLOUT_MEMORY,
    "score, estimate": SCORING_MEMORY,
    "update of PPO": UPDATE_MEMORY,
    "update of SFT and reward model": SUPERVISED_MEMORY,
}


def test_the_warning_of_a_skipped_update_reads_as_on_the_page() -> None:
    (shown,) = (block.text for block in blocks(PAGE) if block.language == "text")
    broken = {"ppo/policy_loss": torch.tensor(torch.nan)}
    trainer: Any = None  # asked for its checkpoints at the end of a run only

    with pytest.warns(UserWarning, match="skipped at") as warned:
        assert not UpdateGuard(5).check(trainer, "the policy", broken, "iteration 31, minibatch 4")

    on_one_rank = shown.replace(" (on 1 of 8 ranks)", "").split()
    assert str(warned[0].message).split() == on_one_rank


@pytest.mark.parametrize("phase", SETTINGS)
def test_the_settings_of_a_phase_are_those_of_its_error(phase: str) -> None:
    (row,) = re.findall(rf"^\| {phase} \| (.*) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert re.findall(r"`([^`]+)`", row) == list(SETTINGS[phase])
