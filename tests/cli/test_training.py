"""`lit_rlhf fit|validate|test` on a tiny world: stages, checkpoints, overlays, errors, defaults."""

import logging
import re
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from lightning.pytorch.strategies import Strategy

from lit_callbacks import StageProgressBar
from lit_rlhf.cli.main import stage_usage
from lit_rlhf.cli.training import RLHFCLI, hide_notes_of_libraries, is_news, run_cli
from lit_rlhf.errors import UserError
from lit_rlhf.modules import PPOModule
from lit_rlhf.rank_zero import rank_zero_only
from lit_rlhf.rollout import generate_responses
from tests.support import fit_command
from tests.support.nucleus import Nucleus
from tests.support.stages import ppo_options
from tests.support.tiny_runs import QUICKSTART, RUNS, SMALL, logged, overlay, write_moved_config
from tests.support.unpickling import Payload

STAGES = {"sft": "sft.yaml", "reward": "reward.yaml", "ppo": "ppo_max.yaml"}
VALIDATED = {"sft": "val/sft/loss", "reward": "val/reward/accuracy", "ppo": "val/rollout/gold"}
# reference and reward model are frozen in evaluation mode, which Lightning warns about
pytestmark = pytest.mark.filterwarnings("ignore:.*in eval mode at the start of training")


def command(*arguments: object) -> RLHFCLI:
    """A LightningCLI command in this process; gives what it built."""
    with warnings.catch_warnings():
        # a checkpoint names the folder that it was written to
        warnings.filterwarnings("ignore", "The dirpath has changed from")
        # 8 or so examples are no epoch's worth of logs
        warnings.filterwarnings("ignore", ".*callbacks used to create the checkpoint")
        return run_cli([str(argument) for argument in arguments])


usage_error = partial(fit_command.capture_usage_error, command)


def configs(stage: str, world: Path, folder: Path, **options: Any) -> list[object]:
    """Flags: the quickstart's configuration on the tiny world, made small, writing to `folder`."""
    moves = {RUNS: world, f"{RUNS}/logs": folder / "logs", f"{RUNS}/ppo_max": folder / "model"}
    config = write_moved_config(QUICKSTART / STAGES[stage], folder / "configs", moves)
    small = overlay(folder / "configs", f"small_{stage}", SMALL[stage])
    prompts = {"test_sources": [{"path": str(world / "world/prompts_heldout.jsonl")}]}
    held_out = prompts if stage == "ppo" else {"test_fraction": 0.1}
    keep = {"class_path": "lit_callbacks.ResumeCheckpoint", "init_args": {"every_n_batches": 1}}
    mine = {
        "trainer": {"callbacks+": [keep]},
        "model": {"init_args": {"output_dir": str(folder / "model"), **options}},
        "data": {"init_args": held_out},
    }
    last = overlay(folder / "configs", f"mine_{stage}", mine)
    return [part for path in (config, small, last) for part in ("--config", path)]


@pytest.fixture(scope="module")
def checkpoints(world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each stage, left by `fit`."""
    paths = {}
    for stage in STAGES:
        folder = tmp_path_factory.mktemp(stage)
        command("fit", *configs(stage, world, folder))
        *_, paths[stage] = sorted(folder.rglob("*.ckpt"))
        assert (folder / "model/model.safetensors").is_file()
    return paths


@pytest.mark.parametrize("stage", STAGES)
def test_validate_and_test_load_the_weights_of_a_checkpoint(
    world: Path, checkpoints: Any, tmp_path: Path, stage: str
) -> None:
    flags = [*configs(stage, world, tmp_path), "--ckpt_path", checkpoints[stage]]
    saved = torch.load(checkpoints[stage], weights_only=True)["state_dict"]
    validated = command("validate", *flags)
    assert torch.isfinite(validated.trainer.callback_metrics[VALIDATED[stage]])
    weights = validated.model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in saved.items())
    tested = command("test", *flags)
    key = VALIDATED[stage].replace("val/", "test/")
    assert torch.isfinite(tested.trainer.callback_metrics[key])


@pytest.mark.parametrize("verb", ["fit", "validate"])
def test_a_checkpoint_of_another_class_is_refused(
    world: Path, checkpoints: dict[str, Path], tmp_path: Path, capsys: Any, verb: str
) -> None:
    flags = [*configs("ppo", world, tmp_path), "--ckpt_path", checkpoints["sft"]]
    message = usage_error(capsys, verb, *flags)
    assert "is a checkpoint of lit_rlhf.modules.SFTModule" in message
    assert "the configuration trains lit_rlhf.modules.PPOModule" in message
    assert "point --model.model_path at the folder" in message
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("verb", ["fit", "validate", "test"])
def test_code_in_a_checkpoint_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    path, mark = tmp_path / "evil.ckpt", tmp_path / "mark"
    torch.save({"state_dict": {}, "callbacks": Payload(mark)}, path)
    flags = ["--config", QUICKSTART / "sft.yaml", "--ckpt_path", path]
    error = usage_error(capsys, verb, *flags)
    assert f"--ckpt_path: checkpoint {path}: holds more than tensors" in error
    assert not mark.exists()


@pytest.mark.parametrize("verb", ["fit", "validate", "test"])
def test_checkpoint_names_no_code(world: Path, checkpoints: Any, tmp_path: Path, verb: str) -> None:
    mark, named = tmp_path / "mark", f"received_{verb}"
    code = f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
    code += "from lit_rlhf.modules import SFTModule\n"
    (tmp_path / f"{named}.py").write_text(code)
    content = torch.load(checkpoints["sft"], weights_only=True)
    content["hyper_parameters"] |= {
        "_class_path": f"{named}.SFTModule",
        "network": {"trust_remote_code": True, "class_path": f"{named}.SFTModule"},
    }
    torch.save(content, tmp_path / "received.ckpt")
    flags = [*configs("sft", world, tmp_path), "--ckpt_path", tmp_path / "received.ckpt"]
    with patch.object(sys, "path", [str(tmp_path), *sys.path]):
        cli = command(verb, *flags, *(["--trainer.max_epochs", 2] if verb == "fit" else []))
    assert not mark.exists()
    assert not cli.model.network.trust_remote_code


def test_configuration_cannot_allow_code_in_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    allowing = overlay(tmp_path, "allowing", {"weights_only": False})
    flags = ["--config", QUICKSTART / "sft.yaml", "--config", allowing]
    assert "--weights_only false would run code" in usage_error(capsys, "fit", *flags)


def test_a_checkpoint_behind_a_url_is_read_as_tensors_too(world: Path, tmp_path: Path) -> None:
    url = "https://example.org/evil.ckpt"
    flags = [*configs("sft", world, tmp_path), "--ckpt_path", url]
    load = patch.object(Strategy, "load_checkpoint", side_effect=ConnectionError("no network"))
    with load as asked, pytest.raises(ConnectionError, match="no network"):
        command("fit", *flags)
    asked.assert_called_once_with(url, weights_only=True)


def test_flags_win_over_the_settings_in_a_checkpoint(
    world: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    remembered = torch.load(checkpoints["ppo"], weights_only=True)["hyper_parameters"]
    assert remembered["advantages"]["lam"] == 0.9
    assert remembered["sampling"]["max_new_tokens"] == 4
    flags = configs("ppo", world, tmp_path, advantages={"lam": 0.5})
    flags += ["--model.sampling.max_new_tokens", 3, "--trainer.max_epochs", 2]
    cli = command("fit", *flags, "--ckpt_path", checkpoints["ppo"])
    assert (cli.model.advantages.lam, cli.model.sampling.max_new_tokens) == (0.5, 3)
    assert cli.model.hparams["advantages"]["lam"] == 0.5
    # and the run went on where the checkpoint stood
    assert int(cli.model.iteration) == 4


@pytest.mark.parametrize("verb", ["fit", "validate", "test"])
def test_each_command_has_help(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        command(verb, "--help")
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert "--ckpt_path" in shown
    assert all(f"{name}Module" in shown for name in ("SFT", "Reward", "PPO", "PromptData"))
    short = set(re.findall(r"--[\w.]+", stage_usage(verb))) - {"--debug", "--help_all"}
    assert short - {"--model.optimizer.learning_rate"} <= set(re.findall(r"--[\w.]+", shown))


def test_whole_numbers_are_parsed_as_such(monkeypatch: Any, capsys: Any) -> None:
    # `limit_train_batches: 1` would be 1.0, all batches, by what typing's cache has with torch 2.11
    hints = Trainer.__init__.__annotations__
    monkeypatch.setitem(hints, "limit_train_batches", float | int | None)
    usage_error(capsys, "fit", "--trainer.max_epochs", "1")  # after the parser is built
    assert get_args(hints["limit_train_batches"]) == (int, float, type(None))


def test_missing_configuration_is_told_how_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    shown = usage_error(capsys, "fit", "--trainer.max_epochs", "1")
    assert shown.endswith("name a configuration: --config quickstart/sft\n")
    assert shown.count("\n") == 1


def test_a_run_shows_no_foreign_note(world: Path, tmp_path: Path, capsys: Any, caplog: Any) -> None:
    caplog.set_level("INFO")
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    with warnings.catch_warnings():
        hide_notes_of_libraries()
        command("fit", *configs("ppo", world, tmp_path), "--trainer.enable_model_summary", "true")
    shown = capsys.readouterr()
    output = shown.out + shown.err + caplog.text
    assert "Tip:" not in output
    assert logger.filters.count(is_news) == 1


def fit_ppo(root: Path, sampler: Any = None, **trainer: Any) -> RLHFCLI:
    """PPO in three iterations."""
    few = {"limit_train_batches": 3, "num_sanity_val_steps": 0, "enable_checkpointing": False}
    options = ppo_options(root, **{"minibatches.minibatch_size": 2}, output_dir="model")
    options |= {"sampler": sampler} if sampler else {}
    return fit_command.fit(root, "--overwrite", stage="PPO", options=options, trainer=few | trainer)


def bars(cli: RLHFCLI) -> list[ProgressBar]:
    return [callback for callback in cli.trainer.callbacks if isinstance(callback, ProgressBar)]


def test_every_iteration_is_logged(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bar,) = bars(fit_ppo(root))
    curves = logged(Path("lightning_logs/version_0"))
    assert len(curves["rollout/score"]) == len(curves["rollout/kl"]) == 3
    assert isinstance(bar, StageProgressBar)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ppo ")]
    assert lines[-1].startswith("ppo 3/3 100%")
    assert all(name in lines[-1] for name in ("score ", "kl ", "response_length "))


def test_run_in_one_process_logs_whatever_rank_the_environment_has(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of a SLURM job that trains alone has a rank of the job."""
    monkeypatch.setitem(vars(rank_zero_only), "rank", 1)  # as at the import with RANK=1
    fit_ppo(root)
    assert len(logged(Path("lightning_logs/version_0"))["rollout/score"]) == 3


@pytest.mark.parametrize("option", [{"limit_train_batches": 1e-9}, {"accumulate_grad_batches": 2}])
def test_option_that_lightning_refuses_as_it_trains_is_an_error_of_the_user(
    root: Path, option: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=next(iter(option))):
        fit_ppo(root, **option)


def test_metric_that_a_callback_waits_for_in_vain_is_an_error_of_the_user(root: Path) -> None:
    waits = {"monitor": "val/nothing", "check_on_train_epoch_end": True}
    stop = {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": waits}
    with pytest.raises(UserError, match=r"trainer\.callbacks: Early stopping .* `val/nothing`"):
        fit_ppo(root, callbacks=[stop])


def test_a_bar_of_ones_own_or_none_is_kept(root: Path) -> None:
    rich = {"class_path": "lightning.pytorch.callbacks.RichProgressBar"}
    assert bars(fit_ppo(root, enable_progress_bar=False, logger=False)) == []
    (own,) = bars(fit_ppo(root, callbacks=[rich], logger=False))
    assert type(own) is RichProgressBar


def test_a_sampler_is_chosen_by_a_configuration(root: Path, capsys: Any) -> None:
    Nucleus.calls = 0
    path = "tests.support.nucleus.Nucleus"
    nucleus = {"class_path": path, "init_args": {"top_p": 0.5}}
    run: Any = fit_ppo(root, nucleus, limit_train_batches=1)
    assert Nucleus.calls == 1
    assert run.model.ppo.networks.sampler.top_p == 0.5
    # a checkpoint names no code to be run
    run.trainer.save_checkpoint("last.ckpt")
    loaded = PPOModule.load_from_checkpoint("last.ckpt", rewards={str(root / "reward"): 1.0})
    assert loaded.ppo.networks.sampler is generate_responses
    with pytest.raises(SystemExit):
        fit_ppo(root, {"class_path": "lit_rlhf.rollout.RolloutMetrics"})
    assert "sampler" in capsys.readouterr().err
