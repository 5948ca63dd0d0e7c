"""Errors of `lit_rlhf fit` in one line: which option, in which file, and what to do."""

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsspec
import pytest
import torch
import yaml

from lit_rlhf.cli.main import main
from lit_rlhf.files import FolderInUseError
from tests.support.tiny_runs import QUICKSTART

RESUME = "lit_callbacks.ResumeCheckpoint"
NONE = "no such option; did you mean"
USAGE_ERRORS: dict[str, tuple[Any, str]] = {
    "trainer": ({"trainer": {"max_epoch": 3}}, f"trainer.max_epoch: {NONE} trainer.max_epochs?"),
    "section": ({"trainr": {"max_epochs": 3}}, f"trainr.max_epochs: {NONE} trainer.max_epochs?"),
    "a value": (
        {"data": {"init_args": {"batch_size": "many"}}},
        'Parser key "data": Problem with given class_path '
        "'lit_rlhf.data.DemonstrationDataModule': "
        "Parser key \"batch_size\": Expected a <class 'int'>. Got value: many",
    ),
    "a callback": (
        {"trainer": {"callbacks": [{"class_path": "lit_callbacks.ResumeCheckpont"}]}},
        "trainer.callbacks.class_path: no such class lit_callbacks.ResumeCheckpont; did you mean "
        "lit_callbacks.ResumeCheckpoint?",
    ),
    "an option of a callback": (
        {"trainer": {"callbacks": [{"class_path": RESUME, "init_args": {"evry": 1}}]}},
        'Parser key "trainer.callbacks": Problem with given class_path '
        "'lit_callbacks.ResumeCheckpoint': Option 'evry' is not accepted",
    ),
    "a stage": (
        {"model": {"class_path": "SFTModul"}},
        "model.class_path: no such class SFTModul; did you mean lit_rlhf.modules.SFTModule?",
    ),
}


def errors_of(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    """Exit status and what stands on standard error; a message as status goes there too."""
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", str(QUICKSTART / "sft.yaml"), *map(str, arguments)])
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize(("overlay", "expected"), USAGE_ERRORS.values(), ids=USAGE_ERRORS)
def test_mistake_in_overlay(tmp_path: Path, capsys: Any, overlay: Any, expected: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(overlay), "utf-8")
    code, told = errors_of("--config", file, capsys=capsys)
    assert code == 2
    assert told.partition(": error: ")[2] == f"{file}: {expected}\n"


def test_file_that_is_no_yaml_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text("model: [\n a: 3", "utf-8")
    code, told = errors_of("--config", tmp_path / "mine.yaml", capsys=capsys)
    assert code == 2
    assert f"error: {tmp_path / 'mine.yaml'}: while parsing a flow sequence" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--trainer.max_epochs", "many"], 'Parser key "trainer.max_epochs": Expected a <class'),
        (["--data.bacth_size", "3"], f"data.bacth_size: {NONE} "),
        (
            ["--ckpt_path", "/dev/zero"],
            "--ckpt_path: expected a checkpoint, got the device or pipe",
        ),
        (
            ["--config", "quickstart/ppo_max", "--model.critic_optimizer.grad_clip", "-1"],
            "model.critic_optimizer.grad_clip: expected a finite number > 0, got -1.0\n",
        ),
    ],
)
def test_bad_flag(capsys: pytest.CaptureFixture[str], flags: list[str], expected: str) -> None:
    code, told = errors_of(*flags, capsys=capsys)
    assert code == 2
    assert told.partition(": error: ")[2].startswith(expected)
    assert told.count("\n") == 1


def test_missing_model_and_debug(capsys: pytest.CaptureFixture[str]) -> None:
    missing = ("--model.model_path", "runs/no/such_model")
    code, _ = errors_of(*missing, capsys=capsys)
    said = "lit_rlhf fit: error: model.model_path: expected a folder with a model or a hub id"
    assert code.startswith(said)
    assert "runs/no/such_model" in code
    assert code.endswith("; if another stage writes the folder, run that one first")
    assert "\n" not in code
    with pytest.raises(ValueError, match="path: expected a folder with a model"):
        errors_of(*missing, "--debug", capsys=capsys)


def test_a_missing_gpu_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with patch("torch.cuda.device_count", lambda: 0):
        code, _ = errors_of("--trainer.accelerator", "gpu", capsys=capsys)
    assert code == (
        f"lit_rlhf fit: error: trainer.accelerator: got gpu, but torch {torch.__version__} finds "
        "no GPU here; --trainer.accelerator cpu runs on the CPU"
    )


@pytest.mark.parametrize(("package", "logger"), [("wandb", "Wandb"), ("mlflow", "MLFlow")])
def test_missing_tracker(capsys: pytest.CaptureFixture[str], package: str, logger: str) -> None:
    with patch("lit_rlhf.cli.training.find_spec", return_value=None):
        code, _ = errors_of("--config", f"overlays/{package}", capsys=capsys)
    assert code == (
        f"lit_rlhf fit: error: {logger}Logger needs a package that is not installed: "
        f"pip install 'lit-rlhf[{package}]'"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="a full disk is pretended with /dev/full")
def test_a_full_disk_is_named_with_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    def fill(_: object) -> None:  # as Lightning's CSVLogger
        with fsspec.open("/dev/full", "w") as file, file:  # older releases leave it open
            file.write("a row")

    with patch("lit_rlhf.cli.training.run_cli", fill):
        code, _ = errors_of(capsys=capsys)
    assert code.endswith("No space left on device: '/dev/full'")


@pytest.mark.parametrize(
    "error",
    [
        Exception("File too large (os error 27)"),  # of tokenizers
        RuntimeError("Error(s) in loading state_dict for A: Missing key(s)"),
        FolderInUseError("runs/sft: another run writes to this folder: process 7"),
    ],
)
def test_an_error_about_a_file_is_one_line(error: Exception, capsys: Any) -> None:
    with patch("lit_rlhf.cli.training.run_cli", side_effect=error):
        code, _ = errors_of(capsys=capsys)
    assert code == f"lit_rlhf fit: error: {error}"


def test_current_folder_that_vanishes(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("PWD", str(tmp_path))

    def vanish(_: object) -> None:
        tmp_path.rmdir()
        Path("checkpoints").resolve()

    with patch("lit_rlhf.cli.training.run_cli", vanish):
        code, _ = errors_of(capsys=capsys)
    assert code.endswith(f"No such file or directory; the current folder {tmp_path} was deleted")


def test_other_errors_keep_their_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    fails = patch("lit_rlhf.cli.training.run_cli", side_effect=KeyError("a defect"))
    with fails, pytest.raises(KeyError, match="a defect"):
        errors_of(capsys=capsys)
