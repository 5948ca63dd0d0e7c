"""LiveView on a terminal through a real fit: the drawing, and a clean terminal afterwards."""

from __future__ import annotations

import ast
import io
import logging
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from rich.console import Console
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import lit_callbacks
from lit_callbacks import CollapseDetector, Monitor, StageProgressBar
from lit_callbacks.live import LiveView

KL = [1.0, 2.0, math.nan, 12.0, 16.0]
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def frames(self) -> list[list[str]]:
        """Lines of each drawing without colours; what was printed above belongs to the next one."""
        drawn = re.split(r"(?:\r\x1b\[2K)?(?:\x1b\[1A\x1b\[2K)+", self.getvalue())
        plain = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frame) for frame in drawn]
        return [[line.rstrip() for line in frame.splitlines()] for frame in plain]


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Module(LightningModule):
    """One batch takes two seconds and logs the next KL; `fails_at` raises in that batch."""

    def __init__(self, clock: Clock, fails_at: int = -1) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.clock = clock
        self.fails_at = fails_at
        self.seen_in_validation: list[str] = []
        self.terminal: Terminal | None = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.clock.seconds += 2
        if batch_idx == self.fails_at:
            raise RuntimeError("broken step")
        self.log("toy/kl", KL[batch_idx % len(KL)])
        self.log("toy/score", batch_idx / 10)
        return (self.weight * batch).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.terminal is not None and self.trainer.sanity_checking:
            self.seen_in_validation.append(self.terminal.getvalue())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield torch.zeros(1)


def batches(count: int = len(KL)) -> DataLoader[Tensor]:
    return DataLoader(torch.zeros(count, 1))  # type: ignore[arg-type]


def trainer_with(*callbacks: Any, **options: Any) -> Trainer:
    options = {"max_epochs": 1, "enable_checkpointing": False} | options
    return Trainer(
        accelerator="cpu",
        logger=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **options,
    )


def detector() -> CollapseDetector:
    """Baseline 1.5, collapsed in the last two steps; the score is never out of order."""
    kl = Monitor("toy/kl", "KL", high=10.0, baseline_steps=2, horizon=0)
    kl.unit = "nats"  # type: ignore[misc]
    score = Monitor("toy/score", high=99.0, baseline_steps=20, horizon=0)
    return CollapseDetector([kl, score], actions=[], votes=1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("lit_callbacks.live.monotonic", clock)
    return clock


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    return terminal_of(monkeypatch, 100)


def terminal_of(monkeypatch: pytest.MonkeyPatch, width: int) -> Terminal:
    stream = Terminal()
    console = Console(
        file=stream, force_terminal=True, width=width, height=30, color_system="standard"
    )
    monkeypatch.setattr("lit_callbacks.live.stderr_console", lambda who: console)
    return stream


def names_imported(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    return [statement.module or ""] if isinstance(statement, ast.ImportFrom) else []


class TestTheView:
    def test_its_last_drawing_is_progress_verdict_and_monitors(
        self, clock: Clock, terminal: Terminal
    ) -> None:
        trainer_with(LiveView(refresh_per_second=0.1), detector()).fit(Module(clock), batches())

        progress, verdict, *rows = terminal.frames[-1]

        assert progress == "epoch 1/1, batch 5/5, 00:10 elapsed"
        assert verdict == "collapsed: KL 16 nats is 10.7x its baseline"
        assert [row.split() for row in rows] == [
            ["signal", "latest", "unit", "baseline", "history", "state"],
            ["KL", "16", "nats", "1.5", "▁▁", "▆█", "collapsed"],
            ["score", "0.4", "-", "▁▃▅▇█", "healthy"],
        ]

    def test_it_begins_before_the_first_batch(self, clock: Clock, terminal: Terminal) -> None:
        trainer_with(LiveView(refresh_per_second=0.1), detector()).fit(Module(clock), batches())

        progress, verdict, _, kl, _ = terminal.frames[0]

        assert progress == "epoch 1/1, batch 0/5, 00:00 elapsed"
        assert verdict == "healthy: all signals are healthy"
        assert kl.split() == ["KL", "-", "nats", "-", "healthy"]

    def test_a_level_has_its_colour_beside_its_word(self, clock: Clock, terminal: Terminal) -> None:
        trainer_with(LiveView(refresh_per_second=0.1), detector()).fit(Module(clock), batches())

        last = terminal.getvalue().rpartition("epoch 1/1, batch 5/5")[2]

        assert last.count("\x1b[1;31mcollapsed") == 2  # the verdict and the first monitor
        assert last.count("\x1b[32mhealthy") == 1

    def test_metrics_stand_below_the_monitors(self, clock: Clock, terminal: Terminal) -> None:
        view = LiveView(refresh_per_second=0.1, metrics=["toy/score", "toy/never"])
        trainer_with(view, detector()).fit(Module(clock), batches())

        assert [row.split() for row in terminal.frames[-1][-2:]] == [
            ["score", "0.4", "▁▃▅▇█"],
            ["never", "-"],
        ]

    def test_metrics_alone_need_no_detector(self, clock: Clock, terminal: Terminal) -> None:
        view = LiveView(refresh_per_second=0.1, metrics=["toy/score"])
        trainer_with(view).fit(Module(clock), batches())

        progress, header, row = terminal.frames[-1]

        assert progress == "epoch 1/1, batch 5/5, 00:10 elapsed"
        assert header.split()[0] == "signal"
        assert row.split() == ["score", "0.4", "▁▃▅▇█"]

    def test_a_history_is_no_wider_than_asked(self, clock: Clock, terminal: Terminal) -> None:
        view = LiveView(width=2, refresh_per_second=0.1, metrics=["toy/score"])
        trainer_with(view).fit(Module(clock), batches())

        assert terminal.frames[-1][-1].split() == ["score", "0.4", "▁█"]

    def test_a_narrow_terminal_keeps_the_newest_values(
        self, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # columns of 6, 6, 4, 8 and 9 characters with five gaps of 2 leave 10 of 53
        terminal = terminal_of(monkeypatch, 53)
        view = LiveView(refresh_per_second=0.1, metrics=["toy/score"])
        trainer_with(view, detector()).fit(Module(clock), batches(20))

        assert terminal.frames[-1][-1].split() == ["score", "1.9", "▁▁▂▃▄▅▆▇██"]
        assert terminal.frames[-1][-2].split()[-1] == "healthy"

    def test_an_endless_fit_names_no_last_epoch(self, clock: Clock, terminal: Terminal) -> None:
        view = LiveView(refresh_per_second=0.1, metrics=["toy/score"])
        trainer_with(view, max_epochs=-1, max_steps=3).fit(Module(clock), batches())

        assert terminal.frames[-1][0] == "epoch 1, batch 3/5, 00:06 elapsed"

    def test_a_loader_without_a_length_names_no_last_batch(
        self, clock: Clock, terminal: Terminal
    ) -> None:
        view = LiveView(refresh_per_second=0.1, metrics=["toy/score"])
        trainer_with(view, limit_train_batches=2).fit(Module(clock), DataLoader(Endless()))
        limited = terminal.frames[-1][0]
        trainer_with(view, max_steps=3).fit(Module(clock), DataLoader(Endless()))

        assert limited == "epoch 1/1, batch 2/2, 00:04 elapsed"
        assert terminal.frames[-1][0] == "epoch 1/1, batch 3, 00:06 elapsed"


class TestTheTerminal:
    def test_it_is_left_as_it_was(self, clock: Clock, terminal: Terminal) -> None:
        stdout, stderr = sys.stdout, sys.stderr

        trainer_with(LiveView(refresh_per_second=0.1), detector()).fit(Module(clock), batches())

        assert (sys.stdout, sys.stderr) == (stdout, stderr)
        assert terminal.getvalue().count(HIDE) == 1
        assert terminal.getvalue().endswith(SHOW)

    def test_it_is_left_as_it_was_after_an_exception(
        self, clock: Clock, terminal: Terminal
    ) -> None:
        stdout, stderr = sys.stdout, sys.stderr
        bar = StageProgressBar()
        trainer = trainer_with(LiveView(refresh_per_second=0.1), bar, detector())

        with pytest.raises(RuntimeError, match="broken step"):
            trainer.fit(Module(clock, fails_at=2), batches())

        assert (sys.stdout, sys.stderr) == (stdout, stderr)
        assert terminal.getvalue().endswith(SHOW)
        assert terminal.frames[-1][0] == "epoch 1/1, batch 2/5, 00:06 elapsed"
        assert bar.is_enabled

    def test_the_progress_bar_is_off_while_the_view_is_on(
        self, clock: Clock, terminal: Terminal
    ) -> None:
        bar = StageProgressBar()
        enabled: list[bool] = []

        class Watching(Module):
            def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                enabled.append(bar.is_enabled)
                return super().training_step(batch, batch_idx)

        trainer_with(LiveView(refresh_per_second=0.1), bar, detector()).fit(
            Watching(clock), batches()
        )

        assert enabled == [False] * 5
        assert bar.is_enabled

    def test_what_log_handlers_write_stands_above_the_view(
        self, clock: Clock, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        logger = logging.getLogger("test_live")
        handler = logging.StreamHandler(sys.stderr)  # made before the view, as Lightning's is
        monkeypatch.setattr(logger, "handlers", [handler])
        monkeypatch.setattr(logger, "propagate", False)

        class Logging(Module):
            def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                logger.warning("batch %d begins", batch_idx)
                return super().training_step(batch, batch_idx)

        trainer_with(LiveView(refresh_per_second=0.1), detector()).fit(Logging(clock), batches())

        printed = [frame[0] for frame in terminal.frames if frame and "begins" in frame[0]]
        assert printed == [f"batch {index} begins" for index in range(5)]
        assert handler.stream is sys.stderr

    def test_nothing_is_drawn_in_sanity_checks(self, clock: Clock, terminal: Terminal) -> None:
        module = Module(clock)
        module.terminal = terminal
        trainer = trainer_with(LiveView(refresh_per_second=0.1), detector())

        trainer.fit(module, batches(), batches())

        assert module.seen_in_validation == ["", ""]
        assert terminal.getvalue()

    def test_a_stream_that_is_no_terminal_gets_nothing(
        self, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stream = io.StringIO()
        console = Console(file=stream, force_terminal=True)  # as FORCE_COLOR makes it
        monkeypatch.setattr("lit_callbacks.live.stderr_console", lambda who: console)
        enabled: list[bool] = []
        bar = StageProgressBar()
        bar.setup = lambda trainer, pl_module, stage: None  # type: ignore[method-assign]
        bar.on_train_start = (  # type: ignore[method-assign]
            lambda trainer, pl_module: enabled.append(bar.is_enabled)
        )

        trainer_with(LiveView(), bar, detector()).fit(Module(clock), batches())

        assert stream.getvalue() == ""
        assert enabled == [True]

    def test_other_ranks_draw_nothing(
        self, clock: Clock, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Trainer, "is_global_zero", property(lambda _: False))

        trainer_with(LiveView(), detector()).fit(Module(clock), batches())

        assert terminal.getvalue() == ""


class TestErrors:
    def test_neither_detector_nor_metrics(self, clock: Clock, terminal: Terminal) -> None:
        with pytest.raises(ValueError, match=r"expected a CollapseDetector .* or metrics"):
            trainer_with(LiveView()).fit(Module(clock), batches())

    def test_validation_alone_needs_neither(self, clock: Clock, terminal: Terminal) -> None:
        trainer_with(LiveView(), enable_progress_bar=False).validate(
            Module(clock), batches(), verbose=False
        )

        assert terminal.getvalue() == ""

    def test_without_rich_the_extra_is_named(
        self, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "rich.console", None)

        with pytest.raises(ModuleNotFoundError, match="pip install rich"):
            trainer_with(LiveView(), detector(), enable_progress_bar=False).fit(
                Module(clock), batches()
            )

    def test_nothing_optional_is_imported_before_it_is_needed(self) -> None:
        package = Path(lit_callbacks.__file__).parent
        imported = {
            name.split(".")[0]
            for file in package.rglob("*.py")
            for statement in ast.parse(file.read_text("utf-8")).body
            for name in names_imported(statement)
        }

        assert {"lightning", "torch"} <= imported
        assert not imported & {"rich", "tensorboard", "matplotlib"}

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"width": 0}, "width: expected at least 1 character, got 0"),
            ({"refresh_per_second": 0}, "refresh_per_second: expected a number above 0, got 0"),
            ({"metrics": "toy/kl"}, "metrics: expected a list of keys, got the string 'toy/kl'"),
        ],
    )
    def test_arguments(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            LiveView(**arguments)
