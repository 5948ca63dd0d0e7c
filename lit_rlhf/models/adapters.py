"""What every network gets on top of its weights: gradient checkpointing and LoRA adapters."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lit_rlhf.forward import LanguageModel, optimize_forward
from lit_rlhf.models.kernels import compiled, with_fused_kernels
from lit_rlhf.models.options import ModelOptions


def prepared(
    model: PreTrainedModel, options: ModelOptions, task: TaskType, seed: int
) -> LanguageModel:
    """Gradient checkpointing, adapters, the fastest forward, kernels and compilation."""
    model.train()
    if options.gradient_checkpointing:
        model.activation_checkpointing_enable()
    adapted = optimize_forward(with_adapters(model, options, task, seed))
    # Last, as fused kernels need a GPU and a compiled trunk would compile for the comparison of
    # forwards.
    if options.fused_kernels:
        with_fused_kernels(adapted)
    if options.torch_compile is not None:
        compiled(adapted, options.torch_compile)
    return adapted


def with_adapters(
    model: PreTrainedModel, options: ModelOptions, task: TaskType, seed: int
) -> LanguageModel:
    """LoRA adapters on `model` as the options say; `model` itself if their rank is 0."""
    if options.lora_rank == 0:
        return model
    config = LoraConfig(
        task_type=task,
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=options.lora_dropout,
        target_modules=options.lora_targets,
        # GPT-2's layers hold their weight transposed
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    with private_rng(seed), without_peft_warning():
        return get_peft_model(model, config)


@contextmanager
def without_peft_warning() -> Iterator[None]:
    """Without what peft 0.21 asks transformers 5.23 for by its old name: no user can change it."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning
        )
        yield


@contextmanager
def private_rng(seed: int) -> Iterator[None]:
    """Seeds weights drawn on the CPU inside the context; the caller's generator is untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
