"""A run that a detector ends leaves the last healthy weights, and says so."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_callbacks import CollapseEarlyStopping, Monitor
from lit_callbacks.actions import read_coefficient, write_coefficient
from lit_rlhf.files import read_manifest
from lit_rlhf.models import load_causal_lm
from lit_rlhf.modules import PPOModule, SFTModule
from tests.support.stages import copy_state, demonstrations, fit_module, ppo_options, prompts

SABOTAGED, HEALTHY = 4, 1  # a checkpoint of step 3 would not be confirmed


class Sabotage(Callback):
    """Ruins the weights after a batch; logs 1 as `key`, then 100; keeps the weights after each."""

    def __init__(self, key: str = "toy/damage") -> None:
        self.key = key
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        batch = trainer.fit_loop.total_batch_idx + 1
        pl_module.log(self.key, 100.0 if batch >= SABOTAGED else 1.0)
        if batch == SABOTAGED:
            with torch.no_grad():
                for parameter in pl_module.parameters():
                    parameter.mul_(-3.0)
        self.weights[batch] = copy_state(pl_module)


def stopping() -> CollapseEarlyStopping:
    detector = CollapseEarlyStopping([Monitor("toy/damage", high=10.0, patience=1, horizon=0)])
    detector.actions[-1].every_n_steps = 1
    return detector


def test_last_healthy_weights_are_left_and_said(root: Path, tmp_path: Path) -> None:
    module = SFTModule(str(root / "policy"), output_dir=str(tmp_path / "out"))
    sabotage = Sabotage()
    data, callbacks = demonstrations(root, batch_size=1), [sabotage, stopping()]
    run = fit_module(module, data, tmp_path, callbacks=callbacks, enable_checkpointing=True)
    assert run.fit_loop.total_batch_idx + 1 == SABOTAGED
    for name, weight in load_causal_lm(tmp_path / "out").state_dict().items():
        assert torch.equal(weight, sabotage.weights[HEALTHY][f"model.{name}"])
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert "stopped as collapsed at step 4: " in card
    assert "| `toy/damage` | 1 |" in card
    record = read_manifest(tmp_path / "out")["made"]["collapse"]
    assert (record["stopped_at_step"], record["weights_of_step"]) == (4, 1)

    # a later run that ends well leaves no trace of it
    module = SFTModule(str(root / "policy"), output_dir=str(tmp_path / "out"))
    fit_module(module, demonstrations(root), tmp_path)
    made = read_manifest(tmp_path / "out")["made"]
    assert (made["collapse"], made["updates"]) == (None, 2)


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
def test_both_saved_networks_are_of_the_last_healthy_step(
    root: Path, tmp_path: Path, estimator: str
) -> None:
    options = {"output_dir": str(tmp_path / "out"), "minibatches.minibatch_size": 2}
    options["advantages.estimator"] = estimator
    module = PPOModule(**ppo_options(root, **options))
    sabotage, data = Sabotage(), prompts(root, batch_size=2)
    fit_module(module, data, tmp_path, callbacks=[sabotage, stopping()], enable_checkpointing=True)
    for name, weight in load_causal_lm(tmp_path / "out").state_dict().items():
        assert torch.equal(weight, sabotage.weights[HEALTHY][f"policy.{name}"])
    assert (tmp_path / "out" / "critic" / "model.safetensors").is_file() == (estimator == "gae")


def test_without_healthy_weights_no_model_is_left(root: Path, tmp_path: Path) -> None:
    module = SFTModule(str(root / "policy"), output_dir=str(tmp_path / "out"))
    data, callbacks = demonstrations(root, batch_size=1), [Sabotage(), stopping()]
    with pytest.warns(UserWarning, match="no healthy weights were kept: .*out is not written"):
        fit_module(module, data, tmp_path, callbacks=callbacks)
    assert not (tmp_path / "out").exists()


def test_coefficients_and_options_set_at_the_module_act_in_the_algorithm(root: Path) -> None:
    module = PPOModule(**ppo_options(root, loss={"entropy_coef": 0.1}))
    for name, value in (("kl_coef", 0.25), ("loss.entropy_coef", 0.5)):
        write_coefficient(module, name, value)
        assert read_coefficient(module, name) == value
    assert (float(module.ppo.kl_coef), module.ppo.loss.entropy_coef) == (0.25, 0.5)
    assert float(module.state_dict()["kl_coef"]) == 0.25
    module.sampling = replace(module.sampling, temperature=0.5)
    assert module.ppo.sampling.temperature == 0.5
    with pytest.raises(
        ValueError, match=r"name: expected a coefficient .* kl_coef, .*loss\.entropy_coef"
    ):
        read_coefficient(module, "kl_ceof")
