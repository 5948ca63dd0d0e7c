from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlhf.forward import LanguageModel, disable_dropout, eval_mode, freeze, token_logits
from lit_rlhf.models import ModelOptions, load_causal_lm
from tests.support.tiny_models import tiny_causal_lm, tiny_config

IDS = torch.arange(4, 24).reshape(2, 10)
MASK = torch.ones(2, 10, dtype=torch.bool)
DROPOUT_NAMES = (
    "dropout",
    "attention_dropout",
    "hidden_dropout",
    "attn_pdrop",
    "resid_pdrop",
    "embd_pdrop",
)


def with_dropout(family: str) -> PreTrainedModel:
    config = tiny_config(family)
    for name in DROPOUT_NAMES:
        if hasattr(config, name):
            setattr(config, name, 0.5)
    if family == "opt":
        config.layerdrop = 0.5
    model: PreTrainedModel = type(tiny_causal_lm(family))(config)
    model.train()
    return model


def logits(model: LanguageModel) -> Tensor:
    return token_logits(model, IDS, MASK).detach()


def test_disabled_dropout_is_off_in_training_mode(family: str) -> None:
    model = with_dropout(family)
    assert not torch.equal(logits(model), logits(model))
    disable_dropout(model)
    trained = logits(model)
    assert model.training
    assert torch.equal(trained, logits(model.train(False)))


def test_disabled_dropout_covers_adapters(
    causal_folder: Callable[[str], Path],
) -> None:
    options = ModelOptions(lora_rank=2, lora_dropout=0.5)
    model = load_causal_lm(causal_folder("llama"), options)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(parameter)
    assert not torch.equal(logits(model), logits(model))
    disable_dropout(model)
    assert torch.equal(logits(model), logits(model))


def test_disabling_dropout_keeps_the_config() -> None:
    model = disable_dropout(with_dropout("gpt2"))
    assert model.config.resid_pdrop == 0.5


def test_a_frozen_model_has_no_gradients_and_no_dropout() -> None:
    model = freeze(with_dropout("gpt2"))
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(logits(model), logits(model))


def test_evaluating_gives_every_module_its_mode_back() -> None:
    model = with_dropout("gpt2")
    model.get_submodule("transformer.h.1").eval()
    modes = [module.training for module in model.modules()]
    with eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == modes
    assert True in modes
    assert False in modes


def test_evaluating_gives_modes_back_after_an_error() -> None:
    model = with_dropout("gpt2")
    with pytest.raises(RuntimeError, match="stop"), eval_mode(model):
        raise RuntimeError("stop")
    assert model.training
