"""Finds and names NaN and infinite numbers, on all ranks together.

All functions but `join_names` are collectives: under `torch.distributed` every rank has to call
them together, so that all ranks agree on what was found.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lit_rlhf.stats import global_sum, local_part, world_size

_MAX_NAMES = 4  # in a message


class NotFiniteError(ArithmeticError):
    """Some numbers are NaN or infinite.

    Attributes:
        names: What they are.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(f"expected finite numbers, got NaN or infinity in {join_names(names)}")
        self.names = list(names)


def weight_sums(network: nn.Module, name: str) -> dict[str, Tensor]:
    """Sum each weight of a network: it is finite only if all numbers of the weight are.

    Args:
        network: The network; of a sharded one, this rank's part is summed.
        name: Name of the network in the keys of the result.
    """
    # Unlike `isfinite`, a sum takes no memory.
    return {
        f"weights of {name} ({key})": local_part(weight.detach()).sum(dtype=torch.float32)
        for key, weight in network.named_parameters()
    }


def find_non_finite(quantities: Mapping[str, Tensor]) -> list[str]:
    """Names of the quantities that hold NaN or infinity on any rank, the same on all ranks."""
    # one number for each, so that one check serves all: a kernel per weight adds up on a GPU
    numbers = torch.stack([_reduce(value) for value in quantities.values()])
    counts = global_sum((~torch.isfinite(numbers)).int()).tolist()
    n_ranks = world_size()
    return [
        name if n_ranks == 1 else f"{name} (on {count} of {n_ranks} ranks)"
        for name, count in zip(quantities, counts, strict=True)
        if count
    ]


def _reduce(values: Tensor) -> Tensor:
    """A number, 0-dim, that is finite only if all of these are."""
    # times 0, because a sum of large numbers may be infinite
    return values if values.dim() == 0 else (values * 0).sum()


def require_finite(quantities: Mapping[str, Tensor]) -> None:
    """Raise NotFiniteError on all ranks unless these named tensors are finite on all of them."""
    if names := find_non_finite(quantities):
        raise NotFiniteError(names)


def require_finite_weights(module: nn.Module, name: str, where: str) -> None:
    """Refuse weights that are not finite, on all ranks.

    Args:
        module: The networks.
        name: Name of the module in the message.
        where: Where the weights come from, or go to, for the message.
    """
    if names := find_non_finite(weight_sums(module, name)):
        raise ValueError(
            f"{where}: expected finite numbers, got NaN or infinity in {join_names(names)}"
        )


def join_names(names: Sequence[str]) -> str:
    """The first names, and the number of the others: all weights may be NaN at once."""
    n_others = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {n_others} more" if n_others > 0 else "")
