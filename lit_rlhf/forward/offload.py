"""Frozen networks that stay in CPU memory and visit the device for their uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lit_rlhf.forward.networks import LanguageModel, freeze


class Offloaded:
    """A frozen network whose home is CPU memory; `on_device` brings it to the device and back.

    It is no module, so that a LightningModule that holds one neither moves, casts, wraps nor saves
    its weights.

    Args:
        network: A reference or reward model; it is frozen.
    """

    def __init__(self, network: LanguageModel) -> None:
        self.network = freeze(network).cpu()

    @contextmanager
    def visiting(self, device: torch.device) -> Iterator[LanguageModel]:
        """The network, on `device` inside the context."""
        tensors = [*self.network.parameters(), *self.network.buffers()]
        homes = [tensor.data for tensor in tensors]
        try:
            for tensor in tensors:
                tensor.data = copied_to(tensor.data, device)
            yield self.network
        finally:
            # frozen: the copies at home are still right, nothing travels back
            for tensor, home in zip(tensors, homes, strict=True):
                tensor.data = home


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


def copied_to(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`: itself if it is there."""
    return tensor.to(device)
