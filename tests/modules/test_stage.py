"""What all stages share: random generators, optimizers, schedules, dtypes, metrics over ranks."""

from __future__ import annotations

import math
import random
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins.precision import HalfPrecision
from torch import Tensor, distributed

from lit_callbacks import CollapseDetector, Monitor
from lit_rlhf.models import load_causal_lm
from lit_rlhf.modules import OptimizerOptions, PPOModule, SFTModule
from lit_rlhf.modules.resume import random_state, restore_random_state
from lit_rlhf.modules.stage import count_movable
from lit_rlhf.stats import global_means
from tests.support.host_tensors import COLLECTIVES
from tests.support.stages import (
    Rates,
    StepRecorder,
    demonstrations,
    first_batch,
    fit_module,
    ppo_options,
    prompts,
    stage,
    trainer,
)


def test_a_loaded_model_is_no_model_path(root: Path) -> None:
    model: Any = load_causal_lm(root / "policy")
    message = (
        r"got an object of the type LlamaForCausalLM\..*save_pretrained\(folder\), and give the"
    )
    with pytest.raises(ValueError, match=message):
        SFTModule(model)


def test_every_global_generator_goes_on_where_it_stood(tmp_path: Path) -> None:
    device = torch.device("cpu")

    def draws() -> list[float]:
        numpy = [np.random.random(), np.random.normal()]  # noqa: NPY002
        return [random.random(), random.gauss(0, 1), *numpy, float(torch.rand(()))]

    draws()
    torch.save(random_state(device), tmp_path / "state.ckpt")
    expected = draws()
    restore_random_state(torch.load(tmp_path / "state.ckpt", weights_only=True), device)
    assert draws() == expected
    restore_random_state({}, device)  # a checkpoint of another project has none
    assert draws() != expected


@pytest.mark.parametrize("name", ["sft", "reward", "ppo"])
def test_half_precision_leaves_the_rotary_frequencies_alone(root: Path, name: str) -> None:
    module, _ = stage(name, root)
    before = {key: buffer.clone() for key, buffer in module.named_buffers()}
    assert any(key.endswith("inv_freq") for key in before)
    HalfPrecision("bf16-true").convert_module(module)
    assert {p.dtype for p in module.parameters() if p.requires_grad} == {torch.bfloat16}
    for key, buffer in module.named_buffers():
        assert buffer.dtype == before[key].dtype
        assert torch.equal(buffer, before[key]), key


def test_only_what_is_trained_is_given_to_the_optimizer(root: Path) -> None:
    module, _ = stage("sft", root, network={"lora_rank": 2})
    optimizer = module.build_optimizer(module.model, OptimizerOptions(learning_rate=1e-3))
    given: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(p.requires_grad for p in given)
    n_trained = sum(p.requires_grad for p in module.parameters())
    assert 0 < n_trained == len(given) < len(list(module.parameters()))


@pytest.mark.parametrize(("name", "network"), [("sft", "model"), ("reward", "networks")])
def test_trunk_and_heads_are_clipped_together(
    root: Path, tmp_path: Path, name: str, network: str
) -> None:
    (module, data), steps = stage(name, root, optimizer={"grad_clip": 0.25}), StepRecorder()
    run = fit_module(module, data, tmp_path, callbacks=[steps])
    assert any("lm_head" in key for key in steps.steps[network][0])
    assert steps.norms(network) == pytest.approx([0.25, 0.25], rel=1e-4)
    assert float(run.callback_metrics[f"{name}/grad_norm"]) > 0.25  # before


def test_warmup_is_rounded_up_and_the_rate_falls_to_its_least(root: Path, tmp_path: Path) -> None:
    optimizer = {"learning_rate": 1e-3, "lr_scheduler": "cosine_with_min_lr", "min_lr_ratio": 0.3}
    optimizer |= {"warmup_ratio": 0.15}  # 1.5 of ten steps
    (module, data), watch = stage("sft", root, optimizer=optimizer), Rates()
    run = fit_module(module, data, tmp_path, max_epochs=5, callbacks=[watch])
    rates = [rate for ((rate, _),) in watch.seen.values()]
    assert rates[:3] == pytest.approx([0.5e-3, 1e-3, 1e-3])
    last = 0.3 + 0.7 * 0.5 * (1 + math.cos(math.pi * 7 / 8))  # seventh of eight steps
    assert rates[-1] == pytest.approx(1e-3 * last)
    assert run.optimizers[0].param_groups[0]["lr"] == rates[-1]  # held


# --- metrics over ranks


def test_metrics_of_step_take_one_reduction_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced: list[torch.Tensor] = []
    for name in COLLECTIVES:
        monkeypatch.setattr(distributed, name, lambda tensor: reduced.append(tensor))
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(distributed, "get_backend", lambda: "gloo")
    metrics = {
        "time/update": torch.tensor(1.0),  # on the host, as times are
        "sft/loss": torch.ones((), device="meta", dtype=torch.bfloat16),
    }
    means = global_means(metrics, torch.device("meta"))
    assert list(means) == list(metrics)
    (sums,) = reduced
    for tensor in (sums, *means.values()):
        assert (tensor.device.type, tensor.dtype) == ("meta", torch.float64)


def test_sums_of_validation_set_are_not_rounded_with_weights(root: Path, tmp_path: Path) -> None:
    """A number in bfloat16 has three digits."""
    module, data = SFTModule(str(root / "policy")), demonstrations(root, batch_size=1)
    run = trainer(tmp_path, precision="bf16-true", limit_val_batches=None)
    run.validate(module, datamodule=data, verbose=False)
    with torch.no_grad():
        batch = first_batch(demonstrations(root, batch_size=8), root)
        expected = float(module(batch, batch.completion_mask.sum())["sft/loss"])
    assert float(run.callback_metrics["val/sft/loss"]) == pytest.approx(expected, rel=1e-4)


def test_metrics_of_model_are_neither_detectors_nor_machines(root: Path, tmp_path: Path) -> None:
    module = SFTModule(str(root / "policy"))
    detector = CollapseDetector([Monitor("sft/loss", high=1e9)])
    run = fit_module(module, demonstrations(root), tmp_path, callbacks=[detector])
    assert float(run.callback_metrics["monitor/level"]) == 0.0
    assert "time/update" in run.callback_metrics
    assert "sft/loss" in module.model_card().metrics
    left_out = ("monitor/", "time/", "memory/", "throughput/")
    assert [key for key in module.model_card().metrics if key.startswith(left_out)] == []


# --- the dtype of weights


@pytest.mark.parametrize(("dtype", "precision"), [("float16", "32-true"), ("float32", "16-true")])
def test_float16_is_refused(root: Path, tmp_path: Path, dtype: str, precision: str) -> None:
    module = SFTModule(str(root / "policy"), network={"dtype": dtype})
    with pytest.raises(ValueError, match="weights for training, got float16 in model"):
        fit_module(module, demonstrations(root), tmp_path, precision=precision)


def test_bfloat16_weights_warn_of_how_many_can_move(root: Path, tmp_path: Path) -> None:
    rates = {"learning_rate": 5e-7, "warmup_ratio": 0.1, "lr_scheduler": "linear"}
    module = PPOModule(**ppo_options(root, network={"dtype": "bfloat16"}, policy_optimizer=rates))
    total = sum(weight.numel() for weight in module.policy.parameters())
    with pytest.warns(UserWarning, match="rounded back") as shown:
        fit_module(module, prompts(root), tmp_path)
    policy, critic = (str(w.message) for w in shown if "rounded back" in str(w.message))
    pattern = (
        rf"policy: a step at a learning rate of 5e-07 can change .*?([\d,]+) of {total:,} weights"
    )
    match = re.match(pattern, policy)
    assert match is not None
    assert 0 < int(match[1].replace(",", "")) < total / 100
    assert critic.startswith("critic: a step at a learning rate of 0.001 can change ")


def test_trained_weights_in_float32_are_nothing_to_warn_of(root: Path, tmp_path: Path) -> None:
    # warnings are errors here
    fit_module(
        SFTModule(str(root / "policy")), demonstrations(root), tmp_path, precision="bf16-mixed"
    )
    lora = {"dtype": "bfloat16", "lora_rank": 2}
    fit_module(SFTModule(str(root / "policy"), network=lora), demonstrations(root), tmp_path)


@pytest.mark.parametrize(("rate", "expected"), [(1e-6, 1), (0.002, 2), (0.004, 3), (1.0, 4)])
def test_weight_moves_if_a_step_is_not_rounded_back(rate: float, expected: int) -> None:
    """Next to 1 there are 1 + 2^-7 and 1 - 2^-8; a step of half that way, and ties go to even."""
    weights = torch.tensor([[1e-4, 1.0], [1.5, 100.0]], dtype=torch.bfloat16)
    assert count_movable(weights, rate) == expected


@pytest.mark.parametrize(("precision", "warned"), [("bf16-mixed", True), ("32-true", False)])
def test_bfloat16_without_its_instructions_is_told(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: Any, warned: bool
) -> None:
    monkeypatch.setattr("lit_rlhf.modules.stage.has_bfloat16", lambda: False)
    module = SFTModule(str(root / "policy"))
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        fit_module(module, demonstrations(root), tmp_path, precision=precision, max_steps=1)
    assert any("take 32-true" in str(warning.message) for warning in shown) == warned


# --- tools of Lightning and torch


def test_stochastic_weight_averaging_is_refused(root: Path, tmp_path: Path) -> None:
    module, averaging = SFTModule(str(root / "policy")), StochasticWeightAveraging(swa_lrs=1e-3)
    with pytest.raises(ValueError, match=r"callbacks: expected no StochasticWeightAveraging"):
        fit_module(module, demonstrations(root), tmp_path, callbacks=[averaging])
    assert not (tmp_path / "model").exists()


# torch.compile warns when it looks at the module's properties
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_module_is_refused_with_option_that_compiles(root: Path, tmp_path: Path) -> None:
    module: Any = torch.compile(SFTModule(str(root / "policy")))
    with pytest.raises(ValueError, match=r"expected a module that is not compiled.*torch_compile"):
        fit_module(module, demonstrations(root), tmp_path)
