"""The lines of StageProgressBar on a clock that the module under training moves on."""

import io
import re
from functools import partial
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lit_callbacks import StageProgressBar
from tests.support.scripted import PLAIN, Scripted, batches, resumes_at_the_next_batch, trainer


class Stream(io.StringIO):
    """Standard error, a terminal or not; `drawn` is what each redrawing put on the line."""

    is_terminal = False

    def isatty(self) -> bool:
        return self.is_terminal

    @property
    def drawn(self) -> list[str]:
        return [part.removesuffix("\x1b[K") for part in self.getvalue().split("\r") if part]


class Module(Scripted):
    """One batch takes two seconds; the logged loss is the number of the batch."""

    def __init__(self, clock: Any, after: Any = lambda module: None, manual: bool = False) -> None:
        losses = [float(i) for i in range(1, 41)]
        super().__init__({"toy/loss": losses}, logs_step=False, manual=manual)
        self.clock, self.after = clock, after

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        self.clock.seconds += 2
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: object) -> None:
        self.after(self)

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.clock.seconds += 1

    test_step = validation_step


def trainer_with(bar: StageProgressBar, **options: Any) -> Trainer:
    usual = {"num_sanity_val_steps": 0, "enable_progress_bar": True}
    return trainer(Path(), bar, **usual | options)


@pytest.fixture(autouse=True)
def _quiet_lightning(caplog: pytest.LogCaptureFixture) -> None:
    """Keep Lightning's own messages out of the recorded stream."""
    caplog.set_level("ERROR", "lightning.pytorch")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr("lit_callbacks.progress.monotonic", lambda: clock.seconds)
    return clock


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()
    streams = SimpleNamespace(stderr=stream, stdout=io.StringIO())
    monkeypatch.setattr("lit_callbacks.progress.sys", streams)
    return stream


@pytest.fixture
def terminal(log: Stream, monkeypatch: pytest.MonkeyPatch) -> Stream:
    log.is_terminal = True
    monkeypatch.setenv("COLUMNS", "72")
    return log


def test_log_gets_lines_at_the_first_batch_and_each_tenth(clock: Any, log: Stream) -> None:
    bar = StageProgressBar("sft", ["toy/loss"])
    options = {"max_epochs": 2, "num_sanity_val_steps": 2, "limit_val_batches": 1}
    trainer_with(bar, **options).fit(Module(clock), batches(20), batches(3))
    lines = log.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/40", *(f"{i}/40" for i in range(4, 41, 4))]
    assert lines[0] == "sft 1/40 2% 00:02 elapsed, 01:18 left, loss 1"
    # the seconds of validation included
    assert lines[6] == "sft 24/40 60% 00:49 elapsed, 00:32 left, loss 24"
    assert lines[-1] == "sft 40/40 100% 01:22 elapsed, loss 40"


def stopping(after: int) -> Any:
    """A module that stops the fit after so many batches."""

    def stop(module: Module) -> None:
        module.trainer.should_stop = module.batches == after

    return partial(Module, after=stop)


@pytest.mark.parametrize(
    ("kind", "options", "loader", "first", "last"),
    [
        # an epoch of 3 batches makes 2 steps of at most 2 batches: 3 steps end after 3 + 2 batches
        (
            Module,
            {"max_epochs": 10, "max_steps": 3, "accumulate_grad_batches": 2},
            *(batches(3), "1/5 20% 00:02 elapsed, 00:08 left", "5/5 100% 00:10 elapsed"),
        ),
        # how many steps a batch makes is not known
        (
            partial(Module, manual=True),
            {"max_epochs": -1, "max_steps": 4},
            *(batches(10), "1 00:02 elapsed", "4 00:08 elapsed"),
        ),
        (stopping(12), {}, repeat(torch.zeros(1, 1)), "1 00:02 elapsed", "12 00:24 elapsed"),
        (stopping(3), {"max_epochs": 2}, batches(10), "1/20 5% 00:02", "3/20 15% 00:06 elapsed"),
    ],
)
def test_count_ends_where_the_fit_ends(
    clock: Any, log: Stream, kind: Any, options: Any, loader: Any, first: str, last: str
) -> None:
    trainer_with(StageProgressBar("sft", ["toy/loss", "no"]), **options).fit(kind(clock), loader)
    lines = log.getvalue().splitlines()
    assert lines[0].startswith(f"sft {first}")
    assert lines[-1].startswith(f"sft {last}, loss ")
    assert lines[-1].endswith("no -")


@resumes_at_the_next_batch
def test_a_resumed_fit_goes_on_counting(clock: Any, log: Stream, tmp_path: Path) -> None:
    saving = Module(clock, lambda m: m.trainer.save_checkpoint(tmp_path / f"{m.batches}.ckpt"))
    trainer_with(StageProgressBar()).fit(saving, batches(4))
    log.truncate(0)
    log.seek(0)
    clock.seconds = 100.0
    second = trainer_with(StageProgressBar("sft"))
    second.fit(Module(clock), batches(4), ckpt_path=tmp_path / "2.ckpt", **PLAIN)
    expected = "sft 3/4 75% 00:02 elapsed, 00:02 left\nsft 4/4 100% 00:04 elapsed\n"
    assert log.getvalue() == expected


@pytest.mark.parametrize("loop", ["validate", "test"])
def test_a_loop_of_its_own_has_lines_of_its_own(clock: Any, log: Stream, loop: str) -> None:
    bar = StageProgressBar("sft", ["toy/loss"])
    getattr(trainer_with(bar), loop)(Module(clock), [batches(2), batches(1)])
    name = {"validate": "validation"}.get(loop, loop)
    assert log.getvalue().splitlines() == [
        f"sft {name} 1/3 33% 00:01 elapsed, 00:02 left",
        f"sft {name} 2/3 67% 00:02 elapsed, 00:01 left",
        f"sft {name} 3/3 100% 00:03 elapsed",
    ]


def test_terminal_line_is_redrawn_in_place(clock: Any, terminal: Stream) -> None:
    bar = StageProgressBar("ppo", ["toy/loss"])
    run = trainer_with(bar, num_sanity_val_steps=1, val_check_interval=1)
    run.fit(Module(clock), batches(2), batches(2))
    shown = [re.sub(r" \[#+\.*\]", "", line) for line in terminal.drawn]
    assert shown[:5] == [
        "ppo sanity check 1/1 100% 00:01 elapsed, 00:00 left",
        "",  # cleared
        "ppo 1/2 50% 00:02 elapsed, 00:02 left, loss 1",
        "ppo 1/2 50% 00:03 elapsed, 00:03 left, validation 1/2, loss 1",
        "ppo 1/2 50% 00:04 elapsed, 00:04 left, validation 2/2, loss 1",
    ]
    assert shown[8:] == ["", "ppo 2/2 100% 00:08 elapsed, loss 2\x1b[K\n"]


def test_a_message_has_a_line_of_its_own(terminal: Stream) -> None:
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
    clock: Any, terminal: Stream, monkeypatch: pytest.MonkeyPatch, columns: int, expected: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    trainer_with(StageProgressBar("ppo", ["toy/loss"])).fit(Module(clock), batches(2))
    assert terminal.drawn[0] == expected


def test_refresh_rate_spares_drawings_but_not_the_last(clock: Any, terminal: Stream) -> None:
    bar = StageProgressBar("ppo", refresh_rate=3)
    trainer_with(bar).fit(Module(clock), batches(7))
    assert [line.split()[1] for line in terminal.drawn if line] == ["3/7", "6/7", "7/7", "7/7"]


def test_printing_clears_and_redraws(clock: Any, terminal: Stream, capsys: Any) -> None:
    module = Module(clock, after=lambda module: module.print("hello"))
    trainer_with(StageProgressBar("ppo")).fit(module, batches(1))
    line = "ppo 1/1 100% [####################] 00:02 elapsed, 00:00 left"
    assert capsys.readouterr().out == "hello\n"
    assert terminal.drawn[:3] == [line, "", line]


def test_an_exception_starts_on_a_line_of_its_own(clock: Any, terminal: Stream) -> None:
    with pytest.raises(ZeroDivisionError):
        trainer_with(StageProgressBar("ppo")).fit(Module(clock, lambda _: 1 / 0), batches(2))
    assert terminal.getvalue().endswith(" left\x1b[K\n")


def test_rank_1_is_quiet(clock: Any, terminal: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    bar = StageProgressBar("ppo")
    trainer_with(StageProgressBar("ppo", refresh_rate=0)).fit(Module(clock), batches(2))
    monkeypatch.setattr(Trainer, "is_global_zero", property(lambda _: False))
    # as tuners do after their trial runs, on every rank
    monkeypatch.setattr(Module, "on_train_start", lambda _: bar.enable())
    trainer_with(bar).fit(Module(clock), batches(2), batches(1))
    assert terminal.getvalue() == ""


def test_a_disabled_bar_shows_nothing_until_it_is_enabled(clock: Any, log: Stream) -> None:
    bar = StageProgressBar("sft")
    bar.disable()
    trainer_with(bar).fit(Module(clock), batches(1))
    assert log.getvalue() == ""
    bar.enable()
    trainer_with(bar).fit(Module(clock), batches(1))
    assert log.getvalue() == "sft 1/1 100% 00:02 elapsed\n"
