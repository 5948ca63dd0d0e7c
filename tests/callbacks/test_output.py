"""Short texts, and what goes to loggers: on rank 0 only, against the module's own step."""

import html
import json
import math
import re
from pathlib import Path
from time import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call, create_autospec

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import (
    CSVLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from lightning.pytorch.loggers.logger import DummyLogger

from lit_callbacks.output import (
    escape_markdown,
    log_histogram,
    log_note,
    log_text,
    logger_step,
    say,
)
from lit_callbacks.words import format_duration, format_number, shorten_keys, shorten_sentence
from tests.support.report_pages import read_events, read_texts
from tests.support.scripted import Scripted, batches, trainer


def test_durations_and_numbers_fit_a_line() -> None:
    seconds = (0, 59.9, 60, 3599, 108061)
    assert list(map(format_duration, seconds)) == ["00:00", "00:59", "01:00", "59:59", "30:01:01"]
    values = (0.0, 0.51234, -12.345, 1234.4, -123456.0, 5e-7, 1.5e6, math.nan, math.inf)
    shown = "0 0.512 -12.3 1234 -123456 5e-07 1.5e+06 nan inf"
    assert list(map(format_number, values)) == shown.split()


@pytest.mark.parametrize("has_bar", [False, True])
def test_what_is_said_is_one_line(has_bar: bool, caplog: pytest.LogCaptureFixture) -> None:
    bar = Mock(is_enabled=has_bar)
    with caplog.at_level("INFO", "lightning.pytorch"):
        say(Mock(progress_bar_callback=bar, is_global_zero=True), "own\nmetric \x1b[2J")
    written = [one.args[0] for one in bar.print.call_args_list] or caplog.messages
    assert written == [r"own\nmetric \x1b[2J"]


def test_keys_are_whole_where_their_ends_are_alike() -> None:
    keys = ["sft/loss", "rollout/kl", "reward/loss", "lr"]
    assert shorten_keys(keys) == ["sft/loss", "kl", "reward/loss", "lr"]


class Writer(Callback):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        step = logger_step(trainer)
        self.seen.append(step)
        log_text(trainer, "toy/text", f"at {step}", step)
        log_histogram(trainer, "toy/values", [1.0, math.nan, 3.0, math.inf], step)
        log_histogram(trainer, "toy/none", [math.nan], step)


def fit_writer(folder: Path, logs_step: bool, logger: Any) -> Writer:
    """Fit four batches, which are two steps of the optimizer."""
    writer, module = Writer(), Scripted({}, logs_step=logs_step)
    options = {"logger": logger, "log_every_n_steps": 50, "accumulate_grad_batches": 2}
    trainer(folder, writer, **options).fit(module, batches(4))
    return writer


@pytest.mark.parametrize(("logs_step", "steps"), [(True, [1, 2, 3, 4]), (False, [0, 1, 1, 2])])
def test_x_axis_by_module_or_optimizer(logs_step: bool, steps: list[int], tmp_path: Path) -> None:
    board, table = TensorBoardLogger(tmp_path, name="", version=""), CSVLogger(tmp_path / "table")
    assert fit_writer(tmp_path, logs_step, [table, board]).seen == steps
    assert read_texts(tmp_path, "toy/text") == [(step, f"at {step}") for step in steps]
    written = read_events(tmp_path)
    # histograms leave out what TensorBoard cannot draw
    assert written.Tags()["histograms"] == ["toy/values"]
    value = written.Histograms("toy/values")[0].histogram_value
    assert (value.num, value.min, value.max, value.sum) == (2, 1.0, 3.0, 4.0)
    # a logger beside TensorBoard writes too
    other = records(Path(table.log_dir) / "log.jsonl")
    assert [record["step"] for record in other] == steps
    assert fit_writer(tmp_path, logs_step, False).seen == steps


def test_a_mean_just_below_a_step_is_that_step() -> None:
    metrics = {"step": torch.tensor(2.9999998)}
    assert logger_step(Mock(callback_metrics=metrics, global_step=7)) == 3


def trainer_of(*loggers: Any) -> Any:
    return SimpleNamespace(loggers=loggers, is_global_zero=True, default_root_dir="unused")


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def test_trackers_get_texts_in_their_own_ways() -> None:
    # both packages need not be installed
    wandb = create_autospec(WandbLogger, instance=True, experiment=None)
    mlflow = create_autospec(MLFlowLogger, instance=True, run_id="run")
    mlflow.experiment = Mock(spec_set=["log_text"])
    log_text(trainer_of(wandb, mlflow), "toy/text", "a *b*", 7)
    log_note(trainer_of(wandb, mlflow), "monitor/verdict", "bad", 12)
    log_histogram(trainer_of(wandb, mlflow), "toy/values", [1.0], 9)
    columns = ["step", "text"]
    assert wandb.method_calls == [
        call.log_text("toy/text", columns=columns, data=[[7, "a *b*"]], step=7),
        call.log_text("monitor/verdict", columns=columns, data=[[12, "bad"]], step=12),
    ]
    assert mlflow.method_calls == [
        call.experiment.log_text("run", "a *b*", "toy/text/00000007.md"),
        call.experiment.log_text("run", "bad", "monitor/verdict/00000012.md"),
    ]


def test_other_loggers_get_json_lines_beside_their_log(tmp_path: Path) -> None:
    table = CSVLogger(tmp_path / "table")
    other = SimpleNamespace(name="toy", version="1", save_dir=str(tmp_path), log_dir=None)
    trainer = trainer_of(table, other)
    log_text(trainer, "toy/text", "“a”", 7)
    log_note(trainer, "monitor/verdict", "bad", 8)
    (text,) = records(Path(table.log_dir) / "log.jsonl")
    assert text.pop("time") <= time()
    assert text == {"step": 7, "key": "toy/text", "text": "“a”"}
    # a CSVLogger takes short texts as a cell
    keys = [record["key"] for record in records(tmp_path / "toy/1/log.jsonl")]
    assert keys == ["toy/text", "monitor/verdict"]
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


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (8, "KL 41 nats is high: the policy exploits"),
        (7, "KL 41 nats is high"),  # without half of a conclusion
        (5, "KL 41 nats is high"),
        (4, "KL 41 nats ..."),
    ],
)
def test_single_reason_is_shortened_by_its_conclusion_first(words: int, expected: str) -> None:
    sentence = "KL 41 nats is high: the policy exploits"
    assert shorten_sentence(sentence, words) == expected
