"""LiveView on a terminal through a real fit: the drawing, and a clean terminal afterwards."""

import ast
import io
import logging
import math
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from rich.console import Console
from torch import Tensor
from torch.utils.data import DataLoader

import lit_callbacks
from lit_callbacks import CollapseDetector, LiveView, Monitor, StageProgressBar
from lit_callbacks.live import sparkline
from tests.callbacks.scripted import trainer

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


class Module(LightningModule):
    """Logs the next KL in each batch and a warning; `fails_at` raises in that batch."""

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.fails_at = fails_at

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logging.getLogger("test_live").warning("batch %d begins", batch_idx)
        if batch_idx == self.fails_at:
            raise RuntimeError("broken step")
        self.log("toy/kl", KL[batch_idx % len(KL)])
        self.log("toy/score", batch_idx / 10)
        return (self.weight * batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(*callbacks: Any, module: Module | None = None, **options: Any) -> None:
    run = trainer(Path(), *callbacks, **{"enable_progress_bar": True, **options})
    run.fit(module or Module(), DataLoader(torch.zeros(5, 1)))  # type: ignore[arg-type]


def detector() -> CollapseDetector:
    """Baseline 1.5, collapsed in the last two steps; the score is always healthy."""
    kl = Monitor("toy/kl", "KL", high=10.0, baseline_steps=2, horizon=0)
    kl.unit = "nats"  # type: ignore[misc]
    score = Monitor("toy/score", high=99.0, baseline_steps=20, horizon=0)
    return CollapseDetector([kl, score], actions=[], votes=1)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    stream = Terminal()
    console = Console(
        file=stream, force_terminal=True, width=100, height=30, color_system="standard"
    )
    monkeypatch.setattr("lit_callbacks.live.stderr_console", lambda who: console)
    return stream


def test_view_has_progress_verdict_and_monitors(terminal: Terminal) -> None:
    fit(LiveView(), detector())
    first, (progress, verdict, _, *rows) = terminal.frames[0], terminal.frames[-1]
    assert first[0] == "epoch 1, batch 0/5"
    assert first[1].startswith("healthy")
    assert progress == "epoch 1, batch 5/5"
    assert verdict == "collapsed: KL 16 nats is 10.7x its baseline"
    assert [row.split() for row in rows] == [
        ["KL", "16", "nats", "1.5", "▁▁", "▆█", "collapsed"],
        ["score", "0.4", "-", "▁▃▅▇█", "healthy"],
    ]


@pytest.mark.parametrize("fails_at", [-1, 2])
def test_terminal_logs_and_bar_are_restored(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    logger = logging.getLogger("test_live")
    handler = logging.StreamHandler(sys.stderr)  # made before the view, as Lightning's is
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "propagate", False)
    streams, bar, enabled = (sys.stdout, sys.stderr), StageProgressBar(), []

    class Watching(Module):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            enabled.append(bar.is_enabled)
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="broken step") if fails_at >= 0 else nullcontext():
        fit(LiveView(), bar, detector(), module=Watching(fails_at))
    assert enabled == [False] * (3 if fails_at >= 0 else 5)
    assert bar.is_enabled
    assert (sys.stdout, sys.stderr) == streams
    assert handler.stream is sys.stderr
    assert terminal.getvalue().count(HIDE) == 1
    assert terminal.getvalue().endswith(SHOW)
    # log messages stand above the view
    printed = [line for frame in terminal.frames for line in frame[:1] if "begins" in line]
    assert printed == [f"batch {index} begins" for index in range(len(enabled))]


def test_other_ranks_and_streams_that_are_not_terminals_get_nothing(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patches:
        patches.setattr(Trainer, "is_global_zero", property(lambda _: False))
        fit(LiveView(), detector())
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True)  # as FORCE_COLOR makes it
    monkeypatch.setattr("lit_callbacks.live.stderr_console", lambda who: console)
    fit(LiveView(), detector(), enable_progress_bar=False)
    assert terminal.getvalue() == stream.getvalue() == ""


def test_missing_detector_and_rich_are_refused(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="expected a CollapseDetector"):
        fit(LiveView())
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(ModuleNotFoundError, match="LiveView draws with rich: pip install rich"):
        fit(LiveView(), detector(), enable_progress_bar=False)


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 10, "▁▂▃▄▅▆▇█"),
        ([2.5, 2.5, 2.5], 10, "▄▄▄"),
        ([1, math.nan, 3, math.inf, 1], 10, "▁ █ ▁"),
        ([0, 0.9, -1.5e308, 1.5e308], 10, "▅▅▁█"),
        ([], 10, ""),
        ([100, 0, 1, 2], 3, "▁▅█"),  # the newest, on a scale of their own
    ],
)
def test_sparkline(values: list[float], width: int, expected: str) -> None:
    assert sparkline(values, width) == expected


def test_optional_packages_are_imported_when_they_are_needed() -> None:
    imported: set[str] = set()
    for file in Path(lit_callbacks.__file__).parent.rglob("*.py"):
        for statement in ast.parse(file.read_text("utf-8")).body:
            if isinstance(statement, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in statement.names}
            elif isinstance(statement, ast.ImportFrom):
                imported.add(str(statement.module).split(".")[0])
    assert {"lightning", "torch"} <= imported
    assert not imported & {"rich", "tensorboard", "matplotlib"}
