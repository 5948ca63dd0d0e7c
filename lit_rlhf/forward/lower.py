"""The frozen layers below the trained ones: an update need not compute their outputs again.

Notation: `B` rows, `L` columns, `H` hidden size.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rlhf.forward.networks import LanguageModel, Offloaded, forward_plan, trunk_of, unwrap_model

MAX_LOWER_BYTES = 2**30
"""Largest outputs of a network that are kept, in bytes. The update computes larger ones again."""


def decoder_layers(trunk: PreTrainedModel) -> nn.ModuleList:
    """The layers of a trunk, from the bottom to the top."""
    n_layers = trunk.config.get_text_config().num_hidden_layers
    for module in trunk.modules():
        if isinstance(module, nn.ModuleList) and len(module) == n_layers:
            return module
    raise ValueError(
        f"model: expected a decoder with a list of {n_layers} layers, got {type(trunk).__name__}"
    )


def freeze_lower_layers(model: PreTrainedModel, n_trained: int) -> list[str]:
    """Freeze what the input of the highest `n_trained` layers depends on; name these layers."""
    trunk = trunk_of(model)
    layers = decoder_layers(trunk)
    if n_trained > len(layers):
        raise ValueError(
            f"trained_layers: expected at most the {len(layers)} layers of the network, "
            f"got {n_trained}"
        )
    n_lower = len(layers) - n_trained
    inputs: list[Tensor] = []

    def note(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs.append(args[0])

    hook = layers[n_lower].register_forward_pre_hook(note)
    with torch.enable_grad():
        trunk(input_ids=torch.zeros((1, 2), dtype=torch.long, device=model.device))
    hook.remove()
    # walk the graph to its leaves: a backward would take memory
    nodes = [inputs[0].grad_fn]
    seen = set(nodes)
    for node in nodes:
        if node is None:
            continue
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            leaf.requires_grad_(False)
        following = [function for function, _ in node.next_functions if function not in seen]
        seen.update(following)
        nodes += following
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(layer)] for layer in layers[:n_lower]]


def count_frozen_layers(trunk: PreTrainedModel) -> int:
    """Number of layers, from the bottom, without weights that are trained; 0 if all are frozen."""
    layers = decoder_layers(trunk)
    trained = [any(p.requires_grad for p in layer.parameters()) for layer in layers]
    in_layers = {id(parameter) for parameter in layers.parameters()}
    # adapters outside the layers are, with few exceptions, on what the lowest layer reads
    outside = [
        parameter
        for name, parameter in trunk.named_parameters()
        if ".lora_" in name and id(parameter) not in in_layers
    ]
    inputs = [*trunk.get_input_embeddings().parameters(), *outside]
    if True not in trained or any(parameter.requires_grad for parameter in inputs):
        return 0
    return trained.index(True)


class LowerStates:
    """Keeps what the lowest `n_layers` layers give in forwards over consecutive rows."""

    def __init__(self, n_layers: int) -> None:
        self.n_layers = n_layers
        self._parts: list[Tensor] = []

    @classmethod
    def of(cls, model: LanguageModel, mask: Tensor) -> "LowerStates | None":
        """A keeper for forwards of a model, or `None` if it computes all layers in the update.

        Args:
            model: The model, whose plan says how many layers are below the trained ones.
            mask: Real tokens of all rows, `[B, L]` bool.
        """
        n_layers = forward_plan(model).lower_layers
        width = next(model.parameters()).itemsize * trunk_of(model).config.hidden_size
        return cls(n_layers) if n_layers and mask.numel() * width <= MAX_LOWER_BYTES else None

    @contextmanager
    def recording(self, model: LanguageModel, mask: Tensor) -> Iterator[None]:
        """Keep the outputs of one packed forward of the rows `mask`."""
        outputs: list[Tensor] = []
        layer = decoder_layers(trunk_of(model))[self.n_layers - 1]
        hook = layer.register_forward_hook(lambda _, __, output: outputs.append(output))
        try:
            yield
        finally:
            hook.remove()
        tokens = outputs[0].detach().squeeze(0)  # the real ones, and padding behind them
        rectangle = tokens.new_zeros((*mask.shape, tokens.shape[-1]))
        self._parts.append(rectangle.masked_scatter(mask.unsqueeze(-1), tokens))

    def states(self) -> Tensor | None:
        """Outputs at the tokens of all rows, `[B, L, H]`; `None` if there was no forward."""
        return torch.cat(self._parts) if self._parts else None


@contextmanager
def start_above(trunk: PreTrainedModel, n_layers: int, states: Tensor) -> Iterator[None]:
    """Let the first layers of a trunk give known states inside the context, without computing.

    Args:
        trunk: The trunk.
        n_layers: Number of layers, from the bottom.
        states: What they give, in the shape of the forward, `[..., H]`.
    """
    lower = list(decoder_layers(trunk)[:n_layers])
    forwards = [vars(layer).get("forward") for layer in lower]
    for layer in lower:
        layer.forward = lambda *_, **__: states
    try:
        yield
    finally:
        for layer, forward in zip(lower, forwards, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def share_lower_layers(model: LanguageModel, *, source: LanguageModel) -> None:
    """Give `model` the very weights of `source` below its trained layers, where they are equal."""
    n_layers = forward_plan(source).lower_layers
    if not n_layers:
        return
    model_layers, source_layers = (_lower_modules(network, n_layers) for network in (model, source))
    shared = dict(source_layers.named_parameters())
    for name, weight in list(model_layers.named_parameters()):
        if weight.dtype == shared[name].dtype and torch.equal(weight, shared[name]):
            parent, _, attribute = name.rpartition(".")
            setattr(model_layers.get_submodule(parent), attribute, shared[name])
    unwrap_model(model).tie_weights()


def has_lower_layers_of(model: LanguageModel | Offloaded, source: LanguageModel) -> bool:
    """Whether `model` has the very weights of `source` below its trained layers."""
    if isinstance(model, Offloaded):
        return False
    n_layers = forward_plan(source).lower_layers
    model_layers, source_layers = (_lower_modules(network, n_layers) for network in (model, source))
    pairs = zip(model_layers.parameters(), source_layers.parameters(), strict=True)
    return all(weight is source_weight for weight, source_weight in pairs)


def _lower_modules(model: LanguageModel, n_layers: int) -> nn.ModuleList:
    trunk = trunk_of(model)
    return nn.ModuleList([trunk.get_input_embeddings(), *decoder_layers(trunk)[:n_layers]])
