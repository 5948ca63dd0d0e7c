"""Preparing a loaded network: LoRA adapters, the fastest forward, kernels and compilation."""

import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import isroutine
from types import FunctionType, MethodType
from typing import Any

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lit_rlhf.checks import check_choice
from lit_rlhf.forward import (
    PLAN_ATTRIBUTE,
    LanguageModel,
    ModuleT,
    decoder_layers,
    forward_plan,
    freeze_lower_layers,
    optimize_forward,
    trunk_of,
    unwrap_model,
)
from lit_rlhf.models.config import ModelOptions

MAMBA_TYPES = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")
"""Model types with Mamba's layers."""
MAMBA_KERNEL_LAYERS = r".*\.(x_proj|dt_proj|out_proj)"
"""Their layers whose weights kernels read, which pass adapters by."""

_LIGER_LOSSES = ("cross_entropy", "fused_linear_cross_entropy")
"""Arguments of liger-kernel that replace a model's own loss, which nothing here computes."""

MAX_GRAPHS = 64
"""Graphs that torch.compile may make of one function before it runs it uncompiled.

torch allows 8. But it counts by code, not by module: the layers of all networks of a stage share
the graphs of their class, and need different ones for prompts, decoding steps, scoring, training
and activations that are computed again, with and without adapters.
"""


def prepare_model(
    model: PreTrainedModel, options: ModelOptions, task: TaskType, *, seed: int, role: str = ""
) -> LanguageModel:
    """Set a loaded model up for training.

    Args:
        model: The model, which is changed in place.
        options: How it is run and trained.
        task: peft's name of its kind. Under `SEQ_CLS` the scalar head is trained in full.
        seed: Seed of the adapters.
        role: What the model is for, see `optimize_forward`.
    """
    model.train()
    lower = []
    if options.trained_layers is not None:
        lower = freeze_lower_layers(model, options.trained_layers)
    if options.gradient_checkpointing:
        checkpoint_activations(model)
    adapted = add_adapters(model, options, task, seed=seed, without=lower)
    prepared = optimize_forward(adapted, role)
    # Compilation comes last: a compiled trunk would be compiled for the sizes that
    # `optimize_forward` compares forwards on.
    if options.fused_kernels:
        use_fused_kernels(prepared)
    if options.torch_compile is not None:
        check_choice(
            "torch_compile", options.torch_compile, torch.compiler.list_backends(exclude_tags=())
        )
        _compile_layers(prepared, options.torch_compile)
        # compiled layers do not take over what lower layers gave in the rollout
        plan = replace(forward_plan(prepared), lower_layers=0)
        setattr(unwrap_model(prepared), PLAN_ATTRIBUTE, plan)
    return prepared


def _compile_layers(model: LanguageModel, backend: str) -> None:
    """Compile each decoder layer at its first call, for sequences of any length."""
    # Layers of one kind share what is compiled for the first of them. A trunk would be compiled
    # with all of its layers.
    arguments: dict[str, Any] = {"dynamic": True, "backend": backend}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:  # torch 2.13
        arguments["recompile_limit"] = MAX_GRAPHS
    else:
        limit = max(torch._dynamo.config.recompile_limit, MAX_GRAPHS)
        torch._dynamo.config.recompile_limit = limit
    for layer in decoder_layers(trunk_of(model)):
        layer.compile(**arguments)


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Have a model compute activations again in the backward (gradient checkpointing)."""
    # transformers 5.23 deprecates the only name that older releases have
    new_name = getattr(model, "activation_checkpointing_enable", None)
    (new_name or model.gradient_checkpointing_enable)()


def add_adapters(
    model: PreTrainedModel,
    options: ModelOptions,
    task: TaskType,
    *,
    seed: int,
    without: Sequence[str] = (),
) -> LanguageModel:
    """Add LoRA adapters to a model. Everything that is trained is float32.

    Args:
        model: The model.
        options: The options of the adapters. With a rank of 0 the model itself is returned.
        task: peft's name of the model's kind. Under `SEQ_CLS` the scalar head is trained in full.
        seed: Seed of the adapters' weights.
        without: Names of layers that get no adapters.
    """
    if options.lora_rank == 0:
        return model
    check_rank("network.lora_rank", options.lora_rank, model)
    patterns = [rf"{re.escape(name)}\..*" for name in without]
    if options.lora_targets == "all-linear" and model.config.model_type in MAMBA_TYPES:
        patterns.append(MAMBA_KERNEL_LAYERS)
    config = LoraConfig(
        task_type=task,
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,  # type: ignore[arg-type]  # peft 0.21 types it as int
        lora_dropout=options.lora_dropout,
        target_modules=options.lora_targets,
        exclude_modules="|".join(patterns) or None,
        # GPT-2's layers hold their weight transposed
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    try:
        with private_rng(seed), ignore_peft_warning():
            adapted = get_peft_model(model, config)
    except ValueError as error:  # peft's own words name options of peft
        raise ValueError(
            "network.lora_targets: expected modules of the network that LoRA can adapt, got "
            f"{options.lora_targets!r}: {error}"
        ) from error
    # peft (0.21) casts adapters, but leaves its copy of the scalar head in the type of the model
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted


def check_rank(name: str, rank: int, model: PreTrainedModel) -> None:
    """Refuse a rank of adapters beyond the network's width, before memory is taken for them.

    Such adapters have more weights than what they adapt, and can learn nothing more.

    Args:
        name: Where the rank comes from, for the error.
        rank: The rank.
        model: The network.
    """
    width: int = model.config.get_text_config().hidden_size
    if rank > width:
        raise ValueError(f"{name}: expected at most the width of the network, {width}, got {rank}")


def use_fused_kernels(model: ModuleT) -> ModuleT:
    """Replace norms, rotary positions and gated MLPs of `model` with Liger's kernels, in place.

    They act on tensors on a CUDA device; elsewhere, and in other networks, nothing changes.
    """
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise ValueError(
            "fused_kernels: expected liger-kernel to be installed (pip install liger-kernel), "
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
    # the global names of the architecture's file in transformers
    names = vars(sys.modules[type(inner).__module__])
    original_names = dict(names)
    apply(model=inner, **{name: False for name in _LIGER_LOSSES if name in accepted})
    # Liger (0.8.5) binds its forwards to the layers of the model, but it also replaces classes and
    # functions of the file, for every network of the process.
    fused = {name: value for name, value in names.items() if original_names.get(name) is not value}
    names |= original_names
    functions = {
        name: _on_cuda(value, original_names[name])
        for name, value in fused.items()
        if isroutine(value)
    }
    for layer in inner.modules():
        # transformers wraps some forwards to warn of deprecated arguments
        plain = inspect.unwrap(type(layer).forward)
        bound = vars(layer).get("forward")
        if isinstance(bound, MethodType) and bound.__func__ is not plain:
            vars(layer)["forward"] = MethodType(_on_cuda(bound.__func__, plain), layer)
        elif functions.keys() & set(plain.__code__.co_names) and plain.__globals__ is names:
            # the same forward with other functions, such as for rotary positions, in its scope
            rewired = FunctionType(
                plain.__code__,
                names | functions,
                plain.__name__,
                plain.__defaults__,
                plain.__closure__,
            )
            vars(layer)["forward"] = MethodType(rewired, layer)
    return model


def _on_cuda(fused: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """`fused` where the first tensor among the arguments is on a CUDA device, else `plain`."""

    def choose(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # a layer's own signature
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        function = fused if next(tensors).device.type == "cuda" else plain
        return function(*args, **kwargs)

    return choose


@contextmanager
def ignore_peft_warning() -> Iterator[None]:
    """Hide what peft 0.21 warns of without need.

    It reads an attribute of models that transformers 5.23 has renamed. It warns of adapters on tied
    embeddings, which are merged here so that neither layer changes with the other, and of GPT-2's
    output layer, whose weight is not transposed like its other layers'.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning
        )
        warnings.filterwarnings("ignore", "Model (has|with) `tie_word_embeddings", UserWarning)
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to True but", UserWarning)
        yield


@contextmanager
def private_rng(seed: int) -> Iterator[None]:
    """Seed weights drawn on the CPU inside the context; the caller's generator stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
