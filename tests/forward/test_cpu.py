"""oneDNN matmul and padding to multiples."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lit_rlhf.forward import cpu, forward_plan, optimize_forward, target_logprobs
from lit_rlhf.forward.cpu import PadToMultiple, matmul_dtype, mkl_is_slow, use_onednn_matmul
from lit_rlhf.models import ModelOptions, load_causal_lm, load_lm_head, load_scalar_model
from lit_rlhf.rollout import SamplingOptions
from tests.support.decoding import generate_with_transformers, make_prompts, sample_responses
from tests.support.tiny_models import FAMILIES, tiny_causal_lm

onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
    reason="expected a torch with oneDNN",
)


@pytest.fixture
def slow_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where every float32 matmul goes to oneDNN."""
    monkeypatch.setattr("lit_rlhf.forward.optimize.mkl_is_slow", lambda: True)
    monkeypatch.setattr(cpu, "MIN_MULTIPLICATIONS", 1)


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of every matmul that oneDNN gets."""
    rows: list[int] = []
    multiply = cpu._multiply

    def noted(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.is_contiguous() and states.is_contiguous():  # not the matmuls of a backward
            rows.append(states.shape[:-1].numel())
        return multiply(states, weight, bias)

    monkeypatch.setattr(cpu, "_multiply", noted)
    return rows


@onednn
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(600,), (2, 300)])
def test_onednn_matmul_agrees_with_float64(
    shape: tuple[int, ...], bias: bool, expanded: bool, frozen: bool, handed_over: list[int]
) -> None:
    generator, layer = torch.Generator().manual_seed(0), nn.Linear(160, 200, bias=bias)
    exact = copy.deepcopy(layer.requires_grad_(not frozen)).double()
    use_onednn_matmul(layer)
    states = torch.randn((*shape, 160), generator=generator)
    weights, results = torch.randn((*shape, 200), generator=generator), []
    for one, dtype in ((layer, torch.float32), (exact, torch.float64)):
        leaf = states.clone().to(dtype).requires_grad_()
        with torch.autograd.set_detect_anomaly(expanded):  # which reads the gradients
            output = one(leaf)
            # the gradient of a sum is one number, expanded
            (output if expanded else output * weights.to(dtype)).sum().backward()
        assert [p.grad is None for p in one.parameters()] == [frozen] * (1 + bias)
        results.append([output, leaf.grad, *(p.grad for p in one.parameters() if not frozen)])
    assert handed_over == [600]
    for actual, expected in zip(*results, strict=True):
        assert actual.layout == torch.strided
        # torch's own layer is off by up to 5e-5 in the gradients of weights, sums over 600 rows
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=5e-4)


@onednn
def test_no_copy_of_the_input_is_kept_for_the_backward() -> None:
    layer = nn.Linear(160, 200)
    use_onednn_matmul(layer)
    states = torch.randn(600, 160)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(states)
    assert saved == [states.data_ptr(), layer.weight.data_ptr()]


@onednn
def test_small_and_low_precision_matmuls_stay_with_torch(handed_over: list[int]) -> None:
    states, layer = torch.zeros(600, 160), nn.Linear(160, 200)
    use_onednn_matmul(layer)
    layer(states[:131])  # 4.2 million multiplications are 2**22
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(states)
    layer.bfloat16()(states.bfloat16())
    vector = nn.Linear(2**12, 2**12)
    use_onednn_matmul(vector)
    vector(torch.zeros(2**12))
    assert handed_over == []
    layer.float()(states[:132])
    assert handed_over == [132]


@pytest.mark.parametrize("slow", [False, True])
def test_networks_multiply_with_onednn_where_mkl_is_slow(
    slow: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lit_rlhf.forward.optimize.mkl_is_slow", lambda: slow)
    model = load_causal_lm(folder)
    assert forward_plan(model).onednn_matmul is slow
    assert isinstance(model.get_submodule("lm_head"), cpu.OneDNNLinear) is slow


@onednn
@pytest.mark.parametrize(
    ("name", "capability", "slow"),
    [
        ("AMD EPYC", "AVX512", True),
        ("AMD EPYC", "AVX2", False),
        ("Intel(R) Xeon(R)", "AVX512", False),
        (None, "AVX512", False),
    ],
)
def test_mkl_is_slow_on_amd_processors_with_avx512(
    name: str | None, capability: str, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {} if name is None else {"cpu_name": name}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert mkl_is_slow.__wrapped__() is slow
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # torch 2.11
    assert not mkl_is_slow.__wrapped__()


@onednn
@pytest.mark.usefixtures("slow_mkl")
@pytest.mark.parametrize(
    "options",
    [ModelOptions(), ModelOptions(gradient_checkpointing=True), ModelOptions(lora_rank=2)],
    ids=["plain", "checkpointing", "lora"],
)
def test_networks_use_onednn(options: ModelOptions, folder: Path, handed_over: list[int]) -> None:
    ids = torch.randint(4, 288, (3, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(20) < torch.tensor([[20], [9], [14]])
    targets, model = mask & (torch.arange(20) > 3), load_causal_lm(folder, options)
    plain, readings = tiny_causal_lm(), []
    for network in (model, plain):
        n_before = len(handed_over)
        logprobs = target_logprobs(network, ids, mask, targets)
        logprobs.sum().backward()
        readings.append(logprobs)
        assert (len(handed_over) > n_before) == (network is model)
    torch.testing.assert_close(readings[0], readings[1], rtol=1e-5, atol=1e-5)
    if options.lora_rank == 0:
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


@onednn
@pytest.mark.usefixtures("slow_mkl")
def test_heads_and_copies_use_onednn_too(folder: Path, handed_over: list[int]) -> None:
    head, scalar = load_lm_head(folder), load_scalar_model(folder, head_seed=0)
    states = torch.ones(5, head.in_features)
    del handed_over[:]  # filled by the forwards that are compared after loading
    for layer in (head, scalar.score, copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        layer(states)
    assert handed_over == [5] * 4


@onednn
@pytest.mark.usefixtures("slow_mkl")
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_rows_of_a_decoding_step_change_nothing(family: str) -> None:
    ids, mask = make_prompts((20, 13, 5, 17, 2, 9))
    expected = generate_with_transformers(tiny_causal_lm(family), ids, mask)
    greedy = SamplingOptions(max_new_tokens=30, do_sample=False)
    model = optimize_forward(tiny_causal_lm(family))
    read: list[int] = []
    model.get_input_embeddings().register_forward_hook(
        lambda _, inputs, __: read.extend([len(inputs[0])] if inputs[0].shape[1] == 1 else [])
    )
    for n_slots in (6, 2):
        rollouts = sample_responses(model, ids, mask, greedy, batch_size=n_slots)
        assert torch.equal(rollouts.response_ids, expected[:, : rollouts.response_ids.shape[1]])
    assert set(read) == {8}


def test_onednn_keeps_a_limited_number_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    optimize_forward(nn.Linear(2, 2))
    assert [os.environ[name] for name in names] == [str(cpu.MAX_CACHED_KERNELS)] * 2


def test_sizes_are_padded_where_onednn_multiplies() -> None:
    network = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2**13, bias=False))
    plain = PadToMultiple.for_network(network, 64)
    use_onednn_matmul(network)
    padding = PadToMultiple.for_network(network, 64)
    cpu, float32, bfloat16 = torch.device("cpu"), torch.float32, torch.bfloat16
    assert [rule.n_padding(130, cpu, float32) for rule in (plain, padding)] == [0, 62]
    assert padding.n_padding(127, cpu, float32) == 0  # 128 * 4 * 2**13 are 2**22
    without_layers = PadToMultiple.for_network(nn.LayerNorm(3), 64)
    assert without_layers.n_padding(130, cpu, float32) == 0
    assert PadToMultiple().n_padding(13, cpu, bfloat16) == 0
    by_eights = PadToMultiple(8)
    assert [by_eights.n_padding(n, cpu, bfloat16) for n in (1, 8, 13)] == [7, 0, 3]
    assert by_eights.n_padding(13, torch.device("meta"), bfloat16) == 0


def test_few_rows_are_padded_where_mkl_multiplies_a_large_weight() -> None:
    cpu, float32 = torch.device("cpu"), torch.float32
    with torch.device("meta"):
        small, large = nn.Linear(2**10, 2**12 - 1), nn.Linear(2**10, 2**12)
    rows = (1, 7, 8, 15, 16, 17)
    padding = PadToMultiple.for_network(large, 8)
    assert [padding.n_padding(n, cpu, float32) for n in rows] == [0, 0, 8, 1, 0, 0]
    assert [padding.n_padding(n, cpu, torch.bfloat16) for n in rows] == [7, 1, 0, 1, 0, 7]
    assert [padding.n_padding(n, torch.device("meta"), float32) for n in rows] == [0] * 6
    padding = PadToMultiple.for_network(small, 8)
    assert [padding.n_padding(n, cpu, float32) for n in rows] == [0] * 6


def test_matmul_dtype_is_the_weights_unless_autocast_lowers_it() -> None:
    weight = torch.zeros(2, 2)
    assert matmul_dtype(weight) == torch.float32
    assert matmul_dtype(weight.bfloat16()) == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert matmul_dtype(weight) == torch.bfloat16


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flags : fpu avx2 avx512f", False),
        ("flags : fpu avx2 avx512f avx512_bf16", True),
        ("Features : fp asimd bf16", True),
        ("processor : 0", True),
        (None, True),
    ],
)
def test_bfloat16_by_the_flags_of_the_processor(
    text: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(cpu, "CPU_INFO", tmp_path / "cpuinfo")
    assert cpu.has_bfloat16.__wrapped__() == expected
