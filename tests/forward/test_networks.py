"""Modes of networks, dropout, and frozen networks that are on the device for their uses only."""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlhf import forward
from lit_rlhf.models import ModelOptions, load_causal_lm
from tests.support.pretend_cuda import CUDA, PretendCuda, is_on_device, mark
from tests.support.tiny_models import move_adapters, tiny_causal_lm, with_dropout

IDS = torch.arange(4, 24).reshape(2, 10)
MASK = torch.ones(2, 10, dtype=torch.bool)
CPU = torch.device("cpu")


def noisy_causal_lm(family: str) -> PreTrainedModel:
    return type(tiny_causal_lm(family))(with_dropout(family)).train()


def logits(model: forward.LanguageModel) -> Tensor:
    return forward.token_logits(model, IDS, MASK).detach()


def test_disabled_dropout_is_off_in_training_mode(family: str) -> None:
    model = noisy_causal_lm(family)
    assert not torch.equal(logits(model), logits(model))
    config = model.config.to_dict()
    forward.disable_dropout(model)
    trained = logits(model)
    assert model.training
    assert model.config.to_dict() == config
    assert torch.equal(trained, logits(model.train(False)))


def test_disabled_dropout_covers_adapters(causal_folder: Callable[[str], Path]) -> None:
    model = load_causal_lm(causal_folder("llama"), ModelOptions(lora_rank=2, lora_dropout=0.5))
    move_adapters(model)
    assert not torch.equal(logits(model), logits(model))
    forward.disable_dropout(model)
    assert torch.equal(logits(model), logits(model))


def test_evaluating_gives_every_module_its_mode_back() -> None:
    model = noisy_causal_lm("gpt2")
    model.get_submodule("transformer.h.1").eval()
    modes = [module.training for module in model.modules()]
    with forward.eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == modes
    assert set(modes) == {True, False}
    with pytest.raises(RuntimeError, match="stop"), forward.eval_mode(model):
        raise RuntimeError("stop")
    assert [module.training for module in model.modules()] == modes


def test_replaced_parameters_come_back_and_those_shared_with_other_layers_stay() -> None:
    embedding = torch.nn.Embedding(5, 3)
    head = torch.nn.Linear(3, 5)
    weight = embedding.weight
    bias = head.bias
    head.weight = weight

    def double(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        return torch.nn.Parameter(2 * parameter.detach())

    def use() -> None:
        with forward.replace_parameters([head], double):
            assert torch.equal(head.weight, 2 * weight)
            assert torch.equal(head.bias, 2 * bias)
            assert embedding.weight is weight
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        use()
    assert head.weight is weight
    assert head.bias is bias


def places(network: torch.nn.Module) -> list[int]:
    return [t.data_ptr() for t in (*network.parameters(), *network.buffers())]


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Copies made, as for another device; without one, a CPU would use the tensors themselves."""
    made: list[Tensor] = []

    def copy(tensor: Tensor, device: torch.device) -> Tensor:
        made.append(tensor.to(device, copy=True))
        return made[-1]

    monkeypatch.setattr("lit_rlhf.forward.networks.copy_to_device", copy)
    return made


@pytest.mark.parametrize("name", ["llama", "gpt2"])  # whose output layer is its embedding
def test_weights_and_buffers_are_on_device_inside_and_at_home_outside(
    visits: list[Tensor], name: str
) -> None:
    network = tiny_causal_lm(name)
    home, ids = places(network), torch.arange(6).view(1, 6)
    expected = network(ids).logits
    offloaded = forward.Offloaded(network)
    with forward.on_device(offloaded, CPU) as visitor:
        (copied,) = visits
        ends = (copied.data_ptr(), copied.data_ptr() + copied.nbytes)
        assert all(ends[0] <= place < ends[1] for place in places(visitor))
        assert len(set(places(visitor))) == len(home)
        assert torch.equal(visitor(ids).logits, expected)
    home = places(network)
    assert not any(ends[0] <= place < ends[1] for place in home)
    assert torch.equal(network(ids).logits, expected)
    with pytest.raises(RuntimeError, match="inside"), forward.on_device(offloaded, CPU):
        raise RuntimeError("inside")
    assert (places(network), len(visits)) == (home, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_visit_is_one_quick_copy(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Tensor] = []
    copy = forward.networks.copy_to_device

    def watched(tensor: Tensor, device: torch.device) -> Tensor:
        copies.append(copy(tensor, device))
        return copies[-1]

    monkeypatch.setattr(forward.networks, "copy_to_device", watched)
    network = tiny_causal_lm("llama")
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    with PretendCuda() as audit:
        with forward.on_device(forward.Offloaded(network), CUDA) as visitor:
            assert all(is_on_device(p) for p in (*visitor.parameters(), *visitor.buffers()))
        assert not any(is_on_device(p) for p in (*network.parameters(), *network.buffers()))
    assert (audit.waits, len(copies)) == ({}, 1)


@pytest.mark.parametrize("to_cpu", [False, True])
def test_shares_are_gathered_once_per_use(to_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, ranks = torch.arange(6).view(1, 6), (0, 1)
    # weights in bfloat16, and rotary frequencies in float32
    networks_of_ranks = [tiny_causal_lm("llama").to(torch.bfloat16) for _ in ranks]  # type: ignore[arg-type]
    expected = networks_of_ranks[0](ids).logits
    n_bytes = sum(map(n_bytes_of, networks_of_ranks)) // 2
    offloaded = [
        forward.Offloaded(network, to_cpu=to_cpu, shard=True) for network in networks_of_ranks
    ]
    gathered: list[int] = []

    def gather(whole: Tensor, share: Tensor) -> None:
        gathered.append(share.nbytes)
        whole.copy_(torch.cat([one._share.to(share.device) for one in offloaded]))

    monkeypatch.setattr(forward.networks, "world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", gather)
    with PretendCuda() as audit:
        for rank in ranks:
            monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
            with torch.inference_mode():  # a validation comes first
                offloaded[rank]._flatten(CUDA)
        for one, network in zip(offloaded, networks_of_ranks, strict=True):
            for inference in (True, False):
                with torch.inference_mode(inference), forward.on_device(one, CUDA) as visitor:
                    assert all(map(is_on_device, visitor.parameters()))
                    assert torch.equal(visitor(mark(ids.clone())).logits.cpu(), expected)
                assert n_bytes_of(network) == 0
                assert is_on_device(one._share) == (not to_cpu)
            with pytest.raises(RuntimeError, match="inside"), forward.on_device(one, CUDA):
                raise RuntimeError("inside")
            assert not any(p.numel() for p in network.parameters())
    assert (audit.refused, len(gathered)) == ([], 6)
    assert n_bytes / 2 <= gathered[0] < n_bytes / 2 * 1.1


def n_bytes_of(network: torch.nn.Module) -> int:
    return sum(t.nbytes for t in (*network.parameters(), *network.buffers()))


def test_offloaded_network_is_frozen_and_not_part_of_its_holder() -> None:
    holder = torch.nn.Module()
    holder.reference = forward.Offloaded(tiny_causal_lm())  # type: ignore[assignment]
    assert (list(holder.parameters()), holder.state_dict()) == ([], {})
    network = holder.reference.network
    assert not network.training
    assert not any(p.requires_grad for p in network.parameters())


def test_a_network_that_is_not_offloaded_stays_where_it_is(visits: list[Tensor]) -> None:
    network = tiny_causal_lm()
    with forward.on_device(network, CPU) as same:
        assert same is network
    assert visits == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_holds_the_weights_during_a_visit_only() -> None:
    network = tiny_causal_lm()
    size = sum(p.nbytes for p in network.parameters())
    gc.collect()
    before = torch.cuda.memory_allocated()
    with forward.on_device(forward.Offloaded(network), torch.device("cuda", 0)) as visitor:
        assert {p.device.type for p in visitor.parameters()} == {"cuda"}
        assert torch.cuda.memory_allocated() - before >= size
    assert torch.cuda.memory_allocated() == before
    assert {p.device.type for p in network.parameters()} == {"cpu"}
