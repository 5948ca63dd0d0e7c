"""What an update keeps of a token from the forward to the backward, in bytes.

Micro-batches are cut by these numbers, and the doctor's estimate of memory adds them up. The form
is the one of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(2022), Table 2, without the attention matrix, which `sdpa` never holds. The constants are measured
on a CPU.
"""

from contextlib import suppress
from typing import NamedTuple

from torch import nn
from transformers.pytorch_utils import Conv1D

from lit_rlhf.forward.networks import LanguageModel, trunk_of, unwrap_model

KEPT_NUMBERS = 1.5
"""Numbers that a layer keeps for each that goes into or comes out of its matmuls.

Norms, rotary positions and the activation function keep some beside the matmuls. This is a Llama's
number, in float32 and in bfloat16: in LLaMA's layers 57 bytes of bfloat16 per token and hidden
unit. GPT-2 keeps twice that, since its activation function is written out in several operations.
"""
LOGIT_BYTES = 14
"""Bytes of a logit in half precision: itself, its log-softmax in float32, and two gradients."""


class MatmulWidths(NamedTuple):
    """Sizes of a network that decide what its layers keep.

    Attributes:
        layers: Number of layers.
        hidden: Width of a token's hidden state.
        matmuls: Numbers per token that go into and come out of the matmuls of all layers.
    """

    layers: int
    hidden: int
    matmuls: float


def matmul_widths(model: LanguageModel) -> MatmulWidths:
    """Read the sizes of a network, without its head. Adapters of LoRA count as matmuls."""
    network = unwrap_model(model)
    head = network.get_output_embeddings()  # type: ignore[no-untyped-call]
    with suppress(ValueError):  # some models have no trunk of their own
        network = trunk_of(model)
    matmuls = 0
    for module in network.modules():
        if module is head:
            continue
        if isinstance(module, nn.Linear):  # the weight of one in 4 bits has another shape
            matmuls += module.in_features + module.out_features
        elif isinstance(module, Conv1D):
            matmuls += sum(module.weight.shape)
    config = network.config.get_text_config()
    return MatmulWidths(layers=config.num_hidden_layers, hidden=config.hidden_size, matmuls=matmuls)


def activation_bytes(widths: MatmulWidths, *, itemsize: int, checkpointing: bool) -> int:
    """Bytes that the layers keep of a token.

    Args:
        widths: Sizes of the network's trained layers.
        itemsize: Bytes of a number in computation: 2 in half precision, 4 in float32.
        checkpointing: Whether activations are computed again in the backward. Then the layers keep
            their inputs, and one layer at a time keeps all of it.

    Examples:
        >>> llama = MatmulWidths(layers=2, hidden=10, matmuls=2 * 190)
        >>> activation_bytes(llama, itemsize=4, checkpointing=False)  # 1.5 * 4 * 380
        2280
        >>> activation_bytes(llama, itemsize=4, checkpointing=True)  # 1.5 * 4 * 190 + 4 * 2 * 10
        1220
    """
    n_numbers = KEPT_NUMBERS * widths.matmuls
    if checkpointing:
        n_numbers = n_numbers / widths.layers + widths.layers * widths.hidden
    return int(itemsize * n_numbers)


def logit_bytes(itemsize: int) -> int:
    """Bytes of a logit in an update, with its gradient, by the bytes of a number."""
    return LOGIT_BYTES * itemsize // 2


def checkpoints_activations(model: LanguageModel) -> bool:
    """Whether a network computes activations again in the backward."""
    modules = unwrap_model(model).modules()
    return any(getattr(module, "gradient_checkpointing", False) for module in modules)
