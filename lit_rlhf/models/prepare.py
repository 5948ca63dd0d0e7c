"""Preparing a loaded network: LoRA adapters, the fastest forward, kernels and compilation."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lit_rlhf.forward import LanguageModel, ModuleT, optimize_forward, trunk_of, unwrap_model
from lit_rlhf.models.config import ModelOptions

LIGER_LOSSES = ("cross_entropy", "fused_linear_cross_entropy")
"""Arguments of liger-kernel that replace a model's own loss, which nothing here computes."""


def prepare_model(
    model: PreTrainedModel, options: ModelOptions, task: TaskType, seed: int
) -> LanguageModel:
    """Set a loaded model up for training as the options say; it is changed in place.

    Args:
        model: A causal language model or a scalar model.
        options: Adapters, gradient checkpointing, kernels and compilation.
        task: What peft takes the model for. Under `SEQ_CLS` the scalar head is trained in full.
        seed: Seed of the adapters' weights.

    Returns:
        The model in training mode, inside LoRA adapters if `options.lora_rank` is positive.
    """
    model.train()
    if options.gradient_checkpointing:
        model.activation_checkpointing_enable()
    prepared = optimize_forward(add_adapters(model, options, task, seed))
    # These come last: fused kernels need a GPU, and a compiled trunk would be compiled for the
    # sizes that `optimize_forward` compares forwards on.
    if options.fused_kernels:
        use_fused_kernels(prepared)
    if options.torch_compile is not None:
        compile_trunk(prepared, options.torch_compile)
    return prepared


def add_adapters(
    model: PreTrainedModel, options: ModelOptions, task: TaskType, seed: int
) -> LanguageModel:
    """Add LoRA adapters as the options say; without a rank, `model` itself is returned."""
    if options.lora_rank == 0:
        return model
    config = LoraConfig(
        task_type=task,
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,  # type: ignore[arg-type]  # peft 0.21 types it as int
        lora_dropout=options.lora_dropout,
        target_modules=options.lora_targets,
        # GPT-2's layers hold their weight transposed
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    with private_rng(seed), ignore_peft_warning():
        return get_peft_model(model, config)


def use_fused_kernels(model: ModuleT) -> ModuleT:
    """Replace norms, rotary positions and gated MLPs with Liger's kernels, on a CUDA device.

    Args:
        model: A causal language model or a scalar model, changed in place.

    Raises:
        ValueError: If liger-kernel is not installed, or does not know the architecture.
    """
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise ValueError(
            "fused_kernels: expected liger-kernel to be installed (pip install 'lit-rlhf[liger]'), "
            f"got {error}"
        ) from error
    inner = unwrap_model(model)
    architecture = str(inner.config.model_type)
    if architecture not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(
            f"fused_kernels: expected an architecture among "
            f"{', '.join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))}, got {architecture!r}"
        )
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN[architecture]
    accepted = inspect.signature(apply).parameters
    apply(model=inner, **{name: False for name in LIGER_LOSSES if name in accepted})
    return model


def compile_trunk(model: ModuleT, backend: str) -> ModuleT:
    """Put the trunk of `model` behind torch.compile, for sequences of any length.

    Args:
        model: A causal language model or a scalar model, changed in place.
        backend: Backend of torch.compile, for instance `inductor`.

    Raises:
        ValueError: If torch has no such backend.
    """
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise ValueError(f"torch_compile: expected one of {', '.join(known)}, got {backend!r}")
    trunk_of(model).compile(dynamic=True, backend=backend)
    return model


@contextmanager
def ignore_peft_warning() -> Iterator[None]:
    """Hide a warning that no user can act on.

    peft 0.21 reads an attribute of transformers models that transformers 5.23 has renamed.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning
        )
        yield


@contextmanager
def private_rng(seed: int) -> Iterator[None]:
    """Seed weights drawn on the CPU inside the context; the caller's generator stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
