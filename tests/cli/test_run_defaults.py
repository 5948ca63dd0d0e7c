"""What `fit` shows and logs where a configuration names no logger, interval or progress bar."""

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar

from lit_callbacks import StageProgressBar
from lit_rlhf.cli.training import RLHFCLI, run_cli
from tests.configs.tiny_runs import logged
from tests.modules.stages import write_data, write_models


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(write_data(tmp_path_factory.mktemp("defaults")))


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["lit_rlhf"])
    # Lightning 2.6.6 makes classes in a way that jsonargparse 4.53 deprecates
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


def fit(root: Path, **trainer: Any) -> RLHFCLI:
    """PPO in three iterations."""
    config = {
        "trainer": {
            "accelerator": "cpu",
            "max_epochs": 1,
            "limit_train_batches": 3,
            "num_sanity_val_steps": 0,
            "limit_val_batches": 0,
            "enable_checkpointing": False,
            **trainer,
        },
        "model": {
            "class_path": "PPOModule",
            "init_args": {
                "model_path": str(root / "policy"),
                "output_dir": "model",
                "rewards": {str(root / "reward"): 1.0},
                "sampling": {"max_new_tokens": 4},
                "minibatches": {"minibatch_size": 2},
                "loss": {"ptx_coef": 0.0},
                "critic_pretraining": {"iterations": 0},
            },
        },
        "data": {
            "class_path": "PromptDataModule",
            "init_args": {
                "train_sources": [{"path": str(root / "prompts.jsonl")}],
                "max_length": 32,
                "batch_size": 2,
            },
        },
    }
    Path("config.yaml").write_text(json.dumps(config))
    return run_cli(["fit", "--config", "config.yaml", "--overwrite"])


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
