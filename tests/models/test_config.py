"""Options of a network, their help on a command line, and what a config says."""

import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentParser

from lit_rlhf.models import ModelOptions, max_positions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float8"}, "dtype: expected one of"),
        ({"lora_rank": -1}, "lora_rank: expected"),
        ({"lora_alpha": 0.0}, "lora_alpha: expected"),
        ({"lora_dropout": 1.0}, "lora_dropout: expected"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(ModelOptions(), **options)


def test_a_group_of_options_has_help_and_choices_for_every_field() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--network", type=ModelOptions, default=ModelOptions())
    text = " ".join(parser.format_help().split())
    for field in fields(ModelOptions):
        # metavar, then a sentence of the docstring, then type and default
        assert re.search(rf"--network\.{field.name} \S+ [A-Z][^:]*\. \(type: ", text), field.name
    assert "--network.dtype {float32,bfloat16,float16}" in text


def test_positions_are_those_of_config(family: str, causal_folder: Callable[[str], Path]) -> None:
    assert max_positions(causal_folder(family)) == 128
