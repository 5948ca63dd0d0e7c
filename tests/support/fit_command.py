"""`lit_rlhf fit` of a stage in this process, and the usage errors of commands."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_rlhf.cli.training import RLHFCLI, run_cli

DATA = {"SFT": "Demonstration", "Reward": "Preference", "PPO": "Prompt"}
SHORT = {"accelerator": "cpu", "max_epochs": 1, "limit_val_batches": 0}
QUIET = {"log_every_n_steps": 1, "enable_progress_bar": False, "enable_model_summary": False}


def fit(
    root: Path, *flags: str, stage: str, options: dict[str, Any], trainer: dict[str, Any]
) -> RLHFCLI:
    """Fit a stage on the CPU for an epoch, in batches of two rows, with options of its module."""
    rows = root / f"{DATA[stage].lower()}s.jsonl"
    data = {"train_sources": [{"path": str(rows)}], "chat_template": "hh", "max_length": 64}
    model = {"model_path": str(root / "policy"), **options}
    config = {
        "seed_everything": 1,
        "trainer": SHORT | trainer,
        "model": {"class_path": f"{stage}Module", "init_args": model},
        "data": {"class_path": f"{DATA[stage]}DataModule", "init_args": {**data, "batch_size": 2}},
    }
    Path("config.yaml").write_text(json.dumps(config))
    return run_cli(["fit", "--config", "config.yaml", *flags])


def capture_usage_error(
    command: Callable[..., object], capsys: Any, *arguments: object, **options: Any
) -> str:
    """Run a command that must refuse its arguments, and return the message."""
    with pytest.raises(SystemExit) as ended:
        command(*arguments, **options)
    assert ended.value.code == 2
    message: str = capsys.readouterr().err
    return message
