"""`lit_rlhf fit --ckpt_path last`, checkpoints that are kept, names of runs, and earlier runs."""

import json
import os
import re
import shlex
import shutil
import signal
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from jsonargparse import Namespace
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lit_callbacks import ResumeCheckpoint
from lit_rlhf.cli.runs import hash_command, name_run, seed_run
from lit_rlhf.cli.training import RLHFCLI, run_cli
from lit_rlhf.data import RecordError
from lit_rlhf.files import read_manifest
from lit_rlhf.modules import SFTModule
from lit_rlhf.parser import UsageError
from lit_rlhf.strategies import AtomicCheckpointIO
from tests.support import fit_command
from tests.support.config_parsing import cli_parser, parse_configs
from tests.support.stages import content
from tests.support.tiny_runs import QUICKSTART, logged

KEEP_EACH = {"class_path": "lit_callbacks.ResumeCheckpoint", "init_args": {"every_n_batches": 1}}

# a run that resumes finds its own checkpoints, or another callback's
pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from"),
]


@pytest.fixture(autouse=True)
def _log_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")


def forget() -> None:
    """Make the finished model one of an unknown command."""
    manifest = read_manifest("model")
    Path("model/lit_rlhf.json").write_text(json.dumps({**manifest, "command": None}))


def fit(root: Path, *flags: str, **trainer: Any) -> RLHFCLI:
    """Four batches of SFT."""
    quiet = fit_command.QUIET | {"default_root_dir": "run", "logger": False}
    options = {"output_dir": "model"}
    return fit_command.fit(root, *flags, stage="SFT", options=options, trainer=quiet | trainer)


fit_error = partial(fit_command.capture_usage_error, fit)


def weights() -> bytes:
    return Path("model/model.safetensors").read_bytes()


def checkpoints() -> list[str]:
    return sorted(path.name for path in Path("run/checkpoints").iterdir())


def test_last_takes_the_newest_checkpoint(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(root, "--ckpt_path", "last", callbacks=[KEEP_EACH])
    assert "no checkpoint in run/checkpoints; the run starts from the beginning" in caplog.text
    assert checkpoints() == ["batch=3.ckpt", "batch=4.ckpt"]
    first_weights = weights()
    Path("run/checkpoints/batch=4.ckpt").unlink()  # as if killed after the third batch
    forget()
    fit(root, "--ckpt_path", "last", callbacks=[KEEP_EACH])
    assert "Restored all states from the checkpoint at run/checkpoints/batch=3.ckpt" in caplog.text
    assert weights() == first_weights
    assert checkpoints() == ["batch=3.ckpt", "batch=4.ckpt"]


def test_finished_run_without_output_is_found(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        fit(root, "--ckpt_path", "last", "--model.output_dir", "null")
    assert caplog.text.count("The run is finished, and its model is in run/model") == 1


def test_empty_volume_at_the_checkpoints_is_no_earlier_run(root: Path) -> None:
    Path("run/checkpoints/lost+found").mkdir(parents=True)
    fit(root, callbacks=[KEEP_EACH])
    assert weights()


def test_damaged_last_offers_the_one_before(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(root, callbacks=[KEEP_EACH])
    first_weights = weights()
    Path("model/model.safetensors").unlink()
    path = Path("run/checkpoints/batch=4.ckpt")
    path.write_bytes(path.read_bytes()[:-1000])
    for checkpoint in ("last", str(path)):
        error = fit_error(capsys, root, "--ckpt_path", checkpoint, callbacks=[KEEP_EACH])
        assert "checkpoint run/checkpoints/batch=4.ckpt: is damaged or cut off" in error
        assert "resume from run/checkpoints/batch=3.ckpt instead" in error

    assert not Path("model/model.safetensors").exists()
    fit(root, "--ckpt_path", "run/checkpoints/batch=3.ckpt", callbacks=[KEEP_EACH])
    assert weights() == first_weights


def test_last_is_the_newest_whoever_saved_it(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    # a ModelCheckpoint at the end of an epoch, and no `last.ckpt`
    fit(root, callbacks=[{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint"}])
    assert checkpoints() == ["epoch=0-step=4.ckpt"]
    elsewhere = {"dirpath": "elsewhere", "filename": "best", "save_last": True}
    usual = "lightning.pytorch.callbacks.ModelCheckpoint"
    two_checkpoint_callbacks = [{"class_path": usual, "init_args": elsewhere}, KEEP_EACH]
    fit(root, "--ckpt_path", "last", callbacks=two_checkpoint_callbacks, max_epochs=2)
    assert "Restored all states from the checkpoint at run/checkpoints/epoch=0" in caplog.text
    os.utime("elsewhere/best.ckpt", (10**10, 10**10))
    forget()
    fit(root, "--ckpt_path", "last", callbacks=two_checkpoint_callbacks, max_epochs=2)
    matches = re.findall(r"Restored all states from the checkpoint at (\S+)", caplog.text)
    assert Path(matches[-1]).resolve() == Path("elsewhere/best.ckpt").resolve()


def test_run_resumed_at_its_very_end_leaves_its_model_with_metrics_in_the_card(root: Path) -> None:
    fit(root, callbacks=[KEEP_EACH])
    first_weights = weights()
    card = Path("model/README.md").read_text()
    assert "`sft/loss`" in card
    Path("model/model.safetensors").unlink()  # as if killed before it was there
    fit(root, "--ckpt_path", "last", callbacks=[KEEP_EACH])
    assert (weights(), Path("model/README.md").read_text()) == (first_weights, card)


def contents() -> dict[str, tuple[int, bytes]]:
    """Time and content of every file but the configuration of the command."""
    files = [p for p in Path().rglob("*") if p.is_file() and p != Path("config.yaml")]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def killed(*_: object) -> None:
    raise RuntimeError("killed")


def test_finished_run_says_so_and_writes_none(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep = KEEP_EACH | {"init_args": {"every_n_batches": 3}}
    fit(root, callbacks=[keep])  # also without --ckpt_path
    first_content = contents()
    fit(root, "--ckpt_path", "last", callbacks=[keep])
    assert "The run is finished, and its model is in model" in caplog.text
    assert contents() == first_content

    # a longer run is another command
    fit(root, "--ckpt_path", "last", callbacks=[keep], max_epochs=2)
    assert checkpoints() == ["batch=3.ckpt", "batch=6.ckpt"]
    # a run that was started anew and killed is not finished
    with patch.object(SFTModule, "training_step", killed), pytest.raises(RuntimeError):
        fit(root, "--overwrite", callbacks=[keep], max_epochs=2)
    caplog.clear()
    fit(root, "--ckpt_path", "last", callbacks=[keep], max_epochs=2)
    assert "the run starts from the beginning" in caplog.text
    # and neither is one whose model is gone
    shutil.rmtree("model")
    fit(root, "--ckpt_path", "last", callbacks=[keep], max_epochs=2)
    assert Path("model/model.safetensors").is_file()


def test_finished_run_whose_checkpoints_are_gone_says_only_that_it_is_finished(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(root, callbacks=[KEEP_EACH])
    shutil.rmtree("run/checkpoints")
    caplog.clear()
    fit(root, "--ckpt_path", "last", callbacks=[KEEP_EACH])
    assert "The run is finished, and its model is in model" in caplog.text
    assert "starts from the beginning" not in caplog.text


def test_last_spares_another_model(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rate = "--model.optimizer.learning_rate=0.5"  # another command
    fit(root)
    first_weights = weights()
    error = fit_error(capsys, root, "--ckpt_path", "last", rate, callbacks=[KEEP_EACH])
    assert "model: expected no earlier run" in error
    assert weights() == first_weights
    fit(root, "--ckpt_path", "last", rate, "--overwrite", callbacks=[KEEP_EACH])
    assert weights() != first_weights


class Interrupting(Callback):
    """Presses Ctrl-C when the second batch starts, the first time it gets there."""

    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        if trainer.fit_loop.total_batch_idx == 1:
            os.kill(os.getpid(), signal.SIGINT)


INTERRUPTED = {"class_path": "tests.cli.test_runs.Interrupting"}


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


def test_configuration_in_the_current_folder_is_not_written_over(root: Path) -> None:
    fit(root, default_root_dir=".")
    assert isinstance(json.loads(Path("config.yaml").read_text()), dict)  # and not YAML
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": ".", "version": 1}}
    # the configuration is saved before the logger makes its folder
    warnings.filterwarnings("ignore", "Experiment logs directory .* exists and is not empty")
    fit(root, "--model.output_dir", "b", default_root_dir=".", logger=logger)
    assert isinstance(json.loads(Path("config.yaml").read_text()), dict)
    assert "output_dir: b" in Path("lightning_logs/version_1/config.yaml").read_text()


def test_configuration_is_not_written_where_a_link_leads(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("theirs").write_text("kept")
    for name in ("config.yaml", "hparams.yaml"):
        folder = Path("logs/a") / name.partition(".")[0]
        folder.mkdir(parents=True)
        (folder / name).symlink_to(Path("theirs").resolve())
        arguments = {"save_dir": "logs", "name": "a", "version": folder.name}
        logger = {"class_path": "CSVLogger", "init_args": arguments}
        assert "expected no earlier run" in fit_error(capsys, root, logger=logger)
    # with --overwrite the configuration takes the place of the link
    logger["init_args"] = {"save_dir": "logs", "name": "a", "version": "config"}
    warnings.filterwarnings("ignore", "Experiment logs directory .* exists and is not empty")
    fit(root, "--overwrite", logger=logger)
    assert not Path("logs/a/config/config.yaml").is_symlink()
    assert Path("theirs").read_text() == "kept"


def test_command_names_a_checkpoint(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": "logs"}}
    # SaveConfigCallback writes there before the logger does
    warnings.filterwarnings("ignore", "Experiment logs directory .* exists and is not empty")
    with pytest.raises(SystemExit):
        fit(root, callbacks=[INTERRUPTED], enable_checkpointing=True, logger=logger)
    output = capsys.readouterr().out
    assert "--ckpt_path logs/lightning_logs/version_0/checkpoints/batch=2.ckpt" in output


def test_other_run_is_refused_until_allowed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(root, callbacks=[KEEP_EACH])
    flags = ["--ckpt_path", "run/checkpoints/batch=3.ckpt", "--data.seed", "1"]
    error = fit_error(capsys, root, *flags, callbacks=[KEEP_EACH])
    assert "data.seed: 0 -> 1" in error
    assert "--allow_changes on the command line" in error
    cli = fit(root, *flags, "--allow_changes", callbacks=[KEEP_EACH])
    assert cli.trainer.global_step == 4


def test_the_last_resume_checkpoint_of_the_configurations_wins(root: Path) -> None:
    other = {"class_path": "lit_callbacks.ResumeCheckpoint", "init_args": {"every_n_batches": 3}}
    checkpoint_callbacks = fit(root, callbacks=[KEEP_EACH, other]).trainer.checkpoint_callbacks
    assert [callback.every_n_batches for callback in checkpoint_callbacks] == [3]


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
    error = fit_error(capsys, root, "--ckpt_path", "last", enable_checkpointing=False)
    assert "--ckpt_path last: the run keeps no checkpoints" in error


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


EARLIER = "expected no earlier run"


def fit_named(root: Path, *flags: str, **trainer: Any) -> RLHFCLI:
    """SFT in two batches, with the model in `runs/sft` and the log in `runs/logs/sft`."""
    few: dict[str, Any] = fit_command.QUIET | {"limit_train_batches": 2}
    few["callbacks"] = [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint"}]
    log = {"save_dir": "runs/logs", "name": "sft", "version": ""}
    few["logger"] = {"class_path": "TensorBoardLogger", "init_args": log}
    options = {"output_dir": "runs/sft"}
    return fit_command.fit(root, *flags, stage="SFT", options=options, trainer=few | trainer)


named_fit_error = partial(fit_command.capture_usage_error, fit_named)


def test_earlier_run_is_replaced_if_asked(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit_named(root, "--model.optimizer.learning_rate", "1.0e-3")
    first_content = content(Path("runs"))
    first_losses = logged(Path("runs/logs/sft"))["sft/loss"]

    error = named_fit_error(capsys, root, "--model.optimizer.learning_rate", "2.0e-3")
    assert f"runs/sft and runs/logs/sft and runs/logs/sft/checkpoints: {EARLIER}" in error
    for way in ("--name NAME", "--ckpt_path last", "--overwrite"):
        assert way in error
    assert content(Path("runs")) == first_content

    fit_named(root, "--model.optimizer.learning_rate", "2.0e-3", "--name", "faster")
    assert first_content.items() <= content(Path("runs")).items()
    assert logged(Path("runs/logs/faster"))["sft/loss"][1] != first_losses[1]
    faster = Path("runs/faster/model.safetensors").read_bytes()
    assert faster != first_content["sft/model.safetensors"]

    fit_named(root, "--ckpt_path", "last", "--model.optimizer.learning_rate", "1.0e-3")  # finished
    assert first_content.items() <= content(Path("runs")).items()


def test_other_run_replaces_no_model(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("sft", "other"):
        fit_named(root, "--name", name, "--model.optimizer.learning_rate", "1.0e-3")
    (checkpoint,) = Path("runs/logs/other/checkpoints").iterdir()
    first_content = content(Path("runs"))
    flags = ["--ckpt_path", str(checkpoint), "--trainer.max_epochs", "2"]
    error = named_fit_error(capsys, root, *flags)
    assert f"runs/sft and runs/logs/sft and runs/logs/sft/checkpoints: {EARLIER}" in error
    assert content(Path("runs")) == first_content
    fit_named(root, *flags, "--name", "third")
    assert first_content.items() <= content(Path("runs")).items()


def test_overwrite_deletes_no_checkpoint_of_another_run_and_no_copy(root: Path) -> None:
    keep = KEEP_EACH | {"init_args": {"dirpath": "all", "every_n_batches": 1}}
    flags = ["--trainer.callbacks", json.dumps([keep])]
    fit_named(root, "--name", "other", *flags)
    Path("all/batch=2.ckpt").rename("all/batch=1.ckpt.kept")
    Path("all/batch=1.ckpt").unlink()
    Path("all/batch=1.ckpt.kept").rename("all/batch=2.ckpt")
    fit_named(root, "--overwrite", *flags)
    mine = sorted(path.name for path in Path("all").glob("*.ckpt"))
    assert mine == ["batch=1.ckpt", "batch=2-v1.ckpt", "batch=2.ckpt"]
    copy = Path("all/best.ckpt")
    copy.write_bytes(Path("all/batch=2-v1.ckpt").read_bytes())
    Path("all/notes.ckpt").write_text("no checkpoint")
    other_files = {name: Path("all", name).read_bytes() for name in ("batch=2.ckpt", "best.ckpt")}

    fit_named(root, "--overwrite", "--trainer.max_steps", "1", *flags)
    remaining = sorted(path.name for path in Path("all").glob("*.ckpt"))
    assert remaining == ["batch=1.ckpt", "batch=2.ckpt", "best.ckpt", "notes.ckpt"]
    assert {name: Path("all", name).read_bytes() for name in other_files} == other_files


def test_overwrite_replaces_model_and_log(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit_named(root, "--model.optimizer.learning_rate", "1.0e-3")
    Path("runs/logs/sft/notes.txt").write_text("mine")
    Path("runs/logs/sft/samples.jsonl").write_text("of the earlier run")
    first_content = content(Path("runs"))
    with pytest.raises((RecordError, SystemExit)):  # a run that does not start deletes nothing
        fit_named(root, "--overwrite", "--data.init_args.train_sources", '[{"path": "lost.jsonl"}]')
    content_after_refusal = content(Path("runs"))
    changed = {
        name
        for name in first_content
        if "finished" not in name and first_content[name] != content_after_refusal[name]
    }
    assert changed <= {"logs/sft/config.yaml"}

    fit_named(root, "--overwrite", "--model.optimizer.learning_rate", "2.0e-3")
    events = list(Path("runs/logs/sft").glob("events.out.tfevents.*"))
    assert len(events) == 1
    assert str(events[0]) not in first_content
    assert [p.name for p in Path("runs/logs/sft/checkpoints").iterdir()] == ["epoch=0-step=2.ckpt"]
    assert Path("runs/logs/sft/notes.txt").read_text() == "mine"
    assert not Path("runs/logs/sft/samples.jsonl").exists()
    assert content(Path("runs"))["sft/model.safetensors"] != first_content["sft/model.safetensors"]


@pytest.mark.filterwarnings("ignore:Total length of .* across ranks is zero")  # no validation data
def test_a_start_that_failed_and_a_trial_leave_nothing_to_protect(root: Path) -> None:
    Path("runs/logs/sft").mkdir(parents=True)
    for name in ("config.yaml", "hparams.yaml"):
        Path("runs/logs/sft", name).touch()
    fit_named(root, fast_dev_run=1)
    fit_named(root)
    fit_named(root, fast_dev_run=1)  # writes nothing


def test_folder_of_checkpoints_is_protected(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"logger": False, "default_root_dir": "runs/logs"}
    fit_named(root, **options)
    error = named_fit_error(capsys, root, "--model.output_dir", "runs/x", **options)
    assert f"runs/logs/checkpoints: {EARLIER}" in error


def folders(*files: Path, flags: tuple[str, ...] = ()) -> tuple[Any, Any]:
    """Model and log of a configuration, after it has been named."""
    words = [word for file in files for word in ("--config", str(file))]
    config = cli_parser().parse_args(["fit", *words, *flags]).fit
    name_run(config)
    assert (config.name, config.suffix) == (None, [])  # a saved configuration has its folders
    return config.model.init_args.output_dir, config.trainer.logger.init_args.name


def test_a_name_wins_over_the_suffixes_of_overlays(tmp_path: Path) -> None:
    base = QUICKSTART / "ppo_max.yaml"
    ablations = [base.parents[1] / "ablations" / f"{n}.yaml" for n in ("no_ptx", "critic_random")]
    assert folders(base) == ("runs/quickstart/ppo_max", "ppo_max")
    assert folders(base, ablations[0]) == ("runs/quickstart/ppo_max-no_ptx", "ppo_max-no_ptx")
    name = "ppo_max-no_ptx-critic_random"
    assert folders(base, *ablations) == (f"runs/quickstart/{name}", name)
    assert folders(base, *ablations, flags=("--name", "mine")) == ("runs/quickstart/mine", "mine")
    assert "suffix" in parse_configs(base)


@pytest.mark.parametrize("name", ["a/b", "..", ""])
def test_a_name_that_is_no_folders_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="--name: expected the name of a folder"):
        folders(QUICKSTART / "sft.yaml", flags=("--name", name))


def seeds(stage: str, flags: str = "") -> dict[str, int | None]:
    """The seeds of a configuration of the quickstart, after `--seed` has been applied."""
    words = ["fit", "--config", str(QUICKSTART / f"{stage}.yaml"), *flags.split()]
    config = cli_parser().parse_args(words).fit
    seed_run(config, words)
    assert config.seed is None  # a saved configuration has the seeds
    sections = {"model": config.model.init_args, "data": config.data.init_args}
    seeds = {
        f"{section}.{name}": options[name]
        for section, options in sections.items()
        for name in ("seed", "head_seed", "split_seed")
        if name in options
    }
    return seeds | {"seed_everything": config.seed_everything}


def test_one_seed_is_that_of_all_random_numbers_but_not_of_what_is_held_out() -> None:
    default = {"model.seed": 0, "data.seed": 0, "data.split_seed": None, "seed_everything": 0}
    assert seeds("ppo_max") == default
    all_seven = {"model.seed": 7, "data.seed": 7, "data.split_seed": 0, "seed_everything": 7}
    assert seeds("ppo_max", "--seed 7") == all_seven
    mixed = {"model.seed": 3, "data.seed": 4, "data.split_seed": 5, "seed_everything": 7}
    own_seeds = "--model.seed 3 --data.init_args.seed=4 --data.split_seed 5"
    assert seeds("ppo_max", f"--seed=7 {own_seeds}") == mixed
    assert seeds("reward", "--seed 7 --seed_everything 1") == {
        "model.head_seed": 7,
        "data.seed": 7,
        "data.split_seed": 0,
        "seed_everything": 1,
    }


OWN_HASH = "c45a5c308e612fb82768eaaf60c0312cac94db87e742d324518b0b3621ff2d3f"
"""Of the first version that had hashes. A new option belongs in `_LATER_DEFAULTS`."""


def test_finished_run_of_an_earlier_version_has_the_hash_of_its_command() -> None:
    overlay = QUICKSTART.parent / "overlays" / "rollback.yaml"
    words = ["fit", "--config", str(QUICKSTART / "ppo_max.yaml"), "--config", str(overlay)]
    settings = cli_parser().parse_args(words).fit
    seed_run(settings, words)
    callbacks = [c for c in settings.trainer.callbacks if c.class_path.startswith("lit_")]
    assert callbacks
    # what belongs to this project; defaults of Lightning change with its version
    own_settings = Namespace(model=settings.model, data=settings.data, callbacks=callbacks)
    for name in ("name", "suffix", "finished", "seed"):
        own_settings[name] = settings[name]
    assert hash_command(own_settings) == OWN_HASH
    own_settings.finished = "best"
    assert hash_command(own_settings) != OWN_HASH
