"""Short texts, and what goes to loggers: on rank 0 only, against the module's own step."""

import errno
import html
import json
import math
import os
import re
from inspect import signature
from pathlib import Path
from time import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lit_callbacks.output import (
    escape_markdown,
    log_histogram,
    log_note,
    log_text,
    logger_step,
    name_file,
)
from lit_callbacks.words import format_duration, format_number, shorten_keys
from tests.callbacks.reports import read_events, read_texts
from tests.callbacks.scripted import trainer


def test_durations_and_numbers_fit_a_line() -> None:
    seconds = (0, 59.9, 60, 3599, 108061)
    assert list(map(format_duration, seconds)) == ["00:00", "00:59", "01:00", "59:59", "30:01:01"]
    values = (0.0, 0.51234, -12.345, 1234.4, -123456.0, 5e-7, 1.5e6, math.nan, math.inf)
    shown = "0 0.512 -12.3 1234 -123456 5e-07 1.5e+06 nan inf"
    assert list(map(format_number, values)) == shown.split()


def test_keys_are_whole_where_their_ends_are_alike() -> None:
    keys = ["sft/loss", "rollout/kl", "reward/loss", "lr"]
    assert shorten_keys(keys) == ["sft/loss", "kl", "reward/loss", "lr"]


class Module(LightningModule):
    """Three optimizer steps a batch; its own step is ten times the batches."""

    def __init__(self, logs_step: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.automatic_optimization = False
        self.logs_step = logs_step

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for _ in range(3):
            self.manual_backward((self.weight * batch).sum())
            self.optimizers().step()  # type: ignore[union-attr]
        if self.logs_step:
            self.log("step", 10.0 * (batch_idx + 1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Writer(Callback):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        step = logger_step(trainer)
        self.seen.append(step)
        log_text(trainer, "toy/text", f"at {step}", step)
        log_histogram(trainer, "toy/values", [1.0, math.nan, 3.0, math.inf], step)
        log_histogram(trainer, "toy/none", [math.nan], step)


def fitted(folder: Path, logs_step: bool, logger: Any) -> Writer:
    writer = Writer()
    run = trainer(folder, writer, logger=logger, log_every_n_steps=50)
    run.fit(Module(logs_step), DataLoader(torch.ones(2)))  # type: ignore[arg-type]
    return writer


@pytest.mark.parametrize(("logs_step", "steps"), [(True, [10, 20]), (False, [3, 6])])
def test_x_axis_by_module_or_optimizer(logs_step: bool, steps: list[int], tmp_path: Path) -> None:
    board, table = TensorBoardLogger(tmp_path, name="", version=""), CSVLogger(tmp_path / "table")
    assert fitted(tmp_path, logs_step, [table, board]).seen == steps
    assert read_texts(tmp_path, "toy/text") == [(step, f"at {step}") for step in steps]
    written = read_events(tmp_path)
    # histograms leave out what TensorBoard cannot draw
    assert written.Tags()["histograms"] == ["toy/values"]
    value = written.Histograms("toy/values")[0].histogram_value
    assert (value.num, value.min, value.max, value.sum) == (2, 1.0, 3.0, 4.0)
    # a logger beside TensorBoard writes too
    other = records(Path(table.log_dir) / "log.jsonl")
    assert [record["step"] for record in other] == steps
    assert fitted(tmp_path, logs_step, False).seen == steps


def test_a_mean_just_below_a_step_is_that_step() -> None:
    trainer: Any = SimpleNamespace(callback_metrics={"step": torch.tensor(2.9999998)})
    trainer.global_step = 7
    assert logger_step(trainer) == 3


class FakeWandb(Logger):
    """The methods of Lightning's `WandbLogger`, whose package need not be installed."""

    name, version = "toy", "1"

    def __init__(self) -> None:
        self.logged: list[tuple[Any, ...]] = []

    def log_hyperparams(self, params: Any) -> None:
        pass

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.logged += [(key, value, step) for key, value in metrics.items()]

    def log_table(
        self, key: str, columns: Any = None, data: Any = None, dataframe: Any = None, step: int = 0
    ) -> None:
        self.log_metrics({key: (columns, data, dataframe)}, step)

    log_text = log_table


class FakeClient:
    """The methods of MLflow's `MlflowClient` that write artifacts."""

    def __init__(self) -> None:
        self.artifacts: dict[str, Any] = {}

    def log_text(self, run_id: str, text: str, artifact_file: str) -> None:
        self.artifacts[f"{run_id}:{artifact_file}"] = text


class FakeMLflow(FakeWandb):
    """Lightning's `MLFlowLogger`: it has metrics only, and a client."""

    run_id, log_table, log_text = "run", None, None  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.experiment = FakeClient()


class NumbersOnly(Logger):
    """Any other logger: all that Lightning asks of one."""

    name, version = "toy", "1"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def save_dir(self) -> str:
        return str(self.folder)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert all(isinstance(value, float | int) for value in metrics.values())

    def log_hyperparams(self, params: Any) -> None:
        pass


def trainer_of(*loggers: Any) -> Any:
    return SimpleNamespace(loggers=loggers, is_global_zero=True, default_root_dir="unused")


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


@pytest.mark.parametrize("method", ["log_metrics", "log_table", "log_text"])
def test_the_fake_of_wandb_has_the_signatures_of_lightnings_logger(method: str) -> None:
    real, fake = (signature(getattr(x, method)) for x in (WandbLogger, FakeWandb))
    assert list(real.parameters) == list(fake.parameters)


def test_trackers_get_texts_in_their_own_ways() -> None:
    wandb, mlflow = FakeWandb(), FakeMLflow()
    log_text(trainer_of(wandb, mlflow), "toy/text", "a *b*", 7)
    log_note(trainer_of(wandb, mlflow), "monitor/verdict", "bad", 12)
    log_histogram(trainer_of(wandb, mlflow), "toy/values", [1.0], 9)
    assert wandb.logged == [
        ("toy/text", (["step", "text"], [[7, "a *b*"]], None), 7),
        ("monitor/verdict", (["step", "text"], [[12, "bad"]], None), 12),
    ]
    assert mlflow.experiment.artifacts == {
        "run:toy/text/00000007.md": "a *b*",
        "run:monitor/verdict/00000012.md": "bad",
    }
    assert mlflow.logged == []


def test_other_loggers_get_json_lines_beside_their_log(tmp_path: Path) -> None:
    table, other = CSVLogger(tmp_path / "table"), NumbersOnly(tmp_path)
    trainer = trainer_of(table, other)
    log_text(trainer, "toy/text", "“a”", 7)
    log_note(trainer, "monitor/verdict", "bad", 8)
    (text,) = records(Path(table.log_dir) / "log.jsonl")
    assert text.pop("time") <= time()
    assert text == {"step": 7, "key": "toy/text", "text": "“a”"}
    # a CSVLogger takes short texts as a cell
    told = [record["key"] for record in records(tmp_path / "toy/1/log.jsonl")]
    assert told == ["toy/text", "monitor/verdict"]
    table.save()
    rows = (Path(table.log_dir) / "metrics.csv").read_text("utf-8").splitlines()
    assert rows == ["monitor/verdict,step", "bad,8"]


@pytest.mark.parametrize("is_rank_zero", [True, False])
def test_other_ranks_and_a_fast_dev_run_write_nothing(tmp_path: Path, is_rank_zero: bool) -> None:
    real: list[Logger] = [TensorBoardLogger(tmp_path), CSVLogger(tmp_path)]
    loggers = [DummyLogger()] if is_rank_zero else real
    trainer: Any = SimpleNamespace(loggers=loggers, is_global_zero=is_rank_zero)
    log_text(trainer, "a", "b", 0)
    log_note(trainer, "a", "b", 0)
    log_histogram(trainer, "a", [1.0, 1.0], 0)
    assert list(tmp_path.iterdir()) == []


# a library inside TensorBoard warns of itself when it is imported
@pytest.mark.filterwarnings("ignore:html5lib's sanitizer is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "text",
    [
        "a | b, *one* __two__ `three` snake_case",
        "[a](http://b.example) ![c](d) <b>bold</b> &amp; <script>",
        r"back\slash \| and \*",
        "# no heading, - no list, 1. no number",
    ],
)
def test_markdown_shows_the_text_as_it_is(text: str) -> None:
    from tensorboard.plugin_util import markdown_to_safe_html

    page = markdown_to_safe_html(f"| key | {escape_markdown(text)} |\n|---|---|\n| a | b |")
    cells = re.findall(r"<th>(.*?)</th>", page)
    assert [html.unescape(cell) for cell in cells] == ["key", text]


def test_lines_stay_in_one_cell() -> None:
    assert escape_markdown(" one\ntwo\r\n\nfour \n") == "one<br>two<br><br>four"


def test_an_error_of_writing_is_named_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No space left on device: 'a.jsonl'"), name_file("a.jsonl"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(FileNotFoundError, match=r"missing'"), name_file("a.jsonl"):
        (tmp_path / "missing").read_text()
