"""Networks: their parts with and without LoRA adapters, their mode, their device and their plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rlhf.forward.cpu import NO_PADDING, PadToMultiple

LanguageModel: TypeAlias = PreTrainedModel | PeftModel
"""A causal language model or a trunk with a scalar head, with or without LoRA adapters."""

ModuleT = TypeVar("ModuleT", bound=nn.Module)

DROPOUT_LAYERS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)

PLAN_ATTRIBUTE = "_lit_rlhf_forward_plan"
"""Where a network keeps its `ForwardPlan`; deep copies and pickles keep it too."""


def unwrap_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model itself; LoRA layers, if any, stay in it and stay in effect.

    Raises:
        ValueError: If `model` is neither a transformers model nor one inside LoRA adapters.
    """
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(inner, PreTrainedModel):
        raise ValueError(
            "model: expected a transformers PreTrainedModel, with or without peft adapters, "
            f"got {type(model).__name__}"
        )
    return inner


def trunk_of(model: nn.Module) -> PreTrainedModel:
    """The network below the head, from token ids to hidden states.

    Raises:
        ValueError: If the architecture does not separate its trunk from its head.
    """
    inner = unwrap_model(model)
    trunk = inner.base_model
    if trunk is inner or not isinstance(trunk, PreTrainedModel):
        raise ValueError(f"model: expected a trunk with a head on it, got {type(inner).__name__}")
    return trunk


def scalar_head_of(model: nn.Module) -> nn.Module:
    """The layer of a scalar model that maps hidden states `[..., H]` to `[..., 1]`.

    Raises:
        ValueError: If `model` has no such layer, for instance as it is a causal language model.
    """
    inner = unwrap_model(model)
    head = getattr(inner, "score", None)
    if not isinstance(head, nn.Module) or inner.config.num_labels != 1:
        raise ValueError(
            "model: expected a scalar model (AutoModelForSequenceClassification with one label), "
            f"got {type(inner).__name__} with {inner.config.num_labels} labels"
        )
    return head


def freeze(model: ModuleT) -> ModuleT:
    """Put `model` into evaluation mode without gradients, as a reference or reward model."""
    return model.eval().requires_grad_(False)


def disable_dropout(model: ModuleT) -> ModuleT:
    """Switch dropout off in training mode too.

    PPO needs this: log-probs of rollout and update must come from the same network, yet gradient
    checkpointing acts in training mode only. The model's config, and so what is saved, keeps its
    probabilities.
    """
    for module in model.modules():
        if isinstance(module, DROPOUT_LAYERS):
            module.p = 0.0
        # attention and layer dropout are plain floats in many transformers modules
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the context; after it every submodule is in its own mode again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@dataclass(frozen=True)
class ForwardPlan:
    """How a network computes its forward pass, as `optimize_forward` decided.

    The default is the padded forward that any transformers model supports.

    Attributes:
        packed: Sequences lie back to back, so that padding costs nothing.
        chunked_logits: Logits are computed for the scored tokens only, a chunk at a time, by the
            trunk and the output layer one after the other.
        reason: Why the forward is padded; empty if it is packed.
        onednn_matmul: Large float32 matmuls go to oneDNN on CPUs.
        token_padding: What packed forwards pad their number of tokens to.
        row_padding: What decoding steps pad their number of rows to.
    """

    packed: bool = False
    chunked_logits: bool = False
    reason: str = "`optimize_forward` was not called"
    onednn_matmul: bool = False
    token_padding: PadToMultiple = NO_PADDING
    row_padding: PadToMultiple = NO_PADDING


def forward_plan(model: LanguageModel) -> ForwardPlan:
    """The plan of `model`; the default plan if it never went through `optimize_forward`."""
    plan = getattr(unwrap_model(model), PLAN_ATTRIBUTE, None)
    return plan if isinstance(plan, ForwardPlan) else ForwardPlan()


def supports_packing(model: LanguageModel) -> bool:
    """Whether the plan of `model` is the packed forward."""
    return forward_plan(model).packed


def supports_chunked_logits(model: LanguageModel) -> bool:
    """Whether the plan of `model` has chunked logits."""
    return forward_plan(model).chunked_logits


ALIGNMENT = 128
"""Numbers between the starts of tensors in a flat buffer: kernels want aligned addresses."""


class Offloaded:
    """A frozen network that stays in CPU memory; `on_device` copies it to a device for its uses.

    Its tensors lie in one buffer per type, which is pinned where there is CUDA: a visit is one
    asynchronous copy per type, instead of hundreds of blocking ones.

    It is not an `nn.Module`, so a LightningModule that holds one neither moves, casts, wraps nor
    saves its weights.

    Args:
        network: A reference or reward model; it is frozen.
    """

    def __init__(self, network: LanguageModel) -> None:
        self.network = freeze(network).cpu()
        self._flat: dict[torch.dtype, Tensor] = {}

    @contextmanager
    def visiting(self, device: torch.device) -> Iterator[LanguageModel]:
        """The network, on `device` inside the context."""
        if not self._flat:
            # not in the constructor: pinning memory sets CUDA up on the process's current device,
            # which is the rank's own only by now
            self._flat = self._flatten()
        try:
            for dtype, flat in self._flat.items():
                self._point_to(dtype, copy_to_device(flat, device))
            yield self.network
        finally:
            # the network is frozen, so the tensors in CPU memory are still right: nothing is copied
            # back
            for dtype, flat in self._flat.items():
                self._point_to(dtype, flat)

    def _flatten(self) -> dict[torch.dtype, Tensor]:
        """Move the tensors of each type into one buffer."""
        buffers = {}
        for dtype in {tensor.dtype for tensor in self._tensors()}:
            tensors = self._tensors(dtype)
            size = sum(_aligned(tensor.numel()) for tensor in tensors)
            flat = torch.empty(size, dtype=dtype, pin_memory=torch.cuda.is_available())
            values = [tensor.data for tensor in tensors]
            self._point_to(dtype, flat)
            for tensor, value in zip(tensors, values, strict=True):
                tensor.data.copy_(value)
            buffers[dtype] = flat
        return buffers

    def _tensors(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        tensors = [*self.network.parameters(), *self.network.buffers()]
        return [tensor for tensor in tensors if dtype in (None, tensor.dtype)]

    def _point_to(self, dtype: torch.dtype, flat: Tensor) -> None:
        """Let the tensors of a type be views of a buffer."""
        start = 0
        for tensor in self._tensors(dtype):
            tensor.data = flat[start : start + tensor.numel()].view(tensor.shape)
            start += _aligned(tensor.numel())


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


@contextmanager
def on_device(network: LanguageModel | Offloaded, device: torch.device) -> Iterator[LanguageModel]:
    """A network to use inside the context; one that is not offloaded stays where it is.

    Args:
        network: Any network, offloaded or not.
        device: Where an offloaded one goes.
    """
    if isinstance(network, Offloaded):
        with network.visiting(device) as visitor:
            yield visitor
    else:
        yield network


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`: itself if it is there already.

    The host does not wait for a copy from pinned memory. What is computed on the device does.
    """
    return tensor.to(device, non_blocking=True)
