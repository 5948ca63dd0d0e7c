"""Which network of a LightningModule each optimizer trains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer


def optimized_networks(module: nn.Module, optimizers: Sequence[Optimizer]) -> list[str]:
    """For each optimizer, the name of the direct child whose parameters it trains.

    Args:
        module: The LightningModule.
        optimizers: What its `configure_optimizers` returned.

    Raises:
        ValueError: If an optimizer's parameters are not all in one child, if a parameter is in two
            children, or if two optimizers train the same child.
    """
    owners: dict[int, set[str]] = {}
    for name, child in module.named_children():
        for parameter in child.parameters():
            owners.setdefault(id(parameter), set()).add(name)
    names: list[str] = []
    for index, optimizer in enumerate(optimizers):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found = [owners.get(id(p), set()) for p in parameters]
        networks = set[str]().union(*found)
        if len(networks) != 1 or not all(found):
            where = ", ".join(sorted(networks)) or "no child"
            outside = sum(not owner for owner in found)
            raise ValueError(
                f"optimizer {index}: expected the parameters of exactly one direct child module of "
                f"{type(module).__name__}, got those of: {where}"
                + (f", and {outside} that are in no child" if outside else "")
            )
        (name,) = networks
        if name in names:
            raise ValueError(
                f"optimizer {index}: {name!r} already has optimizer {names.index(name)}; give one "
                "optimizer several parameter groups instead"
            )
        names.append(name)
    return names


@torch.no_grad()
def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast a module's floating-point parameters in place; buffers (running moments) keep theirs."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
