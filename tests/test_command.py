"""Errors of the tools' command lines."""

from __future__ import annotations

import pytest

from lit_rlhf.command import Command, run_group


def draw(shape: str, colors: list[str] | None = None, wide: bool = False) -> str:
    """Draw a shape.

    Args:
        shape: Its name.
        colors: Its colors.
        wide: Wide lines.
    """
    return f"{shape} {' '.join(colors or ())} {wide}"


def test_words_need_no_flag() -> None:
    argv = ["red", "blue", "--shape", "disc"]
    assert Command(draw, words=("colors",)).run(argv, "paint") == "disc red blue False"


@pytest.mark.parametrize(
    ("argv", "wide"),
    [
        (["--wide", "--shape", "disc"], True),
        (["--shape=disc", "--wide"], True),
        (["--shape=disc", "--wide", "false"], False),
        (["--shape=disc", "--wide=true"], True),
    ],
)
def test_a_switch_needs_no_value(argv: list[str], wide: bool) -> None:
    assert Command(draw).run(argv, "paint") == f"disc  {wide}"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--shape", "disc", "--colrs", "red"], "colrs: no such option; did you mean colors?\n"),
        (["--shape=disc", "--colors", "red", "--frobnicate", "1"], "frobnicate: no such option\n"),
        ([], "the following arguments are required: shape"),
        (["--shape=disc", "--wide", "big"], "Parser key \"wide\": Expected a <class 'bool'>. Got"),
    ],
)
def test_usage_error_is_one_line_with_status_2(
    capsys: pytest.CaptureFixture[str], argv: list[str], expected: str
) -> None:
    with pytest.raises(SystemExit) as error:
        Command(draw, lists=("colors",)).run(argv, "paint")
    output = capsys.readouterr().err
    assert (error.value.code, output.count("\n")) == (2, 1)
    assert output.startswith(f"paint: error: {expected}")


def sample(seed: int = 0) -> int:
    """Sample.

    Args:
        seed: Seed of the sampling.
    """
    return seed


@pytest.mark.parametrize("seed", ["-1", str(2**32), "9" * 30])
def test_a_seed_that_is_out_of_range_is_refused_by_name(seed: str) -> None:
    assert Command(sample).run(["--seed", str(2**32 - 1)], "paint") == 2**32 - 1
    with pytest.raises(SystemExit, match=f"^paint: seed: expected a seed from .* got {seed}$"):
        Command(sample).run(["--seed", seed], "paint")


def test_an_error_of_several_lines_becomes_one() -> None:
    def fail() -> None:
        """Fail."""
        raise ValueError("no connection.\nCheck it.")

    with pytest.raises(SystemExit) as error:
        Command(fail).run([], "paint")
    assert error.value.code == "paint: no connection. Check it."


def test_a_mistyped_command_of_a_group_is_answered_with_the_nearest() -> None:
    with pytest.raises(SystemExit, match=r"^paint: no command 'drw'; did you mean draw\?"):
        run_group({"draw": Command(draw)}, ["drw"], "paint")
