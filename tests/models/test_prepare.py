"""LoRA adapters, torch.compile and fused kernels on a loaded network."""

import copy
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.llama import modeling_llama

from lit_rlhf.forward import hidden_states, sequence_scores, target_logprobs
from lit_rlhf.models import ModelOptions, load_causal_lm, load_lm_head, load_scalar_model
from lit_rlhf.models.prepare import MAX_GRAPHS
from lit_rlhf.models.saving import merged_state_dict, save_model_folder
from lit_rlhf.rollout import SamplingOptions
from tests.support.adapters import IDS, LORA, MASK, logits, perturb_trained_weights
from tests.support.decoding import sample_responses
from tests.support.pretend_cuda import PretendCuda, mark, mark_module
from tests.support.tiny_models import tiny_causal_lm, tiny_tokenizer

# torch 2.13 looks at the gradients of what it traces, its inductor loads modules that are scripted,
# and it warns of both itself
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]

Folder = Callable[[str], Path]
TARGETS = MASK & (torch.arange(10) > 4)


@torch.no_grad()
def test_policy_with_its_adapter_off_is_the_reference(family: str, causal_folder: Folder) -> None:
    base, model = logits(tiny_causal_lm(family)), load_causal_lm(causal_folder(family), LORA)
    torch.rand(1)
    again = load_causal_lm(causal_folder(family), LORA)
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)  # adapters are seeded
    assert torch.equal(logits(model.eval()), base)  # and change nothing at first
    assert not torch.allclose(logits(perturb_trained_weights(model)), base, atol=1e-2)
    with model.disable_adapter():
        assert torch.equal(logits(model), base)


def test_only_adapters_and_the_scalar_head_are_trained(family: str, causal_folder: Folder) -> None:
    policy = load_causal_lm(causal_folder(family), LORA)
    names = [name for name, p in policy.named_parameters() if p.requires_grad]
    assert names
    assert all(".lora_" in name for name in names)
    critic = load_scalar_model(causal_folder(family), LORA, head_seed=0)
    names = [name for name, p in critic.named_parameters() if p.requires_grad]
    others = {name for name in names if ".lora_" not in name}
    assert others == {"base_model.model.score.modules_to_save.default.weight"}


@pytest.mark.parametrize("autocast", [False, True])
def test_trained_weights_are_float32(family: str, autocast: bool, causal_folder: Folder) -> None:
    options = ModelOptions(lora_rank=2, dtype="bfloat16")
    policy = perturb_trained_weights(load_causal_lm(causal_folder(family), options))
    critic = perturb_trained_weights(load_scalar_model(causal_folder(family), options, head_seed=0))
    for model in (policy, critic):
        dtypes = {(p.requires_grad, p.dtype) for p in model.parameters()}
        assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = target_logprobs(policy, IDS, MASK, TARGETS).sum()
        loss = loss + sequence_scores(critic, IDS, MASK).sum()
    torch.autograd.backward(loss)
    for model in (policy, critic):
        gradients = [p.grad for p in model.parameters() if p.requires_grad]
        assert {g.dtype for g in gradients if g is not None} == {torch.float32}
        assert all(g is not None for g in gradients)


def test_saved_policy_computes_the_same(family: str, causal_folder: Folder, tmp_path: Path) -> None:
    model = perturb_trained_weights(load_causal_lm(causal_folder(family), LORA))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_model_folder(model, tiny_tokenizer(), tmp_path / "m")
    after = model.state_dict()
    assert before.keys() == after.keys()  # the adapters stay on
    assert all(torch.equal(before[name], after[name]) for name in before)
    plain = plainly_loaded(AutoModelForCausalLM, tmp_path / "m")
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-4, atol=1e-4)


def plainly_loaded(kind: Any, folder: Path) -> Any:
    """The model that plain transformers reads, whole."""
    plain, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return plain.eval()


@torch.no_grad()
def test_saved_reward_model_is_alike(family: str, causal_folder: Folder, tmp_path: Path) -> None:
    model = perturb_trained_weights(load_scalar_model(causal_folder(family), LORA, head_seed=0))
    save_model_folder(model, tiny_tokenizer(), tmp_path / "m")
    scores = plainly_loaded(AutoModelForSequenceClassification, tmp_path / "m")(IDS).logits[:, 0]
    torch.testing.assert_close(scores, sequence_scores(model, IDS, MASK), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_weights_keep_their_dtype(family: str, dtype: str, causal_folder: Folder) -> None:
    options = ModelOptions(lora_rank=2, dtype=dtype)
    merged = merged_state_dict(
        perturb_trained_weights(load_causal_lm(causal_folder(family), options))
    )
    plain = load_causal_lm(causal_folder(family), ModelOptions(dtype=dtype)).state_dict()
    assert merged.keys() == plain.keys()
    assert {name: t.dtype for name, t in merged.items()} == {n: t.dtype for n, t in plain.items()}


def test_rank_above_the_width_is_refused_before_memory_is_taken(folder: Path) -> None:
    message = r"network\.lora_rank: expected at most the width of the network, 16, got 1000000000"
    with pytest.raises(ValueError, match=message):
        load_causal_lm(folder, ModelOptions(lora_rank=10**9))
    load_causal_lm(folder, ModelOptions(lora_rank=16))


def test_targets_can_be_chosen(causal_folder: Folder) -> None:
    options = ModelOptions(lora_rank=2, lora_targets=r".*\.q_proj")
    model = load_causal_lm(causal_folder("llama"), options)
    adapted = {n.split(".lora_")[0][-6:] for n, p in model.named_parameters() if p.requires_grad}
    assert adapted == {"q_proj"}


def batch(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, their mask, and the mask of all but the first of a row."""
    mask = torch.arange(length) < torch.tensor([length, length // 2, length - 3])[:, None]
    ids = torch.randint(4, 288, mask.shape, generator=torch.Generator().manual_seed(length))
    return ids, mask, mask & (torch.arange(length) > 0)


def test_layers_are_compiled_after_the_comparison(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []

    def compile_module(layer: nn.Module, **arguments: Any) -> None:
        layer.register_forward_hook(lambda *_: pytest.fail("a compiled layer ran while loading"))
        calls.append(arguments)

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "compile", compile_module)
    model = load_causal_lm(folder, ModelOptions(torch_compile="inductor"))
    assert len(calls) == model.config.num_hidden_layers
    for arguments in calls:
        assert (arguments["dynamic"], arguments["backend"]) == (True, "inductor")
        # torch before 2.13 has one limit for all
        limit = arguments.get("recompile_limit", torch._dynamo.config.recompile_limit)
        assert limit == MAX_GRAPHS


def test_compiled_layers_do_not_decode_on_a_cpu(folder: Path) -> None:
    model = load_causal_lm(folder, ModelOptions(torch_compile="eager"))
    ids, mask, _ = batch(12)
    compiled_frames = torch._dynamo.utils.counters["frames"]
    before = compiled_frames["total"]
    options = SamplingOptions(max_new_tokens=3)
    sample_responses(model, ids.flip(1), mask.flip(1), options)
    assert compiled_frames["total"] == before
    with torch.no_grad():
        target_logprobs(model, *batch(12))
    assert compiled_frames["total"] > before


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_is_the_same_model(folder: Path, backend: str) -> None:
    plain = load_causal_lm(folder)
    model = load_causal_lm(folder, ModelOptions(torch_compile=backend))
    for length in (12, 20, 15):  # other sizes, one compilation
        inputs = batch(length)
        readings = [target_logprobs(network, *inputs) for network in (plain, model)]
        torch.testing.assert_close(readings[0], readings[1], rtol=1e-5, atol=1e-5)
        for network, reading in zip((plain, model), readings, strict=True):
            network.zero_grad()
            reading.sum().backward()
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
    ids, mask, _ = batch(12)
    options = SamplingOptions(max_new_tokens=8)
    one_rollout, other_rollout = (
        sample_responses(network, ids.flip(1), mask.flip(1), options, batch_size=2)
        for network in (plain, model)
    )
    assert torch.equal(one_rollout.response_ids, other_rollout.response_ids)
    assert plain.state_dict().keys() == model.state_dict().keys()


@pytest.mark.slow
def test_adapters_are_compiled_too(folder: Path) -> None:
    model = load_causal_lm(folder, ModelOptions(torch_compile="aot_eager", lora_rank=2))
    target_logprobs(model, *batch(12)).sum().backward()
    assert any(p.grad is not None for name, p in model.named_parameters() if "lora_B" in name)


def test_an_unknown_backend_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"torch_compile: expected one of .*, got 'tpu'"):
        load_causal_lm(folder, ModelOptions(torch_compile="tpu"))


def test_fused_kernels_name_their_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ValueError, match=r"fused_kernels: .*pip install liger-kernel"):
        load_causal_lm(folder, ModelOptions(fused_kernels=True))


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A stand-in for liger-kernel, which lists its kernels as they run, on CUDA tensors only.

    It replaces what liger-kernel 0.8.5 does: the forwards of the model's layers, and the classes
    and functions of transformers' file.
    """
    runs: list[str] = []
    plain_norm, plain_rope = modeling_llama.LlamaRMSNorm, modeling_llama.apply_rotary_pos_emb

    def launch(name: str, states: Tensor) -> None:
        if states.device.type != "cuda":
            raise RuntimeError("0 active drivers ([]). There should only be one.")
        runs.append(name)

    def norm(self: nn.Module, states: Tensor) -> Tensor:
        launch("norm", states)
        return plain_norm.forward(self, states)  # type: ignore[no-any-return]

    def rope(query: Tensor, *others: Tensor) -> Any:
        launch("rope", query)
        return plain_rope(query, *others)

    def apply(
        rope_: bool = True,
        cross_entropy: bool = True,
        fused_linear_cross_entropy: bool = True,
        model: Any = None,
    ) -> None:
        assert not cross_entropy
        assert not fused_linear_cross_entropy
        modeling_llama.apply_rotary_pos_emb = rope
        modeling_llama.LlamaRMSNorm = type("LigerRMSNorm", (plain_norm,), {"forward": norm})
        for layer in model.modules():
            if isinstance(layer, plain_norm):
                vars(layer)["forward"] = MethodType(norm, layer)

    patches = ModuleType("liger_kernel.transformers.monkey_patch")
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": apply}  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", patches)
    for name, value in vars(modeling_llama).items():  # restored if the code under test does not
        if name in ("LlamaRMSNorm", "apply_rotary_pos_emb"):
            monkeypatch.setattr(modeling_llama, name, value)
    return runs


def test_fused_kernels_run_on_the_device_only(folder: Path, liger: list[str]) -> None:
    plain = load_causal_lm(folder)
    model = load_causal_lm(folder, ModelOptions(fused_kernels=True))
    reward = load_scalar_model(folder, ModelOptions(fused_kernels=True, lora_rank=2), head_seed=0)
    load_lm_head(folder, ModelOptions(fused_kernels=True))  # runs a forward of a new Llama
    assert torch.equal(logits(model), logits(plain))
    sequence_scores(reward, IDS, MASK)
    assert liger == []
    copied = copy.deepcopy(model)
    with PretendCuda(), torch.no_grad():
        ids, mask = mark([IDS.clone(), MASK.clone()])
        for network in (plain, model, copied):
            mark_module(network)
        expected = hidden_states(plain, ids, mask)
        assert liger == []  # it is another network of the process
        for network in (model, copied):
            liger.clear()
            assert torch.equal(hidden_states(network, ids, mask), expected)
            assert Counter(liger) == {"norm": 5, "rope": 2}  # two layers
        copied.get_input_embeddings().weight.zero_()
        assert torch.equal(hidden_states(model, ids, mask), expected)


def test_architecture_without_kernels_is_named(causal_folder: Folder, liger: list[str]) -> None:
    with pytest.raises(ValueError, match=r"fused_kernels: expected .* among llama, got 'gemma'"):
        load_causal_lm(causal_folder("gemma"), ModelOptions(fused_kernels=True))
