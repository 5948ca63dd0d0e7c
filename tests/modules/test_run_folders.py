"""What a run checks and locks before it trains."""

import errno
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lit_callbacks import ResumeCheckpoint
from lit_rlhf.files import FolderLocks, lock_path
from lit_rlhf.modules import PPOModule, SFTModule
from tests.support import stages
from tests.support.stages import content, demonstrations, fit_module, ppo_options, prompts


class Started(AssertionError):
    """Training has begun."""


class Interrupted(Callback):
    """The run ends in its first batch."""

    def on_train_batch_start(self, *_: Any) -> None:
        raise KeyError


class Refused(Callback):
    """No run that is refused trains."""

    def on_train_start(self, *_: Any) -> None:
        raise Started


def sft(root: Path, output: Path | None, **options: Any) -> None:
    """Start SFT, and stop when it trains."""
    module = SFTModule(str(root / "policy"), output_dir=None if output is None else str(output))
    if "callbacks" in options:
        options["enable_checkpointing"] = True
    callbacks = [Refused(), *options.pop("callbacks", [])]
    fit_module(module, demonstrations(root), root / "logs", callbacks=callbacks, **options)


@pytest.fixture
def own_root(tmp_path: Path) -> Path:
    """Models and data that a test may change."""
    return stages.write_models(stages.write_data(tmp_path))


def test_the_output_may_not_be_an_input(own_root: Path) -> None:
    (own_root / "link").symlink_to(own_root / "policy", target_is_directory=True)
    for output in (
        own_root / "policy",
        own_root / "link",
        own_root / "policy" / ".." / "policy",
        own_root,
    ):
        message = rf"output_dir: .*{output.name}, which is or contains model_path \(.*policy\)"
        with pytest.raises(ValueError, match=message):
            sft(own_root, output)
    module = PPOModule(**ppo_options(own_root, output_dir=str(own_root / "reward")))
    message = r"output_dir: .*reward, which is or contains rewards \(.*reward\)"
    with pytest.raises(ValueError, match=message):
        fit_module(module, prompts(own_root), own_root / "logs", callbacks=[Refused()])
    inside = ppo_options(
        own_root, output_dir=str(own_root / "ppo"), model_path=str(own_root / "ppo" / "sft")
    )
    (own_root / "ppo").mkdir()
    (own_root / "policy").rename(own_root / "ppo" / "sft")
    with pytest.raises(ValueError, match=r"ppo, which is or contains model_path"):
        fit_module(PPOModule(**inside), prompts(own_root), own_root / "logs", callbacks=[Refused()])


def test_a_link_to_itself_is_refused_at_the_start(own_root: Path) -> None:
    (own_root / "loop").symlink_to("loop")
    for output, reason in (("loop", "symbolic links"), ("policy/config.json/out", "a directory")):
        with pytest.raises(OSError, match=reason):
            sft(own_root, own_root / output)


def test_the_output_may_not_hold_the_folders_of_the_run(root: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    for options in (
        {"logger": TensorBoardLogger(tmp_path, name="out", version="")},
        {"logger": CSVLogger(output, name="logs", version="one")},
        {"callbacks": [ResumeCheckpoint(2, dirpath=str(output / "checkpoints"))]},
    ):
        with pytest.raises(ValueError, match=r"out, which is or contains the run's own folder"):
            sft(root, output, **options)
    assert not output.exists()


def test_a_model_of_another_program_is_not_replaced(own_root: Path) -> None:
    (own_root / "reward" / "lit_rlhf.json").unlink()
    before = content(own_root / "reward")
    with pytest.raises(ValueError, match=r"expected a model folder.*config\.json"):
        sft(own_root, own_root / "reward")
    (own_root / "reward" / "lit_rlhf.json").write_text("[]")
    with pytest.raises(ValueError, match="expected a model folder"):
        sft(own_root, own_root / "reward", fast_dev_run=1)
    (own_root / "reward" / "lit_rlhf.json").unlink()
    assert content(own_root / "reward") == before


def test_output_that_cannot_be_replaced_at_the_end_is_refused_at_the_start(
    root: Path, tmp_path: Path
) -> None:
    (tmp_path / "volume").mkdir()
    rename = Path.rename

    def move(path: Path, target: Path) -> Path:
        if path.name == "volume":
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        return rename(path, target)

    message = r"output_dir: expected a folder that another one can replace, got .*volume: Device or"
    with patch.object(Path, "rename", move), pytest.raises(ValueError, match=message):
        sft(root, tmp_path / "volume")
    message = r"n: expected a name of at most \d+ bytes"
    with pytest.raises(ValueError, match=message):
        sft(root, tmp_path / ("n" * 240))
    assert [path.name for path in tmp_path.iterdir()] == ["volume"]
    with pytest.raises(Started):
        sft(root, tmp_path / "volume")


@pytest.mark.parametrize(
    "output", ["s3://bucket/model", "gs:/bucket", "~/model", "~other/model", "", "a\0b"]
)
def test_output_that_is_no_path_is_refused(root: Path, output: str) -> None:
    with pytest.raises(ValueError, match="output_dir: expected a path"):
        SFTModule(str(root / "policy"), output_dir=output)


@pytest.mark.filterwarnings("ignore:.*limit_train_batches=0")
@pytest.mark.parametrize("limit", [{"max_epochs": 0}, {"max_steps": 0}, {"limit_train_batches": 0}])
def test_run_without_a_batch_is_an_error(root: Path, tmp_path: Path, limit: Any) -> None:
    with pytest.raises(ValueError, match="expected at least one batch to train on, got none"):
        sft(root, tmp_path / "out", **limit)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("clip", [-1.0, float("nan")])
def test_clip_of_the_trainer_that_would_be_ignored_is_refused(
    root: Path, tmp_path: Path, clip: float
) -> None:
    expected = rf"gradient_clip_val: expected none, got {clip}: .*grad_clip"
    with pytest.raises(ValueError, match=expected):
        sft(root, tmp_path / "out", gradient_clip_val=clip)


@pytest.mark.filterwarnings("ignore:Experiment logs directory")  # CSVLogger's, once it may run
@pytest.mark.parametrize("held", ["out", "logs/one", "logs/one/checkpoints", "other"])
def test_second_run_in_a_folder_is_refused(root: Path, tmp_path: Path, held: str) -> None:
    logger = CSVLogger(tmp_path, name="logs", version="one")
    checkpoints = [ResumeCheckpoint(dirpath=str(tmp_path / "other"))]
    options: dict[str, Any] = {"logger": logger, "callbacks": checkpoints}
    if held == "logs/one/checkpoints":
        options = {"default_root_dir": tmp_path / "logs/one", "enable_checkpointing": True}
    running = FolderLocks()
    running.acquire([tmp_path / held])
    (tmp_path / "logs/one").mkdir(parents=True, exist_ok=True)
    metrics = tmp_path / "logs/one/metrics.csv"
    metrics.write_text("of the first run")  # which CSVLogger would delete
    with pytest.raises(RuntimeError, match=rf"{held}: another run or command writes to it"):
        sft(root, tmp_path / "out", **options)
    assert metrics.read_text() == "of the first run"
    sft_options = {"fast_dev_run": 1, **options, "logger": False}
    with pytest.raises(Started):  # it writes nothing
        sft(root, tmp_path / "out", **sft_options)
    running.release()
    with pytest.raises(Started):
        sft(root, tmp_path / "out", **options)


def test_run_that_ends_leaves_no_lock_and_interrupted_one_mark(root: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    with pytest.raises(Started):  # nothing is trained yet
        sft(root, output)
    assert not lock_path(output).exists()
    module = SFTModule(str(root / "policy"), output_dir=str(output))
    with pytest.raises(KeyError):
        fit_module(module, demonstrations(root), tmp_path, callbacks=[Interrupted()])
    assert lock_path(output).is_file()
    fit_module(module, demonstrations(root), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_run_does_not_start_from_the_folder_of_an_interrupted_one(own_root: Path) -> None:
    """The model there may come from a run before."""
    (own_root / "policy").rename(own_root / "sft")
    module = SFTModule(str(own_root / "sft"), output_dir=str(own_root / "policy"))
    with pytest.raises(KeyError):
        fit_module(module, demonstrations(own_root), own_root, callbacks=[Interrupted()])
    (own_root / "sft").rename(own_root / "policy")  # stands for the model of an earlier run
    message = (
        rf"model_path: expected a finished model, got {own_root}/policy, .*process {os.getpid()} on"
    )
    first, ppo = SFTModule(str(own_root / "policy")), PPOModule(**ppo_options(own_root))
    for stage, data in ((first, demonstrations(own_root)), (ppo, prompts(own_root))):
        with pytest.raises(ValueError, match=message):
            fit_module(stage, data, own_root / "logs", callbacks=[Refused()])
    lock_path(own_root / "policy").unlink()
    with pytest.raises(Started):
        sft(own_root, own_root / "out")


def test_only_rank_0_checks_and_locks(root: Path, tmp_path: Path) -> None:
    running = FolderLocks()
    running.acquire([tmp_path / "out"])
    with patch("lightning.pytorch.Trainer.is_global_zero", False), pytest.raises(Started):
        sft(root, tmp_path / "out")
    running.release()
