"""`lit_rlhf fit --ckpt_path last`, and the checkpoints that the command line keeps."""

import json
import os
import re
import shlex
import shutil
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lit_callbacks import ResumeCheckpoint
from lit_rlhf.cli.training import RLHFCLI, run_cli
from lit_rlhf.files import read_manifest
from lit_rlhf.modules import SFTModule
from lit_rlhf.strategies import AtomicCheckpointIO
from tests.cli import fitting
from tests.configs.parsing import parsed
from tests.configs.tiny_runs import CONFIGS

KEEP_EACH = {"class_path": "lit_callbacks.ResumeCheckpoint", "init_args": {"every_n_batches": 1}}

# a run that resumes finds its own checkpoints, or another callback's
pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from"),
]


def forget() -> None:
    """Make the finished model one of an unknown command."""
    manifest = read_manifest("model")
    Path("model/lit_rlhf.json").write_text(json.dumps({**manifest, "command": None}))


def fit(root: Path, *flags: str, stage: str = "SFT", **trainer: Any) -> RLHFCLI:
    """Four batches of SFT, or of another stage."""
    quiet = fitting.QUIET | {"default_root_dir": "run", "logger": False}
    options = {"output_dir": "model"}
    return fitting.fit(root, *flags, stage=stage, options=options, trainer=quiet | trainer)


def weights() -> bytes:
    return Path("model/model.safetensors").read_bytes()


def checkpoints() -> list[str]:
    return sorted(path.name for path in Path("run/checkpoints").iterdir())


def refused(capsys: pytest.CaptureFixture[str], root: Path, *flags: str, **options: Any) -> str:
    """What the usage error says."""
    with pytest.raises(SystemExit) as ended:
        fit(root, *flags, **options)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_last_takes_the_newest_checkpoint(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fit(root, "--ckpt_path", "last", callbacks=[KEEP_EACH])
    assert "no checkpoint in run/checkpoints; the run starts from the beginning" in caplog.text
    assert checkpoints() == ["batch=3.ckpt", "batch=4.ckpt"]
    whole = weights()
    Path("run/checkpoints/batch=4.ckpt").unlink()  # as if killed after the third batch
    forget()
    with caplog.at_level("INFO"):
        fit(root, "--ckpt_path", "last", callbacks=[KEEP_EACH])
    assert "Restored all states from the checkpoint at run/checkpoints/batch=3.ckpt" in caplog.text
    assert weights() == whole
    assert checkpoints() == ["batch=3.ckpt", "batch=4.ckpt"]


def test_finished_run_without_output_is_found(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        for _ in range(2):
            fit(root, "--ckpt_path", "last", "--model.output_dir", "null")
    assert caplog.text.count("The run is finished, and its model is in run/model") == 1


def test_damaged_last_offers_the_one_before(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(root, callbacks=[KEEP_EACH])
    whole = weights()
    Path("model/model.safetensors").unlink()
    path = Path("run/checkpoints/batch=4.ckpt")
    content = path.read_bytes()

    path.write_bytes(content[:-1000])
    for value in ("last", str(path)):
        told = refused(capsys, root, "--ckpt_path", value, callbacks=[KEEP_EACH])
        assert "checkpoint run/checkpoints/batch=4.ckpt: is damaged or cut off" in told
        assert "resume from run/checkpoints/batch=3.ckpt instead" in told

    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1  # seen when it is read as a whole
    path.write_bytes(flipped)
    message = r"batch=4\.ckpt: is damaged: .*; resume from run/checkpoints/batch=3\.ckpt instead"
    with pytest.raises(ValueError, match=message):
        fit(root, "--ckpt_path", "last", callbacks=[KEEP_EACH])

    assert not Path("model/model.safetensors").exists()
    fit(root, "--ckpt_path", "run/checkpoints/batch=3.ckpt", callbacks=[KEEP_EACH])
    assert weights() == whole


def test_last_is_the_newest_whoever_saved_it(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    # a ModelCheckpoint at the end of an epoch, and no `last.ckpt`
    fit(root, callbacks=[{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint"}])
    assert checkpoints() == ["epoch=0-step=4.ckpt"]
    elsewhere = {"dirpath": "elsewhere", "filename": "best", "save_last": True}
    usual = "lightning.pytorch.callbacks.ModelCheckpoint"
    both = [{"class_path": usual, "init_args": elsewhere}, KEEP_EACH]
    with caplog.at_level("INFO"):
        fit(root, "--ckpt_path", "last", callbacks=both, max_epochs=2)
        assert "Restored all states from the checkpoint at run/checkpoints/epoch=0" in caplog.text
        os.utime("elsewhere/best.ckpt", (10**10, 10**10))
        forget()
        fit(root, "--ckpt_path", "last", callbacks=both, max_epochs=2)
    found = re.findall(r"Restored all states from the checkpoint at (\S+)", caplog.text)
    assert Path(found[-1]).resolve() == Path("elsewhere/best.ckpt").resolve()


def test_run_resumed_at_its_very_end_leaves_its_model_with_metrics_in_the_card(root: Path) -> None:
    fit(root, callbacks=[KEEP_EACH])
    whole, card = weights(), Path("model/README.md").read_text()
    assert "`sft/loss`" in card
    Path("model/model.safetensors").unlink()  # as if killed before it was there
    fit(root, "--ckpt_path", "last", callbacks=[KEEP_EACH])
    assert (weights(), Path("model/README.md").read_text()) == (whole, card)


def contents() -> dict[str, tuple[int, bytes]]:
    """Time and content of every file but the configuration of the command."""
    files = [p for p in Path().rglob("*") if p.is_file() and p != Path("config.yaml")]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def killed(*_: object) -> None:
    raise RuntimeError("killed")


def test_finished_run_says_so_and_writes_none(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep = {"class_path": "lit_callbacks.ResumeCheckpoint", "init_args": {"every_n_batches": 3}}
    fit(root, callbacks=[keep])  # also without --ckpt_path
    before = contents()
    with caplog.at_level("INFO"):
        fit(root, "--ckpt_path", "last", callbacks=[keep])
    assert "The run is finished, and its model is in model" in caplog.text
    assert contents() == before

    # a longer run is another command
    fit(root, "--ckpt_path", "last", callbacks=[keep], max_epochs=2)
    assert checkpoints() == ["batch=3.ckpt", "batch=6.ckpt"]
    # a run that was started anew and killed is not finished
    with patch.object(SFTModule, "training_step", killed), pytest.raises(RuntimeError):
        fit(root, "--overwrite", callbacks=[keep], max_epochs=2)
    caplog.clear()
    with caplog.at_level("INFO"):
        fit(root, "--ckpt_path", "last", callbacks=[keep], max_epochs=2)
    assert "the run starts from the beginning" in caplog.text
    # and neither is one whose model is gone
    shutil.rmtree("model")
    fit(root, "--ckpt_path", "last", callbacks=[keep], max_epochs=2)
    assert Path("model/model.safetensors").is_file()


def test_last_spares_another_model(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rate = "--model.optimizer.learning_rate=0.5"  # another command
    fit(root)
    whole = weights()
    told = refused(capsys, root, "--ckpt_path", "last", rate, callbacks=[KEEP_EACH])
    assert "model: expected no earlier run" in told
    assert weights() == whole
    fit(root, "--ckpt_path", "last", rate, "--overwrite", callbacks=[KEEP_EACH])
    assert weights() != whole


INTERRUPTED = {"class_path": "tests.cli.interrupting.Interrupting", "init_args": {"batch": 2}}


def test_ctrl_c_saves_and_says_how_to_go_on(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        fit(root, "--ckpt_path=last", callbacks=[INTERRUPTED], enable_checkpointing=True)
    assert ended.value.code == 130
    assert checkpoints() == ["batch=2.ckpt"]
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("To resume: "))
    command = shlex.split(line.removeprefix("To resume: "))
    assert command == ["lit_rlhf", "fit", "--config", "config.yaml", "--ckpt_path", "last"]
    run_cli(command[1:])
    resumed = weights()
    fit(root, "--overwrite", default_root_dir="whole")
    assert weights() == resumed


def test_command_names_a_checkpoint(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": "logs"}}
    # SaveConfigCallback writes there before the logger does
    warnings.filterwarnings("ignore", "Experiment logs directory .* exists and is not empty")
    with pytest.raises(SystemExit):
        fit(root, callbacks=[INTERRUPTED], enable_checkpointing=True, logger=logger)
    told = capsys.readouterr().out
    assert "--ckpt_path logs/lightning_logs/version_0/checkpoints/batch=2.ckpt" in told


def test_other_run_is_refused_until_allowed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(root, callbacks=[KEEP_EACH])
    flags = ["--ckpt_path", "run/checkpoints/batch=3.ckpt", "--data.seed", "1"]
    told = refused(capsys, root, *flags, callbacks=[KEEP_EACH])
    assert "data.seed: 0 -> 1" in told
    assert "--allow_changes on the command line" in told
    cli = fit(root, *flags, "--allow_changes", callbacks=[KEEP_EACH])
    assert cli.trainer.global_step == 4


def test_the_last_resume_checkpoint_of_the_configurations_wins(root: Path) -> None:
    other = {"class_path": "lit_callbacks.ResumeCheckpoint", "init_args": {"every_n_batches": 3}}
    found = fit(root, callbacks=[KEEP_EACH, other]).trainer.checkpoint_callbacks
    assert [callback.every_n_batches for callback in found] == [3]


def test_a_run_that_was_stopped_as_collapsed_has_a_status_of_its_own(root: Path) -> None:
    monitor = {"key": "toy/damage", "high": 10.0, "patience": 1, "horizon": 0}
    monitors = [{"class_path": "lit_callbacks.Monitor", "init_args": monitor}]
    callbacks = [
        {"class_path": "tests.modules.test_stage_collapse.Sabotage"},
        {"class_path": "lit_callbacks.CollapseEarlyStopping", "init_args": {"monitors": monitors}},
    ]
    with pytest.raises(SystemExit) as ended:
        fit(root, callbacks=callbacks)
    assert ended.value.code == 3
    assert "stopped as collapsed" in Path("model/README.md").read_text()
    assert read_manifest("model").get("command") is None


def test_last_without_checkpoint_is_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, root, "--ckpt_path", "last", enable_checkpointing=False)
    assert "--ckpt_path last: the run keeps no checkpoints" in told


def test_checkpoints_of_the_command_line_are_written_safely_and_one_at_sigterm(root: Path) -> None:
    by_default = fit(root).trainer
    assert type(by_default.strategy.checkpoint_io) is AtomicCheckpointIO
    (added,) = by_default.checkpoint_callbacks
    assert isinstance(added, ResumeCheckpoint)
    assert (added.every_n_batches, added.every_n_minutes) == (None, 15)
    plugins = [{"class_path": "lightning.pytorch.plugins.io.AsyncCheckpointIO"}]
    chosen = fit(root, "--overwrite", callbacks=[KEEP_EACH], plugins=plugins).trainer
    assert type(chosen.strategy.checkpoint_io) is AsyncCheckpointIO
    assert [type(c) for c in chosen.checkpoint_callbacks] == [ResumeCheckpoint]
    last = fit(root, "--overwrite", enable_checkpointing=False).trainer
    assert last.checkpoint_callbacks == []


@pytest.mark.parametrize("stage", ["sft", "reward"])
@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_configurations_of_7b_keep_checkpoints(stage: str, language: str) -> None:
    settings = parsed(CONFIGS / stage / f"paper_7b_{language}.yaml")
    assert settings["trainer.enable_checkpointing"] is not False
    kept = [c for c in settings["trainer.callbacks"] if "ResumeCheckpoint" in c["class_path"]]
    assert [callback["init_args"]["every_n_batches"] for callback in kept] == [100]
    assert isinstance(settings["trainer.logger.init_args.version"], str)  # one folder at all times
