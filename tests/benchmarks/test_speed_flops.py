"""Counts of operations, by hand."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.speed.flops import (
    generation_bytes,
    layer_weights,
    stage_flops,
    trunk_flops,
    update_flops,
)
from benchmarks.speed.workload import Workload, policy_network, scalar_network

# width of keys and values 4; a layer: 8*8 (q) + 2*8*4 (k, v) + 8*8 (o) + 3*8*12 = 480
SMALL = Workload(hidden=8, layers=2, heads=2, kv_heads=1, intermediate=12, vocab=16)


def test_weights_match_the_network() -> None:
    layers = policy_network(SMALL).get_submodule("model.layers")
    matrices = sum(p.numel() for p in layers.parameters() if p.dim() == 2)
    assert layer_weights(SMALL) == matrices


def test_trunks_forward_pass() -> None:
    # 3 tokens: 2 * 960 * 3 products; 6 pairs, each 2 products of width 8 in 2 layers
    assert trunk_flops(SMALL, 3) == 5760 + 6 * (2 * 2 * 8) * 2


def test_update_with_one_response() -> None:
    # prompt 2, response 2: three tokens are fed to policy and critic, four to the reward model
    trunk_of_3 = 5760 + 384
    trunk_of_4 = 2 * 960 * 4 + 10 * 64
    policy = trunk_of_3 + 2 * (2 * 8 * 16)
    critic = trunk_of_3 + 2 * (2 * 8)
    reward = trunk_of_4 + 2 * 8
    flops = update_flops(SMALL, [2], [2])
    assert flops.rollout == policy
    assert flops.score == policy + critic + reward
    assert flops.update == 3 * policy + 3 * critic
    assert flops.total == 5 * policy + 4 * critic + reward


def counted_by_torch(model: torch.nn.Module, ids: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        model(ids)
    counts = counter.get_flop_counts()["Global"].items()
    # Products of batches are not those of weights: of rotary frequencies and positions in older
    # releases of transformers, and of attention, which is none of its own in torch 2.8.
    apart = ("attention", "bmm")
    return sum(count for name, count in counts if not any(a in str(name) for a in apart))


def test_torch_counts_the_same_products_in_a_language_model() -> None:
    ids = torch.arange(4).unsqueeze(0) + 3
    attention = 10 * 64  # ten pairs, as above
    # five tokens of a prompt and a response: the last is not fed, four logits are used
    forward = stage_flops("sft", SMALL, [1], [4]).total / 3
    assert forward - attention == counted_by_torch(policy_network(SMALL), ids)


def test_torch_counts_the_same_products_in_a_scalar_model() -> None:
    ids = torch.arange(4).unsqueeze(0) + 3
    attention = 10 * 64
    unused = 3 * 2 * 8  # transformers reads the head at every token and takes the last
    forward = stage_flops("reward", SMALL, [1], [3]).total / 3
    assert forward - attention == counted_by_torch(scalar_network(SMALL), ids) - unused


def test_bytes_that_generation_reads() -> None:
    # two steps for the longer response: 960 + 8*16 weights each. Cached: 2 (k, v) * 2 layers * 4
    # values per token; the first response sees 3 and 4 tokens, the second 5.
    assert generation_bytes(SMALL, [3, 5], [2, 1], 2) == 2 * (2 * (960 + 128) + 16 * (3 + 4 + 5))
