"""What a command prepares before torch loads."""

import importlib
import logging
import os
import subprocess
import sys
from typing import Any

import pytest

from lit_rlhf import rank_zero
from lit_rlhf.environment import VARIABLES, hide_loading_notes, set_environment

NAMES = [name for variable in VARIABLES for name in (variable.name, *variable.rivals)]


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what the test sets is undone
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "torch")


@pytest.mark.usefixtures("without_torch")
def test_set_environment_gives_each_variable_its_value() -> None:
    expected = {variable.name: variable.value for variable in VARIABLES}
    assert set_environment() == expected
    assert {name: os.environ[name] for name in NAMES if name in os.environ} == expected


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(
    ("chosen", "left"),
    [(name, variable.name) for variable in VARIABLES for name in (variable.name, *variable.rivals)],
)
def test_set_environment_leaves_what_the_user_has_chosen(
    monkeypatch: pytest.MonkeyPatch, chosen: str, left: str
) -> None:
    monkeypatch.setenv(chosen, "mine")
    assert left not in set_environment()
    assert os.environ[chosen] == "mine"
    assert chosen == left or left not in os.environ


def test_set_environment_does_nothing_once_torch_is_loaded(monkeypatch: Any) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    assert set_environment() == {}
    assert os.environ.keys().isdisjoint(NAMES)


def test_debug_tells_in_one_line_what_was_set() -> None:
    command = [sys.executable, "-m", "lit_rlhf", "configs", "list"]
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    environment["OMP_WAIT_POLICY"] = "passive"
    quiet, debug = (
        subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stderr
        for words in (command, [*command, "--debug"])
    )
    assert quiet == ""
    assert (
        debug
        == "lit_rlhf: set PYTORCH_ALLOC_CONF=expandable_segments:True THP_MEM_ALLOC_ENABLE=1\n"
    )


def test_hide_loading_notes_leaves_other_messages_of_the_libraries(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deepspeed = logging.getLogger("DeepSpeed")
    bitsandbytes = logging.getLogger("bitsandbytes.backends.cpu.ops")
    for logger in (deepspeed, bitsandbytes):
        monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logging.getLogger("bitsandbytes"), "level", logging.NOTSET)
    bitsandbytes.manager._clear_cache()  # type: ignore[attr-defined]  # it holds the level before
    hide_loading_notes()
    deepspeed.warning("Setting accelerator to CPU. If you have GPU")
    deepspeed.warning("another one")
    bitsandbytes.warning("Failed to load CPU gemm_4bit_forward from kernels-community")
    bitsandbytes.error("no such kernel")
    assert {record.getMessage() for record in caplog.records} == {"another one", "no such kernel"}


def test_rank_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ValueError, match=r"RANK: expected a rank in this .* variable, got 'first'"):
        importlib.reload(rank_zero)
