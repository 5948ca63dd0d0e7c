from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from lit_rlhf.cli.main import main as command
from lit_rlhf.tools.commands.plot import main, parse_runs


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    with SummaryWriter(str(folder)) as writer:
        for step in range(3):
            writer.add_scalar("rollout/score", float(step), step)
            writer.add_scalar("ppo/policy_loss", 0.1, step)
    return folder


def test_a_figure_is_written(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "figure.png"
    runs = ("--runs", f"vanilla={run}", f"PPO-max={run}")
    chosen = ("--keys", "[ppo/policy_loss, rollout/score]", "--baseline", "{rollout/score: 0.5}")
    command(["plot", *runs, "--output", str(output), *chosen])
    assert output.read_bytes().startswith(b"\x89PNG")


def test_a_folder_may_have_an_equals_sign() -> None:
    assert parse_runs(["a=runs/lr=1", "b=runs/b"]) == {"a": "runs/lr=1", "b": "runs/b"}


def test_a_run_is_named_after_its_folder(run: Path, tmp_path: Path) -> None:
    assert parse_runs([f"{run}", "b=runs/b"]) == {"run": str(run), "b": "runs/b"}
    main([str(run), "--output", str(tmp_path / "figure.svg")])
    assert b"<svg" in (tmp_path / "figure.svg").read_bytes()


@pytest.mark.parametrize("runs", [["=runs/a"], ["a="], ["a=x", "a=y"], ["x/a", "y/a"]])
def test_runs_without_a_name_of_their_own_are_refused(runs: list[str]) -> None:
    with pytest.raises(ValueError, match="runs: expected FOLDER or NAME=FOLDER"):
        parse_runs(runs)


def test_a_folder_without_a_run_ends_the_command(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as error:
        main(["--runs", f"a={tmp_path}"])
    assert str(error.value.code).startswith("lit_rlhf plot: log: expected a folder")
