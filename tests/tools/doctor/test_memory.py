"""The memory estimate: DeepSpeed's numbers, sums by hand, and what the tensors of a Llama take."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lit_rlhf.forward import (
    map_target_logits,
    matmul_widths,
    optimize_forward,
    target_logprobs,
)
from lit_rlhf.forward.outputs import CHUNK_SIZE
from lit_rlhf.functional import token_logprobs_and_entropy
from lit_rlhf.models.prepare import checkpoint_activations
from lit_rlhf.tools.doctor.checks.time import PhaseSeconds, ppo_seconds
from lit_rlhf.tools.doctor.memory import (
    SCORED_LOGIT_BYTES,
    NetworkShape,
    PPOMemory,
    PPOSizes,
    network_shape,
    ppo_memory,
    zero2_model_states,
)
from tests.support.live_memory import LiveTensors

SHAPE = NetworkShape(
    parameters=1000, layers=3, hidden=8, kv_width=4, vocabulary=50, matmul_width=160
)
KEPT = 480
"""Bytes that a layer keeps of a token: 1.5 numbers of two bytes for each of its matmuls."""
SIZES: Any = {"gpus": 4, "prompt_tokens": 6, "response_tokens": 4, "rollouts": 5, "rows": 2}
SIZES["scored_tokens"] = 30
ROWS, TOKENS = 8, 64


def test_model_states_are_deepspeeds_without_a_bfloat16_copy_of_the_gradients() -> None:
    cases = [(n, gpus, offload) for n in (10, 7**9) for gpus in (1, 8) for offload in (True, False)]
    # importing deepspeed looks for compilers, and takes its time
    code = (
        "from deepspeed.runtime.zero import stage_1_and_2 as zero\n"
        "estimate = zero.estimate_zero2_model_states_mem_needs\n"
        f"print([estimate(n, gpus, 1, offload) for n, gpus, offload in {cases}])"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    deepspeed_estimates = ast.literal_eval(done.stdout.splitlines()[-1])
    for (n, gpus, offload), (cpu, gpu) in zip(cases, deepspeed_estimates, strict=True):
        states = zero2_model_states(n, gpus=gpus, offload=offload)
        assert states.cpu == cpu
        copy = 0 if offload else 2 * n // gpus
        assert states.states + states.gradients + copy == pytest.approx(gpu, abs=3)  # rounding


def test_a_node_has_memory_for_its_own_ranks() -> None:
    for offload in (True, False):
        two_nodes = zero2_model_states(100, gpus=16, offload=offload, nodes=2)
        assert two_nodes.cpu == zero2_model_states(100, gpus=8, offload=offload).cpu
        assert two_nodes.states == zero2_model_states(100, gpus=16, offload=offload).states
    sizes = {**SIZES, "gpus": 4, "offload_frozen": True}
    shared, alone = (ppo_memory(SHAPE, PPOSizes(**sizes, nodes=nodes)).cpu for nodes in (2, 1))
    assert shared == alone / 2


def test_seconds_of_the_phases_by_hand() -> None:
    sizes = PPOSizes(**{**SIZES, "rollouts": 3, "gradient_checkpointing": False})
    seconds = ppo_seconds(SHAPE, sizes, rollouts=5, ppo_epochs=2, operations=10.0, bandwidth=100.0)
    forward = 2 * 1000 * 5 * (6 + 4) / 10  # two rounds: of three rollouts, and of two
    read = 2 * 4 * 2 * 1000 + 5 * (6 + 7 + 8 + 9) * 2 * 2 * 3 * 4
    assert seconds == {
        "rollout": PhaseSeconds(products=forward, memory=read / 100),
        "score": PhaseSeconds(products=forward),  # the reward model
        "estimate": PhaseSeconds(products=3 * forward),  # the policy, the reference and the critic
        "update": PhaseSeconds(products=2 * 2 * 3 * forward),
    }
    assert seconds["rollout"].total == forward + read / 100
    in_float32 = ppo_seconds(SHAPE, PPOSizes(**SIZES, itemsize=4), rollouts=5, operations=10.0)
    # in float32 the rollout has the policy's log-probs
    assert in_float32["estimate"].products == 2 * forward
    assert in_float32["update"].products == 2 * 4 * forward


def test_phase_is_bound_by_what_takes_longer() -> None:
    assert PhaseSeconds(products=2.0, memory=2.5).bound == "memory"
    assert PhaseSeconds(products=2.5, memory=2.0).bound == "products"


def test_only_trained_layers_keep_activations() -> None:
    whole, top = (ppo_memory(SHAPE, PPOSizes(**SIZES, trained_layers=n)) for n in (None, 1))
    # 20 tokens of 8 units keep 2 bytes for each of two layers; of 50 tokens, both networks do
    assert whole.update - top.update == 20 * 8 * 2 * 2 - 2 * 50 * 8 * 2


def test_the_terms_by_hand() -> None:
    assert ppo_memory(SHAPE, PPOSizes(**SIZES)) == PPOMemory(
        trained=2 * (2000 + 12_000 // 4),
        frozen=2 * 2000,
        rollout=2 * 2 * 3 * 4 * 10 * 5,
        scoring=30 * 8 * 25 + 5 * 4 * 50 * 18,
        update=2 * (10 * (8 * 3 * 2 + KEPT) + 4 * 50 * 14),
        gradients=4000 // 4 + 2 * 2000,
        cpu=2 * 1000 * 4 * 4 * 3 // 2,
    )
    short = ppo_memory(SHAPE, PPOSizes(**SIZES, micro_batch_tokens=15))
    assert short.update == 15 * (8 * 3 * 2 + KEPT) + 2 * 4 * 50 * 14
    single = ppo_memory(SHAPE, PPOSizes(**SIZES, micro_batch_tokens=5))
    assert single.update == 10 * (8 * 3 * 2 + KEPT) + 2 * 4 * 50 * 14
    plain = ppo_memory(SHAPE, PPOSizes(**SIZES, gradient_checkpointing=False))
    assert plain.update == 2 * (10 * 3 * KEPT + 4 * 50 * 14)
    offloaded = ppo_memory(SHAPE, PPOSizes(**SIZES, offload_optimizer=True, offload_frozen=True))
    assert (offloaded.trained, offloaded.frozen) == (2 * 2000, 0)
    assert offloaded.scoring == 30 * 8 * 25 + 5 * 4 * 50 * 18 + 2000
    assert offloaded.gradients == 2 * 2000
    assert offloaded.cpu == 2 * 24_000 + 2 * 2048 * 4  # pinned memory comes in powers of two
    sharded = ppo_memory(SHAPE, PPOSizes(**SIZES, shard_frozen=True))
    assert (sharded.frozen, sharded.scoring) == (2 * 500, 30 * 8 * 25 + 5 * 4 * 50 * 18 + 2000)
    assert sharded.cpu == 2 * 24_000
    offloaded = ppo_memory(SHAPE, PPOSizes(**SIZES, shard_frozen=True, offload_frozen=True))
    assert (offloaded.frozen, offloaded.scoring) == (0, sharded.scoring + 500)
    assert offloaded.cpu == 2 * 24_000 + 2 * 512 * 4


def test_phases_in_float32_by_hand() -> None:
    half = ppo_memory(SHAPE, PPOSizes(**SIZES, offload_frozen=True))
    full = ppo_memory(SHAPE, PPOSizes(**SIZES, offload_frozen=True, itemsize=4))
    assert (full.rollout, full.scoring) == (2 * half.rollout, 2 * half.scoring)
    assert full.update == 2 * half.update


def test_logits_are_those_of_a_chunk_of_the_device() -> None:
    shape = replace(SHAPE, vocabulary=2**26)  # two tokens' are a chunk on CUDA
    cuda, cpu = (
        ppo_memory(shape, PPOSizes(**SIZES, device=torch.device(kind))) for kind in ("cuda", "cpu")
    )
    few = ppo_memory(SHAPE, PPOSizes(**SIZES))
    beside_scoring = few.scoring - 18 * 5 * 4 * 50
    beside_update = few.update - 14 * 2 * 4 * 50
    assert cuda.scoring == beside_scoring + 18 * 2**27
    assert cuda.update == beside_update + 14 * 2**27
    assert cpu.scoring == beside_scoring + 18 * 2**20
    assert cpu.update == beside_update + 14 * 2**24


def test_the_peak_is_that_of_the_largest_phase() -> None:
    sizes = {"trained": 1, "gradients": 10, "frozen": 100, "cpu": 7}
    assert PPOMemory(rollout=5000, scoring=0, update=2000, **sizes).peak == 5101
    assert PPOMemory(rollout=0, scoring=3000, update=2000, **sizes).peak == 3101
    assert PPOMemory(rollout=0, scoring=0, update=2000, **sizes).peak == 2111


def test_a_size_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="rollouts: expected an integer >= 1, got 0"):
        PPOSizes(**(SIZES | {"rollouts": 0}))


@pytest.mark.parametrize(
    ("vocabulary", "hidden", "layers", "checkpointing"),
    [(288, 128, 4, True), (288, 128, 4, False), (4096, 32, 2, True)],
)
def test_activations_next_to_the_tensors_of_a_llama(
    vocabulary: int, hidden: int, layers: int, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": layers}
    sizes |= {"intermediate_size": hidden * 43 // 16, "num_attention_heads": hidden // 32}
    config = LlamaConfig(**sizes)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()  # type: ignore[no-untyped-call]
    optimize_forward(model)
    if checkpointing:
        checkpoint_activations(model)
    ids = torch.randint(4, 280, (ROWS, 2 * TOKENS))
    mask = torch.ones_like(ids, dtype=torch.bool)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    targets = torch.arange(2 * TOKENS).expand_as(ids) >= TOKENS

    def logprobs_and_entropy() -> None:
        with torch.no_grad():
            map_target_logits(model, ids, mask, targets, token_logprobs_and_entropy)

    def update() -> None:
        target_logprobs(model, ids, mask, targets).sum().backward()

    monkeypatch.setattr("lit_rlhf.forward.outputs.CPU_CHUNK_SIZE", CHUNK_SIZE)
    sizes = PPOSizes(
        gpus=1,
        prompt_tokens=TOKENS,
        response_tokens=TOKENS,
        rollouts=ROWS,
        rows=ROWS,
        scored_tokens=2 * TOKENS * ROWS,
        gradient_checkpointing=checkpointing,
    )
    logits = SCORED_LOGIT_BYTES * ROWS * TOKENS * vocabulary
    shape = NetworkShape(
        parameters=1,
        layers=layers,
        hidden=hidden,
        kv_width=hidden,
        vocabulary=vocabulary,
        matmul_width=matmul_widths(model).matmuls / layers,
    )
    expected = ppo_memory(shape, sizes)
    assert peak(model, update) == pytest.approx(expected.update, rel=0.2)
    # the layers' tensors are gone when the logits are computed
    layers_or_logits = max(expected.scoring - logits, logits)
    assert peak(model, logprobs_and_entropy) == pytest.approx(layers_or_logits, rel=0.1)


def peak(model: torch.nn.Module, work: Any) -> int:
    """Most bytes that tensors took during `work`, beside weights and their gradients."""
    with LiveTensors() as live:
        for parameter in model.parameters():
            parameter.view(-1)
            parameter.grad.view(-1)
        before = live.live
        work()
    return live.peak - before


def test_shape_of_a_network_is_read_from_its_config() -> None:
    sizes = {"num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 50}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = AutoModelForCausalLM.from_config(config)
    # query and output are 16 by 16, key and value 16 by 2 * 4, and gate, up and down 16 by 24
    assert network_shape(model) == NetworkShape(
        parameters=sum(p.numel() for p in model.parameters()),
        layers=3,
        hidden=16,
        kv_width=8,
        vocabulary=50,
        matmul_width=2 * 32 + 2 * 24 + 3 * 40,
    )
