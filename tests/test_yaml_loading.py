"""Configurations mean what they say: no key twice, no odd base, no endless alias."""

import os
from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentError, ArgumentParser

from lit_callbacks import yaml_reading
from lit_callbacks.yaml_reading import MAX_BYTES, load_yaml, read_yaml
from lit_rlhf.yaml_loading import strict_flags
from tests.support.hostile_yaml import BOMB


def test_values_are_read_as_jsonargparse_reads_them() -> None:
    text = "{a: 1, b: 1e-5, c: .5, d: -.inf, e: 2020-01-01, f: null, g: [yes, 'no'], h: 0x1f}"
    assert load_yaml(text) == {
        "a": 1,
        "b": 1e-5,
        "c": 0.5,
        "d": float("-inf"),
        "e": "2020-01-01",
        "f": None,
        "g": [True, "no"],
        "h": 31,
    }
    assert load_yaml("") is None
    assert repr(load_yaml("[" * 50 + "]" * 50)) == "[" * 50 + "]" * 50
    assert load_yaml("a: &x {b: 1}\nc: {<<: *x, d: 2}\ne: *x") == {
        "a": {"b": 1},
        "c": {"b": 1, "d": 2},
        "e": {"b": 1},
    }
    assert load_yaml("{time: '1:30', port: 'a:80'}") == {"time": "1:30", "port": "a:80"}
    assert load_yaml("['010', 0, 0.10, 08, -0]") == ["010", 0, 0.1, "08", 0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: 2\na: 3", "line 3, column 1: expected each key once, got 'a' twice"),
        ("x: {a: {b: 1, b: 2}}", "line 1, column 15: expected each key once, got 'b' twice"),
        ("a: 1:30", "line 1, column 4: expected a number or text in quotes, got 1:30, which"),
        ("a: -1:30:00", "got -1:30:00, which YAML reads to the base 60"),
        ("a: 0:30.5", "got 0:30.5, which YAML"),
        ("a: 010", "got 010, which YAML reads to the base 8"),
        ("a: -0_7", "got -0_7, which YAML reads to the base 8"),
        ("a: &a [*a]", "column 7: expected a value, got an alias of what contains it|line 1"),
        ("a: &a {b: {c: *a}}", "got an alias of what contains it"),
        ("&a {? *a : 1}", "alias of what contains it|unhashable"),
        (BOMB, "expected at most 100000 values, aliases resolved"),
        ("[" * 51 + "a" + "]" * 51, "expected at most 50 levels of nesting"),
        ("[" * 10**6, "expected at most 50 levels of nesting"),
        ("[" + "1," * 250_000 + "}", "expected at most 100000 values"),  # not read to its end
        ("a: " + "9" * 5000, "integer"),
        ("a: [", "while parsing a flow"),
        ("a:\n\tb: 1", "^line 2, column 1: expected spaces before a key, got a tab$"),
    ],
)
def test_what_silently_means_something_else_is_refused(text: str, problem: str) -> None:
    with pytest.raises(yaml.YAMLError, match=problem):
        load_yaml(text)


def test_largest_number_of_values_counts_what_aliases_stand_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "a: &a [1, 2]\nb: *a\nc: *a"  # three keys, three lists of three values, and the whole
    monkeypatch.setattr(yaml_reading, "MAX_VALUES", 13)
    assert load_yaml(text) == {"a": [1, 2], "b": [1, 2], "c": [1, 2]}
    monkeypatch.setattr(yaml_reading, "MAX_VALUES", 12)
    with pytest.raises(yaml.YAMLError, match="at most 12 values"):
        load_yaml(text)


def test_a_flag_of_a_number_is_no_time_inside_the_block_alone() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--size", type=int | str)
    with strict_flags():
        assert parser.parse_args(["--size", "1:30"]).size == "1:30"
        assert parser.parse_args(["--size", "12"]).size == 12
        assert parser.parse_args(["--size", "010"]).size in ("010", 10)
    # what jsonargparse does by itself: once it does not, the block can go
    assert parser.parse_args(["--size", "1:30"]).size == 90


def test_file_of_anybody_is_read_as_far_as_the_limits_allow(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes("\ufeffa: é".encode())
    assert read_yaml(file) == {"a": "é"}
    file.write_bytes(b"a: \xe9")
    with pytest.raises(ValueError, match=r"a\.yaml: expected YAML in UTF-8, got .*0xe9"):
        read_yaml(file)
    file.write_text(BOMB)
    with pytest.raises(ValueError, match=r"a\.yaml: .* at most 100000 values"):
        read_yaml(file)
    file.write_text("a" * (MAX_BYTES + 1))
    with pytest.raises(ValueError, match=r"a\.yaml: expected at most 4,194,304 bytes"):
        read_yaml(file)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ValueError, match=r"a\.yaml: expected a file"):
        read_yaml(file)


@pytest.mark.parametrize(
    "text", ["&a [*a]", BOMB, "{a: 1, a: 2}", "[" * 60 + "]" * 60, "[" * 100_000]
)
def test_a_flag_has_nothing_that_a_configuration_may_not_have(text: str) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--size", type=int | list[int] | dict[str, int])
    with strict_flags(), pytest.raises(ArgumentError):
        parser.parse_args(["--size", text])
