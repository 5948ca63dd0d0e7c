"""`lit_rlhf doctor` on a tiny world: findings, exit status, report, errors, help."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_rlhf.terminal import help_text
from lit_rlhf.tools.doctor.run import ALL_CHECKS, START, START_ABOUT
from tests.support.stages import content
from tests.support.tiny_runs import (
    CONFIGS,
    QUICKSTART,
    RUNS,
    fit_stage,
    overlay,
    run,
    write_moved_config,
)

MODEL = {"minibatches": {"minibatch_size": 4}, "sampling": {"max_new_tokens": 60}}
SMALL = {"trainer": {"default_root_dir": "somewhere"}, "model": {"init_args": MODEL}}
SMALL |= {"data": {"init_args": {"batch_size": 8}}}


def ppo_configs(world: Path, folder: Path, **changes: Any) -> list[str]:
    """PPO-max on the tiny world, made small, with changed settings of the model."""
    moves = {RUNS: world, f"{RUNS}/logs": folder / "logs", f"{RUNS}/ppo_max": folder / "model"}
    first = write_moved_config(QUICKSTART / "ppo_max.yaml", folder / "configs", moves)
    small = overlay(folder / "configs", "small", SMALL)
    last = overlay(folder / "configs", "last", {"model": {"init_args": changes}})
    return [part for path in (first, small, last) for part in ("--config", str(path))]


def doctor(*arguments: str) -> int:
    """Exit status of the command."""
    try:
        run("doctor", *arguments)
    except SystemExit as ended:
        return int(str(ended.code))
    return 0


@pytest.fixture(scope="module")
def sound(world: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a sound run."""
    return ppo_configs(world, tmp_path_factory.mktemp("sound"))


def test_a_sound_run_has_a_report(sound: Any, world: Path, tmp_path: Path, capsys: Any) -> None:
    before = content(world)
    assert doctor(*sound, "--output", "report.json") == 0
    report = json.loads((tmp_path / "report.json").read_text("utf-8"))
    assert report["failed"] is False
    assert {c["check"]: c["status"] for c in report["checks"]}["clipping"] == "ok"
    assert len(report["checks"]) == 14
    shown = capsys.readouterr()
    assert "The run can start." in shown.out
    assert shown.err == ""
    # nothing but what was asked for
    assert list(tmp_path.iterdir()) == [tmp_path / "report.json"]
    assert content(world) == before


def test_output_that_cannot_be_written_is_refused_before_the_checks(
    sound: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(*sound, "--output", str(tmp_path)) == 2
    assert "output: expected a file of its own" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"lit_rlhf doctor: .*No space left"):
        run("doctor", *sound, "--output", "/dev/full")


@pytest.mark.parametrize(
    ("flag", "status", "said"),
    [
        ("--data.chat_template=paper-zh", 1, "FAIL text contract"),
        ("--model.model_path=.", 1, "FAIL start path: expected a tokenizer at ., got none"),
        ("--model.no_such_option=3", 2, "no_such_option: no such option"),
    ],
)
def test_failure_or_error_is_the_exit_status(
    sound: Any, capsys: Any, flag: str, status: int, said: str
) -> None:
    assert doctor(*sound, flag) == status
    shown = " ".join("".join(capsys.readouterr()).split())
    assert said in shown
    assert "Namespace" not in shown


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_configuration_of_another_stage_is_refused(
    capsys: pytest.CaptureFixture[str], stage: str
) -> None:
    Path("runs/quickstart/world/base").mkdir(parents=True)
    Path("runs/quickstart/sft").mkdir()
    flags = ["--data.train_sources", "[{path: mine}]", "--data.val_sources", "[{path: mine}]"]
    assert doctor("--config", str(QUICKSTART / f"{stage}.yaml"), *flags) == 2
    shown = capsys.readouterr().err
    assert "the doctor checks PPO runs, this configuration trains" in shown


def test_absent_gpus_are_named_with_what_is_not_checked(
    sound: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    many = str(CONFIGS / "overlays" / "zero2_8xa100.yaml")
    small = ["--model.memory.rollout_batch_size", "4", "--data.batch_size", "8"]
    assert doctor(*sound, "--config", many, *small, "--trainer.precision", "32-true") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "there is no GPU here to compare it with" in shown
    assert "clipping without the strategy multi_deepspeed_stage_2" in shown
    assert "The configuration has 8 processes" in shown


def test_saved_configuration_is_taken(world: Path, tmp_path: Path) -> None:
    moves = {RUNS: world, f"{RUNS}/logs": tmp_path / "logs", f"{RUNS}/ppo_max": tmp_path / "model"}
    fit_stage("ppo", [QUICKSTART / "ppo_max.yaml"], tmp_path, moves)
    (saved,) = tmp_path.glob("logs/**/config.yaml")
    assert "ckpt_path" in yaml.safe_load(saved.read_text("utf-8"))
    before = content(tmp_path)
    assert doctor("--config", str(saved), "--model.sampling.max_new_tokens", "60") == 0
    assert content(tmp_path) == before


def test_help_lists_the_checks_in_their_order() -> None:
    abouts = [(START, START_ABOUT), *((check.name, check.about) for check in ALL_CHECKS)]
    listed = help_text("doctor").partition("checks:\n")[2].partition("\n\n")[0]
    assert listed.splitlines() == [f"  {name:<16} {about}" for name, about in abouts]
