"""N + M iterations equal N, a kill, a resume and M: bit by bit on one process."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer

from lit_rlhf.modules import PPOModule, RewardModule, SFTModule
from tests.modules.stages import (
    assert_equal_states,
    copied,
    demonstrations,
    fitted,
    ppo_options,
    preferences,
    prompts,
    write_data,
    write_models,
)
from tests.support.tiny_models import tiny_config

BATCH = 2  # four steps an epoch
STOPPED_AT = 3  # in the middle of an epoch


@pytest.fixture(scope="module")
def dropout_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2 with dropout, so that SFT and reward modelling draw random numbers at each step."""
    config = tiny_config("gpt2")
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.5
    return write_models(write_data(tmp_path_factory.mktemp("dropout")), config)


def sft(root: Path) -> tuple[LightningModule, LightningDataModule]:
    module = SFTModule(str(root / "policy"), optimizer={"learning_rate": 1e-3})
    return module, demonstrations(root, batch_size=BATCH)


def reward(root: Path) -> tuple[LightningModule, LightningDataModule]:
    module = RewardModule(str(root / "policy"), optimizer={"learning_rate": 1e-3})
    return module, preferences(root, batch_size=BATCH)


def ppo(root: Path) -> tuple[LightningModule, LightningDataModule]:
    options = ppo_options(
        root,
        minibatches={"minibatch_size": 1},
        policy_optimizer={"lr_scheduler": "cosine_with_min_lr"},
        critic_optimizer={"lr_scheduler": "cosine_with_min_lr"},
        critic_pretraining={"iterations": 1},
        loss={"ptx_coef": 0.3},
        reward_shaping={"kl_target": 0.5, "kl_horizon": 50},
    )
    return PPOModule(**options), prompts(root, ptx=True, batch_size=BATCH, samples_per_epoch=10)


STAGES = {"sft": sft, "reward": reward, "ppo": ppo}


class SaveOnce(Callback):
    """Leaves `stopped.ckpt` in a folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "stopped.ckpt"

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == STOPPED_AT:
            trainer.save_checkpoint(self.path)


def run(stage: str, root: Path, folder: Path, **arguments: Any) -> tuple[Any, dict[str, Any]]:
    """Two epochs; the module at their end, and the optimizers' and schedules' states."""
    module, data = STAGES[stage](root)
    run = fitted(module, data, folder, max_epochs=2, callbacks=[SaveOnce(folder)], **arguments)
    optimizers = [optimizer.state_dict() for optimizer in run.optimizers]
    schedules = [config.scheduler.state_dict() for config in run.lr_scheduler_configs]
    return module, {"optimizers": optimizers, "schedules": schedules}


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    dropout_root: Path, tmp_path: Path, stage: str
) -> None:
    torch.manual_seed(1)
    whole, expected = run(stage, dropout_root, tmp_path)
    checkpoint = tmp_path / "stopped.ckpt"
    torch.manual_seed(99)  # a new process stands elsewhere in its random stream
    resumed, actual = run(stage, dropout_root, tmp_path / "resumed", ckpt_path=checkpoint)
    assert_equal_states(copied(resumed), copied(whole))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    # the run went on after the checkpoint, and the checkpoint is not the end
    saved = torch.load(checkpoint, weights_only=True)["state_dict"]
    unlike = [name for name in saved if not torch.equal(saved[name], whole.state_dict()[name])]
    assert len(unlike) > 10


class Killed(Exception):
    """In place of a kill."""


class SaveAndDie(Callback):
    """Saves a checkpoint in the hook of that name after so many batches, and ends the run there."""

    def __init__(self, hook: str, batches: int, path: Path) -> None:
        self.steps: list[int] = []
        self.batches, self.path = batches, path
        setattr(self, hook, self.save)

    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        self.steps.append(trainer.fit_loop.total_batch_idx)

    def save(self, trainer: Trainer, *_: object) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.batches:
            trainer.save_checkpoint(self.path)
            raise Killed


@pytest.mark.parametrize(
    ("first", "second"),
    [
        # behind the last batch of an epoch, then at the end of the next
        (("on_train_batch_end", 4), ("on_train_epoch_end", 8)),
        (("on_train_batch_end", 4), ("on_train_batch_end", 8)),
        (("on_train_epoch_end", 4), ("on_validation_end", 8)),
        (("on_validation_end", 4), ("on_train_batch_end", 6)),
        # before a validation in the middle of an epoch, then after the next
        (("on_train_batch_end", 2), ("on_validation_end", 4)),
        (("on_validation_end", 6), ("on_train_epoch_end", 12)),
    ],
)
def test_a_run_resumes_from_any_hook_and_then_again(
    root: Path, tmp_path: Path, first: tuple[str, int], second: tuple[str, int]
) -> None:
    options: dict[str, Any] = {"max_epochs": 3, "limit_val_batches": 1, "val_check_interval": 2}

    def go(hook: str, batches: int, ckpt_path: Path | None) -> tuple[Any, list[int]]:
        module, data = sft(root)
        callback = SaveAndDie(hook, batches, tmp_path / f"{batches}.ckpt")
        with suppress(Killed):
            fitted(module, data, tmp_path, callbacks=[callback], ckpt_path=ckpt_path, **options)
        return module, callback.steps

    whole, steps = go("never", 0, None)
    assert steps == list(range(12))
    seen = go(*first, None)[1]
    seen += go(*second, tmp_path / f"{first[1]}.ckpt")[1]
    module, rest = go("never", 0, tmp_path / f"{second[1]}.ckpt")
    assert seen + rest == steps
    assert_equal_states(copied(module), copied(whole))


def test_a_checkpoint_of_ppo_holds_its_state_and_no_frozen_weights(
    dropout_root: Path, tmp_path: Path
) -> None:
    module, data = ppo(dropout_root)
    path = tmp_path / "stopped.ckpt"
    fitted(module, data, tmp_path, callbacks=[SaveOnce(tmp_path)])
    saved = torch.load(path, weights_only=True)
    state = saved["state_dict"]
    assert not [name for name in state if name.startswith(("reference", "reward"))]
    assert int(state["iteration"]) == 3
    assert int(state["ppo_step"]) == 2 * 2 * 2  # two iterations, epochs and minibatches
    assert bool(state["pretraining_done"])
    assert float(state["kl_coef"]) != 0.05
    assert float(state["score_moments.count"]) == 3 * BATCH
    assert state["score_moments.mean"].dtype == torch.float64
    assert len(saved["optimizer_states"]) == 2
    # what is left out is loaded from the folders again, and nothing else may be missing
    again = PPOModule.load_from_checkpoint(path, weights_only=True)
    for name, weight in again.reference.state_dict().items():
        assert torch.equal(weight, module.reference.state_dict()[name])
    del saved["state_dict"]["kl_coef"]
    torch.save(saved, tmp_path / "damaged.ckpt")
    with pytest.raises(RuntimeError, match=r"Missing key.*kl_coef"):
        PPOModule.load_from_checkpoint(tmp_path / "damaged.ckpt", weights_only=True)
