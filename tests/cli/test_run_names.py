"""Names of runs, and what `fit` does where an earlier run of the same name has left its files."""

import json
from pathlib import Path
from typing import Any

import pytest

from lit_rlhf.cli.training import RLHFCLI
from lit_rlhf.command import UsageError
from lit_rlhf.data import RecordError
from tests.cli import fitting
from tests.configs.parsing import parsed
from tests.configs.tiny_runs import QUICKSTART, logged

EARLIER = "expected no earlier run"


def fit(root: Path, *flags: str, **trainer: Any) -> RLHFCLI:
    """SFT in two batches, with the model in `runs/sft` and the log in `runs/logs/sft`."""
    few: dict[str, Any] = fitting.QUIET | {"limit_train_batches": 2}
    few["callbacks"] = [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint"}]
    few["logger"] = {
        "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
        "init_args": {"save_dir": "runs/logs", "name": "sft", "version": ""},
    }
    options = {"output_dir": "runs/sft"}
    return fitting.fit(root, *flags, stage="SFT", options=options, trainer=few | trainer)


def contents() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}


def refusal(capsys: pytest.CaptureFixture[str], root: Path, *flags: str, **options: Any) -> str:
    """The last line of the usage error with which `fit` ends."""
    with pytest.raises(SystemExit) as ended:
        fit(root, *flags, **options)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_earlier_run_is_replaced_if_asked(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(root, "--model.optimizer.learning_rate", "1.0e-3")
    before, first = contents(), logged(Path("runs/logs/sft"))["sft/loss"]

    told = refusal(capsys, root, "--model.optimizer.learning_rate", "2.0e-3")
    assert f"runs/sft and runs/logs/sft and runs/logs/sft/checkpoints: {EARLIER}" in told
    for way in ("--name NAME", "--ckpt_path last", "--overwrite"):
        assert way in told
    assert contents() == before

    fit(root, "--model.optimizer.learning_rate", "2.0e-3", "--name", "faster")
    assert before.items() <= contents().items()
    assert logged(Path("runs/logs/faster"))["sft/loss"][1] != first[1]
    faster = Path("runs/faster/model.safetensors").read_bytes()
    assert faster != before["runs/sft/model.safetensors"]

    fit(root, "--ckpt_path", "last", "--model.optimizer.learning_rate", "1.0e-3")  # finished
    assert before.items() <= contents().items()


@pytest.mark.filterwarnings("ignore:The dirpath has changed from")
def test_other_run_replaces_no_model(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("sft", "other"):
        fit(root, "--name", name, "--model.optimizer.learning_rate", "1.0e-3")
    (checkpoint,) = Path("runs/logs/other/checkpoints").iterdir()
    before, more = contents(), ["--ckpt_path", str(checkpoint), "--trainer.max_epochs", "2"]
    told = refusal(capsys, root, *more)
    assert f"runs/sft and runs/logs/sft and runs/logs/sft/checkpoints: {EARLIER}" in told
    assert contents() == before
    fit(root, *more, "--name", "third")
    assert before.items() <= contents().items()


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_overwrite_deletes_no_checkpoint_of_another_run_and_no_copy(root: Path) -> None:
    keep = {"class_path": "lit_callbacks.ResumeCheckpoint", "init_args": {"dirpath": "all"}}
    keep["init_args"]["every_n_batches"] = 1
    flags = ["--trainer.callbacks", json.dumps([keep])]
    fit(root, "--name", "other", *flags)
    Path("all/batch=2.ckpt").rename("all/batch=1.ckpt.kept")
    Path("all/batch=1.ckpt").unlink()
    Path("all/batch=1.ckpt.kept").rename("all/batch=2.ckpt")
    fit(root, "--overwrite", *flags)
    mine = sorted(path.name for path in Path("all").glob("*.ckpt"))
    assert mine == ["batch=1.ckpt", "batch=2-v1.ckpt", "batch=2.ckpt"]
    copy = Path("all/best.ckpt")
    copy.write_bytes(Path("all/batch=2-v1.ckpt").read_bytes())
    Path("all/notes.ckpt").write_text("no checkpoint")
    others = {name: Path("all", name).read_bytes() for name in ("batch=2.ckpt", "best.ckpt")}

    fit(root, "--overwrite", "--trainer.max_steps", "1", *flags)
    left = sorted(path.name for path in Path("all").glob("*.ckpt"))
    assert left == ["batch=1.ckpt", "batch=2.ckpt", "best.ckpt", "notes.ckpt"]
    assert {name: Path("all", name).read_bytes() for name in others} == others


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_overwrite_replaces_model_and_log(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(root, "--model.optimizer.learning_rate", "1.0e-3")
    Path("runs/logs/sft/notes.txt").write_text("mine")
    Path("runs/logs/sft/samples.jsonl").write_text("of the earlier run")
    before = contents()
    with pytest.raises((RecordError, SystemExit)):  # a run that does not start deletes nothing
        fit(root, "--overwrite", "--data.init_args.train_sources", '[{"path": "lost.jsonl"}]')
    kept = contents()
    changed = {name for name in before if "finished" not in name and before[name] != kept[name]}
    assert changed <= {"runs/logs/sft/config.yaml"}

    fit(root, "--overwrite", "--model.optimizer.learning_rate", "2.0e-3")
    events = list(Path("runs/logs/sft").glob("events.out.tfevents.*"))
    assert len(events) == 1
    assert str(events[0]) not in before
    assert [p.name for p in Path("runs/logs/sft/checkpoints").iterdir()] == ["epoch=0-step=2.ckpt"]
    assert Path("runs/logs/sft/notes.txt").read_text() == "mine"
    assert not Path("runs/logs/sft/samples.jsonl").exists()
    assert contents()["runs/sft/model.safetensors"] != before["runs/sft/model.safetensors"]


@pytest.mark.filterwarnings("ignore:Total length of .* across ranks is zero")  # no validation data
def test_a_start_that_failed_and_a_trial_leave_nothing_to_protect(root: Path) -> None:
    Path("runs/logs/sft").mkdir(parents=True)
    for name in ("config.yaml", "hparams.yaml"):
        Path("runs/logs/sft", name).touch()
    fit(root, fast_dev_run=1)
    fit(root)
    fit(root, fast_dev_run=1)  # writes nothing


def test_folder_of_checkpoints_is_protected(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(root, logger=False, default_root_dir="runs/logs")
    options: dict[str, Any] = {"logger": False, "default_root_dir": "runs/logs"}
    told = refusal(capsys, root, "--model.output_dir", "runs/x", **options)
    assert f"runs/logs/checkpoints: {EARLIER}" in told


def folders(*files: Path, flags: tuple[str, ...] = ()) -> tuple[Any, Any]:
    """Model and log of a configuration, after it has been named."""
    from jsonargparse import Namespace

    from lit_rlhf.cli.runs import name_run
    from tests.configs.parsing import cli_parser

    words = [word for file in files for word in ("--config", str(file))]
    config: Namespace = cli_parser().parse_args(["fit", *words, *flags]).fit
    name_run(config)
    assert (config.name, config.suffix) == (None, [])  # a saved configuration has its folders
    return config.model.init_args.output_dir, config.trainer.logger.init_args.name


def test_a_name_wins_over_the_suffixes_of_overlays(tmp_path: Path) -> None:
    base = QUICKSTART / "ppo_max.yaml"
    ablations = [base.parents[1] / "ablations" / f"{n}.yaml" for n in ("no_ptx", "critic_random")]
    assert folders(base) == ("runs/quickstart/ppo_max", "ppo_max")
    assert folders(base, ablations[0]) == ("runs/quickstart/ppo_max-no_ptx", "ppo_max-no_ptx")
    both = "ppo_max-no_ptx-critic_random"
    assert folders(base, *ablations) == (f"runs/quickstart/{both}", both)
    assert folders(base, *ablations, flags=("--name", "mine")) == ("runs/quickstart/mine", "mine")
    assert "suffix" in parsed(base)


@pytest.mark.parametrize("name", ["a/b", "..", ""])
def test_a_name_that_is_no_folders_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="--name: expected the name of a folder"):
        folders(QUICKSTART / "sft.yaml", flags=("--name", name))
