"""Networks: their parts with and without LoRA adapters, their mode, their device and their plan."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from peft import PeftModel
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lit_rlhf.forward.cpu import NO_PADDING, PadToMultiple
from lit_rlhf.stats import world_size

LanguageModel: TypeAlias = PreTrainedModel | PeftModel
"""A causal language model or a trunk with a scalar head, with or without LoRA adapters."""

ModuleT = TypeVar("ModuleT", bound=nn.Module)
ResultT = TypeVar("ResultT")

DROPOUT_LAYERS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
"""All dropout layers of torch; their common base is private."""

PLAN_ATTRIBUTE = "_lit_rlhf_forward_plan"
"""Where a network keeps its `ForwardPlan`; deep copies and pickles keep it too."""


def unwrap_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model itself; LoRA layers, if any, stay in it and stay in effect."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(inner, PreTrainedModel):
        raise ValueError(
            "model: expected a transformers PreTrainedModel, with or without peft adapters, "
            f"got {type(model).__name__}"
        )
    return inner


def trunk_of(model: nn.Module) -> PreTrainedModel:
    """The network below the head, from token ids to hidden states."""
    inner = unwrap_model(model)
    trunk = inner.base_model
    if trunk is inner or not isinstance(trunk, PreTrainedModel):
        raise ValueError(f"model: expected a trunk with a head on it, got {type(inner).__name__}")
    return trunk


def scalar_head_of(model: nn.Module) -> nn.Module:
    """The layer of a scalar model that maps hidden states `[..., H]` to `[..., K]` of `K` heads."""
    inner = unwrap_model(model)
    head = getattr(inner, "score", None)
    if not isinstance(head, nn.Module) or not count_heads(inner.config):
        raise ValueError(
            "model: expected a scalar model (AutoModelForSequenceClassification with one label, or "
            f"heads of RewardModule), got {type(inner).__name__}, {inner.config.num_labels} labels"
        )
    return head


def count_heads(config: PreTrainedConfig) -> int:
    """Number of scalar heads: 1 of one label, several by `head_labels`, 0 of a classifier."""
    n_labels = config.num_labels or 0
    return n_labels if n_labels == 1 or config.id2label == head_labels(n_labels) else 0


def head_labels(heads: int) -> dict[int, str]:
    """Labels in the config of a scalar model with several heads, which tell it from others."""
    return {head: f"reward_{head}" for head in range(heads)}


def stop_token_ids(
    model: LanguageModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> list[int]:
    """Ids of the tokens that end a response, ascending: the model's and the tokenizer's EOS tokens.

    `generation_config.json` of a chat model has several, such as the ends of a turn and of a
    document.
    """
    config = unwrap_model(model).generation_config
    ids = None if config is None else config.eos_token_id
    listed = [i for i in (ids if isinstance(ids, list | tuple) else [ids]) if i is not None]
    if not all(isinstance(i, int) for i in listed):
        raise ValueError(f"path: expected ids of tokens in eos_token_id of a model, got {ids!r}")
    stop_ids = set(listed)
    if tokenizer is not None:
        stop_ids.add(int(tokenizer.eos_token_id))
    return sorted(stop_ids)


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


CALL = "lit_rlhf_call"
"""Method of a sharded network that calls a function while the network's weights can be used."""


def is_language_model(module: nn.Module) -> bool:
    """Whether a module is a transformers model, with or without adapters."""
    return isinstance(module, PreTrainedModel | PeftModel)


def is_sharded(network: nn.Module) -> bool:
    """Whether this rank has only a share of some weights at the moment."""
    return any(isinstance(parameter, DTensor) for parameter in network.parameters())


def call(network: nn.Module, function: Callable[..., ResultT], *args: object) -> ResultT:
    """The result of a function that computes with a network, whose gradient may be taken.

    The weights of a sharded network are gathered layer by layer, here and in the backward. All
    ranks have to call it equally often.
    """
    method: Callable[..., ResultT] | None = getattr(network, CALL, None)
    return function(*args) if method is None else method(function, *args)


def gathered(network: nn.Module) -> AbstractContextManager[None]:
    """All weights of a sharded network inside the context, which computes no gradients.

    Inside, ranks may call the network and its parts as often as they like.
    """
    # not sharded may also mean gathered already
    return _gather_shards(network) if is_sharded(network) else nullcontext()


@contextmanager
def _gather_shards(network: nn.Module) -> Iterator[None]:
    parts = [module for module in network.modules() if isinstance(module, FSDPModule)]
    try:
        with torch.inference_mode(False):  # an update uses the same memory
            for part in parts:
                part.set_reshard_after_forward(False)
                part.unshard()
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(True)
            part.reshard()


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, gathered, inside the context; each submodule has its own mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with gathered(model):
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def replace_parameters(
    layers: Iterable[nn.Module], make: Callable[[nn.Parameter], nn.Parameter]
) -> Iterator[None]:
    """Give layers other parameters inside the context; they have their own again afterwards.

    A layer outside of `layers` that shares a parameter, like a tied embedding, keeps it.

    Args:
        layers: The layers, whose submodules stay as they are.
        make: Makes the other parameter from a layer's own.
    """
    originals = {layer: dict(layer.named_parameters(recurse=False)) for layer in layers}
    try:
        for layer, parameters in originals.items():
            for name, parameter in parameters.items():
                setattr(layer, name, make(parameter))
        yield
    finally:
        for layer, parameters in originals.items():
            for name, parameter in parameters.items():
                setattr(layer, name, parameter)


def copy_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Copy a parameter, for `replace_parameters`, so that the original stays as it is."""
    return nn.Parameter(parameter.detach().clone(), parameter.requires_grad)


@dataclass(frozen=True)
class ForwardPlan:
    """Decisions of `optimize_forward` on how a network computes its forward pass.

    The default is the padded forward that any transformers model supports.

    Attributes:
        packed: Sequences lie back to back, so that padding costs nothing.
        chunked_logits: Logits are computed for the scored tokens only, a chunk at a time, by the
            trunk and the output layer one after the other.
        reason: Why the forward is padded; empty if it is packed.
        onednn_matmul: Large float32 matmuls go to oneDNN on CPUs.
        token_padding: What packed forwards pad their number of tokens to.
        row_padding: What decoding steps pad their number of rows to.
        lower_layers: Number of layers below the trained ones, whose outputs PPO keeps.
        varying_positions: Rotary factors would depend on the longest row of a forward, and are
            fixed by `set_longest_sequence`.
    """

    packed: bool = False
    chunked_logits: bool = False
    reason: str = "`optimize_forward` was not called"
    onednn_matmul: bool = False
    token_padding: PadToMultiple = NO_PADDING
    row_padding: PadToMultiple = NO_PADDING
    lower_layers: int = 0
    varying_positions: bool = False


def forward_plan(model: LanguageModel) -> ForwardPlan:
    """The plan of `model`; the default plan if it never went through `optimize_forward`."""
    plan = getattr(unwrap_model(model), PLAN_ATTRIBUTE, None)
    return plan if isinstance(plan, ForwardPlan) else ForwardPlan()


_ALIGNMENT = 256
"""Tensors in a buffer begin at multiples of this many bytes, which kernels need."""


class _BufferPlace(NamedTuple):
    """Position of a tensor in the buffer of its network.

    Attributes:
        tensor: The parameter or buffer.
        shape: Its shape.
        start: Its first byte in the buffer.
    """

    tensor: Tensor
    shape: torch.Size
    start: int


class Offloaded:
    """A frozen network that `on_device` puts on a device for its uses.

    Between uses it is in CPU memory, or each rank keeps an equal share of it, on its device or in
    CPU memory. All of its tensors lie in one buffer, which is pinned in CPU memory where there is
    CUDA. So a use costs one asynchronous copy, and of shares one collective, instead of hundreds of
    blocking copies. Between uses the tensors of a network in shares are empty.

    All ranks have to use a network that they share at the same time. It is not an `nn.Module`, so a
    LightningModule that holds one neither moves, casts, wraps nor saves its weights.
    """

    def __init__(self, network: LanguageModel, *, to_cpu: bool = True, shard: bool = False) -> None:
        self.network = freeze(network).cpu()
        self._to_cpu = to_cpu
        self._shard = shard
        self._places: list[_BufferPlace] = []
        self._share = torch.empty(0)
        self._n_ranks = 1  # that have a share

    @contextmanager
    def visiting(self, device: torch.device) -> Iterator[LanguageModel]:
        """The network, on `device` inside the context."""
        if not self._places:
            # not in the constructor: the ranks know each other, and the process's current device,
            # which pinning memory sets CUDA up on, is the rank's own, only by now
            self._flatten(device)
        at_home = self._share if self._n_ranks == 1 else None
        try:
            self._point_to(self._gather(copy_to_device(self._share, device)))
            yield self.network
        finally:
            self._point_to(at_home)  # nothing is copied back: the network is frozen

    # A validation may be the first use. Tensors of its inference mode cannot be written later.
    @torch.inference_mode(False)
    def _flatten(self, device: torch.device) -> None:
        """Move the network, or this rank's share of it, into one buffer."""
        n_bytes = 0
        places = []
        for tensor in (*self.network.parameters(), *self.network.buffers()):
            places.append(_BufferPlace(tensor, tensor.shape, start=n_bytes))
            n_bytes += _round_up(tensor.numel() * tensor.itemsize, _ALIGNMENT)
        self._n_ranks = world_size() if self._shard else 1
        rank = distributed.get_rank() if self._n_ranks > 1 else 0
        size = _round_up(n_bytes, self._n_ranks * _ALIGNMENT) // self._n_ranks
        if self._to_cpu:
            pin = device.type == "cuda" and torch.cuda.is_available()
            self._share = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
        else:
            self._share = torch.empty(size, dtype=torch.uint8, device=device)
        self._places = places
        for tensor, _, start in places:
            values = tensor.data.flatten().view(torch.uint8)
            first = rank * size - start  # start of the share, counted from the tensor's first byte
            part = values[max(first, 0) : max(first + size, 0)]
            offset = max(-first, 0)
            self._share[offset : offset + len(part)].copy_(part, non_blocking=True)
            tensor.data = tensor.data.new_empty(0)  # now: else the network is in memory twice

    def _gather(self, share: Tensor) -> Tensor:
        """The shares of all ranks in one buffer."""
        if self._n_ranks == 1:
            return share
        buffer = share.new_empty(self._n_ranks * len(share))
        distributed.all_gather_into_tensor(buffer, share)
        return buffer

    def _point_to(self, buffer: Tensor | None) -> None:
        """Let the tensors be views of the network's buffer, or empty without one."""
        for tensor, shape, start in self._places:
            if buffer is None:
                tensor.data = tensor.data.new_empty(0)
            else:
                part = buffer[start : start + shape.numel() * tensor.itemsize]
                tensor.data = part.view(tensor.dtype).view(shape)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@contextmanager
def on_device(network: LanguageModel | Offloaded, device: torch.device) -> Iterator[LanguageModel]:
    """A network to use inside the context, gathered; `device` is for an offloaded one."""
    if isinstance(network, Offloaded):
        with network.visiting(device) as visitor:
            yield visitor
    else:
        with gathered(network):
            yield network


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`: itself if it is there already.

    The host does not wait for a copy from pinned memory. What is computed on the device does.
    """
    return tensor.to(device, non_blocking=True)
