"""The callback under transformers' own Trainer."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_callbacks import Level, Monitor, Watch, WatchCallback
from lit_callbacks.logs import watch_logs
from tests.support.trainer_logs import CALM, FAR

transformers = pytest.importorskip("transformers")


class Reports(transformers.Trainer):  # type: ignore[misc,name-defined]
    """A Trainer that logs what a trainer of TRL logs."""

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        step = self.state.global_step
        super().log(logs | (CALM if step <= 10 else FAR), *arguments, **options)


def run(folder: Path, callback: WatchCallback) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 8}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    row = {"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}
    options = {"max_steps": 20, "logging_steps": 1, "per_device_train_batch_size": 2}
    options |= {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    arguments = transformers.TrainingArguments(str(folder), **options)
    trainer = Reports(model=model, args=arguments, train_dataset=[row] * 8, callbacks=[callback])
    trainer.train()
    trainer.save_state()
    return trainer.state


def test_trainer_and_log_have_one_verdict(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lit_callbacks")
    callback = WatchCallback()
    state = run(tmp_path, callback)
    assert state.global_step == 12
    assert callback.stopped_by is not None
    assert (callback.stopped_by.level, callback.stopped_by.step) == (Level.COLLAPSED, 12)
    levels = [record.get("monitor/level") for record in state.log_history]
    assert levels[:12] == [0] * 11 + [2]
    assert "thresholds: KL per token at most 0.07 nats" in caplog.text
    assert "collapsed at step 12: KL per token 0.4 nats is 5.7x its limit of 0.07" in caplog.text
    log = str(tmp_path / "trainer_state.json")
    assert watch_logs([log]) == {log: Level.COLLAPSED}


def test_trainer_goes_on_if_the_callback_only_tells(tmp_path: Path) -> None:
    callback = WatchCallback(stop=None)
    assert run(tmp_path, callback).global_step == 20
    assert callback.watch.verdict.level is Level.COLLAPSED
    assert callback.stopped_by is None


def test_names_and_monitors_may_be_given(tmp_path: Path) -> None:
    watch = Watch([Monitor("length", high=100.0, patience=1)], votes=1)
    callback = WatchCallback(watch, {"length": "completions/mean_length"}, stop="suspicious")
    assert run(tmp_path, callback).global_step == 11
    with pytest.raises(ValueError, match="stop: expected one of healthy, suspicious, collapsed"):
        WatchCallback(stop="bad")


def test_callback_has_the_events_of_a_trainer_and_nothing_else() -> None:
    callback = WatchCallback()
    assert callback.on_step_end(None, None, None) is None
    with pytest.raises(AttributeError, match="nothing"):
        callback.nothing  # noqa: B018
