"""ResumeCheckpoint: the checkpoints over a run, and SIGTERM or Ctrl-C at each moment of it."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_callbacks import ResumeCheckpoint, default_checkpoint_dir
from tests.support import scripted
from tests.support.scripted import resumes_at_the_next_batch
from tests.support.signals_in_training import Module, Numbers, SignalInHook


class Counts(Callback):
    """Its state is how many batches it has seen."""

    batches = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}


@pytest.fixture(autouse=True)
def _quiet_lightning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR", "lightning.pytorch")


def trainer(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    default = {"max_epochs": 2, "num_sanity_val_steps": 0, "enable_checkpointing": True}
    return scripted.trainer(folder, *callbacks, **{**default, **options})


def fit(folder: Path, *callbacks: Callback, **options: Any) -> Module:
    module = Module()
    validation = Numbers() if "val_check_interval" in options else None
    ckpt_path = options.pop("ckpt_path", None)
    trainer(folder, *callbacks, **options).fit(module, Numbers(), validation, ckpt_path=ckpt_path)
    return module


def ended_by_sigterm(folder: Path, *callbacks: Callback, **options: Any) -> None:
    """Fit until SIGTERM ends it, with the status that says so."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SIGTERMException) as ended:
        fit(folder, *callbacks, **options)
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def ended_by_ctrl_c(folder: Path, *callbacks: Callback, **options: Any) -> int | str | None:
    """Fit until Ctrl-C ends it; the exit status."""
    with pytest.raises(SystemExit) as ended:
        fit(folder, *callbacks, **options)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return ended.value.code


def resumed(folder: Path, done: int, **options: Any) -> Module:
    """Fit from the checkpoint of `done` batches."""
    path = folder / "checkpoints" / f"batch={done}.ckpt"
    return fit(folder, ResumeCheckpoint(), ckpt_path=path, **options)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("*"))


def test_it_saves_every_so_many_batches_of_all_epochs_and_keeps_the_newest(tmp_path: Path) -> None:
    callback = ResumeCheckpoint(every_n_batches=3)
    assert callback.last_model_path == ""
    fit(tmp_path, callback)
    assert names(tmp_path) == ["batch=3.ckpt", "batch=6.ckpt"]
    assert callback.last_model_path == str(tmp_path / "checkpoints" / "batch=6.ckpt")
    fit(tmp_path / "three", ResumeCheckpoint(every_n_batches=1, keep=3))
    assert names(tmp_path / "three") == [f"batch={n}.ckpt" for n in (6, 7, 8)]


def test_minutes_pass_between_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(0, 10_000, 25))  # each look at the clock comes 25 seconds after the last
    clock = Mock(monotonic=lambda: float(next(seconds)))
    monkeypatch.setattr("lit_callbacks.resume.time", clock)
    fit(tmp_path, ResumeCheckpoint(every_n_minutes=1.0, keep=9))
    # looks: at the start, after each batch, and after a save
    assert names(tmp_path) == ["batch=3.ckpt", "batch=6.ckpt"]


def test_closed_terminal_ends_the_run_as_sigterm_does(tmp_path: Path) -> None:
    callback = SignalInHook("on_train_batch_start", 3, signal.SIGHUP)
    ended_by_sigterm(tmp_path, callback, ResumeCheckpoint())
    assert names(tmp_path) == ["batch=3.ckpt"]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("number", "handler", "calls"),
    [(signal.SIGHUP, signal.SIG_IGN, 0), (signal.SIGINT, Mock(), 1)],
    ids=["nohup", "a notebook's"],
)
def test_handler_that_is_not_pythons_is_kept(
    tmp_path: Path, number: Any, handler: Any, calls: int
) -> None:
    before = signal.signal(number, handler)
    try:
        fit(tmp_path, SignalInHook("on_train_batch_start", 3, number), ResumeCheckpoint())
    finally:
        signal.signal(number, before)
    assert getattr(handler, "call_count", 0) == calls
    assert names(tmp_path) == []


def test_without_a_period_it_saves_nothing_unless_told_to_end(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    fit(tmp_path, ResumeCheckpoint())
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # nor does a trial run
    fit(tmp_path, ResumeCheckpoint(every_n_batches=1), fast_dev_run=2)
    ended_by_sigterm(
        tmp_path, SignalInHook("on_train_start", 1), ResumeCheckpoint(), fast_dev_run=2
    )
    assert names(tmp_path) == []


def test_a_resumed_run_goes_on_with_its_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    ended_by_sigterm(tmp_path, SignalInHook("on_train_batch_start", 5), ResumeCheckpoint(2))
    assert names(tmp_path) == ["batch=4.ckpt", "batch=5.ckpt"]
    module = fit(tmp_path, ResumeCheckpoint(2), ckpt_path=folder / "batch=5.ckpt")
    assert module.seen == [1, 2, 3]
    assert names(tmp_path) == ["batch=6.ckpt", "batch=8.ckpt"]


def test_checkpoints_of_another_run_are_neither_replaced_nor_deleted(tmp_path: Path) -> None:
    fit(tmp_path, ResumeCheckpoint(every_n_batches=3))
    content = (tmp_path / "checkpoints/batch=3.ckpt").read_bytes()
    fit(tmp_path, ResumeCheckpoint(every_n_batches=3))
    expected = [f"batch={n}{version}.ckpt" for n in (3, 6) for version in ("-v1", "")]
    assert names(tmp_path) == expected
    assert (tmp_path / "checkpoints/batch=3.ckpt").read_bytes() == content


def received(path: Path, names: list[str]) -> Path:
    """Rewrite a checkpoint, so that it says that it keeps other ones."""
    content = torch.load(path, weights_only=True)
    content["callbacks"]["ResumeCheckpoint"] = {"names": names}
    torch.save(content, path)
    return path


def test_a_received_checkpoint_deletes_nothing_elsewhere(tmp_path: Path) -> None:
    fit(tmp_path, ResumeCheckpoint(every_n_batches=2), max_epochs=1)
    folder, precious = tmp_path / "checkpoints", tmp_path / "precious"
    precious.mkdir()
    (precious / "batch=1.ckpt").touch()
    (folder / "best.ckpt").touch()
    foreign = [str(precious), "../precious", "../precious/batch=1.ckpt", "best.ckpt", "..", "."]
    path = received(folder / "batch=4.ckpt", [*foreign, "batch=2.ckpt", "batch=4.ckpt"])
    fit(tmp_path, ResumeCheckpoint(every_n_batches=2), ckpt_path=path)
    assert names(tmp_path) == ["batch=6.ckpt", "batch=8.ckpt", "best.ckpt"]
    assert (precious / "batch=1.ckpt").exists()


def test_a_checkpoint_from_elsewhere_deletes_no_checkpoint_of_its_names(tmp_path: Path) -> None:
    fit(tmp_path, ResumeCheckpoint(every_n_batches=2), max_epochs=1)
    path = tmp_path / "received.ckpt"
    shutil.copy(tmp_path / "checkpoints" / "batch=4.ckpt", path)
    fit(tmp_path, ResumeCheckpoint(every_n_batches=2), ckpt_path=path)
    assert names(tmp_path) == [f"batch={n}.ckpt" for n in (2, 4, 6, 8)]


@resumes_at_the_next_batch
@pytest.mark.parametrize(
    ("hook", "nth", "saved", "left"),
    [
        ("on_train_batch_start", 3, 3, [3, 0, 1, 2, 3]),
        ("on_train_batch_start", 4, 4, [0, 1, 2, 3]),
        ("on_train_batch_end", 2, 2, [2, 3, 0, 1, 2, 3]),
        ("on_train_batch_start", 8, 8, []),
    ],
)
def test_the_batch_under_way_is_finished_and_the_rest_is_left_to_the_resumed_run(
    tmp_path: Path, hook: str, nth: int, saved: int, left: list[int]
) -> None:
    ended_by_sigterm(tmp_path, SignalInHook(hook, nth), ResumeCheckpoint())
    assert names(tmp_path) == [f"batch={saved}.ckpt"]
    module = resumed(tmp_path, saved)
    assert module.seen == left
    assert float(module.weight.detach()) == pytest.approx(-0.1 * 2 * 2 * (0 + 1 + 2 + 3))


@pytest.mark.parametrize(("nth", "saved"), [(1, 2), (5, 4), (16, 8)])
def test_a_validation_under_way_is_finished(tmp_path: Path, nth: int, saved: int) -> None:
    ended = SignalInHook(
        "on_validation_batch_end", nth
    )  # 4 batches, after every second of training
    ended_by_sigterm(tmp_path, ended, ResumeCheckpoint(), val_check_interval=2)
    assert len(ended.calls) == -(-nth // 4) * 4
    assert names(tmp_path) == [f"batch={saved}.ckpt"]
    assert resumed(tmp_path, saved, val_check_interval=2).seen == (2 * [0, 1, 2, 3])[saved:]


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_ctrl_c_saves_after_the_batch_under_way_and_ends_with_a_status_of_its_own(
    tmp_path: Path, hook: str, capfd: pytest.CaptureFixture[str]
) -> None:
    callback = SignalInHook(hook, 3, signal.SIGINT)
    assert ended_by_ctrl_c(tmp_path, callback, ResumeCheckpoint()) == 130
    assert names(tmp_path) == ["batch=3.ckpt"]
    assert "Ctrl-C: the run ends after this batch" in capfd.readouterr().err
    assert resumed(tmp_path, 3).seen == [3, 0, 1, 2, 3]


def test_sigterm_is_told_before_the_batch_ends(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stop = SignalInHook("on_train_batch_start", 3)
    ended_by_sigterm(tmp_path, stop, ResumeCheckpoint())
    output = capfd.readouterr().err
    assert "SIGTERM: the run ends after this batch, with a checkpoint.\n" in output


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path: Path) -> None:
    twice = [SignalInHook("on_train_batch_start", 3, signal.SIGINT) for _ in range(2)]
    assert ended_by_ctrl_c(tmp_path, *twice, ResumeCheckpoint()) == 1  # Lightning's
    assert names(tmp_path) == []


def test_a_validation_that_is_due_does_not_begin(tmp_path: Path) -> None:
    validation, callback = (
        SignalInHook("on_validation_batch_start", 9),
        SignalInHook("on_train_batch_start", 2),
    )
    ended_by_sigterm(tmp_path, callback, validation, ResumeCheckpoint(), val_check_interval=2)
    assert validation.calls == []


def test_a_signal_before_the_first_batch_is_not_lost(tmp_path: Path) -> None:
    sanity = SignalInHook("on_sanity_check_end", 1)
    options: dict[str, Any] = {"val_check_interval": 2, "num_sanity_val_steps": 1}
    ended_by_sigterm(tmp_path, sanity, ResumeCheckpoint(), **options)
    assert names(tmp_path) == ["batch=1.ckpt"]
    # in the sanity check itself Lightning ends the run, and there is nothing to save
    options["num_sanity_val_steps"] = 2
    sanity = SignalInHook("on_validation_batch_end", 1)
    ended_by_sigterm(tmp_path / "2", sanity, ResumeCheckpoint(), **options)
    assert names(tmp_path / "2") == []


def test_the_last_batch_is_logged_before_the_run_ends(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="", flush_logs_every_n_steps=1)
    ended_by_sigterm(
        tmp_path, SignalInHook("on_train_batch_start", 3), ResumeCheckpoint(), logger=logger
    )
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert rows[0].split(",").index("toy/batch") >= 0
    assert len(rows) == 1 + 3


def test_other_callbacks_have_seen_the_batch_that_is_saved(tmp_path: Path) -> None:
    fit(tmp_path, ResumeCheckpoint(every_n_batches=4), Counts())  # Lightning puts checkpoints last
    saved = torch.load(tmp_path / "checkpoints/batch=4.ckpt", weights_only=True)
    assert saved["callbacks"]["Counts"] == {"batches": 4}


@pytest.mark.parametrize(
    "logger",
    [
        lambda folder: None,
        lambda folder: CSVLogger(folder, name="run", version=""),
        lambda folder: CSVLogger(folder, name="run"),
        lambda folder: TensorBoardLogger(folder, name="run", version="a"),
        lambda folder: TensorBoardLogger(folder, name=None, version=3),
    ],
)
def test_its_folder_is_that_of_model_checkpoint(tmp_path: Path, logger: Any) -> None:
    lightning_checkpoint, resume_checkpoint = ModelCheckpoint(), ResumeCheckpoint()
    run_logger: Logger | None = logger(tmp_path / "logs")
    run = trainer(tmp_path, lightning_checkpoint, resume_checkpoint, logger=run_logger or False)
    folder = default_checkpoint_dir(run)
    run.fit(Module(), Numbers())
    assert os.path.normpath(str(lightning_checkpoint.dirpath)) == os.path.normpath(folder)
    assert resume_checkpoint.dirpath == str(folder)


def test_a_batch_that_was_just_saved_is_not_saved_again_at_sigterm(tmp_path: Path) -> None:
    ended_by_sigterm(tmp_path, SignalInHook("on_train_batch_start", 4), ResumeCheckpoint(2))
    assert names(tmp_path) == ["batch=2.ckpt", "batch=4.ckpt"]
