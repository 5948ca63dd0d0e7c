"""Offloaded networks visit the device and leave nothing there."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from lit_rlhf.forward import Offloaded, offload, on_device
from tests.support.tiny_models import tiny_causal_lm

CPU = torch.device("cpu")


def places(network: torch.nn.Module) -> list[int]:
    return [t.data_ptr() for t in (*network.parameters(), *network.buffers())]


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Copies made, as for another device; without one, a CPU would use the tensors themselves."""
    made: list[Tensor] = []

    def copy(tensor: Tensor, device: torch.device) -> Tensor:
        made.append(tensor.to(device, copy=True))
        return made[-1]

    monkeypatch.setattr(offload, "copied_to", copy)
    return made


def test_weights_and_buffers_are_on_the_device_inside_and_at_home_outside(
    visits: list[Tensor],
) -> None:
    network = tiny_causal_lm("llama")
    home, ids = places(network), torch.arange(6).view(1, 6)
    expected = network(ids).logits
    with on_device(Offloaded(network), CPU) as visitor:
        assert places(visitor) == [tensor.data_ptr() for tensor in visits]
        assert not set(places(visitor)) & set(home)
        assert torch.equal(visitor(ids).logits, expected)
    assert places(network) == home


def test_an_error_inside_brings_the_network_home(visits: list[Tensor]) -> None:
    network = tiny_causal_lm("gpt2")  # its output layer is its embedding
    home = places(network)
    with pytest.raises(RuntimeError, match="inside"), on_device(Offloaded(network), CPU):
        raise RuntimeError("inside")
    assert places(network) == home
    assert len(visits) == len(home)


def test_it_is_frozen_and_no_part_of_a_module_that_holds_it() -> None:
    holder = torch.nn.Module()
    holder.reference = Offloaded(tiny_causal_lm())  # type: ignore[assignment]
    assert list(holder.parameters()) == []
    assert holder.state_dict() == {}
    network = holder.reference.network
    assert not network.training
    assert not any(p.requires_grad for p in network.parameters())


def test_a_network_that_is_not_offloaded_stays_where_it_is(visits: list[Tensor]) -> None:
    network = tiny_causal_lm()
    with on_device(network, CPU) as same:
        assert same is network
    assert visits == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_holds_the_weights_during_a_visit_only() -> None:
    network = tiny_causal_lm()
    size = sum(p.nbytes for p in network.parameters())
    gc.collect()
    before = torch.cuda.memory_allocated()
    with on_device(Offloaded(network), torch.device("cuda", 0)) as visitor:
        assert {p.device.type for p in visitor.parameters()} == {"cuda"}
        assert torch.cuda.memory_allocated() - before >= size
    assert torch.cuda.memory_allocated() == before
    assert {p.device.type for p in network.parameters()} == {"cpu"}
