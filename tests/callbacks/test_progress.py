"""The exact lines of StageProgressBar on a clock that the module under training moves on."""

import io
import logging
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lit_callbacks import StageProgressBar
from tests.callbacks.scripted import PLAIN, resumes_at_the_next_batch, trainer


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Terminal(io.StringIO):
    """A stream that says it is a terminal; `drawn` is what each redrawing put on the line."""

    def isatty(self) -> bool:
        return True

    @property
    def drawn(self) -> list[str]:
        return [part.removesuffix("\x1b[K") for part in self.getvalue().split("\r") if part]


class Module(LightningModule):
    """One batch takes two seconds; the logged loss is the number of the batch."""

    def __init__(self, clock: Clock, manual: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.clock = clock
        self.automatic_optimization = not manual
        self.batches = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.clock.seconds += 2
        self.batches += 1
        self.log("toy/loss", float(self.batches))
        loss = (self.weight * batch).sum()
        if not self.automatic_optimization:
            for _ in range(3):  # three optimizer steps in each batch
                self.manual_backward((self.weight * batch).sum())
                self.optimizers().step()  # type: ignore[union-attr]
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.clock.seconds += 1

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield torch.zeros(1)


def zeros(batches: int) -> DataLoader[Tensor]:
    return DataLoader(torch.zeros(batches, 1))  # type: ignore[arg-type]


def trainer_with(bar: StageProgressBar, **options: Any) -> Trainer:
    usual = {"num_sanity_val_steps": 0, "enable_progress_bar": True}
    return trainer(Path(), bar, **usual | options)


@pytest.fixture(autouse=True)
def _quiet_lightning(caplog: pytest.LogCaptureFixture) -> None:
    """Keep Lightning's own messages out of the recorded stream."""
    caplog.set_level("ERROR", "lightning.pytorch")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("lit_callbacks.progress.monotonic", clock)
    return clock


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    streams = SimpleNamespace(stderr=io.StringIO(), stdout=io.StringIO())
    monkeypatch.setattr("lit_callbacks.progress.sys", streams)
    return streams.stderr


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    streams = SimpleNamespace(stderr=Terminal(), stdout=io.StringIO())
    monkeypatch.setattr("lit_callbacks.progress.sys", streams)
    monkeypatch.setenv("COLUMNS", "72")
    return streams.stderr


def test_log_gets_lines_at_the_first_batch_and_each_tenth(clock: Clock, log: io.StringIO) -> None:
    bar = StageProgressBar("sft", ["toy/loss"])
    options = {"max_epochs": 2, "num_sanity_val_steps": 2, "limit_val_batches": 1}
    trainer_with(bar, **options).fit(Module(clock), zeros(20), zeros(3))
    lines = log.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/40", *(f"{i}/40" for i in range(4, 41, 4))]
    assert lines[0] == "sft 1/40 2% 00:02 elapsed, 01:18 left, loss 1"
    # the seconds of validation included
    assert lines[6] == "sft 24/40 60% 00:49 elapsed, 00:32 left, loss 24"
    assert lines[-1] == "sft 40/40 100% 01:22 elapsed, loss 40"


class Ending(Module):
    """Ends an endless epoch after twelve batches."""

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
        return -1 if batch_idx == 12 else None


class Stopping(Module):
    def on_train_batch_end(self, *_: object) -> None:
        self.trainer.should_stop = self.batches == 3


@pytest.mark.parametrize(
    ("kind", "options", "loader", "first", "last"),
    [
        # an epoch of 3 batches makes 2 steps of at most 2 batches: 3 steps end after 3 + 2 batches
        (
            Module,
            {"max_epochs": 10, "max_steps": 3, "accumulate_grad_batches": 2},
            *(zeros(3), "1/5 20% 00:02 elapsed, 00:08 left", "5/5 100% 00:10 elapsed"),
        ),
        # 3 steps in each batch, of which 11 are made within the fourth: the total is unknown
        (
            partial(Module, manual=True),
            {"max_epochs": -1, "max_steps": 11},
            *(zeros(10), "1 00:02 elapsed", "4 00:08 elapsed"),
        ),
        (Ending, {}, DataLoader(Endless()), "1 00:02 elapsed", "12 00:24 elapsed"),
        (Stopping, {"max_epochs": 2}, zeros(10), "1/20 5% 00:02 elapsed", "3/20 15% 00:06 elapsed"),
    ],
)
def test_count_ends_where_the_fit_ends(
    clock: Clock, log: io.StringIO, kind: Any, options: Any, loader: Any, first: str, last: str
) -> None:
    trainer_with(StageProgressBar("sft", ["toy/loss", "no"]), **options).fit(kind(clock), loader)
    said = log.getvalue().splitlines()
    assert said[0].startswith(f"sft {first}")
    assert said[-1].startswith(f"sft {last}, loss ")
    assert said[-1].endswith("no -")


# the loader yields zeros only, where it goes on does not matter
@resumes_at_the_next_batch
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_a_resumed_fit_goes_on_counting(clock: Clock, log: io.StringIO, tmp_path: Path) -> None:
    class Saving(Module):
        def on_train_batch_end(self, *_: object) -> None:
            if self.batches == 2:
                self.trainer.save_checkpoint(tmp_path / "two.ckpt")

    trainer_with(StageProgressBar()).fit(Saving(clock), zeros(4))
    log.truncate(0)
    log.seek(0)
    clock.seconds = 100.0
    second = trainer_with(StageProgressBar("sft"))
    second.fit(Module(clock), zeros(4), ckpt_path=tmp_path / "two.ckpt", **PLAIN)
    expected = "sft 3/4 75% 00:02 elapsed, 00:02 left\nsft 4/4 100% 00:04 elapsed\n"
    assert log.getvalue() == expected


@pytest.mark.parametrize("loop", ["validate", "test"])
def test_a_loop_of_its_own_has_lines_of_its_own(clock: Clock, log: io.StringIO, loop: str) -> None:
    bar = StageProgressBar("sft", ["toy/loss"])
    getattr(trainer_with(bar), loop)(Module(clock), [zeros(2), zeros(1)])
    name = {"validate": "validation"}.get(loop, loop)
    assert log.getvalue().splitlines() == [
        f"sft {name} 1/3 33% 00:01 elapsed, 00:02 left",
        f"sft {name} 2/3 67% 00:02 elapsed, 00:01 left",
        f"sft {name} 3/3 100% 00:03 elapsed",
    ]


def test_terminal_line_is_redrawn_in_place(clock: Clock, terminal: Terminal) -> None:
    bar = StageProgressBar("ppo", ["toy/loss"])
    run = trainer_with(bar, num_sanity_val_steps=1, val_check_interval=1)
    run.fit(Module(clock), zeros(2), zeros(2))
    shown = [re.sub(r" \[#+\.*\]", "", line) for line in terminal.drawn]
    assert shown[:5] == [
        "ppo sanity check 1/1 100% 00:01 elapsed, 00:00 left",
        "",  # cleared
        "ppo 1/2 50% 00:02 elapsed, 00:02 left, loss 1",
        "ppo 1/2 50% 00:03 elapsed, 00:03 left, validation 1/2, loss 1",
        "ppo 1/2 50% 00:04 elapsed, 00:04 left, validation 2/2, loss 1",
    ]
    assert shown[8:] == ["", "ppo 2/2 100% 00:08 elapsed, loss 2\x1b[K\n"]


def test_a_message_has_a_line_of_its_own(terminal: Terminal) -> None:
    bar = StageProgressBar("SFT")
    bar._draw("SFT 1/2")
    print("a warning", file=terminal)
    bar._draw("SFT 2/2")
    bar._end_line("\n")
    print("done", file=terminal)
    assert terminal.getvalue() == ("\rSFT 1/2\x1b[K\r\x1b[Ka warning\n\rSFT 2/2\x1b[K\ndone\n")
    assert "write" not in vars(terminal)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (55, "ppo 1/2 50% [###...] 00:02 elapsed, 00:02 left, loss 1"),
        (54, "ppo 1/2 50% 00:02 elapsed, 00:02 left, loss 1"),
        (45, "ppo 1/2 50% 00:02 elapsed, 00:02 left"),
        (20, "ppo 1/2 50% 00:02 e"),
    ],
)
def test_a_narrow_terminal_loses_the_bar_first_and_then_the_end(
    clock: Clock, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, columns: int, expected: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    trainer_with(StageProgressBar("ppo", ["toy/loss"])).fit(Module(clock), zeros(2))
    assert terminal.drawn[0] == expected


@pytest.mark.parametrize("validation", [1.0, 0.0])
def test_lightning_says_why_a_fit_ends_on_a_line_of_its_own(
    clock: Clock, terminal: Terminal, validation: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    lightning = logging.getLogger("lightning.pytorch")
    run = trainer_with(StageProgressBar("ppo"), limit_val_batches=validation)
    lightning.setLevel(logging.INFO)
    monkeypatch.setattr(lightning, "handlers", [logging.StreamHandler(terminal)])
    run.fit(Module(clock), zeros(2), zeros(2))
    assert "\r\x1b[K`Trainer.fit` stopped: `max_epochs=1` reached.\n" in terminal.getvalue()


def test_refresh_rate_spares_drawings_but_not_the_last(clock: Clock, terminal: Terminal) -> None:
    bar = StageProgressBar("ppo", refresh_rate=3)
    trainer_with(bar).fit(Module(clock), zeros(7))
    assert [line.split()[1] for line in terminal.drawn if line] == ["3/7", "6/7", "7/7", "7/7"]


def test_printing_clears_and_redraws(clock: Clock, terminal: Terminal, capsys: Any) -> None:
    class Talking(Module):
        def on_train_batch_end(self, *_: object) -> None:
            self.print("hello")

    trainer_with(StageProgressBar("ppo")).fit(Talking(clock), zeros(1))
    line = "ppo 1/1 100% [####################] 00:02 elapsed, 00:00 left"
    assert capsys.readouterr().out == "hello\n"
    assert terminal.drawn[:3] == [line, "", line]


def test_an_exception_starts_on_a_line_of_its_own(clock: Clock, terminal: Terminal) -> None:
    class Broken(Module):
        def on_train_batch_end(self, *_: object) -> None:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        trainer_with(StageProgressBar("ppo")).fit(Broken(clock), zeros(2))
    assert terminal.getvalue().endswith(" left\x1b[K\n")


def test_rank_1_is_quiet(clock: Clock, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    class Enabling(Module):
        def on_train_start(self) -> None:
            bar.enable()  # as tuners do after their trial runs, on every rank

    bar = StageProgressBar("ppo")
    trainer_with(StageProgressBar("ppo", refresh_rate=0)).fit(Module(clock), zeros(2))
    monkeypatch.setattr(Trainer, "is_global_zero", property(lambda _: False))
    trainer_with(bar).fit(Enabling(clock), zeros(2), zeros(1))
    assert terminal.getvalue() == ""


def test_a_disabled_bar_shows_nothing_until_it_is_enabled(clock: Clock, log: io.StringIO) -> None:
    bar = StageProgressBar("sft")
    bar.disable()
    trainer_with(bar).fit(Module(clock), zeros(1))
    assert log.getvalue() == ""
    bar.enable()
    trainer_with(bar).fit(Module(clock), zeros(1))
    assert log.getvalue() == "sft 1/1 100% 00:02 elapsed\n"
