"""Variables that a command sets before torch loads."""

import importlib
import os
import subprocess
import sys
from typing import Any

import pytest

from lit_rlhf import rank_zero
from lit_rlhf.environment import VARIABLES, set_environment

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


def test_rank_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ValueError, match=r"RANK: expected a rank in this .* variable, got 'first'"):
        importlib.reload(rank_zero)
