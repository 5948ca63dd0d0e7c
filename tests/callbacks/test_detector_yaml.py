"""Detector, monitors and actions by short names in the configuration of a LightningCLI."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

import lit_callbacks
from lit_callbacks import (
    CollapseDetector,
    CollapseEarlyStopping,
    KLMonitor,
    Monitor,
    NonFiniteMonitor,
)

DETECTOR = """
class_path: CollapseDetector
init_args:
  votes: 3
  when: validation
  monitors:
    - {class_path: KLMonitor, init_args: {high: 3.5, patience: 4, key: val/kl}}
    - {class_path: Monitor, init_args: {key: loss, high_ratio: 2, optional: true}}
    - {class_path: NonFiniteMonitor, init_args: {patience: 7}}
  actions:
    - {class_path: AdjustCoefficient, init_args: {name: beta, factor: 1.5, lower: 0.1}}
    - class_path: RollBack
      init_args: {times: 2, keep: [beta], folder: kept, cooldown: 3}
"""


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI warns of pytest's own arguments, and jsonargparse of LightningCLI."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


def callbacks(folder: Path, *configs: dict[str, Any]) -> list[Any]:
    """What a LightningCLI makes of configurations on top of each other, in the order written."""
    files = []
    for i, config in enumerate(configs):
        files += ["--config", str(folder / f"{i}.yaml")]
        (folder / f"{i}.yaml").write_text(yaml.safe_dump({"trainer": config}), "utf-8")
    quiet: dict[str, Any] = {"accelerator": "cpu", "logger": False}
    quiet |= {f"enable_{x}": False for x in ("checkpointing", "progress_bar", "model_summary")}
    options: dict[str, Any] = {"run": False, "save_config_callback": None}
    args = ["--seed_everything=false", *files]
    cli = LightningCLI(BoringModel, args=args, trainer_defaults=quiet, **options)
    return list(cli.trainer.callbacks)  # type: ignore[attr-defined]  # set, but not declared


@pytest.mark.parametrize("overlay", [False, True])
def test_detector_with_monitors_and_actions_is_built_from_yaml(
    tmp_path: Path, overlay: bool
) -> None:
    detector_config = yaml.safe_load(DETECTOR)
    if overlay:
        base = {"callbacks": [{"class_path": "EarlyStopping", "init_args": {"monitor": "loss"}}]}
        built = callbacks(tmp_path, base, {"callbacks+": [detector_config]})
        assert isinstance(built[0], EarlyStopping)
        detector = built[1]
    else:
        (detector,) = callbacks(tmp_path, {"callbacks": [detector_config]})
    assert type(detector) is CollapseDetector
    assert (detector.votes, detector.when) == (3, "validation")
    kl, loss, non_finite = detector.monitors
    assert (type(kl), kl.key, kl.high, kl.patience) == (KLMonitor, "val/kl", 3.5, 4)
    assert (type(loss), loss.key, loss.high_ratio, loss.optional) == (Monitor, "loss", 2.0, True)
    assert (type(non_finite), non_finite.patience) == (NonFiniteMonitor, 7)
    coefficient, roll_back = detector.actions
    assert (coefficient.name, coefficient.factor) == ("beta", 1.5)
    assert (coefficient.lower, coefficient.upper) == (0.1, math.inf)
    assert (roll_back.times, roll_back.keep, roll_back.folder) == (2, ["beta"], "kept")
    assert roll_back.cooldown == 3


def test_early_stopping_with_one_monitor_is_built_from_yaml(tmp_path: Path) -> None:
    init = {"monitors": [{"class_path": "lit_callbacks.KLMonitor", "init_args": {"high": 2}}]}
    config = {"class_path": "lit_callbacks.CollapseEarlyStopping", "init_args": init}
    (stopping,) = callbacks(tmp_path, {"callbacks+": [config]})
    assert type(stopping) is CollapseEarlyStopping
    assert [monitor.high for monitor in stopping.monitors] == [2.0]


@pytest.mark.parametrize("name", ["CollapseDetector", "CollapseEarlyStopping"])
def test_preset_and_thresholds_are_chosen_in_yaml(tmp_path: Path, name: str) -> None:
    thresholds = {"rollout/kl_per_token": {"high": 0.3}, "scores": {"high_ratio": 4}}
    init_args = {"preset": "short answers", "thresholds": thresholds}
    (detector,) = callbacks(tmp_path, {"callbacks": [{"class_path": name, "init_args": init_args}]})
    by_key = {monitor.key: monitor for monitor in detector.monitors}
    assert detector.watch.preset == "short answers"
    assert by_key["rollout/kl_per_token"].high == 0.3
    assert by_key["rollout/response_length"].high_ratio == 2.5
    assert by_key["scores"].high_ratio == 4.0


def test_every_monitor_and_action_can_be_named(tmp_path: Path) -> None:
    needed: dict[str, dict[str, Any]] = {
        "Monitor": {"key": "loss", "high": 1.0},
        "AdjustCoefficient": {"name": "beta", "factor": 2.0},
    }
    classes: dict[str, list[str]] = {"monitors": [], "actions": []}
    for name in lit_callbacks.__all__:
        exported = getattr(lit_callbacks, name)
        for argument, base in (("monitors", Monitor), ("actions", lit_callbacks.Action)):
            if isinstance(exported, type) and issubclass(exported, base) and name != "Action":
                classes[argument].append(name)
    assert len(classes["monitors"]) >= 12
    assert len(classes["actions"]) >= 4
    init_args = {
        argument: [{"class_path": name, "init_args": needed.get(name, {})} for name in names]
        for argument, names in classes.items()
    }
    config = {"class_path": "CollapseDetector", "init_args": init_args}
    (detector,) = callbacks(tmp_path, {"callbacks": [config]})
    for argument, names in classes.items():
        assert [type(instance).__name__ for instance in getattr(detector, argument)] == names
