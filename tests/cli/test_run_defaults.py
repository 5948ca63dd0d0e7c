"""What `fit` shows and logs where a configuration names no logger, interval or progress bar."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar

from lit_callbacks import StageProgressBar
from lit_rlhf.cli.training import RLHFCLI
from tests.cli import fitting
from tests.configs.tiny_runs import logged

PPO: dict[str, Any] = {"sampling": {"max_new_tokens": 4}, "minibatches": {"minibatch_size": 2}}
PPO |= {"loss": {"ptx_coef": 0.0}, "critic_pretraining": {"iterations": 0}}


def fit(root: Path, **trainer: Any) -> RLHFCLI:
    """PPO in three iterations."""
    few = {"limit_train_batches": 3, "num_sanity_val_steps": 0, "enable_checkpointing": False}
    options = {**PPO, "output_dir": "model", "rewards": {str(root / "reward"): 1.0}}
    return fitting.fit(root, "--overwrite", stage="PPO", options=options, trainer=few | trainer)


def bars(cli: RLHFCLI) -> list[ProgressBar]:
    return [callback for callback in cli.trainer.callbacks if isinstance(callback, ProgressBar)]


@pytest.mark.filterwarnings("ignore:.*in eval mode at the start of training")
def test_every_iteration_is_logged(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bar,) = bars(fit(root))
    curves = logged(Path("lightning_logs/version_0"))
    assert len(curves["rollout/score"]) == len(curves["rollout/kl"]) == 3
    assert isinstance(bar, StageProgressBar)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ppo ")]
    assert lines[-1].startswith("ppo 3/3 100%")
    assert all(name in lines[-1] for name in ("score ", "kl ", "response_length "))


@pytest.mark.filterwarnings("ignore:.*in eval mode at the start of training")
def test_a_bar_of_ones_own_or_none_is_kept(root: Path) -> None:
    rich = {"class_path": "lightning.pytorch.callbacks.RichProgressBar"}
    assert bars(fit(root, enable_progress_bar=False, logger=False)) == []
    (own,) = bars(fit(root, callbacks=[rich], logger=False))
    assert type(own) is RichProgressBar
