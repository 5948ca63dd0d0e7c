"""Products by oneDNN are the cpu, of the layers and the sizes that gain by it."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lit_rlhf.forward import cpu, map_target_logits
from lit_rlhf.forward.cpu import filling, mkl_is_slow, with_fast_products
from lit_rlhf.functional import token_logprobs
from lit_rlhf.models import ModelOptions, load_causal_lm, load_lm_head
from lit_rlhf.models.loading import load_scalar_model
from lit_rlhf.rollout import SamplingOptions, generate_responses
from tests.rollout.test_decoder import EOS, by_transformers, prompts
from tests.support.tiny_models import FAMILIES, PAD_ID, tiny_causal_lm

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
    reason="expected a torch with oneDNN",
)


@pytest.fixture
def slow_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that leaves every product to oneDNN."""
    monkeypatch.setattr(cpu, "mkl_is_slow", lambda: True)
    monkeypatch.setattr(cpu, "LEAST", 1)


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of every product that oneDNN is left."""
    rows: list[int] = []
    linear = nn.functional.linear

    def noted(states: Tensor, *args: Tensor) -> Tensor:
        if states.is_mkldnn:
            rows.append(states.shape[:-1].numel())
        return linear(states, *args)

    monkeypatch.setattr(nn.functional, "linear", noted)
    return rows


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(600,), (2, 300)])
def test_values_and_gradients_are_those_of_float64(
    shape: tuple[int, ...],
    bias: bool,
    monkeypatch: pytest.MonkeyPatch,
    handed_over: list[int],
) -> None:
    monkeypatch.setattr(cpu, "mkl_is_slow", lambda: True)
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(160, 200, bias=bias)
    exact = copy.deepcopy(layer).double()
    states = torch.randn((*shape, 160), generator=generator)
    weights = torch.randn((*shape, 200), generator=generator)
    results = []
    for one, dtype in ((with_fast_products(layer), torch.float32), (exact, torch.float64)):
        leaf = states.clone().to(dtype).requires_grad_()
        output = one(leaf)
        (output * weights.to(dtype)).sum().backward()
        results.append([output, leaf.grad, *(p.grad for p in one.parameters())])
    assert handed_over == [600]
    for actual, expected in zip(*results, strict=True):
        assert actual.layout == torch.strided
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-4)


def test_what_gains_nothing_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, handed_over: list[int]
) -> None:
    states = torch.zeros(600, 160)
    with_fast_products(nn.Linear(160, 200))(states) if not mkl_is_slow() else None
    monkeypatch.setattr(cpu, "mkl_is_slow", lambda: True)
    layer = with_fast_products(nn.Linear(160, 200))
    layer(states[:524])  # 16.8 million multiplications are 2**24
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(states)
    layer.bfloat16()(states.bfloat16())
    assert handed_over == []
    layer.float()(states[:525])
    assert handed_over == [525]


@pytest.mark.parametrize(
    ("name", "capability", "slow"),
    [
        ("AMD EPYC", "AVX512", True),
        ("AMD EPYC", "AVX2", False),
        ("Intel(R) Xeon(R)", "AVX512", False),
        (None, "AVX512", False),
    ],
)
def test_amd_with_avx512_is_what_mkl_is_slow_on(
    name: str | None, capability: str, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {} if name is None else {"cpu_name": name}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert mkl_is_slow.__wrapped__() is slow
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # torch 2.11
    assert not mkl_is_slow.__wrapped__()


@pytest.mark.usefixtures("slow_mkl")
@pytest.mark.parametrize(
    "options",
    [ModelOptions(), ModelOptions(gradient_checkpointing=True), ModelOptions(lora_rank=2)],
    ids=["plain", "checkpointing", "lora"],
)
def test_a_network_that_is_loaded_multiplies_so(
    options: ModelOptions, folder: Path, handed_over: list[int]
) -> None:
    ids = torch.randint(4, 288, (3, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(20) < torch.tensor([[20], [9], [14]])
    targets = mask & (torch.arange(20) > 3)
    model = load_causal_lm(folder, options)
    plain = tiny_causal_lm()
    readings = []
    for network in (model, plain):
        n_before = len(handed_over)
        (logprobs,) = map_target_logits(
            network, ids, mask, targets, lambda a, b: (token_logprobs(a, b),)
        )
        logprobs.sum().backward()
        readings.append(logprobs)
        assert (len(handed_over) > n_before) == (network is model)
    torch.testing.assert_close(readings[0], readings[1], rtol=1e-5, atol=1e-5)
    if options.lora_rank == 0:
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("slow_mkl")
def test_heads_and_copies_multiply_so_too(folder: Path, handed_over: list[int]) -> None:
    head, scalar = load_lm_head(folder), load_scalar_model(folder)
    states = torch.ones(5, head.in_features)
    for layer in (head, scalar.score, copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        layer(states)
    assert handed_over == [5] * 4


@pytest.mark.usefixtures("slow_mkl")
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_fill_up_a_decode_step_change_nothing(family: str) -> None:
    ids, mask = prompts((20, 13, 5, 17, 2, 9))
    expected = by_transformers(tiny_causal_lm(family), ids, mask)
    greedy = SamplingOptions(max_new_tokens=30, do_sample=False)
    model = with_fast_products(tiny_causal_lm(family))
    read: list[int] = []
    model.get_input_embeddings().register_forward_hook(  # type: ignore[no-untyped-call]
        lambda _, inputs, __: read.extend([len(inputs[0])] if inputs[0].shape[1] == 1 else [])
    )
    for n_slots in (6, 2):
        rollouts = generate_responses(model, ids, mask, greedy, EOS, PAD_ID, 0, n_slots)
        width = rollouts.response_ids.shape[1]
        assert torch.equal(rollouts.response_ids, expected[:, :width])
    assert set(read) == {8}


def test_sizes_come_back_where_they_are_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    network = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2**15, bias=False))
    for slow, n_tokens, expected in ((False, 130, 0), (True, 127, 0), (True, 130, 62)):
        monkeypatch.setattr(cpu, "mkl_is_slow", lambda slow=slow: slow)
        assert filling(network, n_tokens, 64) == expected  # 128 * 4 * 2**15 are 2**24
    assert filling(nn.LayerNorm(3), 130, 64) == 0
    monkeypatch.setattr(cpu, "mkl_is_slow", lambda: False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert [filling(network, n, 8) for n in (1, 8, 13)] == [7, 0, 3]
    assert filling(network.bfloat16(), 13, 8) == 3
    assert filling(network.to("meta"), 13, 8) == 0
