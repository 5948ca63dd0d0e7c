"""All stages on the pretend CUDA device: no mixed devices, few host waits, metrics on the device.

`tests/support/pretend_cuda.py` says what is refused and what is counted. Times and numbers of a
real GPU are not seen here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from peft import TaskType
from torch import Tensor, distributed, nn
from transformers import AutoModelForCausalLM

from lit_rlhf import micro_batches
from lit_rlhf.finite import NotFiniteError, require_finite, weight_sums
from lit_rlhf.forward import LanguageModel, disable_dropout, target_logprobs
from lit_rlhf.models import ModelOptions, load_causal_lm
from lit_rlhf.models.prepare import prepare_model
from lit_rlhf.modules import PPOModule
from lit_rlhf.modules.phase_timer import PhaseTimer
from lit_rlhf.modules.stage import StageModule
from lit_rlhf.modules.updates import UpdateGuard
from lit_rlhf.rollout import SamplingOptions, generate_responses
from lit_rlhf.rollout.decoder import GPU_RELEASE_INTERVAL, Decoder, KVCache
from lit_rlhf.stats import global_sum
from tests.support.pretend_cuda import (
    CUDA,
    PretendCuda,
    PretendCudaStrategy,
    Refused,
    is_on_device,
    mark,
    mark_module,
)
from tests.support.stages import (
    demonstrations,
    fit_module,
    ppo_options,
    preferences,
    prompts,
    stage,
)
from tests.support.tiny_models import EOS_ID, PAD_ID, tiny_config

pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec")

PLAIN: dict[str, Any] = {}
ADAPTED: dict[str, Any] = {"lora_rank": 2, "gradient_checkpointing": True}

WAITS = {"rollout": 10, "prefill": 1, "score": 6, "estimate": 10, "update": 32}
"""Most host waits of PPO's phases, two of them by the timer of each; none in a decoding step.

The update has a minibatch of two micro-batches, and a step of each network.
"""
WAITS_OF_A_STEP = 16
"""Most host waits of a step of SFT or reward modelling, in two micro-batches."""
WAITS_OF_A_LOOK = 2
"""Most host waits of a look at which responses have ended: to read it, and to close the gaps."""
KERNELS = {"bf16-true": (41, 49), "bf16-mixed": (44, 45), "32-true": (42, 51)}
"""Most kernels of a decoding step by precision: in each layer of a Llama, and around the layers.

Float32 attends with a mask, and has the log-probs of what is sampled in the step.
"""
KERNELS_WITH_LORA = {"bf16-true": (83, 49), "bf16-mixed": (77, 45), "32-true": (42, 51)}
"""The same with adapters on all linear layers, which float32 merges into the weights."""
KERNELS_OF_TRAINING = {"bf16-true": (37, 72), "bf16-mixed": (47, 88)}
"""Most kernels of a layer in a forward and in its backward, attention's own left out."""
KERNELS_OF_TRAINING_WITH_LORA = {"bf16-true": (79, 124), "bf16-mixed": (98, 135)}
"""The same with adapters on all linear layers."""
KERNELS_OF_A_CHECK = 8
"""Most kernels of a check for finite weights, beside one for each weight."""
KERNELS_OF_A_MOVE = 2
"""Kernels that move sequences in a buffer of keys or values, however many they are."""


def stage_module(name: str, root: Path, network: dict[str, Any]) -> StageModule:
    micro: dict[str, Any] = {"micro_batch_size": 2}
    micro = {"minibatches": micro | {"ppo_epochs": 1}} if name == "ppo" else micro
    module: StageModule = stage(name, root, network=network, **micro)[0]
    return module


def stage_data(name: str, root: Path) -> LightningDataModule:
    return {"sft": demonstrations, "reward": preferences, "ppo": prompts}[name](root, batch_size=4)


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group, so that collectives are called; the audit refuses what NCCL refuses."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@contextmanager
def auditing(*, count_kernels: bool = False) -> Iterator[PretendCuda]:
    """An audit that knows the phases of a training step and of decoding."""
    audit, timed = PretendCuda(count_kernels=count_kernels), PhaseTimer.__call__

    @contextmanager
    def named_phase(timer: PhaseTimer, name: str, *args: Any) -> Iterator[None]:
        with audit.named(name), timed(timer, name, *args):
            yield

    with pytest.MonkeyPatch.context() as patch, audit:
        patch.setattr(PhaseTimer, "__call__", named_phase)
        for method in ("step", "sample", "release"):
            audit.watch(patch, Decoder, method, method)
        audit.watch(patch, Decoder, "_decode", "decode")
        audit.watch(patch, Decoder, "admit", "prefill")
        yield audit


def audited_fit(module: StageModule, data: Any, folder: Path, **trainer: Any) -> PretendCuda:
    """Fit one batch, write a checkpoint and the finished model, all on the pretend device."""
    with auditing() as audit, one_rank():
        place: dict[str, Any] = {"accelerator": "auto", "strategy": PretendCudaStrategy()}
        run = fit_module(module, data, folder, limit_train_batches=1, **place, **trainer)
        run.save_checkpoint(folder / "run.ckpt")
    return audit


@pytest.mark.parametrize("network", [PLAIN, ADAPTED], ids=["plain", "adapters"])
@pytest.mark.parametrize("name", ["sft", "reward", "ppo"])
def test_fit_rarely_waits_for_the_device(
    root: Path, tmp_path: Path, name: str, network: dict[str, Any]
) -> None:
    module = stage_module(name, root, network)
    before = {key: p.detach().clone() for key, p in module.named_parameters() if p.requires_grad}
    audit = audited_fit(module, stage_data(name, root), tmp_path)
    assert (audit.refused, audit.host_metrics) == ([], set())
    parameters = dict(module.named_parameters())
    assert all(is_on_device(parameter) for parameter in parameters.values())
    assert any(not torch.equal(parameters[key].cpu(), p) for key, p in before.items())
    assert (tmp_path / "model/config.json").exists()
    torch.load(tmp_path / "run.ckpt", weights_only=True)
    limits = WAITS if name == "ppo" else {"update": WAITS_OF_A_STEP}
    check_waits(audit, limits)
    if name == "ppo":
        check_decoding(audit)


@pytest.mark.parametrize("name", ["sft", "reward", "ppo"])
def test_each_stage_asks_the_device_for_its_micro_batches(
    root: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = micro_batches.default_tokens
    answers: list[int | None] = []

    def record(model: LanguageModel, device: torch.device) -> int | None:
        answers.append(rule(model, device))
        return answers[-1]

    monkeypatch.setattr(micro_batches, "default_tokens", record)
    module, data = stage(name, root)
    audit = audited_fit(module, data, tmp_path)
    assert audit.refused == []
    # the largest micro-batch of a GPU, which a tiny network reaches; a CPU takes a GiB's
    assert set(answers) == {16384}


def test_networks_on_the_host_are_saved(root: Path, tmp_path: Path) -> None:
    class Leaving(PretendCudaStrategy):
        teardown = SingleDeviceStrategy.teardown  # which all of Lightning's strategies do

    with auditing() as audit, one_rank():
        module, place = stage_module("sft", root, PLAIN), {"accelerator": "auto"}
        fit_module(module, stage_data("sft", root), tmp_path, strategy=Leaving(), **place)
    assert not is_on_device(next(module.parameters()))
    assert audit.refused == []
    assert (tmp_path / "model/config.json").exists()


@pytest.mark.parametrize("critic_init", ["reward", "shared"])
def test_kept_states_stay_on_the_device(root: Path, tmp_path: Path, critic_init: str) -> None:
    options = {"network.trained_layers": 1, "critic_init": critic_init}
    batches = {"minibatches.micro_batch_size": 2, "minibatches.ppo_epochs": 1}
    module = PPOModule(**ppo_options(root, **options, **batches))
    audit = audited_fit(module, stage_data("ppo", root), tmp_path)
    assert audit.refused == []
    assert all(is_on_device(parameter) for parameter in module.critic.parameters())
    check_waits(audit, WAITS)


@pytest.mark.parametrize("place", ["offload_frozen", "shard_frozen"])
def test_offloaded_networks_wait_no_more_often(root: Path, tmp_path: Path, place: str) -> None:
    network = {"dtype": "bfloat16", "gradient_checkpointing": True}
    minibatches = {"micro_batch_size": 2, "ppo_epochs": 1}
    options = ppo_options(root, network=network, minibatches=minibatches, memory={place: True})
    module = PPOModule(**options)
    module.policy.float()
    module.critic.float()
    computed: set[torch.dtype] = set()
    layer = module.policy.get_submodule("model.layers.0.mlp")
    layer.register_forward_hook(lambda *args: computed.add(args[-1].dtype))
    audit = audited_fit(module, stage_data("ppo", root), tmp_path, precision="bf16-mixed")
    assert (audit.refused, audit.host_metrics, computed) == ([], set(), {torch.bfloat16})
    assert {p.dtype for p in module.policy.parameters()} == {torch.float32}
    at_home = {is_on_device(p) for p in module.reference.network.parameters()}
    assert at_home == {place == "shard_frozen"}  # the share of one rank is the whole network
    # log-probs of half precision are computed again after sampling
    check_waits(audit, WAITS | {"estimate": 16})
    check_decoding(audit)


def check_waits(audit: PretendCuda, limits: dict[str, int]) -> None:
    assert limits.keys() <= audit.calls.keys()
    for phase, most in limits.items():
        assert audit.n_waits(phase) <= most * audit.calls[phase], audit.waits[phase]


def check_decoding(audit: PretendCuda) -> None:
    assert audit.calls["step"] > 0
    for phase in ("step", "replay", "decode", "sample"):
        assert audit.n_waits(phase) == 0, audit.waits[phase]
        if phase != "sample":  # which is a part of prefills, too
            assert audit.host_tensors[phase] == 0
    looks = audit.calls["step"] // GPU_RELEASE_INTERVAL + audit.calls["prefill"]
    assert audit.n_waits("release") <= WAITS_OF_A_LOOK * looks, audit.waits["release"]


@pytest.fixture
def policy(root: Path) -> LanguageModel:
    return disable_dropout(load_causal_lm(root / "policy"))


def audited_rollout(policy: LanguageModel, *, precision: str = "32-true") -> PretendCuda:
    """Sample responses of 12 tokens to three prompts in two slots."""
    mask = torch.arange(5) >= torch.tensor([[0], [3], [2]])
    ids = torch.where(mask, torch.arange(4, 19).view(3, 5), PAD_ID)
    mark_module(policy)
    options = SamplingOptions(max_new_tokens=12)
    mixed = precision == "bf16-mixed"
    with (
        auditing(count_kernels=True) as audit,
        # as Lightning's plugin does
        torch.autocast("cuda", dtype=torch.bfloat16, enabled=mixed, cache_enabled=False),
    ):
        marked_ids, marked_mask = mark([ids, mask])
        generate_responses(
            policy,
            marked_ids,
            marked_mask,
            options,
            eos_token_ids=[EOS_ID],
            pad_token_id=PAD_ID,
            seed=0,
            batch_size=2,
        )
    return audit


@pytest.mark.parametrize("lora_rank", [0, 2], ids=["plain", "adapters"])
@pytest.mark.parametrize("precision", KERNELS)
def test_a_decoding_step_launches_a_bounded_number_of_kernels(
    root: Path, precision: str, lora_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_kernels: set[int] = set()
    n_rows: set[int] = set()
    decode = Decoder._decode

    def counted(self: Decoder, n: int, width: int | None = None) -> None:
        before = sum(audits[0].kernels.values())
        n_rows.add(n)
        decode(self, n, width=width)
        n_kernels.add(sum(audits[0].kernels.values()) - before)

    audits: list[PretendCuda] = []
    enter = PretendCuda.__enter__
    monkeypatch.setattr(PretendCuda, "__enter__", lambda self: audits.append(self) or enter(self))
    monkeypatch.setattr(Decoder, "_decode", counted)
    dtype = "bfloat16" if precision == "bf16-true" else "float32"
    options = ModelOptions(dtype=dtype, lora_rank=lora_rank)
    policy = disable_dropout(load_causal_lm(root / "policy", options))
    audit = audited_rollout(policy, precision=precision)
    check_decoding(audit)
    per_layer, per_step = (KERNELS_WITH_LORA if lora_rank else KERNELS)[precision]
    (steps,) = n_kernels  # as many in each step, whatever the lengths and the rows
    assert steps <= per_layer * policy.config.num_hidden_layers + per_step
    # bf16-mixed casts weights once, before the first step
    assert audit.weight_casts["decode"] + audit.weight_casts["sample"] == 0
    # A captured step is one launch. Before it, each number of rows has one step that warms it up,
    # and the network has one step that looks for waits.
    captured = audit.calls["step"] - len(n_rows) - 1
    assert audit.calls["replay"] == (0 if precision == "32-true" else captured)


class Attention(torch.autograd.Function):
    """Attention to packed rows without a kernel or numbers, forward and backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        return torch.empty_like(query)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


def attend_without_kernels(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """In place of `varlen_attn`."""
    with torch._C.DisableTorchFunction():
        output: Tensor = mark(Attention.apply(query, key, value))
    return output


def kernels_of_training(n_layers: int, precision: str, lora_rank: int) -> tuple[int, int]:
    """Kernels of the log-probs of a packed batch, and of their backward."""
    config = tiny_config("llama")
    config.num_hidden_layers = n_layers
    dtype = "bfloat16" if precision == "bf16-true" else "float32"
    network = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    options = ModelOptions(dtype=dtype, lora_rank=lora_rank)
    model = disable_dropout(prepare_model(network, options, TaskType.CAUSAL_LM, seed=0))
    mark_module(model)
    mask = torch.arange(7) < torch.tensor([[7], [4], [5]])
    ids = torch.arange(4, 25).view(3, 7)
    targets = mask & (torch.arange(7) > 0)
    mixed = precision == "bf16-mixed"
    with (
        PretendCuda(count_kernels=True) as audit,
        torch.autocast("cuda", dtype=torch.bfloat16, enabled=mixed, cache_enabled=False),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("lit_rlhf.forward.attention._find_kernel", lambda: attend_without_kernels)
        mark([ids, mask, targets])
        with audit.named("forward"):
            logprobs = target_logprobs(model, ids, mask, targets)
        with audit.named("backward"):
            logprobs.sum().backward()
    return audit.kernels["forward"], audit.kernels["backward"]


@pytest.mark.parametrize("lora_rank", [0, 2], ids=["plain", "adapters"])
@pytest.mark.parametrize("precision", KERNELS_OF_TRAINING)
def test_a_layer_in_training_launches_a_bounded_number_of_kernels(
    precision: str, lora_rank: int
) -> None:
    fewer, more = (kernels_of_training(n, precision, lora_rank) for n in (1, 2))
    of_a_layer = [two - one for one, two in zip(fewer, more, strict=True)]
    bounds = (KERNELS_OF_TRAINING_WITH_LORA if lora_rank else KERNELS_OF_TRAINING)[precision]
    for count, most in zip(of_a_layer, bounds, strict=True):
        assert 0 < count <= most, of_a_layer


@pytest.mark.parametrize("n_moved", [1, 3])
def test_moved_sequences_cost_two_kernels_in_each_buffer(n_moved: int) -> None:
    n_layers = 2
    with PretendCuda(count_kernels=True) as audit:
        cache = KVCache(n_slots=8, capacity=6, device=CUDA)
        modules = [nn.Module() for _ in range(n_layers)]
        states = torch.arange(8.0, device=CUDA)[:, None, None].expand(8, 2, 4)
        slots = torch.arange(8, device=CUDA)
        layers = [
            cache.write(module, states, -states, slots, torch.ones_like(slots))
            for module in modules
        ]
        sources = slots[-n_moved:]
        targets = slots[:n_moved].flip(0)
        before = sum(audit.kernels.values())
        cache.move(sources=sources, targets=targets, width=2)
        assert sum(audit.kernels.values()) - before == KERNELS_OF_A_MOVE * 2 * n_layers
        for layer in layers:
            numbers = layer.keys[:, 1, 0, 0].tolist()
            assert numbers[:n_moved] == [7.0 - slot for slot in range(n_moved)]
            assert numbers[n_moved:] == [float(slot) for slot in range(n_moved, 8)]
            assert torch.equal(layer.values, -layer.keys)


def test_check_of_weights_launches_one_kernel_for_each(policy: LanguageModel) -> None:
    mark_module(policy)
    weights = dict(policy.named_parameters())
    with PretendCuda(count_kernels=True) as audit:
        require_finite(weight_sums(policy, "the policy"))
        assert sum(audit.kernels.values()) <= len(weights) + KERNELS_OF_A_CHECK
        assert audit.n_waits("start") == 1
        with torch.no_grad():
            weights["model.norm.weight"][3] = torch.inf
        with pytest.raises(NotFiniteError, match=r"weights of the policy \(model\.norm\.weight\)$"):
            require_finite(weight_sums(policy, "the policy"))


def test_read_while_decoding_is_found(
    policy: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Decoder.step

    def reading(self: Decoder) -> None:
        self.slots.lengths.max().item()
        step(self)

    monkeypatch.setattr(Decoder, "step", reading)
    audit = audited_rollout(policy)
    assert audit.n_waits("step") == audit.calls["step"] > 0
    with pytest.raises(AssertionError):
        check_decoding(audit)


def test_an_index_on_the_host_is_found() -> None:
    with PretendCuda() as audit:
        values = torch.ones((4, 2), device=CUDA)
        assert torch.equal(values[torch.tensor([0, 1])], values[:2])
        assert audit.n_waits("start") == 2  # the other one is `equal`


def test_metric_on_the_host_is_found(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def host_means(metrics: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        return {key: value.detach().cpu() for key, value in metrics.items()}

    monkeypatch.setattr("lit_rlhf.modules.stage.global_means", host_means)
    audit = audited_fit(stage_module("sft", root, PLAIN), stage_data("sft", root), tmp_path)
    assert {"sft/loss", "time/update", "sft/skipped_updates"} <= audit.host_metrics


def test_what_cuda_refuses_is_refused() -> None:
    with PretendCuda(), one_rank():
        values, generator = torch.ones(3, device=CUDA), torch.Generator()
        assert is_on_device(global_sum(values))
        assert not is_on_device(global_sum(UpdateGuard(1).pop_count()))
        with pytest.raises(Refused, match="No backend type associated with cpu"):
            distributed.all_reduce(torch.ones(1))
        with pytest.raises(Refused, match=r"add: tensors on the host of shape \(3,\)"):
            values + torch.ones(3)
        with pytest.raises(Refused, match="stack: tensors on the host"):
            torch.stack([values.sum(), torch.tensor(1.0)])
        with pytest.raises(Refused, match="rand: a generator of the CPU"):
            torch.rand(3, generator=generator, device=CUDA)
        with pytest.raises(Refused, match="multinomial: a generator of the CPU"):
            torch.multinomial(values, 1, generator=generator)
        with pytest.raises(Refused, match="numpy: a tensor on the device"):
            values.numpy()
        assert is_on_device(values + torch.tensor(1.0))  # numbers are copied by torch
        assert not is_on_device(values.cpu())
        with torch.device("meta"):
            assert torch.ones(1).is_meta
        assert torch.ones(1).to("meta").is_meta
