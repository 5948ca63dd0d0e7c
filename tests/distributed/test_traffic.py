"""What ZeRO-2 and FSDP2 send in an iteration of PPO, on two gloo ranks, beside the count."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import LlamaConfig

from lit_rlhf.modules import PhaseTimer
from lit_rlhf.tools.doctor import NetworkShape, PPOSizes, ppo_traffic
from tests.support.rank_runs import strategy
from tests.support.ranks import run_on_ranks
from tests.support.stages import fit_module, write_data, write_models
from tests.support.tiny_models import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE
from tests.support.traffic import CountTraffic
from tests.support.trajectories import stage_run

RANKS = 2
ROWS = 4
HIDDEN, LAYERS = 64, 2
SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS}
SIZES |= {"intermediate_size": 128, "num_attention_heads": 2, "max_position_embeddings": 128}
TOKENS = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
LAYER_WEIGHTS = 4 * HIDDEN**2 + 3 * HIDDEN * 128 + 2 * HIDDEN
CONFIG = LlamaConfig(**SIZES, **TOKENS, tie_word_embeddings=False)
UNITS = LAYERS + 1
"""Parts of a network that FSDP2 gathers one by one: its layers, and the rest."""
LEAST = 4096
"""Bytes of the smallest tensor that is counted: norms and their like are smaller."""


class Iteration(NamedTuple):
    """What a rank's collectives carried in an iteration.

    Attributes:
        policy: Number of the policy's weights.
        critic: Number of the critic's weights, and of the reward model's.
        bytes: Bytes of whole tensors, by phase and kind of collective.
        calls: Number of collectives.
    """

    policy: int
    critic: int
    bytes: dict[tuple[str, str], int]
    calls: dict[tuple[str, str], int]


def on_a_rank(rank: int, root: Path, name: str) -> Iteration:
    """The second iteration, in which policy and critic are updated in two micro-batches each."""
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    timed = PhaseTimer.__call__
    with CountTraffic(least=LEAST) as traffic, pytest.MonkeyPatch.context() as patch:

        @contextmanager
        def watched_phase(timer: PhaseTimer, phase: str, *args: Any) -> Iterator[None]:
            traffic.phase = phase
            for key in [key for key in traffic.calls if key[0] == phase]:
                del traffic.calls[key], traffic.bytes[key]  # an earlier iteration's
            with timed(timer, phase, *args):
                yield
            traffic.phase = ""

        patch.setattr(PhaseTimer, "__call__", watched_phase)
        options: dict[str, Any] = {"loss.ptx_coef": 0.0, "network.gradient_checkpointing": True}
        options |= {"minibatches.ppo_epochs": 1, "micro_batch_size": ROWS // 2}
        options |= {"memory": {"shard_frozen": name == "deepspeed", "frozen_dtype": "bfloat16"}}
        module, data = stage_run("ppo", root, ROWS, **options)
        arguments: Any = {"strategy": strategy(name), "devices": RANKS}
        arguments |= {"precision": "bf16-mixed", "use_distributed_sampler": False}
        fit_module(module, data, root / "run", max_epochs=2, **arguments)
    policy, critic = (
        sum(p.numel() for p in n.parameters()) for n in (module.policy, module.critic)
    )
    return Iteration(policy, critic, dict(traffic.bytes), dict(traffic.calls))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepspeed", "fsdp2"])
def test_each_phase_sends_what_the_doctor_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    root = write_models(write_data(tmp_path), CONFIG)
    for iteration in run_on_ranks(on_a_rank, RANKS, tmp_path, root, name):
        check(iteration, sharded=name == "fsdp2")


def check(iteration: Iteration, *, sharded: bool) -> None:
    def counted(parameters: int) -> Any:
        shape = NetworkShape(
            parameters=parameters, layers=2, hidden=64, kv_width=64, vocabulary=1, matmul_width=1
        )
        sizes = PPOSizes(
            gpus=RANKS,
            prompt_tokens=1,
            response_tokens=1,
            rollouts=ROWS,
            rows=ROWS // 2,
            shard_frozen=not sharded,
            sharded=sharded,
        )
        return ppo_traffic(shape, sizes, updates=1, micro_batches=2)

    policy, critic = counted(iteration.policy), counted(iteration.critic)
    rounding = pytest.approx  # shares are padded, and the smallest tensors are left out
    assert iteration.bytes["score", "gathered"] == rounding(critic["score"].gathered, rel=0.01)
    update = {
        kind: (getattr(policy["update"], kind) + getattr(critic["update"], kind)) // 2
        for kind in ("summed", "scattered", "gathered")
    }
    if sharded:
        # the policy, the reference and the critic
        estimate = (2 * policy["estimate"].gathered + critic["estimate"].gathered) / 3
        assert iteration.bytes["estimate", "gathered"] == rounding(estimate, rel=0.01)
        assert iteration.bytes["update", "scattered"] == rounding(update["scattered"], rel=0.01)
        calls = {key: iteration.calls[key, "gathered"] for key in ("score", "estimate")}
        assert calls == {"score": UNITS, "estimate": 3 * UNITS}
        assert iteration.calls["update", "scattered"] == 4 * UNITS  # in each of four backwards
        # checkpointing may gather a layer once more in each of four backwards
        more = iteration.bytes["update", "gathered"] - update["gathered"]
        assert 0 <= more <= 4 * 2 * LAYER_WEIGHTS * 1.01
        return
    assert iteration.bytes["estimate", "gathered"] == rounding(
        policy["estimate"].gathered, rel=0.01
    )
    assert iteration.bytes["update", "summed"] == update["summed"]
    assert iteration.bytes["update", "gathered"] == rounding(update["gathered"], rel=0.01)
    assert (iteration.calls["update", "summed"], iteration.calls["update", "gathered"]) == (4, 2)
